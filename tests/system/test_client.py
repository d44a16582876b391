"""The Python clients against a real server: calls, ids, cancel, time-outs, slow readers."""

import asyncio
import time
from typing import Any

import pytest

from bench.harness import RunningServer, wait_until
from protocol import AsyncClient, Client, Result
from protocol.errors import RequestFailed, ServerNotFound

TEXT = "Straße, naïve 😀👩‍👩‍👧 漢字 ℵ₀ 1234\n\ttabs"
ENDLESS: dict[str, Any] = {"max_tokens": 60_000, "temperature": 0, "ignore_eos": True}


def test_tokenize_and_detokenize_round_trip(client: Client):
    ids = client.tokenize(TEXT)
    assert ids
    assert client.detokenize(ids) == TEXT
    assert client.tokenize("") == []
    assert client.detokenize([]) == ""


def test_tokenize_messages_uses_the_template(client: Client):
    ids = client.tokenize(messages=[{"role": "user", "content": "hello"}])
    text = client.detokenize(ids)
    assert "hello" in text
    assert "<|im_start|>user" in text


def test_detokenize_skips_unknown_ids(client: Client):
    ids = client.tokenize("hello")
    assert client.detokenize([4_000_000_000, *ids]) == "hello"


def test_models(client: Client):
    (card,) = client.models()
    assert (card.name, card.context, card.vocab_size) == ("tiny", 65_536, 49_152)


def test_ids_come_with_or_without_text(client: Client):
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    both = list(client.generate(ids=[700, 800], return_ids=True, **options))
    only = list(client.generate(ids=[700, 800], return_ids=True, return_text=False, **options))
    ids = [token for delta in both for token in delta.ids]
    assert ids == [token for delta in only for token in delta.ids]
    assert len(ids) == 12
    assert sum(delta.count for delta in both) == 12
    assert "".join(delta.text for delta in only) == ""
    assert client.detokenize(ids) == "".join(delta.text for delta in both)


def test_the_end_tells_usage_and_timing(client: Client):
    stream = client.generate(ids=[700, 800, 900], max_tokens=5, temperature=0, ignore_eos=True)
    stream.text()
    assert stream.prompt_tokens == 3
    assert stream.end is not None
    assert (stream.end.usage.prompt_tokens, stream.end.usage.completion_tokens) == (3, 5)
    assert 0 <= stream.end.timing.ttft <= stream.end.timing.total


def test_a_traced_request_tells_when_it_was_where(client: Client):
    for prompt in ({"prompt": "hello"}, {"ids": [700, 800]}):
        sent = time.monotonic()
        stream = client.generate(**prompt, max_tokens=2, temperature=0, ignore_eos=True, trace=True)
        stream.text()
        assert stream.end is not None
        trace = stream.end.trace
        assert trace is not None
        text = [trace.asked, trace.tokenizing, trace.tokenized]
        assert ("prompt" in prompt) == (min(text) >= 0)
        way = [sent, trace.received, *(text if "prompt" in prompt else ()), trace.encoded, trace.submitted]
        way += [trace.queued, trace.stepped, trace.arrived, trace.ended, time.monotonic()]
        assert way == sorted(way)
        assert 0 < trace.in_model < trace.stepped - trace.queued
    stream = client.generate(ids=[700], max_tokens=1)
    stream.text()
    assert stream.end is not None
    assert stream.end.trace is None


def test_cancel_ends_the_stream_and_frees_the_row(server: RunningServer, client: Client):
    stream = client.generate(ids=[700, 800], **ENDLESS)
    next(stream)
    stream.cancel()
    stream.cancel()
    for _ in stream:
        pass
    assert stream.end is not None
    assert stream.end.outcome == "cancelled"
    server.wait_idle()


def test_closing_a_client_frees_its_rows(server: RunningServer):
    before = len(server.log())
    with Client(endpoint=server.endpoint) as leaving:
        streams = [leaving.generate(ids=[700 + i], **ENDLESS) for i in range(4)]
        for stream in streams:
            next(stream)
    server.wait_idle()
    assert "client silent" not in server.log()[before:]  # it said that it went


def test_a_time_out_ends_the_stream(client: Client):
    began = time.monotonic()
    with pytest.raises(RequestFailed) as failure:
        client.generate(ids=[700, 800], timeout=0.5, **ENDLESS).text()
    assert failure.value.code == "timeout"
    assert time.monotonic() - began >= 0.5


def test_a_slow_reader_gets_everything_and_is_not_taken_for_dead(server: RunningServer, client: Client):
    stream = client.generate(ids=[700, 800], max_tokens=300, temperature=0, ignore_eos=True)
    other = client.generate(ids=[700, 800], max_tokens=300, temperature=0, ignore_eos=True).text()
    server.wait_idle()
    # All 300 tokens are generated; what is here is bounded by the window, the rest came in one piece with the end.
    wait_until(lambda: stream.buffered >= 66, 10)
    assert stream.buffered == 64 + 2  # the end among them
    deltas = list(stream)
    assert sum(delta.count for delta in deltas) == 300
    assert "".join(delta.text for delta in deltas) == other


def test_many_streams_of_one_async_client_keep_apart(server: RunningServer):
    async def run() -> tuple[list[str], list[str]]:
        async with AsyncClient(endpoint=server.endpoint) as client:
            prompts = [[900 + i, 901 + i, 902 + i] for i in range(24)]

            async def ask(ids: list[int]) -> str:
                return await client.generate(ids=ids, max_tokens=16, temperature=0, ignore_eos=True).text()

            together = await asyncio.gather(*(ask(ids) for ids in prompts))
            one_by_one = [await ask(ids) for ids in prompts[:6]]
            return together, one_by_one

    together, one_by_one = asyncio.run(run())
    assert together[:6] == one_by_one
    assert len(set(together)) == len(together)


def test_a_slow_consumer_is_sent_no_more_than_the_window(server: RunningServer):
    """What it has not taken waits in the server; taking a part of it brings as much again."""

    async def run() -> None:
        async with AsyncClient(endpoint=server.endpoint) as client:
            stream = client.generate(ids=[700, 800], **ENDLESS)
            await asyncio.to_thread(wait_until, lambda: stream.buffered == 64, 10)
            before = stream.tokens
            other = client.generate(ids=[700, 800], max_tokens=40, temperature=0, ignore_eos=True)
            assert await other.result()
            assert (stream.buffered, stream.tokens) == (64, before)
            for _ in range(9):  # the credit for a delta goes out when the next one is taken
                await anext(stream)
            await asyncio.to_thread(wait_until, lambda: stream.buffered == 64 - 9 + 8, 10)
            assert stream.tokens > before + 20  # the first of the new ones brings all that was gathered
            stream.cancel()
            await stream.result()

    asyncio.run(run())


def test_many_prompts_are_answered_in_their_order(server: RunningServer, client: Client):
    options: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_ids": True}
    prompts: list[Any] = [[900 + i, 901 + i] for i in range(20)]
    prompts += ["hello", [{"role": "user", "content": "hello"}], [4_000_000_000]]

    async def ask() -> list[Result]:
        async with AsyncClient(endpoint=server.endpoint) as other:
            return await other.generate_many(prompts, at_once=8, **options)

    results = client.generate_many(prompts, at_once=8, **options)
    again = asyncio.run(ask())
    for one, two in zip(results, again, strict=True):
        assert (one.text, one.ids, one.reason) == (two.text, two.ids, two.reason)
    *good, bad = results
    assert all(one.error is None and len(one.ids) == 6 for one in good)
    assert bad.error is not None
    assert bad.error.code == "invalid_request"
    for prompt, one in zip(prompts[:3], good, strict=False):
        alone = client.generate(ids=prompt, **options)
        assert alone.result().ids == one.ids
        assert alone.stats is not None
        assert (alone.stats.prompt_tokens, alone.stats.completion_tokens) == (2, 6)
        assert 0 <= alone.stats.queue <= alone.stats.ttft <= alone.stats.total


def test_async_calls_and_cancel(server: RunningServer):
    async def run() -> None:
        async with AsyncClient(endpoint=server.endpoint) as client:
            ids = await client.tokenize(TEXT)
            assert await client.detokenize(ids) == TEXT
            assert (await client.models())[0].name == "tiny"
            stream = client.generate(ids=ids, **ENDLESS)
            async for _ in stream:
                client.cancel(stream)
            assert stream.end is not None
            assert stream.end.outcome == "cancelled"

    asyncio.run(run())


def test_no_server_by_that_name(server: RunningServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CALLBOARD_HOME", str(server.home))
    with pytest.raises(ServerNotFound, match=server.name):
        Client("somebody-else")
    with Client() as found:
        assert found.models()[0].name == "tiny"


def test_a_large_prompt_is_served(server: RunningServer, client: Client):
    stream = client.generate(ids=[1000 + i % 3000 for i in range(3000)], max_tokens=3, temperature=0, ignore_eos=True)
    stream.text()
    assert stream.end is not None
    assert stream.end.usage.prompt_tokens == 3000
    server.wait_idle()
