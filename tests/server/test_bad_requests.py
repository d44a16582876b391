"""Requests that are wrong in themselves: each ends with its status in OpenAI's error shape, and harms nobody."""

import json
from typing import Any

import pytest
from http_worker import HttpWorker, chat

JSON = {"content-type": "application/json"}


def refused(worker: HttpWorker, body: bytes | dict[str, Any], status: int = 400, path: str = "chat/completions") -> Any:
    """Post a body that must be refused before it reaches the streamer; the error object."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = worker.client.post(f"/v1/{path}", content=content, headers=JSON)
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    assert worker.streamer.streams == []
    assert response.json().keys() == {"error"}
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in error["message"]
    return error


@pytest.mark.parametrize(
    "body", [b"", b"{", b"nope", b'{"messages": [}', b"\x00", b'{"messages": []} x', b"{'a': 1}", b'{"n": NaN}']
)
def test_bad_json(worker: HttpWorker, body: bytes) -> None:
    assert "not valid JSON" in refused(worker, body)["message"]


@pytest.mark.parametrize("body", [b"[]", b"5", b'"text"', b"null", b"true", b"[" * 100_000])
def test_no_object(worker: HttpWorker, body: bytes) -> None:
    assert "expected object" in refused(worker, body)["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_p": []}, "top_p"),
        ({"seed": 1.5}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"stop": 5}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": "x" * 1025}, "stop"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": "x"}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 1.1}, "min_p"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"-5": 1}}, "logit_bias"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"logit_bias": {"5": "x"}}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"xtc_probability": 2}, "xtc_probability"),
        ({"xtc_threshold": 0.6}, "xtc_threshold"),
        ({"priority": "high"}, "priority"),
        ({"logprobs": 5}, "logprobs"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": True}, "top_logprobs"),
        ({"stream": 1}, "stream"),
        ({"stream": "true"}, "stream"),
        ({"ignore_eos": "yes"}, "ignore_eos"),
        ({"stream_options": True}, "stream_options"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"model": 5}, "model"),
        ({"user": 5}, "user"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": ["Hi"]}, "messages[0]"),
        ({"messages": [{}]}, "messages[0].role"),
        ({"messages": [{"role": "", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": 1, "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ],
)
def test_field_is_named(worker: HttpWorker, fields: dict[str, Any], param: str) -> None:
    error = refused(worker, chat() | fields)
    assert error["param"] == param
    assert param in error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["code"] == "invalid_request"


def test_missing_messages(worker: HttpWorker) -> None:
    error = refused(worker, {"model": "tiny"})
    assert (error["param"], error["message"]) == ("messages", "messages is required")


def test_unknown_model(worker: HttpWorker) -> None:
    error = refused(worker, chat() | {"model": "gpt-9"}, 404)
    assert error["code"] == "model_not_found"
    assert error["param"] == "model"
    assert "gpt-9" in error["message"]
    assert "tiny" in error["message"]


SURROGATES = [
    (b'"\\ud800"', True),
    (b'"a\\udc00b"', True),
    (b'"\\ud83d\\u0041"', True),
    (b'"\\udc00\\ud800"', True),
    (b'"\xed\xa0\x80"', True),
    (b'"\xed\xb0\x80 and more"', True),
    (b'"\\ud83d\\ude00"', False),
]


@pytest.mark.parametrize(("text", "lone"), SURROGATES)
def test_lone_surrogates(worker: HttpWorker, text: bytes, lone: bool) -> None:
    body = b'{"messages": [{"role": "user", "content": %s}]}' % text
    if not lone:
        assert worker.client.post("/v1/chat/completions", content=body).status_code == 200
        return
    error = refused(worker, body)
    assert "messages[0].content holds a lone surrogate" in error["message"]
    assert error["param"] == "messages[0].content"
    error = refused(worker, b'{"prompt": ["a", %s]}' % text, path="completions")
    assert error["param"] == "prompt[1]"
    error = refused(worker, b'{"prompt": "a", "stop": %s}' % text, path="completions")
    assert error["param"] == "stop"


def test_invalid_utf8(worker: HttpWorker) -> None:
    error = refused(worker, b'{"messages": [{"role": "user", "content": "\xff"}]}')
    assert "not valid UTF-8" in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"unknown": ' + b'{"a":' * 5_000 + b"1" + b"}" * 5_000 + b"}",
        json.dumps(chat() | {"chat_template_kwargs": json.loads('{"a":' * 200 + "1" + "}" * 200)}).encode(),
        json.dumps({"messages": [{"role": "user", "content": "a", "x": json.loads("[" * 200 + "]" * 200)}]}).encode(),
    ],
)
def test_deep_json(worker: HttpWorker, body: bytes) -> None:
    assert "deep" in refused(worker, body)["message"]


@pytest.mark.parametrize("chunked", [False, True])
def test_large_body(worker: HttpWorker, chunked: bool) -> None:
    body = json.dumps(chat("x" * (1 << 20))).encode()
    pieces = iter([body[:1000], body[1000:]])
    response = worker.client.post("/v1/chat/completions", content=pieces if chunked else body)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"
    assert worker.client.post("/v1/chat/completions", json=chat()).status_code == 200


def test_huge_numbers(worker: HttpWorker) -> None:
    assert refused(worker, b'{"messages": [{"role": "user", "content": "a"}], "seed": ' + b"9" * 5000 + b"}")
    assert refused(worker, b'{"messages": [{"role": "user", "content": "a"}], "n": 1e999}')["param"] == "n"
    assert refused(worker, b'{"messages": [{"role": "user", "content": "a", "x": 1%s}]}' % (b"0" * 30))


@pytest.mark.parametrize(
    "fields",
    [
        {"n": True},
        {"n": 0},
        {"n": 65},
        {"tools": "get_weather"},
        {"tool_choice": "required"},
        {"functions": [{}]},
        {"best_of": 2},
        {"repetition_context_size": 20},
        {"allowed_token_ids": [5]},
        {"prompt_logprobs": 1},
        {"modalities": ["text", "audio"]},
        {"audio": {"voice": "x"}},
        {"structural_tag": {"type": "structural_tag"}},
    ],
)
def test_unsupported_values(worker: HttpWorker, fields: dict[str, Any]) -> None:
    assert refused(worker, chat() | fields)["param"] == next(iter(fields))


def test_a_key_of_a_wrong_type_is_said_to_be_one(worker: HttpWorker) -> None:
    error = refused(worker, chat(logit_bias={"five": 1}))
    assert error["message"] == "logit_bias: expected integer, got string in a key"


def test_unknown_fields_are_ignored_and_logged_once(worker: HttpWorker) -> None:
    for _ in range(3):
        body = chat() | {"a_new_field": {"x": 1}, "another": None}
        assert worker.client.post("/v1/chat/completions", json=body).status_code == 200
    lines = [line for line in worker.log_lines() if line["event"] == "unknown request field ignored"]
    names = [line["field"] for line in lines]
    assert sorted(name for name in names if name in ("a_new_field", "another")) == ["a_new_field", "another"]


def test_rejections_of_the_streamer(worker: HttpWorker) -> None:
    text = "This model's maximum context length is 4096 tokens, but the prompt has 5000"
    worker.streamer.on_generate = lambda stream: stream.reject("prompt_too_long", text, param="messages")
    for stream in (False, True):
        response = worker.client.post("/v1/chat/completions", json=chat(stream=stream))
        assert response.status_code == 400
        error = response.json()["error"]
        assert error == {
            "message": text,
            "type": "invalid_request_error",
            "param": "messages",
            "code": "context_length_exceeded",
        }


@pytest.mark.parametrize(
    ("code", "status", "retry"),
    [
        ("queue_full", 503, "8"),
        ("out_of_memory", 503, "8"),
        ("draining", 503, "8"),
        ("loading", 503, "8"),
        ("invalid_request", 400, None),
        ("model_not_found", 404, None),
        ("internal_error", 500, None),
        ("something_new", 500, None),
    ],
)
def test_codes_become_statuses(worker: HttpWorker, code: str, status: int, retry: str | None) -> None:
    worker.streamer.on_generate = lambda stream: stream.reject(code, "no", retry_after=7.2)
    response = worker.client.post("/v1/chat/completions", json=chat())
    assert response.status_code == status
    assert response.headers.get("retry-after") == retry


def test_failures_before_the_answer(worker: HttpWorker) -> None:
    worker.streamer.on_generate = lambda stream: stream.fail("timeout", "it took too long")
    for stream in (False, True):
        response = worker.client.post("/v1/chat/completions", json=chat(stream=stream))
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "timeout"


def test_unknown_paths_and_methods(worker: HttpWorker) -> None:
    response = worker.client.get("/v2/nothing")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_found"
    for method, path in [("GET", "/v1/chat/completions"), ("DELETE", "/v1/completions"), ("POST", "/v1/models")]:
        response = worker.client.request(method, path)
        assert response.status_code == 405
        assert response.json()["error"]["code"] == "method_not_allowed"
        assert response.headers["allow"]
    assert worker.client.get("/v1/models/other").status_code == 404


def test_a_compressed_body(worker: HttpWorker) -> None:
    response = worker.client.post("/v1/completions", content=b"\x1f\x8b", headers=JSON | {"content-encoding": "gzip"})
    assert (response.status_code, response.json()["error"]["code"]) == (415, "body_encoded")
    plain = worker.client.post("/v1/chat/completions", json=chat(), headers={"content-encoding": "identity"})
    assert plain.status_code == 200


def test_more_tokens_than_can_be_counted(worker: HttpWorker) -> None:
    assert refused(worker, chat(max_tokens=10**30))["param"] == "max_tokens"
