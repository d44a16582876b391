"""Usage adds up: prompt, completion and reasoning tokens, streamed or not, by each API."""

from typing import Any

import pytest

from bench.ask import events, post
from bench.harness import RunningServer
from protocol import Client
from protocol.messages import ToolChoice

MESSAGES = [{"role": "user", "content": "Count to ten — schnell, 数えて! 🙂"}]
EXACT: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


@pytest.mark.parametrize("options", [{"max_tokens": 12}, {"max_tokens": 12, "n": 3, "seed": 1, "temperature": 1.0}])
def test_a_chats_tokens(server: RunningServer, client: Client, options: dict[str, Any]):
    url, body = f"{server.url}/v1/chat/completions", {"messages": MESSAGES, **EXACT, **options}
    whole = post(url, body).body["usage"]
    *_, last = events(url, {**body, "stream_options": {"include_usage": True}})
    assert last["usage"] == whole
    assert whole["prompt_tokens"] == len(client.tokenize(messages=MESSAGES))
    assert whole["completion_tokens"] == 12 * options.get("n", 1)
    assert whole["total_tokens"] == whole["prompt_tokens"] + whole["completion_tokens"]


def test_a_text_and_its_tokens_agree(server: RunningServer, client: Client):
    answer = post(f"{server.url}/v1/completions", {"prompt": "One two", "max_tokens": 9, **EXACT}).body
    deltas = list(client.generate("One two", max_tokens=9, return_ids=True, **EXACT))
    ids = [token for delta in deltas for token in delta.ids]
    assert len(ids) == answer["usage"]["completion_tokens"] == 9
    assert client.detokenize(ids) == answer["choices"][0]["text"]
    assert answer["usage"]["prompt_tokens"] == len(client.tokenize("One two"))


def test_the_apis_agree(server: RunningServer):
    chat = post(f"{server.url}/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 5, "temperature": 0}).body
    said = post(f"{server.url}/v1/messages", {"messages": MESSAGES, "max_tokens": 5, "temperature": 0}).body
    answer = post(f"{server.url}/v1/responses", {"input": MESSAGES, "max_output_tokens": 5, "temperature": 0}).body
    counts = (chat["usage"]["prompt_tokens"], chat["usage"]["completion_tokens"])
    assert (said["usage"]["input_tokens"], said["usage"]["output_tokens"]) == counts
    assert (answer["usage"]["input_tokens"], answer["usage"]["output_tokens"]) == counts
    text = chat["choices"][0]["message"]["content"]
    assert text == said["content"][0]["text"] == answer["output"][0]["content"][0]["text"]


def test_a_prompt_is_echoed_before_its_text(server: RunningServer, client: Client):
    url = f"{server.url}/v1/completions"
    plain = post(url, {"prompt": "One two", "max_tokens": 4, **EXACT}).body["choices"][0]["text"]
    for prompt in ("One two", client.tokenize("One two")):
        body = {"prompt": prompt, "max_tokens": 4, "echo": True, **EXACT}
        assert post(url, body).body["choices"][0]["text"] == "One two" + plain
        assert "".join(event["choices"][0]["text"] for event in events(url, body)) == "One two" + plain


def test_a_running_request_is_cancelled_by_its_id(server: RunningServer):
    url, body = f"{server.url}/v1/completions", {"prompt": "x", "max_tokens": 60_000, **EXACT}
    stream = events(url, body)
    first = next(stream)
    assert post(f"{server.url}/v1/requests/{first['id']}/cancel", {}).body == {"id": first["id"], "cancelled": 1}
    *_, last = stream
    assert last["error"]["code"] == "cancelled"
    assert post(f"{server.url}/v1/requests/{first['id']}/cancel", {}).status == 404


FUNCTION: dict[str, Any] = {
    "name": "paint",
    "parameters": {"type": "object", "properties": {"colour": {"enum": ["red", "green"]}}, "required": ["colour"]},
}


def test_the_tokens_of_calls_are_those_that_were_generated(server: RunningServer, client: Client):
    tools = [{"type": "function", "function": FUNCTION}]
    choice, once = ToolChoice("required", "", False), {"tool_choice": "required", "parallel_tool_calls": False}
    stream = client.generate(
        messages=MESSAGES,
        tools=tools,
        tool_choice=choice,
        split_reply=True,
        return_ids=True,
        temperature=0,
        max_tokens=30,
    )
    generated = sum(len(delta.ids) for delta in stream)
    wanted = (len(client.tokenize(messages=MESSAGES, tools=tools)), generated)
    asked: dict[str, Any] = {"temperature": 0, "tools": tools, **once}
    url, body = f"{server.url}/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 30, **asked}
    whole = post(url, body).body["usage"]
    *_, last = events(url, {**body, "stream_options": {"include_usage": True}})
    assert last["usage"] | {"prompt_tokens_details": None} == whole | {"prompt_tokens_details": None}
    assert (whole["prompt_tokens"], whole["completion_tokens"]) == wanted
    url, body = f"{server.url}/v1/responses", {"input": MESSAGES, "max_output_tokens": 30, **asked}
    body["tools"] = [{"type": "function", **FUNCTION}]
    *_, done = events(url, body)
    for usage in (post(url, body).body["usage"], done["response"]["usage"]):
        assert (usage["input_tokens"], usage["output_tokens"]) == wanted
    url, body = f"{server.url}/v1/messages", {"messages": MESSAGES, "max_tokens": 30, "temperature": 0}
    body["tools"] = [{"name": "paint", "input_schema": FUNCTION["parameters"]}]
    body["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}
    delta = [event for event in events(url, body) if event["type"] == "message_delta"][-1]
    for usage in (post(url, body).body["usage"], delta["usage"]):
        assert (usage["input_tokens"] + usage["cache_read_input_tokens"], usage["output_tokens"]) == wanted


def test_tokens_that_were_found_are_named_by_each_api(server: RunningServer, client: Client):
    long = [{"role": "user", "content": "To be found again. " * 80}]
    count = len(client.tokenize(messages=long))
    found = (count - 1) // 256 * 256
    salt = {"cache_salt": "usage", "temperature": 0}
    first = post(f"{server.url}/v1/chat/completions", {"messages": long, "max_tokens": 1, **salt}).body["usage"]
    assert (first["prompt_tokens"], first["prompt_tokens_details"]["cached_tokens"]) == (count, 0)
    again = post(f"{server.url}/v1/chat/completions", {"messages": long, "max_tokens": 1, "n": 2, **salt}).body["usage"]
    assert (again["prompt_tokens"], again["prompt_tokens_details"]["cached_tokens"]) == (count, found)
    answer = post(f"{server.url}/v1/responses", {"input": long, "max_output_tokens": 1, **salt}).body["usage"]
    assert (answer["input_tokens"], answer["input_tokens_details"]["cached_tokens"]) == (count, found)
    said = post(f"{server.url}/v1/messages", {"messages": long, "max_tokens": 1, **salt}).body["usage"]
    assert (said["input_tokens"], said["cache_read_input_tokens"]) == (count - found, found)
    other = {**salt, "cache_salt": "other"}
    apart = post(f"{server.url}/v1/messages", {"messages": long, "max_tokens": 1, **other}).body["usage"]
    assert (apart["input_tokens"], apart["cache_read_input_tokens"]) == (count, 0)
