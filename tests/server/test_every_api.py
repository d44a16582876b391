"""Options that all APIs share reach the streamer by each of them; conversations keep their turns."""

from typing import Any

import pytest
from fake_streamer import FakeStream
from http_worker import HttpWorker, chat

from protocol.messages import Generate, Grammar, ToolCallDelta

TURN = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": chat(),
    "completions": {"prompt": "Hi"},
    "responses": {"input": "Hi", "store": False},
    "messages": {"messages": TURN, "max_tokens": 9},
}
SHARED: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.9,
    "seed": 5,
    "ignore_eos": True,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "logit_bias": {9: 1.0},
    "top_k": 40,
    "min_p": 0.01,
    "repetition_penalty": 1.1,
    "min_tokens": 2,
    "stop_token_ids": [9],
    "xtc_probability": 0.1,
    "xtc_threshold": 0.2,
    "priority": 1,
}


def asked(worker: HttpWorker, path: str, **fields: Any) -> Generate:
    """Post a request that must succeed, and return what the streamer was asked for."""
    response = worker.client.post(f"/v1/{path}", json={**BODIES[path], **fields})
    assert response.status_code == 200, response.text
    return worker.streamer.stream().request


@pytest.mark.parametrize("path", BODIES)
def test_shared_options_reach_the_streamer(worker: HttpWorker, path: str) -> None:
    request = asked(worker, path, **SHARED, cache_salt="tenant", structured_outputs={"regex": "a+"})
    assert {name: getattr(request.params, name) for name in SHARED} == SHARED
    assert request.cache_salt == "tenant"
    assert request.params.grammar == Grammar("regex", "a+", "structured_outputs.regex")


@pytest.mark.parametrize("path", BODIES)
def test_shared_options_are_refused_by_name(worker: HttpWorker, path: str) -> None:
    for name, value in {"cache_salt": 5, "min_p": 2, "priority": "high", "repetition_penalty": 0}.items():
        response = worker.client.post(f"/v1/{path}", json={**BODIES[path], name: value})
        assert response.status_code == 400
        assert name in response.json()["error"]["message"]
    assert worker.streamer.streams == []


def test_a_response_may_stop_at_a_text(worker: HttpWorker) -> None:
    assert asked(worker, "responses", stop="x").params.stop == ["x"]


@pytest.mark.parametrize("content", ["Well", [{"type": "text", "text": "Well"}]])
def test_a_message_that_ends_with_the_assistant_is_continued(worker: HttpWorker, content: Any) -> None:
    request = asked(worker, "messages", messages=[*TURN, {"role": "assistant", "content": content}])
    assert request.template_kwargs["continue_final_message"] is True
    assert "continue_final_message" not in asked(worker, "messages").template_kwargs


def test_an_empty_last_message_begins_nothing(worker: HttpWorker) -> None:
    request = asked(worker, "messages", messages=[*TURN, {"role": "assistant", "content": ""}])
    assert request.messages == TURN
    assert "continue_final_message" not in request.template_kwargs


def test_what_was_refused_before_is_part_of_the_conversation(worker: HttpWorker) -> None:
    said = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    assert asked(worker, "chat/completions", messages=[*TURN, said, *TURN]).messages == [*TURN, said, *TURN]
    turns = asked(worker, "responses", input=[*TURN, said, *TURN]).messages
    assert turns is not None
    assert turns[1]["content"] == "No."


def test_an_empty_input_is_named(worker: HttpWorker) -> None:
    empty = worker.client.post("/v1/responses", json={"input": []})
    assert (empty.status_code, empty.json()["error"]["param"]) == (400, "input")


def test_a_chat_is_continued_when_asked(worker: HttpWorker) -> None:
    both = {"continue_final_message": True, "add_generation_prompt": False}
    assert asked(worker, "chat/completions", **both).template_kwargs == both
    response = worker.client.post("/v1/chat/completions", json={**chat(), **dict.fromkeys(both, True)})
    assert response.json()["error"]["param"] == "continue_final_message"


def test_items_of_one_answer_are_one_turn(worker: HttpWorker) -> None:
    answer = [
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes."}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "done"},
    ]
    request = asked(worker, "responses", input=[*TURN, *answer])
    assert request.messages is not None
    user, turn, result = request.messages
    assert (user["content"], turn["reasoning_content"], turn["content"]) == ("Hi", "Hm.", "Yes.")
    assert turn["tool_calls"][0]["function"]["name"] == "f"
    assert result == {"role": "tool", "tool_call_id": "c", "content": "done"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "arguments", ['{"a": "\\ud800"}', '{"a": NaN}', '{"a": 1e999}', '{"a": ' * 20_000, '{"a": "cut', "[1]", ""]
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"])
def test_whatever_arguments_a_model_writes_the_answer_has_its_form(
    worker: HttpWorker, path: str, arguments: str, stream: bool
) -> None:
    def call(asked: FakeStream) -> None:
        asked.accept()
        asked.piece("", "", ToolCallDelta(0, "call_1", "paint", arguments))
        asked.finish("tool_calls")

    worker.streamer.on_generate = call
    function = {"name": "paint", "parameters": {"type": "object"}}
    body: dict[str, Any] = {"messages": TURN, "model": "tiny", "max_tokens": 9, "stream": stream}
    body["tools"] = [{"type": "function", "function": function}]
    if path == "/v1/responses":
        body |= {"input": "Hi", "store": False, "tools": [{"type": "function", **function}]}
        del body["messages"], body["max_tokens"]
    if path == "/v1/messages":
        body["tools"] = [{"name": "paint", "input_schema": {"type": "object"}}]
    if path == "/api/chat":
        del body["max_tokens"]
    answer = worker.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert "paint" in answer.text
    assert "error" not in answer.text.replace('"error":null', "")
    if not stream:
        answer.json()


def test_anthropics_clients_get_models_in_their_words(worker: HttpWorker) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    listed = worker.client.get("/v1/models", headers=headers).json()
    [model] = listed["data"]
    assert (model["type"], model["id"], model["display_name"]) == ("model", "tiny", "tiny")
    assert model["created_at"].endswith("Z")
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "tiny", "tiny")
    assert worker.client.get("/v1/models/tiny", headers=headers).json() == model
    assert worker.client.get("/v1/models").json()["object"] == "list"
