"""What HTTP gives besides the text: shapes, usage, health, CORS, request ids, log lines."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from bench.ask import chat, events, get, post, request, streamed_text
from bench.harness import RunningServer, wait_until
from protocol import AsyncClient
from server.schemas import HealthEngine

ORIGIN = "https://app.example"  # the one that conftest allows
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
EXACT: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


def test_models_lists_the_served_one(server: RunningServer):
    body = get(f"{server.url}/v1/models").body
    assert body["object"] == "list"
    assert [model["id"] for model in body["data"]] == ["tiny"]


def test_health_names_every_process(server: RunningServer):
    health = server.health()
    assert health["status"] == "ok"
    assert health["model"] == "tiny"
    names = {actor["name"] for actor in health["actors"]}
    assert names == {"http0", "http1", "streamer", "tokenizer0", "tokenizer1", "engine"}
    assert {actor["state"] for actor in health["actors"]} == {"ready"}
    assert len({actor["pid"] for actor in health["actors"]}) == len(names)
    assert health["engine"].keys() == set(HealthEngine.__struct_fields__)


def test_serve_prints_where_it_listens_who_works_and_a_curl_line(server: RunningServer):
    log = server.log()
    assert f"curl {server.url}/v1/chat/completions" in log
    assert all(str(pid) in log for name, pid in server.pids().items() if name != "supervisor")


def test_chat_whole_and_streamed_agree(server: RunningServer):
    body = chat("Tell me something.", max_tokens=24, ignore_eos=True, stream_options={"include_usage": True})
    whole = post(server.url + CHAT, {**body, "stream_options": None}).body
    streamed = list(events(server.url + CHAT, body))
    assert whole["object"] == "chat.completion"
    assert whole["choices"][0]["message"]["content"] == streamed_text(iter(streamed))
    assert whole["choices"][0]["finish_reason"] == "length"
    assert {event["object"] for event in streamed} == {"chat.completion.chunk"}
    assert len({event["id"] for event in streamed}) == 1
    assert streamed[0]["choices"][0]["delta"]["role"] == "assistant"
    last, usage = streamed[-2:]
    assert last["choices"][0]["finish_reason"] == "length"
    assert usage["choices"] == []
    assert usage["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == 24
    assert whole["usage"]["total_tokens"] == whole["usage"]["prompt_tokens"] + 24


def test_no_usage_in_a_stream_that_did_not_ask(server: RunningServer):
    streamed = list(events(server.url + COMPLETIONS, {"prompt": "a", "max_tokens": 4, **EXACT}))
    assert all("usage" not in event or event["usage"] is None for event in streamed)
    assert all(event["choices"] for event in streamed)


def test_completions_take_strings_lists_and_ids(server: RunningServer):
    def texts(prompt: Any) -> list[str]:
        choices = post(server.url + COMPLETIONS, {"prompt": prompt, "max_tokens": 8, **EXACT}).body["choices"]
        assert [choice["index"] for choice in choices] == list(range(len(choices)))
        return [choice["text"] for choice in choices]

    (one,) = texts("The sun")
    (other,) = texts([3000, 4000, 5000])
    assert texts(["The sun", "The sun"]) == [one, one]
    assert texts([[3000, 4000, 5000]]) == [other]


def test_completions_default_to_sixteen_tokens(server: RunningServer):
    body = {"prompt": [3000, 4000], **EXACT}
    assert post(server.url + COMPLETIONS, body).body["usage"]["completion_tokens"] == 16


def test_content_parts_and_max_completion_tokens(server: RunningServer):
    plain = chat("Hello there", max_completion_tokens=6, ignore_eos=True)
    parts = {**plain, "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello there"}]}]}
    answers = [post(server.url + CHAT, body).body for body in (plain, parts)]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["usage"]["completion_tokens"] == 6


def test_default_values_of_unsupported_options_are_accepted(server: RunningServer):
    body = chat("a", max_tokens=2, n=1, best_of=1, response_format={"type": "text"}, tools=None)
    assert post(server.url + CHAT, body).status == 200


def test_a_known_option_that_is_not_served_is_named(server: RunningServer):
    for name, value in {"best_of": 2, "allowed_token_ids": [5]}.items():
        answer = post(server.url + CHAT, chat("a", max_tokens=2, **{name: value}))
        assert answer.status == 400
        assert name in answer.error["message"]


def test_unknown_fields_are_ignored_and_logged_once(server: RunningServer):
    for _ in range(6):  # both HTTP workers get some
        assert post(server.url + COMPLETIONS, {"prompt": "a", "max_tokens": 1, "whatever_this": 3}).status == 200
    lines = [line for line in server.log().splitlines() if "whatever_this" in line]
    assert 1 <= len(lines) <= 2


@pytest.mark.parametrize(("origin", "allowed"), [(ORIGIN, True), ("https://other.example", False)])
def test_cors(server: RunningServer, origin: str, allowed: bool):
    preflight = request(
        "OPTIONS",
        server.url + CHAT,
        headers={
            "origin": origin,
            "access-control-request-method": "POST",
            "access-control-request-headers": "content-type",
        },
    )
    answer = get(f"{server.url}/v1/models", headers={"origin": origin})
    expected = origin if allowed else None
    assert answer.headers.get("access-control-allow-origin") == expected
    assert preflight.headers.get("access-control-allow-origin") == expected
    assert (preflight.status < 300) is allowed


def test_a_request_id_comes_back_and_stands_in_one_log_line(server: RunningServer):
    wanted = "req-7.a:b_c"
    answer = post(
        server.url + COMPLETIONS,
        {"prompt": [3000, 4000], "max_tokens": 5, **EXACT},
        headers={"x-request-id": wanted},
    )
    assert answer.headers["x-request-id"] == wanted

    def lines() -> list[dict[str, Any]]:
        return [json.loads(line) for line in server.log().splitlines() if wanted in line]

    wait_until(lambda: bool(lines()), 10, "the request is logged")
    (line,) = lines()
    assert line["request_id"] == wanted
    assert line["tokens"] == 5
    assert line["prompt_tokens"] == 2
    assert line["reason"] == "length"
    assert line.keys() >= {"queue", "prefill", "ttft", "cached"}


def test_a_request_without_an_id_gets_one(server: RunningServer):
    first, second = (get(f"{server.url}/v1/models").headers["x-request-id"] for _ in range(2))
    assert first
    assert first != second


def test_a_stream_whose_client_left_gets_few_more_tokens(server: RunningServer):
    """Of the 60,000 that it asked for; the log tells how far it came. Among others, so that a step takes a while,
    as the news does on a machine that is busy with other tests."""
    wanted = "left-in-the-middle"
    body = json.dumps({"prompt": [3000, 4000], "max_tokens": 60_000, "stream": True, **EXACT}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\nx-request-id: {wanted}\r\ncontent-length: {len(body)}\r\n\r\n"

    async def read_some_and_leave() -> int:
        async with AsyncClient(endpoint=server.endpoint) as crowd:
            others = [crowd.generate(ids=[3000 + i], max_tokens=60_000, **EXACT) for i in range(32)]
            async for _ in others[-1]:
                break
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(head.encode() + body)
            events = 0
            while events < 12:
                events += (await reader.readline()).startswith(b"data:")
            writer.transport.abort()
            await asyncio.to_thread(wait_until, lambda: wanted in server.log(), 10, "the request is logged")
            return events

    events = asyncio.run(read_some_and_leave())
    (line,) = (json.loads(line) for line in server.log().splitlines() if wanted in line)
    assert line["reason"] == "client_gone"
    assert events <= line["tokens"] <= events + 300


def test_what_is_kept_of_a_response_is_not_to_be_had_by_the_id_of_its_request(server: RunningServer):
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:
        ask = {"input": "Hello", "max_output_tokens": 3, "temperature": 0}
        twin = {"x-request-id": "twin"}
        first, second = (client.post("/v1/responses", json=ask, headers=twin).json() for _ in range(2))
        assert first["id"] != second["id"]
        assert client.get("/v1/responses/resp_twin").status_code == 404
        assert client.get(f"/v1/responses/{first['id']}").json()["id"] == first["id"]
        endless = {"input": "Hello", "stream": True, "ignore_eos": True, "store": False}
        with client.stream("POST", "/v1/responses", json=endless, headers=twin) as stream:
            lines = stream.iter_lines()
            created = next(json.loads(line[6:]) for line in lines if line.startswith("data: "))
            wanted = created["response"]["id"]
            assert client.post(f"/v1/requests/{wanted}/cancel").json() == {"id": wanted, "cancelled": 1}
            assert "response.failed" in "".join(lines)
