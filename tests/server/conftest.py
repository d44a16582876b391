"""The HTTP worker in tests: one shared by a module, or one of a test's own with its own options."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the test tools beside this file, which is no package

from fake_streamer import say_hello
from http_worker import HttpWorker


@pytest.fixture(scope="module")
def shared_worker() -> Iterator[HttpWorker]:
    """A serving worker that all tests of a module use."""
    worker = HttpWorker(keepalive_interval=0.2, allow_origins=["http://page.test"], max_body_bytes=1 << 20)
    yield worker
    worker.close()


@pytest.fixture
def worker(shared_worker: HttpWorker) -> HttpWorker:
    """The module's worker with a streamer that behaves as by default."""
    shared_worker.streamer.on_generate = say_hello
    shared_worker.streamer.streams.clear()
    shared_worker.streamer.ttfts.clear()
    return shared_worker


@pytest.fixture
def start_worker() -> Iterator[Callable[..., HttpWorker]]:
    """Starts a worker of the test's own; arguments are those of `HttpWorker`."""
    started: list[HttpWorker] = []

    def start(**options: Any) -> HttpWorker:
        started.append(HttpWorker(**options))
        return started[-1]

    yield start
    for one in started:
        one.close()
