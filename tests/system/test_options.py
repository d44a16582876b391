"""A server whose options bound what it does: stream interval, time-out, rows."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.ask import events, post
from bench.harness import RunningServer
from protocol import AsyncClient, Client
from protocol.errors import RequestRejected

INTERVAL = 8
ROWS = 4
WAITING = 32
TIMEOUT = 6.0


@pytest.fixture(scope="module")
def bounded(tiny_model: Path) -> Iterator[RunningServer]:
    """A tiny server with a long stream interval, few rows and a short time-out."""
    with RunningServer(
        tiny_model,
        *("--stream-interval", str(INTERVAL), "--max-num-seqs", str(ROWS), "--timeout", str(TIMEOUT)),
    ) as running:
        yield running


@pytest.mark.parametrize("tokens", [1, 2, 9, 30])
def test_stream_interval_gathers_tokens(bounded: RunningServer, tokens: int):
    with Client(endpoint=bounded.endpoint) as client:
        stream = client.generate(
            ids=[700, 800], max_tokens=tokens, temperature=0, ignore_eos=True, return_ids=True, return_text=False
        )
        counts = [delta.count for delta in stream]
    assert sum(counts) == tokens
    assert counts[0] == 1
    assert max(counts) <= INTERVAL
    assert len(counts) <= 1 + math.ceil((tokens - 1) / INTERVAL)


def test_no_more_rows_run_than_allowed_and_the_queue_is_bounded(bounded: RunningServer):
    asked = ROWS + WAITING + 10

    async def run() -> Counter[str]:
        async with AsyncClient(endpoint=bounded.endpoint) as client:

            async def ask(index: int) -> str:
                stream = client.generate(ids=[700 + index], max_tokens=40, temperature=0, ignore_eos=True)
                try:
                    await stream.text()
                except RequestRejected as refusal:
                    return f"{refusal.code}, {'come back' if refusal.retry_after >= 1 else 'never'}"
                return "finished"

            tasks = [asyncio.create_task(ask(index)) for index in range(asked)]
            most = 0
            while not all(task.done() for task in tasks):
                most = max(most, (await asyncio.to_thread(bounded.load))["running"])
            assert 1 <= most <= ROWS
            return Counter(task.result() for task in tasks)

    assert asyncio.run(run()) == {"finished": ROWS + WAITING, "queue_full, come back": 10}


def test_a_full_queue_is_503_with_retry_after_over_http(bounded: RunningServer):
    async def run() -> None:
        async with AsyncClient(endpoint=bounded.endpoint) as client:
            streams = [
                client.generate(ids=[700], max_tokens=60_000, temperature=0, ignore_eos=True)
                for _ in range(ROWS + WAITING)
            ]
            async for _ in streams[0]:
                break
            answer = await asyncio.to_thread(
                post, f"{bounded.url}/v1/completions", {"prompt": "a", "max_tokens": 1}
            )
            assert answer.status == 503
            assert answer.error["code"] == "queue_full"
            assert int(answer.headers["retry-after"]) >= 1

    asyncio.run(run())
    bounded.wait_idle()


def test_the_servers_time_out_ends_requests_over_http(bounded: RunningServer):
    body = {"prompt": [700, 800], "max_tokens": 60_000, "temperature": 0, "ignore_eos": True}
    began = time.monotonic()
    answer = post(f"{bounded.url}/v1/completions", body)
    assert answer.status == 504
    assert answer.error["code"] == "timeout"
    assert TIMEOUT - 1 < time.monotonic() - began < TIMEOUT + 3
    *_, last = events(f"{bounded.url}/v1/completions", body)
    assert last["error"]["code"] == "timeout"
    bounded.wait_idle(2)
