"""The demo model, asked for real by every way in."""

import pytest

from bench.checks import answers
from bench.checks.report import Report
from bench.harness import RunningServer


@pytest.mark.timeout(180)
def test_every_way_in_gives_the_same_answer_with_paris(demo_server: RunningServer, report: Report):
    answers.paris(report, demo_server)
    assert report.failures == []


def test_a_stop_string_inside_tokens_cuts_exactly(demo_server: RunningServer, report: Report):
    answers.stop_strings(report, demo_server)
    assert report.failures == []
