"""Malformed requests and messages: real ones with bytes changed, cut, doubled or swapped, and made ones. Pure."""

import json
import random
from collections.abc import Iterator
from typing import Any

import hypothesis
from hypothesis import strategies as st

from bench.load.over_http import build_request
from protocol.codec import encode
from protocol.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Credit,
    Detokenize,
    Generate,
    Hello,
    ListModels,
    Ping,
    SamplingParams,
    Tokenize,
)

FIELDS = (
    *("model", "messages", "prompt", "max_tokens", "temperature", "top_p", "stop", "seed", "stream", "logit_bias"),
    *("stream_options", "logprobs", "top_logprobs", "n", "user", "priority", "min_tokens", "stop_token_ids", "top_k"),
)
PATHS = ("/v1/chat/completions", "/v1/completions")

_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
_bodies = st.dictionaries(st.sampled_from(FIELDS), _json, max_size=6)
_frames = st.binary(max_size=60) | st.lists(_json, max_size=8)


def _examples(strategy: "st.SearchStrategy[Any]", count: int) -> list[Any]:
    """So many values that hypothesis thinks of."""
    found: list[Any] = []

    @hypothesis.settings(max_examples=count, database=None, deadline=None, derandomize=True)
    @hypothesis.given(strategy)
    def collect(value: Any) -> None:
        found.append(value)

    collect()
    return found


def mutated(data: bytes, draw: random.Random) -> bytes:
    """`data` with one to four faults."""
    for _ in range(draw.randrange(1, 5)):
        if not data:
            return bytes(draw.randrange(256) for _ in range(8))
        place, length = draw.randrange(len(data)), draw.randrange(1, 9)
        part = data[place : place + length]
        change = draw.randrange(6)
        if change == 0:  # other bytes
            part = bytes(draw.randrange(256) for _ in part)
        elif change == 1:  # a bit
            part = bytes([part[0] ^ (1 << draw.randrange(8))]) + part[1:]
        elif change == 2:  # twice
            part += part
        elif change == 3:  # not at all
            part = b""
        elif change == 4:  # cut short here
            return data[:place]
        else:  # something from elsewhere
            other = draw.randrange(len(data))
            part = data[other : other + length]
        data = data[:place] + part + data[place + length :]
    return data


def http_requests(url: str, count: int, seed: int = 0) -> Iterator[bytes]:
    """`count` requests, most of them malformed, as bytes for a connection of their own each."""
    draw = random.Random(seed)
    made = _examples(_bodies, max(count // 10, 10))
    real = [
        (PATHS[0], {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2, "stream": True}),
        (
            PATHS[0],
            {"messages": [{"role": "system", "content": "x"}], "max_tokens": 1, "temperature": 0.5, "stop": ["a"]},
        ),
        (PATHS[1], {"prompt": [1000, 1001], "max_tokens": 2, "logprobs": 1, "seed": 3}),
        (
            PATHS[1],
            {"prompt": "a", "max_tokens": 1, "logit_bias": {"5": -100}, "stream_options": {"include_usage": True}},
        ),
    ]
    wholes = [build_request(url, path, json.dumps(body).encode()) for path, body in real]
    for number in range(count):
        kind = number % 5
        if kind == 0:
            body = json.dumps(draw.choice(made), ensure_ascii=draw.random() < 0.5).encode("utf-8", "surrogatepass")
            yield build_request(url, draw.choice(PATHS), body)
        elif kind == 1:  # the body alone
            path, given = draw.choice(real)
            yield build_request(url, path, mutated(json.dumps(given).encode(), draw))
        elif kind == 2:  # no HTTP at all
            yield bytes(draw.randrange(256) for _ in range(draw.randrange(1, 200)))
        else:
            yield mutated(draw.choice(wholes), draw)


def zmq_frames(count: int, seed: int = 0) -> Iterator[list[bytes]]:
    """`count` messages as lists of frames, most of them malformed."""
    draw = random.Random(seed)
    params = SamplingParams(0.5, 0.9, 3, 2, True, ["a"], logit_bias={5: -1.0})
    real = [
        encode(message)
        for message in (
            Hello(PROTOCOL_VERSION, "x"),
            Hello(PROTOCOL_VERSION + 1, "newer"),
            Ping(1),
            Generate(1, params, prompt="hi", label="x"),
            Generate(2, params, messages=[{"role": "user", "content": "hi"}]),
            Generate(3, params, ids=b"\5\0\0\0\6\0\0\0", return_ids=True),
            Cancel(1),
            Credit([1, 2], [3, 4]),
            Tokenize(4, "text"),
            Detokenize(5, b"\5\0\0\0"),
            ListModels(6),
        )
    ]
    made = _examples(_frames, max(count // 10, 10))
    for number in range(count):
        kind = number % 5
        if kind == 0:
            value = draw.choice(made)
            try:
                frame = value if isinstance(value, bytes) else encode(value)
            except ValueError:
                frame = repr(value).encode("utf-8", "replace")
        elif kind == 1:
            frame = draw.choice(real)[: draw.randrange(20)]
        else:
            frame = mutated(draw.choice(real), draw)
        yield [frame] if draw.random() < 0.9 else [frame, *(draw.choice(real) for _ in range(draw.randrange(1, 4)))]
