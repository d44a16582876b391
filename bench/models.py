"""The models that checks run on."""

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from bench.harness import ROOT
from server.models.cache import built_once
from server.models.demo import demo_model

DEMO = "demo"
NEVER = "<never>"


def tiny_model() -> Path:
    """Folder of the tiny random llama of the tests, made when it isn't there yet."""
    spec = importlib.util.spec_from_file_location("tiny", ROOT / "tests" / "models" / "tiny.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder: Path = module.tiny_model()
    return folder


def other_tiny(number: int) -> Path:
    """The tiny model with another head, so that it says other things: its rows stand `number` places further on."""

    def make(folder: Path) -> None:
        tiny = tiny_model()
        for file in tiny.iterdir():
            if file.is_file() and file.suffix != ".safetensors":
                shutil.copy(file, folder / file.name)
        weights = load_file(tiny / "model.safetensors")
        weights["lm_head.weight"] = np.roll(weights["lm_head.weight"], number, axis=0)
        save_file(weights, str(folder / "model.safetensors"), metadata={"format": "mlx"})

    return built_once(f"{tiny_model().name}-turned-{number}", make, waiting=lambda: None)


def demo_folder() -> Path:
    """Folder of the demo model, made when it isn't there yet."""
    return demo_model("cpu", progress=False)


def endless(model: Path) -> Path:
    """The same model without an end of sequence, so that every server generates all tokens it is asked for.

    Its end is a token that the head has no row for. The weights are the same file.
    """
    return built_once(f"{model.name}-endless-1", lambda folder: _make_endless(model, folder), waiting=lambda: None)


def _make_endless(model: Path, folder: Path) -> None:
    for file in model.iterdir():
        if file.suffix == ".safetensors":
            (folder / file.name).symlink_to(file.resolve())
        elif file.is_file():
            shutil.copy(file, folder / file.name)
    config = _read(folder / "config.json")
    end = config["vocab_size"]
    for name in ("config.json", "generation_config.json"):
        _write(folder / name, _read(folder / name) | {"eos_token_id": end})
    tokenizer = _read(folder / "tokenizer.json")
    token = {"content": NEVER, "special": True}
    token |= dict.fromkeys(("normalized", "lstrip", "rstrip", "single_word"), False)
    tokenizer["added_tokens"].append({"id": end, **token})
    _write(folder / "tokenizer.json", tokenizer)
    settings = _read(folder / "tokenizer_config.json") | {"eos_token": NEVER}
    settings.setdefault("added_tokens_decoder", {})[str(end)] = token
    _write(folder / "tokenizer_config.json", settings)


def _read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_bytes())
    return found


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1), encoding="utf-8")
