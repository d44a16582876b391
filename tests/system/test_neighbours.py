"""Two servers of one user."""

from pathlib import Path

from bench.checks import neighbours
from bench.checks.report import Report


def test_two_names_live_side_by_side_and_one_name_is_refused(tiny_model: Path, report: Report):
    neighbours.two_servers(report, tiny_model)
    assert report.failures == []
