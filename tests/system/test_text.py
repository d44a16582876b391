"""Seeds and stop strings through the whole system."""

import asyncio
from typing import Any

import pytest

from bench.ask import events, post, streamed_text
from bench.harness import RunningServer
from protocol import AsyncClient, Client

COMPLETIONS = "/v1/completions"
PROMPT = list(range(2000, 2040))
SAMPLED: dict[str, Any] = {"max_tokens": 40, "temperature": 0.8, "top_p": 0.95, "ignore_eos": True}


def test_a_seed_gives_the_same_text_alone_and_among_others(server: RunningServer, client: Client):
    seeds = range(4)
    alone = [client.generate(ids=PROMPT, seed=seed, **SAMPLED).text() for seed in seeds]

    async def among_others() -> list[str]:
        async with AsyncClient(endpoint=server.endpoint) as crowd:
            others = [
                crowd.generate(ids=PROMPT[i:], seed=1000 + i, **{**SAMPLED, "max_tokens": 10 + 2 * i})
                for i in range(20)
            ]
            streams = [crowd.generate(ids=PROMPT, seed=seed, **SAMPLED) for seed in seeds]
            texts = await asyncio.gather(*(stream.text() for stream in [*streams, *others]))
            return texts[: len(seeds)]

    assert asyncio.run(among_others()) == alone
    assert len(set(alone)) == len(seeds)


def test_without_a_seed_texts_differ(client: Client):
    texts = {client.generate(ids=PROMPT, **SAMPLED).text() for _ in range(3)}
    assert len(texts) == 3


def test_http_and_zmq_draw_the_same_text_from_a_seed(server: RunningServer, client: Client):
    over_http = post(server.url + COMPLETIONS, {"prompt": PROMPT, "seed": 11, **SAMPLED}).body
    assert over_http["choices"][0]["text"] == client.generate(ids=PROMPT, seed=11, **SAMPLED).text()


@pytest.fixture
def whole_text(client: Client) -> str:
    """Sixty greedy tokens after PROMPT."""
    return client.generate(ids=PROMPT, max_tokens=60, temperature=0, ignore_eos=True).text()


@pytest.mark.parametrize("length", [1, 3, 9, 25])
@pytest.mark.parametrize("begin", [20, 61])
def test_text_ends_right_before_a_stop_string(server: RunningServer, whole_text: str, begin: int, length: int):
    stop = whole_text[begin : begin + length]
    expected = whole_text[: whole_text.index(stop)]
    body = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "ignore_eos": True, "stop": ["\x00never", stop]}
    whole = post(server.url + COMPLETIONS, body).body
    assert whole["choices"][0]["text"] == expected
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens"] <= 60
    assert streamed_text(events(server.url + COMPLETIONS, body)) == expected


def test_the_earliest_stop_string_wins(client: Client, whole_text: str):
    late, early = whole_text[70:76], whole_text[30:36]
    stream = client.generate(ids=PROMPT, max_tokens=60, temperature=0, ignore_eos=True, stop=[late, early])
    assert stream.text() == whole_text[: min(whole_text.index(late), whole_text.index(early))]


def test_a_stop_string_that_never_comes_leaks_nothing_and_holds_nothing_back(client: Client, whole_text: str):
    almost = whole_text[-3:] + "\x00"
    stream = client.generate(ids=PROMPT, max_tokens=60, temperature=0, ignore_eos=True, stop=almost)
    assert stream.text() == whole_text
    assert stream.end is not None
    assert stream.end.reason == "length"
