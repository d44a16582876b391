"""The checks of `bench/checks/prefixes.py` and `prefix_trouble.py`, small: hits, sharing, chats and trouble on real
servers, and costs without one."""

import time
from pathlib import Path

import pytest

from bench.checks import prefix_trouble, prefixes
from bench.checks.report import Report
from bench.harness import RunningServer, wait_until
from cache_store.write_queue import LINGER
from protocol import Client


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


def test_what_a_stream_generates_is_written_when_the_model_has_a_break(server: RunningServer, client: Client) -> None:
    def waits() -> int:
        count: int = server.health()["prefix_cache"]["queued_bytes"]
        return count

    wait_until(lambda: waits() == 0, 20, "nothing is to be written")
    began = time.monotonic()
    stream = client.generate(ids=[811, 812, 813], max_tokens=700, temperature=0, ignore_eos=True, cache_salt="break")
    tokens = 0
    for delta in stream:
        tokens += delta.count
        if tokens >= 450 and waits():  # its first block was ready at 253
            break
    else:
        assert time.monotonic() - began > LINGER, "it was written at once"
    for delta in stream:
        tokens += delta.count
    assert tokens == 700
    wait_until(lambda: waits() == 0, 20, "it is written")
