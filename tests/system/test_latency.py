"""The parts of a small request; what they come to is for `make verify-latency`."""

from pathlib import Path

import pytest

from bench import bare_chain, latency
from bench.checks.latency import judge
from bench.checks.report import Report
from bench.harness import RunningServer


def test_the_parts_of_a_request_are_all_of_it(server: RunningServer, monkeypatch: pytest.MonkeyPatch, report: Report):
    monkeypatch.setattr(latency, "WARM", 2)
    samples = latency.measure(server, 5)
    assert {way: len(each) for way, each in samples.items()} == {"raw": 5, "client": 5, "http": 5}
    for sample in (*samples["raw"], *samples["client"]):
        assert sum(sample.parts) == pytest.approx(sample.total)
        assert 0 < sample.in_model < sample.in_engine < sample.total
        assert sample.parts[latency.PARTS.index("tokenizer")] == 0
        assert sample.parts[latency.PARTS.index("engine: Python")] > 0
    judge(report, samples)
    assert len(report.claims) == 2


def test_the_bare_chain_that_it_is_shown_beside(tiny_model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bare_chain, "WARM", 2)
    beyond = bare_chain.measure(tiny_model, 5)
    assert len(beyond) == 5
    assert all(0 < seconds < 1 for seconds in beyond)
