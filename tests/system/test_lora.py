"""LoRA adapters through real clients, on a server with room for two of its three."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.checks import lora
from bench.checks.report import Report
from bench.harness import RunningServer


@pytest.fixture(scope="module")
def adapted_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with RunningServer(tiny_model, *lora.arguments(tiny_model, tmp_path_factory.mktemp("adapters"))) as running:
        yield running


def test_the_openai_package_gets_the_adapter_it_asks_for(adapted_server: RunningServer, report: Report):
    lora.by_openai(report, adapted_server)
    assert report.failures == []


def test_streams_keep_their_adapters_when_the_engine_dies(adapted_server: RunningServer, report: Report):
    lora.over_zmq(report, adapted_server, tokens=90)
    assert report.failures == []


def test_the_step_with_four_adapters_is_measured(report: Report):
    lora.step_time(report, "tiny", rows=5, rounds=1, bars={})
    assert report.failures == []
