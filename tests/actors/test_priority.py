"""Actors that serve streams go behind the engine where the CPU computes the model."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from actors import priority

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="priorities are set on Linux alone")


@pytest.fixture
def sleeper() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield process.pid
        process.kill()


@pytest.mark.parametrize(
    ("role", "cuda", "lowered"),
    [
        ("http", False, True),
        ("streamer", False, True),
        ("tokenizer", False, False),
        ("engine", False, False),
        ("cast", False, False),
        ("http", True, False),
    ],
)
def test_who_gives_way(sleeper: int, monkeypatch: pytest.MonkeyPatch, role: str, cuda: bool, lowered: bool) -> None:
    monkeypatch.setattr(priority, "has_cuda_backend", lambda: cuda)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    priority.give_way(role, sleeper)
    assert os.getpriority(os.PRIO_PROCESS, sleeper) == (min(own + priority.NICE, 19) if lowered else own)


def test_an_actor_that_is_gone_is_normal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(priority, "has_cuda_backend", lambda: False)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    priority.give_way("http", gone.pid)
