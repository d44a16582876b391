"""Decoding bodies: whatever comes, the result is a request or an error that says what is wrong."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.codec import encode
from protocol.limits import MAX_DEPTH
from server.chat import parse_chat
from server.completions import parse_completion
from server.errors import MAX_MESSAGE, ApiError
from server.generation import Generation
from server.messages import parse_message
from server.request_body import MAX_STEP, MAX_VALUES, check_depth
from server.responses import parse_response
from server.schemas import ChatRequest, CompletionRequest
from server.schemas_messages import MessagesRequest
from server.schemas_responses import ResponsesRequest
from server.unsupported import CHAT_UNSUPPORTED

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters())
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10)
messages = st.lists(st.fixed_dictionaries({"role": values, "content": values}) | values, max_size=3)
requests = (ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest)
fields = sorted({*CHAT_UNSUPPORTED, *(name for kind in requests for name in kind.__struct_fields__)})
bodies = st.dictionaries(st.sampled_from(fields), values, max_size=4)


def parse(body: bytes) -> list[Generation | ApiError]:
    results: list[Generation | ApiError] = []
    for parser in (parse_chat, parse_completion, parse_response, parse_message):
        try:
            results.append(parser(body, "m", "id")[1])
        except ApiError as error:
            results.append(error)
    return results


@given(st.binary())
def test_any_bytes(body: bytes) -> None:
    for result in parse(body):
        assert isinstance(result, ApiError)
        assert result.status == 400
        json.loads(result.body())


@given(bodies, messages, values)
def test_any_values(body: dict[str, Any], some_messages: list[Any], prompt: Any) -> None:
    filled = {"messages": some_messages, "prompt": prompt, "input": prompt, "max_tokens": 5} | body
    for result in parse(json.dumps(filled).encode()):
        if isinstance(result, ApiError):
            assert result.status == 400
            assert len(result.message) <= MAX_MESSAGE + 1
            json.loads(result.body())
        else:
            assert encode(result.params)
            assert result.prompts or result.prepare is not None


@pytest.mark.parametrize("depth", [1, MAX_DEPTH, MAX_DEPTH + 1, 900])
def test_depth(depth: int) -> None:
    value: Any = []
    for _ in range(depth - 1):
        value = [value] if depth % 2 else {"a": value}
    if depth <= MAX_DEPTH:
        check_depth(value, "field")
    else:
        with pytest.raises(ApiError, match="field is nested more than"):
            check_depth(value, "field")


def test_long_quotes_are_cut() -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "x" * 100_000}]}]}
    error, *_ = parse(json.dumps(body).encode())
    assert isinstance(error, ApiError)
    assert len(error.body()) < 3000


def test_a_malformed_body_with_long_keys_costs_no_more_than_it_is_long() -> None:
    # With a path made for each element this would take gigabytes.
    body = b'{"%s": [%s], "x": NaN, "y": "\\ud800"}' % (b"k" * 120_000, b",".join([b"0"] * 60_000))
    for result in parse(body):
        assert isinstance(result, ApiError)
        assert result.param == "y"


def test_the_place_of_a_lone_surrogate_is_named_with_long_keys_cut() -> None:
    body = b'{"messages": [{"role": "user"}, {"%s": ["a", "\\ud800"]}]}' % (b"k" * 1000)
    error, *_ = parse(body)
    assert isinstance(error, ApiError)
    assert error.param == f"messages[1].{'k' * MAX_STEP}[1]"


def test_a_body_may_hold_so_many_values_and_texts_any_number_of_brackets() -> None:
    many = b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": [%s]}}'
    error, *_ = parse(many % b",".join([b"[]"] * MAX_VALUES))
    assert isinstance(error, ApiError)
    assert str(MAX_VALUES) in error.message
    text = b'{"messages": [{"role": "user", "content": "%s"}]}' % (b'{[\\"' * MAX_VALUES)
    made, *_ = parse(text)
    assert isinstance(made, Generation)
