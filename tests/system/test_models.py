"""Several models behind one server: they come and go within a budget that holds one of them."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.checks import models
from bench.checks.report import Report
from bench.harness import RunningServer, is_running
from protocol.errors import MODEL_NOT_FOUND, RequestRejected


@pytest.fixture(scope="module")
def house(tiny_model: Path) -> Iterator[RunningServer]:
    """Models `a` and `b`, alias `gpt`, and room for one."""
    with tempfile.TemporaryDirectory() as folder:
        named = {
            "a": {"model": str(tiny_model), "memory": 1},
            "b": {"model": str(models.other_tiny(tiny_model, Path(folder), 1)), "memory": 1, "aliases": ["gpt"]},
        }
        with models.house(Path(folder), named, "--models-memory", "1") as server:
            yield server


def test_models_come_and_go_and_a_client_of_each_is_served(house: RunningServer, report: Report):
    with models.connect(house, "a") as first:
        said = models.by_zmq(first, "Once", 8)
        cast = models.cast_of(house, "a")
        pids = [cast.pid, *(actor.pid for actor in cast.children(recursive=True))]
        assert models.by_http(house, "gpt", "Once", 8) != said  # a gives way to b
        assert not any(is_running(pid) for pid in pids)
        now = models.states(house)
        assert {name: state.state for name, state in now.items()} == {"a": "unloaded", "b": "ready"}
        assert (now["a"].memory, now["b"].loads) == (0, 1)
        assert models.by_zmq(first, "Once", 8) == said  # over the house, which loads it again
    with pytest.raises(RequestRejected, match="no model 'c'") as error:
        models.connect(house, "c")
    assert error.value.code == MODEL_NOT_FOUND
    answer = models.order(house, "unload", "a")
    assert [state.state for state in answer.models] == ["unloaded"]
