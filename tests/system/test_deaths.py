"""The supervisor's sudden death under load: everything ends soon. Of the others `tests/faults` tells."""

from pathlib import Path

from bench.checks import deaths
from bench.checks.report import Report
from bench.harness import RunningServer


def test_a_killed_supervisor_ends_the_system_in_order(tiny_model: Path, report: Report):
    with RunningServer(tiny_model) as server:
        deaths.kill_supervisor(report, server, streams=4, limit=20.0)  # how soon is for `make verify-…` to judge
    assert report.failures == []
