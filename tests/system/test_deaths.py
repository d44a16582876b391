"""Sudden death of each kind of process under load: everything ends soon, and `serve` says why."""

from pathlib import Path

import pytest

from bench.checks import deaths
from bench.checks.report import Report
from bench.harness import RunningServer


@pytest.mark.parametrize("actor", ["supervisor", "engine", "streamer", "tokenizer0", "http0"])
def test_a_killed_process_ends_the_system_in_order(tiny_model: Path, report: Report, actor: str):
    with RunningServer(tiny_model) as server:
        deaths.kill(report, server, actor, streams=4)
    assert report.failures == []
