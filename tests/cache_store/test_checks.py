"""The checks of `bench/checks` that need no engine, in short."""

from bench.checks import block_disk, blocks
from bench.checks.report import Report


def test_writers_killed_at_random_moments(report: Report):
    blocks.kills(report, rounds=4, seed=1)
    assert report.failures == []


def test_damaged_files(report: Report):
    blocks.damage(report)
    assert report.failures == []


def test_a_disk_that_refuses_and_company(report: Report):
    block_disk.disk(report, blocks=300)
    assert report.failures == []
