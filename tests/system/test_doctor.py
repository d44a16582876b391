"""`callboard doctor` on a machine with things broken on purpose."""

from pathlib import Path

from bench.checks.doctor import doctor
from bench.checks.report import Report


def test_what_is_broken_is_named_with_its_remedy(tiny_model: Path, report: Report):
    doctor(report, tiny_model)
    assert report.failures == []
