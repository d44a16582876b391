"""What every test may ask for: the real demo model, the tiny model, and a Callboard home of its own."""

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from actors.blas import blas_environment
from server.models.resolve import resolve_model

# Property tests try the same examples in every run, so that a change is judged by itself;
# `HYPOTHESIS_PROFILE=random make test` looks for new ones.
settings.register_profile("steady", derandomize=True, deadline=None)
settings.register_profile("random", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))


def pytest_configure(config: pytest.Config) -> None:
    """Where tests run in worker processes, give these the engine's BLAS; what they start finds its own."""
    if hasattr(config, "workerinput"):
        for name in ("LD_PRELOAD", "OPENBLAS_NUM_THREADS"):
            os.environ.pop(name, None)
    elif config.getoption("numprocesses", None):
        os.environ.update(blas_environment(1))


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Folder of the demo model with float32 weights; fetched once into the user's cache folder."""
    return resolve_model("demo", device="cpu", progress=False)


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """Folder of the tiny random llama, made once into the user's cache folder."""
    spec = importlib.util.spec_from_file_location("tiny", Path(__file__).parent / "models" / "tiny.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder: Path = module.tiny_model()
    return folder


@pytest.fixture(scope="session", autouse=True)
def callboard_home() -> Iterator[Path]:
    """The run's own `$CALLBOARD_HOME`, so that no test meets the user's servers or another run's.

    Directly under /tmp: socket paths are short, and the temporary folder of macOS is not.
    """
    home = Path(tempfile.mkdtemp(prefix="cb-", dir="/tmp"))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("CALLBOARD_HOME", str(home))
        environment.delenv("CALLBOARD_ENDPOINT", raising=False)
        yield home
    shutil.rmtree(home, ignore_errors=True)
