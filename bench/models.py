"""The models that checks run on."""

import importlib.util
from pathlib import Path

from bench.harness import ROOT
from server.models.demo import demo_model

DEMO = "demo"


def tiny_model() -> Path:
    """Folder of the tiny random llama of the tests, made when it isn't there yet."""
    spec = importlib.util.spec_from_file_location("tiny", ROOT / "tests" / "models" / "tiny.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder: Path = module.tiny_model()
    return folder


def demo_folder() -> Path:
    """Folder of the demo model, made when it isn't there yet."""
    return demo_model("cpu", progress=False)
