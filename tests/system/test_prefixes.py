"""The checks of `bench/checks/prefixes.py` and `prefix_trouble.py`, small: hits, sharing, chats and trouble on real
servers, and costs without one."""

from pathlib import Path

import pytest

from bench.checks import prefix_trouble, prefixes
from bench.checks.report import Report
from bench.harness import RunningServer


def passed(report: Report) -> None:
    assert report.failures == []


def test_miss_hit_miss_hit_and_an_immediate_repeat(server: RunningServer, report: Report) -> None:
    prefixes.hits(report, server)
    passed(report)


def test_users_that_share_a_prefix_compute_and_hold_it_once(server: RunningServer, report: Report) -> None:
    prefixes.shared(report, server, users=8, tokens=1024)
    passed(report)


def test_each_turn_of_a_chat_finds_the_ones_before(server: RunningServer, report: Report) -> None:
    prefixes.chat(report, server, turns=4, tokens=300)
    passed(report)


def test_after_a_restart_the_prefix_comes_from_the_ssd(tiny_model: Path, report: Report) -> None:
    prefixes.ttft(report, tiny_model, 1024, bars=None, rounds=1)
    passed(report)


@pytest.mark.timeout(180)
def test_streams_go_on_when_the_directory_goes_or_is_shared(tiny_model: Path, report: Report) -> None:
    prefix_trouble.trouble(report, tiny_model)
    passed(report)


@pytest.mark.timeout(180)
def test_a_kill_while_writing_leaves_nothing_wrong(tiny_model: Path, report: Report) -> None:
    prefix_trouble.kills(report, tiny_model, rounds=1, requests=4)
    passed(report)


def test_restore_and_cost_without_a_server(tiny_model: Path, report: Report) -> None:
    prefixes.restore(report, tiny_model, tokens=1024, rounds=1, bar=None)
    prefixes.cost(report, tiny_model, rows=2, tokens=300, budget=10, rounds=1, held=False)
    prefixes.same(report, [("plain", None)], lengths=[256, 257], others=2)
    passed(report)
