"""The step loop's checks in short forms. Speed is measured small here and not judged: other tests share the cores."""

import sys
from pathlib import Path

import pytest

from bench import peers
from bench.checks import fairness, floods, limits, loop, same
from bench.checks.peers import against_peers
from bench.checks.report import Report
from bench.harness import RunningServer
from bench.load.plan import Plan


@pytest.mark.timeout(200)
def test_step_overhead_is_measured(tiny_model: Path, report: Report):
    loop.step_overhead(report, [4], [], rounds=1, held=False)
    assert report.failures == []
    assert report.figures["tiny_4_ratios"]["greedy"] > 0


def test_a_join_and_a_leave_copy_no_more_than_their_row(tiny_model: Path, report: Report):
    loop.joins(report, tiny_model, rows=10, tokens=32_000)
    assert report.failures == []


def test_uneven_lengths_cost_less_than_padding(tiny_model: Path, report: Report):
    loop.mixed(report, tiny_model, long=8000, rows=31, short=200, rounds=3)
    assert report.failures == []


def test_the_bare_limit_is_measured(tiny_model: Path, report: Report):
    plan = Plan(via="http", streams=16, requests=16, prompt_tokens=40, max_tokens=8)
    limits.bare(report, tiny_model, plan, rounds=1, bar=None)
    assert report.failures == []
    assert report.figures["ratio"] > 0


def test_peers_are_measured(tiny_model: Path, report: Report, monkeypatch: pytest.MonkeyPatch):
    # The environment of these tests has mlx_lm's server, too; an environment for each peer is what `verify` makes.
    monkeypatch.setattr(peers, "installed", lambda peer: Path(sys.executable).parent)
    plan = Plan(via="http", streams=4, requests=4, prompt_tokens=20, max_tokens=4, vocab_size=49_152)
    against_peers(report, tiny_model, plan, ["mlx_lm.server"], bar=3.5, ttft=True, held=False)
    assert report.failures == []
    assert report.figures["ratio_to_the_best"] > 0


def test_one_stream_is_compared_with_mlx_lm(server: RunningServer, tiny_model: Path, report: Report):
    limits.single_stream(report, server, tiny_model, tokens=16, rounds=1, bar=0.0)
    assert report.failures == []
    assert report.figures["same_tokens"]


def test_scaling_is_measured(server: RunningServer, report: Report):
    limits.scaling(report, server, bars={5: 2.5}, tokens=8, rounds=1, held=False)
    assert report.failures == []


def test_fairness_is_measured(server: RunningServer, report: Report):
    fairness.fairness(report, server, streams=8, tokens=4000, target_ms=100, rounds=1, held=False)
    assert report.failures == []


def test_the_same_tokens_alone_in_a_crowd_and_in_motion(server: RunningServer, tiny_model: Path, report: Report):
    same.same_tokens(report, server, tiny_model, 12, 40, tokens=24)
    assert report.failures == []


def test_a_low_memory_limit_parks_rows_and_changes_no_token(tiny_model: Path, report: Report):
    same.low_memory(report, tiny_model, streams=16, tokens=500, limit="39MB")
    assert report.failures == []


def test_a_flood_is_refused_in_part_and_what_cant_fit_at_all(tiny_model: Path, report: Report):
    floods.flood(report, tiny_model, requests=200, rounds=3, seats=16, slack=128 << 20)
    assert report.failures == []
