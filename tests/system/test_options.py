"""Options of a server that bound what it does (stream interval, time-out, rows), and those of single requests."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench.ask import events, post
from bench.harness import RunningServer, wait_until
from protocol import AsyncClient, Client
from protocol.errors import RequestRejected
from protocol.messages import SamplingParams

INTERVAL = 8
ROWS = 4
WAITING = 32
RESERVE = 9  # a quarter of both
TIMEOUT = 1.5


@pytest.fixture(scope="module")
def bounded(tiny_model: Path) -> Iterator[RunningServer]:
    """A tiny server with a long stream interval and few rows."""
    arguments = ("--stream-interval", str(INTERVAL), "--max-num-seqs", str(ROWS))
    with RunningServer(tiny_model, *arguments) as running:
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
    async def run() -> Counter[str]:
        async with AsyncClient(endpoint=bounded.endpoint) as client:

            async def ask(index: int) -> str:
                stream = client.generate(ids=[700 + index], max_tokens=40, temperature=0, ignore_eos=True)
                try:
                    await stream.text()
                except RequestRejected as refusal:
                    return f"{refusal.code}, {'come back' if refusal.retry_after >= 1 else 'never'}"
                return "finished"

            # Every row stays taken until the requests beyond the queue were refused, however slowly they arrive.
            held = [client.generate(ids=[700], max_tokens=60_000, temperature=0, ignore_eos=True) for _ in range(ROWS)]
            await asyncio.gather(*(anext(stream) for stream in held))
            tasks = [asyncio.create_task(ask(index)) for index in range(WAITING + 10)]
            most = 0
            while not all(task.done() for task in tasks):
                load = await asyncio.to_thread(bounded.load)
                most = max(most, load["running"])
                if load["waiting"] == WAITING and sum(task.done() for task in tasks) >= 10:
                    while held:
                        held.pop().cancel()
            assert most == ROWS
            return Counter(task.result() for task in tasks)

    assert asyncio.run(run()) == {"finished": WAITING, "queue_full, come back": 10}


def test_a_full_queue_is_503_with_retry_after_over_http(bounded: RunningServer):
    def has(count: int) -> bool:
        load = bounded.load()
        return load["running"] + load["prefilling"] + load["waiting"] == count

    async def run() -> None:
        # Two clients: a full server keeps some room for clients that have less than their part.
        async with AsyncClient(endpoint=bounded.endpoint) as one, AsyncClient(endpoint=bounded.endpoint) as other:
            streams, opened = [], 0
            for client, count in ((one, ROWS + WAITING), (other, RESERVE)):
                opened += count
                for _ in range(count):
                    streams.append(client.generate(ids=[700], max_tokens=60_000, temperature=0, ignore_eos=True))
                await asyncio.to_thread(wait_until, partial(has, opened), 30, "they are in the queue")
            answer = await asyncio.to_thread(post, f"{bounded.url}/v1/completions", {"prompt": "a", "max_tokens": 1})
            assert answer.status == 503
            assert answer.error["code"] == "queue_full"
            assert int(answer.headers["retry-after"]) >= 1

    asyncio.run(run())
    bounded.wait_idle()


def test_the_servers_time_out_ends_requests_over_http(tiny_model: Path):
    body = {"prompt": [700, 800], "max_tokens": 60_000, "temperature": 0, "ignore_eos": True}
    with RunningServer(tiny_model, "--timeout", str(TIMEOUT)) as hasty:
        began = time.monotonic()
        answer = post(f"{hasty.url}/v1/completions", body)
        assert answer.status == 504
        assert answer.error["code"] == "timeout"
        assert time.monotonic() - began >= TIMEOUT
        *_, last = events(f"{hasty.url}/v1/completions", body)
        assert last["error"]["code"] == "timeout"
        hasty.wait_idle()


EVERY: dict[str, Any] = {
    "temperature": 0.8,
    "top_p": 0.9,
    "seed": 5,
    "max_tokens": 6,
    "ignore_eos": True,
    "stop": ["never to be met"],
    "top_k": 40,
    "min_p": 0.01,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "min_tokens": 2,
    "stop_token_ids": [9],
    "xtc_probability": 0.1,
    "xtc_threshold": 0.2,
    "priority": 1,
}
PROMPT = [700, 800, 900]
COMPLETIONS = "/v1/completions"


def complete(server: RunningServer, **options: Any) -> dict[str, Any]:
    """The one choice of a completion of `PROMPT`."""
    answer = post(server.url + COMPLETIONS, {"prompt": PROMPT, **options})
    assert answer.status == 200, answer.body
    choice: dict[str, Any] = answer.body["choices"][0]
    return choice


def test_every_option_gives_the_same_over_http_and_zmq(server: RunningServer, client: Client):
    assert EVERY.keys() | {"logit_bias", "logprobs", "grammar", "thinking_budget"} == set(
        SamplingParams.__struct_fields__
    )
    choice = complete(server, **EVERY, logit_bias={"9": -100, "1000": 5})
    stream = client.generate(ids=PROMPT, **EVERY, logit_bias={9: -100.0, 1000: 5.0})
    assert stream.text() == choice["text"] != ""
    assert stream.end is not None
    assert (stream.end.reason, stream.end.usage.completion_tokens) == (choice["finish_reason"], 6)


def test_a_bias_decides_and_a_stop_token_id_ends(server: RunningServer, client: Client):
    first = client.tokenize(" Paris")[0]
    greedy: dict[str, Any] = {
        "max_tokens": 5,
        "temperature": 0,
        "ignore_eos": True,
        "logit_bias": {str(first): 100},
    }
    assert complete(server, **greedy)["text"] == " Paris" * 5
    ended = complete(server, **greedy, stop_token_ids=[first])
    assert (ended["text"], ended["finish_reason"]) == ("", "stop")
    held = client.generate(
        ids=PROMPT, max_tokens=5, temperature=0, logit_bias={first: 100.0}, stop_token_ids=[first], min_tokens=2
    )
    held.text()
    assert held.end is not None
    assert (held.end.reason, held.end.usage.completion_tokens) == ("stop", 2)


def test_no_stop_string_matches_before_min_tokens(server: RunningServer, client: Client):
    first = client.tokenize(" Paris")[0]
    options: dict[str, Any] = {"temperature": 0, "logit_bias": {str(first): 100}, "stop": "Paris", "max_tokens": 5}
    assert complete(server, **options)["text"] == " "
    assert complete(server, **options, min_tokens=3)["text"] == " Paris" * 3 + " "


def test_logprobs_of_a_greedy_row_name_its_tokens_first(server: RunningServer, client: Client):
    options: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    choice = complete(server, **options, logprobs=3)
    columns = choice["logprobs"]
    assert [len(column) for column in columns.values()] == [6] * 4
    assert all(logprob <= 0 for logprob in columns["token_logprobs"])
    assert columns["text_offset"][0] == 0
    deltas = list(client.generate(ids=PROMPT, return_ids=True, logprobs=3, **options))
    tokens = [token for delta in deltas for token in delta.logprobs]
    assert [token.token_id for token in tokens] == [token for delta in deltas for token in delta.ids]
    assert [token.logprob for token in tokens] == pytest.approx(columns["token_logprobs"])
    for token in tokens:
        ids, logprobs, _ = zip(*token.top, strict=True)
        assert ids[0] == token.token_id
        assert logprobs[0] == pytest.approx(token.logprob)
        assert list(logprobs) == sorted(logprobs, reverse=True)
        assert len(ids) == 3


def test_logprobs_of_a_chat(server: RunningServer):
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    answer = post(f"{server.url}/v1/chat/completions", {**body, "logprobs": True, "top_logprobs": 2})
    assert answer.status == 200, answer.body
    content = answer.body["choices"][0]["logprobs"]["content"]
    assert len(content) == 4
    assert all(len(token["top_logprobs"]) == 2 for token in content)
    chunks = events(f"{server.url}/v1/chat/completions", {**body, "logprobs": True, "top_logprobs": 2})
    choices = [chunk["choices"][0] for chunk in chunks]
    streamed = [token for choice in choices for token in (choice["logprobs"] or {}).get("content", [])]
    assert [token["token"] for token in streamed] == [token["token"] for token in content]


def test_rows_that_ask_for_logprobs_run_beside_rows_that_do_not(server: RunningServer, client: Client):
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    streams = [client.generate(ids=[700 + i], logprobs=i % 2 or None, **options) for i in range(6)]
    counts = [sum(len(delta.logprobs) for delta in stream) for stream in streams]
    assert counts == [0, 8, 0, 8, 0, 8]
