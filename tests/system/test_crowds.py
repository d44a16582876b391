"""Many clients at once, in short forms of the checks in `bench/checks`. How soon is for those to judge."""

import pytest

from bench.checks import crowds, interference
from bench.checks.report import Report
from bench.harness import RunningServer
from bench.load.plan import Plan

LATE = 20.0  # seconds, where the machine may be busy with other tests


def test_connections_at_once_are_all_accepted(server: RunningServer, report: Report):
    crowds.connections(report, server, 256)
    crowds.raw_connections(report, server, 200)
    assert report.failures == []


@pytest.mark.parametrize("via", ["http", "zmq"])
def test_a_crowd_of_streams_completes(server: RunningServer, report: Report, via: str):
    plan = Plan(via=via, streams=64, requests=96, prompt_tokens=100, max_tokens=24, shared_prefix=30, model="tiny")
    crowds.stress(report, server, plan)
    assert report.failures == []
    assert report.figures["completion_tokens"] == 96 * 24
    for actor in ("supervisor", "engine", "streamer", "tokenizer0", "http0", "http1"):
        assert report.figures["peak_memory_mib"][actor] > 5


def test_the_engine_drops_http_streams_whose_client_vanished(server: RunningServer, report: Report):
    crowds.vanish_http(report, server, streams=24, max_tokens=200, limit=LATE)
    assert report.failures == []


def test_the_engine_drops_streams_of_a_killed_client(server: RunningServer, report: Report):
    crowds.vanish_zmq(report, server, streams=24, max_tokens=1200, limit=LATE)
    assert report.failures == []


def test_a_client_that_leaves_before_its_whole_answer_is_dropped(server: RunningServer, report: Report):
    crowds.vanish_unstreamed(report, server, 8, limit=LATE)
    assert report.failures == []


def test_the_interference_of_tokenizing_is_measured(server: RunningServer, report: Report):
    interference.tokenize_itl(report, server, streams=4, tokens=20_000, rounds=1, seconds=1.5)
    assert report.figures["ratio"] > 0
    assert report.claims[0] == ("all tokenize calls were answered in full", True)
