"""Usage adds up: prompt, completion and reasoning tokens, streamed or not, by each API."""

from typing import Any

import pytest

from bench.ask import events, post
from bench.harness import RunningServer
from protocol import Client

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
