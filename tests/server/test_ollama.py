"""Ollama's API on a worker: the bodies of requests and answers."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from fake_streamer import FakeStream, embed, say_hello
from http_worker import HttpWorker

from protocol.messages import CallFailed, ToolCallDelta
from server.ollama import MOST_KEPT, seconds_of

ASK = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}


def lines(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("name", ["tiny", "tiny:latest"])
def test_chat_streams_lines_unless_told_otherwise(worker: HttpWorker, name: str):
    answer = worker.client.post("/api/chat", json=ASK | {"model": name})
    assert answer.headers["content-type"] == "application/x-ndjson"
    *pieces, last = lines(answer.text)
    assert [piece["message"]["content"] for piece in pieces] == ["Hello", ", ", "world"]
    assert all(piece["done"] is False and piece["model"] == "tiny:latest" for piece in pieces)
    assert (last["done"], last["done_reason"], last["prompt_eval_count"], last["eval_count"]) == (True, "stop", 5, 3)
    assert last["total_duration"] == 100_000_000
    whole = worker.client.post("/api/chat", json=ASK | {"stream": False}).json()
    assert whole["message"] == {"role": "assistant", "content": "Hello, world"}
    assert whole["done"] is True


def test_generate(worker: HttpWorker):
    body = {"model": "tiny", "prompt": "Hi", "system": "Be brief", "stream": False, "keep_alive": "5m"}
    assert worker.client.post("/api/generate", json=body).json()["response"] == "Hello, world"
    asked = worker.streamer.streams[-1].request
    assert asked.messages == [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}]
    *pieces, last = lines(worker.client.post("/api/generate", json=body | {"raw": True, "stream": True}).text)
    assert "".join(piece["response"] for piece in pieces) == "Hello, world"
    assert (last["done"], last["response"]) == (True, "")
    assert worker.streamer.streams[-1].request.prompt == "Hi"


def test_options_are_taken_under_ollamas_names(worker: HttpWorker):
    options = {
        "temperature": 0.5,
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 3,
        "num_predict": 9,
        "stop": ["x"],
        "repeat_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "num_ctx": 4096,
    }
    worker.client.post("/api/chat", json=ASK | {"options": options, "format": "json"})
    params = worker.streamer.streams[-1].request.params
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.seed) == (0.5, 5, 0.9, 0.1, 3)
    assert (params.max_tokens, params.stop, params.repetition_penalty) == (9, ["x"], 1.2)
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, 0.25)
    assert params.grammar is not None
    assert params.grammar.kind == "json_object"
    worker.client.post("/api/chat", json=ASK | {"options": {"num_predict": -1}, "format": {"type": "object"}})
    params = worker.streamer.streams[-1].request.params
    assert params.max_tokens is None
    assert params.grammar is not None
    assert (params.grammar.kind, params.grammar.text) == ("json", '{"type": "object"}')
    refused = worker.client.post("/api/chat", json=ASK | {"options": {"repeat_penalty": -1}})
    assert refused.status_code == 400
    assert "repeat_penalty" in refused.json()["error"]


def think_and_call(stream: FakeStream) -> None:
    stream.accept()
    stream.piece("", "hm")
    stream.piece("", "", ToolCallDelta(0, "call_1", "paint", '{"colour":'))
    stream.piece("", "", ToolCallDelta(0, "", "", ' "red"}'))
    stream.finish("tool_calls")


@pytest.mark.parametrize("stream", [True, False])
def test_thinking_and_tool_calls(worker: HttpWorker, stream: bool):
    worker.streamer.on_generate = think_and_call
    tool = {"type": "function", "function": {"name": "paint", "parameters": {"type": "object"}}}
    got = lines(worker.client.post("/api/chat", json=ASK | {"tools": [tool], "think": True, "stream": stream}).text)
    calls = [call for line in got for call in line["message"].get("tool_calls", [])]
    assert calls == [{"function": {"name": "paint", "arguments": {"colour": "red"}}}]
    assert "".join(line["message"].get("thinking", "") for line in got) == "hm"
    request = worker.streamer.streams[-1].request
    assert request.template_kwargs["enable_thinking"] is True
    assert request.tools[0]["function"]["name"] == "paint"
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    result = {"role": "tool", "tool_name": "paint", "content": "done"}
    worker.client.post("/api/chat", json={"model": "tiny", "messages": [*ASK["messages"], said, result]})
    sent = worker.streamer.streams[-1].request.messages
    assert sent is not None
    assert json.loads(sent[1]["tool_calls"][0]["function"]["arguments"]) == {"colour": "red"}
    assert sent[2]["role"] == "tool"


def test_loading_and_unloading_answer_at_once(worker: HttpWorker):
    count = len(worker.streamer.streams)
    assert worker.client.post("/api/generate", json={"model": "tiny"}).json()["done_reason"] == "load"
    body = {"model": "tiny", "messages": [], "keep_alive": 0}
    assert worker.client.post("/api/chat", json=body).json()["done_reason"] == "unload"
    assert len(worker.streamer.streams) == count


def test_what_there_is(worker: HttpWorker):
    assert "version" in worker.client.get("/api/version").json()
    [model] = worker.client.get("/api/tags").json()["models"]
    assert (model["name"], model["model"]) == ("tiny:latest", "tiny:latest")
    [running] = worker.client.get("/api/ps").json()["models"]
    assert running["context_length"] == 4096
    shown = worker.client.post("/api/show", json={"model": "tiny"}).json()
    assert shown["capabilities"] == ["completion", "tools"]
    assert worker.client.get("/", headers={"accept": "text/html"}).headers["location"] == "/admin"
    assert worker.client.get("/").text == "Ollama is running"


def test_errors_have_ollamas_form(worker: HttpWorker):
    worker.streamer.on_generate = lambda stream: stream.reject("queue_full", "full")
    answer = worker.client.post("/api/chat", json=ASK)
    assert (answer.status_code, answer.json()) == (503, {"error": "full"})

    def fail_later(stream: FakeStream) -> None:
        stream.accept()
        stream.text("a")
        stream.fail("timeout", "too slow")

    worker.streamer.on_generate = fail_later
    assert lines(worker.client.post("/api/chat", json=ASK).text)[-1] == {"error": "too slow"}
    worker.streamer.on_generate = say_hello
    for path, body, status in (
        ("/api/chat", ASK | {"model": "other"}, 404),
        ("/api/show", {"model": "other"}, 404),
        ("/api/show", {}, 400),
        ("/api/chat", {"model": "tiny", "messages": [{"role": "user", "images": ["x"]}]}, 400),
        ("/api/pull", {"model": "x"}, 400),
        ("/api/embed", {"model": "tiny"}, 400),
    ):
        answer = worker.client.post(path, json=body)
        assert (answer.status_code, list(answer.json())) == (status, ["error"]), path
    assert "callboard pull" in worker.client.post("/api/pull", json={}).json()["error"]


def test_vectors_as_long_as_asked_for(worker: HttpWorker):
    body = {"model": "tiny", "input": ["one two", "three"], "options": {}, "truncate": True}
    answer = worker.client.post("/api/embed", json=body).json()
    assert (answer["embeddings"], answer["prompt_eval_count"]) == ([[2.0, 1.0, 2.0]] * 2, 3)
    short = worker.client.post("/api/embed", json=body | {"dimensions": 2}).json()["embeddings"]
    assert short == [pytest.approx([2 / 5**0.5, 1 / 5**0.5])] * 2
    assert worker.client.post("/api/embeddings", json={"model": "tiny", "prompt": "x"}).json()["embedding"] == [2, 1, 2]
    for wrong, named in (
        ({"dimensions": 4}, "dimensions must be at most 3"),
        ({"dimensions": 0}, "dimensions"),
        ({"options": {"num_ctx": 8}}, "options.num_ctx"),
    ):
        answer = worker.client.post("/api/embed", json=body | wrong)
        assert (answer.status_code, named in answer.json()["error"]) == (400, True), answer.text


def test_texts_beyond_the_context_are_cut_unless_told_otherwise(worker: HttpWorker, monkeypatch: pytest.MonkeyPatch):
    def only_ids(call: Any) -> Any:
        return CallFailed(call.ref, "prompt_too_long", "5000 tokens", "input") if call.texts else embed(call)

    monkeypatch.setattr(worker.streamer, "on_embed", only_ids)
    body = {"model": "tiny", "input": ["w " * 5000, "w w"]}
    assert worker.client.post("/api/embed", json=body).json()["prompt_eval_count"] == 4096 + 2
    answer = worker.client.post("/api/embed", json=body | {"truncate": False})
    assert (answer.status_code, answer.json()) == (400, {"error": "5000 tokens"})


@pytest.mark.parametrize("given", ["999999999h", 1e300, "9" * 400, "5m", -1])
def test_a_model_can_be_kept_for_any_time(given: float | str) -> None:
    seconds = seconds_of(given)
    assert seconds is not None
    assert seconds <= MOST_KEPT
    datetime.now(UTC) + timedelta(seconds=seconds)


def test_numbers_and_stops_are_taken_as_ollama_takes_them(worker: HttpWorker) -> None:
    options = {"num_predict": 5.0, "top_k": 40.0, "seed": 3.0, "stop": ""}
    assert worker.client.post("/api/chat", json=ASK | {"options": options}).status_code == 200
    params = worker.streamer.streams[-1].request.params
    assert (params.max_tokens, params.top_k, params.seed, params.stop) == (5, 40, 3, [])
    worker.client.post("/api/chat", json=ASK | {"options": {"num_predict": 0, "top_p": 0, "stop": ["", "x"]}})
    params = worker.streamer.streams[-1].request.params
    assert (params.max_tokens, params.top_k, params.top_p, params.stop) == (None, 1, None, ["x"])
    assert worker.client.post("/api/chat", json=ASK | {"options": {"top_k": 1e300}}).status_code == 400


@pytest.mark.parametrize("field", [{"logprobs": True}, {"top_logprobs": 2}, {"context": [1, 2]}])
def test_what_is_not_served_is_refused_by_name(worker: HttpWorker, field: dict[str, Any]) -> None:
    for path, body in (("/api/chat", ASK), ("/api/generate", {"model": "tiny", "prompt": "x"})):
        refused = worker.client.post(path, json=body | field)
        assert refused.status_code == 400
        assert next(iter(field)) in refused.json()["error"]


def test_a_last_message_of_the_assistant_is_continued(worker: HttpWorker) -> None:
    begun = {"role": "assistant", "content": "One, two,"}
    worker.client.post("/api/chat", json=ASK | {"messages": [*ASK["messages"], begun]})
    assert worker.streamer.streams[-1].request.template_kwargs == {"continue_final_message": True}
    worker.client.post("/api/chat", json=ASK)
    assert worker.streamer.streams[-1].request.template_kwargs == {}


def test_arguments_that_are_cut_off_are_passed_on_as_text(worker: HttpWorker) -> None:
    def cut(stream: FakeStream) -> None:
        stream.accept()
        stream.piece("", "", ToolCallDelta(0, "call_1", "paint", '{"colour": "re'))
        stream.finish("length")

    worker.streamer.on_generate = cut
    [call] = worker.client.post("/api/chat", json=ASK | {"stream": False}).json()["message"]["tool_calls"]
    assert call["function"] == {"name": "paint", "arguments": {"arguments": '{"colour": "re'}}
