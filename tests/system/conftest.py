"""Real servers for the system tests: one with the tiny model that most tests share, one with the demo model."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.checks.report import Report
from bench.harness import RunningServer
from bench.houses import house_of
from bench.models import other_tiny
from protocol import Client

ORIGIN = "https://app.example"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """No test here may hang: each has a limit of its own."""
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(90))


@pytest.fixture(scope="session")
def shared_server(tiny_model: Path) -> Iterator[RunningServer]:
    """The one tiny server; tests take it as `server`."""
    with RunningServer(
        tiny_model,
        *("--served-model-name", "tiny", "--http-workers", "2", "--tokenizers", "2", "--allow-origins", ORIGIN),
    ) as running:
        yield running


@pytest.fixture
def server(shared_server: RunningServer) -> Iterator[RunningServer]:
    """The shared tiny server. After the test it must have all its processes and nothing to do."""
    pids = shared_server.pids()
    yield shared_server
    shared_server.wait_idle()
    assert shared_server.pids() == pids
    assert shared_server.health()["status"] == "ok"


@pytest.fixture
def client(server: RunningServer) -> Iterator[Client]:
    """A ZeroMQ client of the shared tiny server."""
    with Client(endpoint=server.endpoint) as connected:
        yield connected


@pytest.fixture(scope="session")
def shared_house(tiny_model: Path) -> Iterator[RunningServer]:
    """The one server of two models, `alpha` (the tiny one) and `beta`."""
    models = {"alpha": tiny_model, "beta": other_tiny(101)}
    with house_of(models, "--preload", "alpha,beta", name="house") as running:
        yield running


@pytest.fixture
def house(shared_house: RunningServer) -> Iterator[RunningServer]:
    """The shared server of two models. After the test nothing runs on it."""
    yield shared_house
    shared_house.wait_idle()
    assert shared_house.health()["status"] == "ok"


@pytest.fixture(scope="module")
def demo_server(demo_model: Path) -> Iterator[RunningServer]:
    """A server with the demo model, which really answers."""
    with RunningServer(demo_model, "--served-model-name", "demo") as running:
        yield running


@pytest.fixture
def report() -> Report:
    """For the checks of `bench/checks`, which the tests run small."""
    return Report(print)
