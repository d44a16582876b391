"""Request ids, the log line of each request, and CORS."""

import pytest
from fake_streamer import FakeStream
from http_worker import HttpWorker, chat

from server.request_log import MAX_ID


def test_log_line_of_a_generation(worker: HttpWorker) -> None:
    headers = {"x-request-id": "my-id.1"}
    response = worker.client.post("/v1/chat/completions", json=chat(stream=True), headers=headers)
    assert response.headers["x-request-id"] == "my-id.1"
    assert worker.streamer.stream().request.label == "my-id.1"
    line = worker.wait_log(event="request", request_id="my-id.1")
    wanted = {
        "level": "info",
        "actor": "http0",
        "epoch": 7,
        "method": "POST",
        "path": "/v1/chat/completions",
        "status": 200,
        "stream": True,
        "queue": 0.002,
        "prefill": 0.003,
        "ttft": 0.006,
        "prompt_tokens": 5,
        "cached": 2,
        "tokens": 3,
        "reason": "stop",
    }
    assert wanted.items() <= line.items()
    assert 0 < line["seconds"] < 5


def test_ids_are_made_when_none_comes(worker: HttpWorker) -> None:
    ids = {worker.client.get(path).headers["x-request-id"] for path in ("/health", "/ready", "/nix", "/v1/models")}
    assert len(ids) == 4
    assert worker.wait_log(event="request", path="/nix")["request_id"] in ids


@pytest.mark.parametrize(
    ("sent", "back"),
    [
        ("a b<c>", "abc"),
        ("x" * 1000, "x" * MAX_ID),
        ("öäü-1", "-1"),
        ("ok_9:z.Z-", "ok_9:z.Z-"),
    ],
)
def test_ids_are_made_harmless(worker: HttpWorker, sent: str, back: str) -> None:
    response = worker.client.get("/nix", headers={b"x-request-id": sent.encode()})
    assert response.headers["x-request-id"] == back


def test_useless_ids_are_replaced(worker: HttpWorker) -> None:
    assert len(worker.client.get("/nix", headers={"x-request-id": "<>"}).headers["x-request-id"]) == 32


def test_failures_are_logged(worker: HttpWorker) -> None:
    worker.client.post("/v1/chat/completions", json={}, headers={"x-request-id": "bad"})
    line = worker.wait_log(event="request", request_id="bad")
    assert (line["status"], line["reason"]) == (400, "invalid_request")
    worker.streamer.on_generate = lambda stream: stream.fail("engine_lost", "dead")
    worker.client.post("/v1/chat/completions", json=chat(), headers={"x-request-id": "failed"})
    line = worker.wait_log(event="request", request_id="failed")
    assert (line["status"], line["reason"]) == (503, "engine_lost")

    def late(stream: FakeStream) -> None:
        stream.text("Hello")
        stream.fail("engine_lost", "dead")

    worker.streamer.on_generate = late
    worker.client.post("/v1/chat/completions", json=chat(stream=True), headers={"x-request-id": "late"})
    line = worker.wait_log(event="request", request_id="late")
    assert (line["status"], line["reason"]) == (200, "engine_lost")


def test_several_prompts_in_one_line(worker: HttpWorker) -> None:
    worker.client.post("/v1/completions", json={"prompt": ["a", "b"]}, headers={"x-request-id": "two"})
    line = worker.wait_log(event="request", request_id="two")
    assert (line["prompts"], line["tokens"], line["reason"]) == (2, 6, "stop")


def test_cors(worker: HttpWorker) -> None:
    origin = {"origin": "http://page.test"}
    for response in (
        worker.client.post("/v1/chat/completions", json=chat(), headers=origin),
        worker.client.post("/v1/chat/completions", json=chat(stream=True), headers=origin),
        worker.client.post("/v1/chat/completions", json={}, headers=origin),
        worker.client.get("/nix", headers=origin),
    ):
        assert response.headers["access-control-allow-origin"] == "http://page.test"
        assert "x-request-id" in response.headers["access-control-expose-headers"]
    response = worker.client.get("/health", headers={"origin": "http://evil.test"})
    assert "access-control-allow-origin" not in response.headers
    preflight = {
        **origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-request-id",
    }
    response = worker.client.options("/v1/chat/completions", headers=preflight)
    assert response.status_code == 200
    assert "authorization" in response.headers["access-control-allow-headers"]
    assert response.headers["x-request-id"]


def test_a_prompt_that_choices_share_counts_once(worker: HttpWorker) -> None:
    response = worker.client.post("/v1/chat/completions", json=chat(n=3))
    usage = response.json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 9)
    line = worker.wait_log(event="request", request_id=response.headers["x-request-id"])
    assert (line["prompt_tokens"], line["tokens"], line["cached"]) == (5, 9, 2)
