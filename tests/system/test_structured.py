"""Structured output in the batch, and the API description, against real servers."""

import pytest

from bench.checks import fuzz, structured
from bench.checks.report import Report
from bench.harness import RunningServer


@pytest.mark.timeout(240)
def test_some_schemas_on_the_demo_model(demo_server: RunningServer, report: Report):
    structured.schema_outputs(report, demo_server, 20, 90)
    assert report.failures == []


@pytest.mark.timeout(120)
def test_rows_with_every_mix_of_options(server: RunningServer, report: Report):
    which = [*range(0, structured.MIXES, 5)]
    # Requests that come later than others take more steps; rows outside the batch would take ten times as many.
    structured.mixed_options(report, server, which, 24, 0.0, rounds=1, alone=3, most_steps=4.0)
    assert report.failures == []


@pytest.mark.filterwarnings("ignore")
def test_no_request_breaks_the_server(server: RunningServer, report: Report):
    fuzz.schemathesis_finds_nothing(report, server, 8)
    assert report.failures == []
