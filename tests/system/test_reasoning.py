"""Reasoning apart from the answer, by each API; the model is a random one with marks of reasoning."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.ask import events, post
from bench.checks.clients import anthropic_client, openai_client
from bench.harness import RunningServer
from protocol import Client
from protocol.messages import Grammar

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Why?"}], "max_tokens": 24, "temperature": 0}
BUDGET = 6


@pytest.fixture(scope="module")
def thinker() -> Iterator[RunningServer]:
    """A server whose model reasons."""
    spec = importlib.util.spec_from_file_location("tiny", Path(__file__).parents[1] / "models" / "tiny.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with RunningServer(module.thinker_model(), "--served-model-name", "thinker") as running:
        yield running


def test_reasoning_comes_apart_and_its_budget_holds(thinker: RunningServer):
    answer = post(thinker.url + CHAT, {**BODY, "thinking_token_budget": BUDGET}).body
    message, usage = answer["choices"][0]["message"], answer["usage"]
    assert message["reasoning_content"]
    assert message["content"]
    assert "think>" not in message["content"] + message["reasoning_content"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == BUDGET + 1  # with the mark at its end
    streamed = list(events(thinker.url + CHAT, {**BODY, "thinking_token_budget": BUDGET}))
    deltas = [chunk["choices"][0]["delta"] for chunk in streamed if chunk["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == message["reasoning_content"]
    assert "".join(delta.get("content") or "" for delta in deltas) == message["content"]


def test_reasoning_can_be_left_out_or_switched_off(thinker: RunningServer):
    asked = {**BODY, "thinking_token_budget": BUDGET}
    silent = post(thinker.url + CHAT, {**asked, "include_reasoning": False}).body["choices"][0]["message"]
    assert "reasoning_content" not in silent
    for off in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}):
        answer = post(thinker.url + CHAT, {**BODY, **off}).body
        assert "reasoning_content" not in answer["choices"][0]["message"]
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


def test_a_grammar_holds_for_the_answer_alone(thinker: RunningServer):
    asked = {**BODY, "thinking_token_budget": BUDGET, "guided_choice": ["yes", "no"]}
    message = post(thinker.url + CHAT, asked).body["choices"][0]["message"]
    assert message["reasoning_content"]
    assert message["content"] in ("yes", "no")


def test_responses_have_an_item_of_reasoning(thinker: RunningServer):
    asked = {"input": "Why?", "max_output_tokens": 24, "temperature": 0, "chat_template_kwargs": {}}
    whole = post(f"{thinker.url}/v1/responses", asked).body
    assert [item["type"] for item in whole["output"]] == ["reasoning"]
    assert whole["status"] == "incomplete"
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] == 24


def test_messages_have_a_block_of_thinking_when_asked(thinker: RunningServer):
    url = f"{thinker.url}/v1/messages"
    body = {**BODY, "thinking": {"type": "enabled", "budget_tokens": BUDGET}}
    blocks = post(url, body).body["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text"]
    again = [BODY["messages"][0], {"role": "assistant", "content": blocks}, BODY["messages"][0]]
    assert post(url, {**body, "messages": again}).status == 200
    assert [block["type"] for block in post(url, BODY).body["content"]] == ["text"]


def test_zmq_clients_have_it_too(thinker: RunningServer):
    with Client(endpoint=thinker.endpoint) as client:
        stream = client.generate(
            messages=BODY["messages"],
            max_tokens=24,
            split_reply=True,
            thinking_budget=BUDGET,
            grammar=Grammar("json", json.dumps({"enum": [1, 2]})),
        )
        deltas = list(stream)
    assert "".join(delta.reasoning for delta in deltas)
    assert "".join(delta.text for delta in deltas) in ("1", "2")


def test_the_packages_show_it(thinker: RunningServer):
    asked: dict[str, Any] = {"model": "thinker", "messages": BODY["messages"], "max_tokens": 24}
    with openai_client(thinker) as client:
        extra = {"thinking_token_budget": BUDGET}
        stream = client.chat.completions.create(**asked, temperature=0, stream=True, extra_body=extra)
        deltas = [chunk.choices[0].delta for chunk in stream]
        thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
        whole = client.chat.completions.create(**asked, temperature=0, extra_body=extra)
        given = client.responses.create(model="thinker", input="Why?", max_output_tokens=24, temperature=0)
    assert getattr(whole.choices[0].message, "reasoning_content", None) == thought != ""
    assert whole.choices[0].message.content == "".join(delta.content or "" for delta in deltas) != ""
    assert [item.type for item in given.output] == ["reasoning"]
    client: Any = anthropic_client(thinker)
    with (
        client,
        client.messages.stream(
            **asked, extra_body={"temperature": 0}, thinking={"type": "enabled", "budget_tokens": BUDGET}
        ) as events_of_it,
    ):
        thinking, text = events_of_it.get_final_message().content
    assert (thinking.type, thinking.thinking, text.type) == ("thinking", thought, "text")
