"""The dashboard's requests against a real server; `make verify-dashboard` has the browser."""

from bench.checks import dashboard
from bench.checks.report import Report
from bench.harness import RunningServer


def test_what_the_page_asks_for(server: RunningServer, report: Report):
    dashboard.replay(report, server)
    assert report.failures == []
