"""The load client itself: what it counts as completed and as failed, without a Callboard server."""

import asyncio
import math
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.checks.report import Report
from bench.load.driver import Progress, run_load
from bench.load.outcome import Outcome
from bench.load.over_http import HttpLoad
from bench.load.plan import Plan, prompt_ids
from bench.load.summary import percentile, summarize

PLAN = Plan(via="http", streams=2, requests=3, prompt_tokens=4, max_tokens=2)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
TEXT = b'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\n'
LAST = b'data: {"choices": [{"text": "b", "finish_reason": "length"}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 2}}\n\n'
DONE = b"data: [DONE]\n\n"
ERROR = b'data: {"error": {"message": "gone", "code": "engine_lost"}}\n\n'

Writer = asyncio.StreamWriter


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


GOOD = HEAD + chunk(b": keep-alive\n\n") + chunk(TEXT) + chunk(LAST) + chunk(USAGE + DONE) + chunk(b"")


def outcomes_of(answer: Callable[[Writer], Awaitable[None]]) -> list[Outcome]:
    """Run PLAN against a server that answers every request with `answer`."""

    async def serve(reader: asyncio.StreamReader, writer: Writer) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        (length,) = (int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length"))
        await reader.readexactly(length)
        await answer(writer)
        writer.close()

    async def run() -> list[Outcome]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            async with HttpLoad(PLAN, f"http://127.0.0.1:{port}") as load:
                return await run_load(load, Progress(PLAN))

    return asyncio.run(run())


def sends(data: bytes, size: int = 1 << 20) -> Callable[[Writer], Awaitable[None]]:
    """An answer of fixed bytes, in pieces of `size`."""

    async def answer(writer: Writer) -> None:
        for start in range(0, len(data), size):
            writer.write(data[start : start + size])
            await writer.drain()

    return answer


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_a_whole_stream_counts_as_completed(size: int):
    outcomes = outcomes_of(sends(GOOD, size))
    assert [(o.index, o.error, o.arrivals, len(o.gaps)) for o in outcomes] == [(i, "", 2, 1) for i in range(3)]
    summary = summarize(PLAN, outcomes)
    assert (summary.completed, summary.failed, summary.completion_tokens) == (3, 0, 6)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (HEAD + chunk(TEXT), "closed before the end"),
        (b"", "closed before the end"),
        (HEAD + chunk(TEXT + ERROR + DONE) + chunk(b""), "engine_lost: gone"),
        (HEAD + chunk(TEXT + LAST + USAGE) + chunk(b""), "without [DONE]"),
        (HEAD + chunk(LAST + DONE) + chunk(b""), "usage says 0 completion tokens"),
        (HEAD + chunk(LAST.replace(b"length", b"stop") + USAGE + DONE) + chunk(b""), "finish_reason is stop"),
        (b"HTTP/1.1 503 No\r\ncontent-length: 2\r\n\r\n{}", "HTTP 503"),
        (b"garbage\r\n\r\n", "unreadable"),
    ],
)
def test_anything_less_counts_as_failed_with_its_reason(data: bytes, error: str):
    outcomes = outcomes_of(sends(data))
    assert all(error in outcome.error for outcome in outcomes), outcomes[0].error
    assert summarize(PLAN, outcomes).failed == 3


def test_nobody_listening_counts_as_failed():
    async def run() -> list[Outcome]:
        async with HttpLoad(PLAN, "http://127.0.0.1:1") as load:
            return await run_load(load, Progress(PLAN))

    assert all("Connect" in outcome.error for outcome in asyncio.run(run()))


@given(st.lists(st.floats(0, 1e6), min_size=1), st.sampled_from([1, 50, 95, 99, 100]))
def test_a_percentile_is_the_smallest_value_that_enough_others_dont_exceed(values: list[float], percent: int):
    ordered = sorted(values)
    found = percentile(ordered, percent)
    assert sum(value <= found for value in ordered) >= len(ordered) * percent / 100
    assert sum(value < found for value in ordered) < len(ordered) * percent / 100


def test_a_percentile_of_nothing_is_not_a_number():
    assert math.isnan(percentile([], 99))


@given(st.integers(1, 50), st.integers(0, 50), st.integers(0, 5))
def test_prompts_are_exact_shared_and_distinct(length: int, shared: int, seed: int):
    shared = min(shared, length)
    plan = Plan(via="zmq", streams=1, requests=1, prompt_tokens=length, max_tokens=1, shared_prefix=shared, seed=seed)
    first, second = prompt_ids(plan, 0), prompt_ids(plan, 1)
    assert len(first) == len(second) == length
    assert first[:shared] == second[:shared]
    assert first == prompt_ids(plan, 0)
    assert all(100 <= token < plan.vocab_size for token in first)
    if length - shared >= 8:
        assert first[shared:] != second[shared:]


def test_a_report_without_claims_has_failed():
    report = Report()
    assert report.failures
    report.expect(True, "something holds")
    assert report.failures == []
    report.expect(False, "this does not", got=3)
    assert report.failures == ["this does not; got 3"]
