"""Wrong requests against the real system: each gets an answer that says what is wrong, and nobody is harmed."""

from typing import Any

import pytest
import zmq

from bench.ask import post, request
from bench.checks import refusals
from bench.checks.report import Report
from bench.harness import RunningServer, wait_until
from protocol import Client
from protocol.codec import encode, server_codec
from protocol.errors import RequestRejected
from protocol.ids import pack_ids
from protocol.messages import PROTOCOL_VERSION, Generate, Hello, Ping, Refused, SamplingParams, Welcome
from protocol.sockets import connect_dealer

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
CONTEXT = 65_536
USER = [{"role": "user", "content": "a"}]


def test_a_stop_of_a_wrong_type_is_refused_and_harms_nobody(server: RunningServer, report: Report):
    refusals.bad_stop(report, server)
    assert report.failures == []


def test_a_lone_surrogate_is_refused_and_harms_nobody(server: RunningServer, report: Report):
    refusals.lone_surrogate(report, server)
    assert report.failures == []


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        (CHAT, b"{not json", 400, "JSON"),
        (CHAT, b"[]", 400, ""),
        (CHAT, b"", 400, ""),
        (COMPLETIONS, b'{"prompt": "\xff"}', 400, "UTF-8"),
        (CHAT, {"messages": []}, 400, "messages"),
        (CHAT, {"max_tokens": 1}, 400, "messages"),
        (CHAT, {"messages": "hello"}, 400, "messages"),
        (CHAT, {"messages": [{"content": "a"}]}, 400, "role"),
        (CHAT, {"messages": [{"role": "user", "content": 7}]}, 400, "content"),
        (CHAT, {"messages": USER, "max_tokens": 0}, 400, "max_tokens"),
        (CHAT, {"messages": USER, "max_tokens": -1}, 400, "max_tokens"),
        (CHAT, {"messages": USER, "max_completion_tokens": -1}, 400, "max_completion_tokens"),
        (CHAT, {"messages": USER, "max_tokens": "7"}, 400, "max_tokens"),
        (CHAT, {"messages": USER, "temperature": -0.1}, 400, "temperature"),
        (CHAT, {"messages": USER, "temperature": "hot"}, 400, "temperature"),
        (CHAT, {"messages": USER, "top_p": 0}, 400, "top_p"),
        (CHAT, {"messages": USER, "top_p": 1.1}, 400, "top_p"),
        (CHAT, {"messages": USER, "seed": 1.5}, 400, "seed"),
        (CHAT, {"messages": USER, "seed": 2**64}, 400, "seed"),
        (CHAT, {"messages": USER, "stop": ["x"] * 17}, 400, "stop"),
        (CHAT, {"messages": USER, "top_k": -2}, 400, "top_k"),
        (CHAT, {"messages": USER, "min_p": 1.5}, 400, "min_p"),
        (CHAT, {"messages": USER, "repetition_penalty": 0}, 400, "repetition_penalty"),
        (CHAT, {"messages": USER, "presence_penalty": 2.5}, 400, "presence_penalty"),
        (CHAT, {"messages": USER, "frequency_penalty": -2.5}, 400, "frequency_penalty"),
        (CHAT, {"messages": USER, "logit_bias": {"5": 101}}, 400, "logit_bias"),
        (CHAT, {"messages": USER, "logit_bias": {"49152": 1}}, 400, "49152 is outside the vocabulary"),
        (CHAT, {"messages": USER, "min_tokens": 5, "max_tokens": 4}, 400, "min_tokens"),
        (CHAT, {"messages": USER, "stop_token_ids": [10**6]}, 400, "stop_token_ids"),
        (CHAT, {"messages": USER, "xtc_probability": 1.5}, 400, "xtc_probability"),
        (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
        (CHAT, {"messages": USER, "top_logprobs": 1}, 400, "top_logprobs"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 21}, 400, "logprobs"),
        (CHAT, {"messages": USER, "model": "no-such-model"}, 404, "no-such-model"),
        (COMPLETIONS, {"prompt": "a", "model": "no-such-model"}, 404, "no-such-model"),
        (COMPLETIONS, {"prompt": []}, 400, "prompt"),
        (COMPLETIONS, {"prompt": 5}, 400, "prompt"),
        (COMPLETIONS, {"prompt": [-1]}, 400, "prompt"),
        (COMPLETIONS, {"prompt": [10**9]}, 400, ""),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
        (COMPLETIONS, {}, 400, "prompt"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_request_gets_an_openai_error(
    server: RunningServer, path: str, body: Any, status: int, says: str, stream: bool
):
    answer = post(server.url + path, {**body, "stream": stream} if isinstance(body, dict) else body)
    assert answer.status == status, answer.body
    assert answer.error.keys() == {"message", "type", "param", "code"}
    assert answer.error["type"] == "invalid_request_error"
    assert says in f"{answer.error['message']} {answer.error['param']}"


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_over_the_context_gets_both_numbers(server: RunningServer, stream: bool):
    too_long = CONTEXT + 7
    answer = post(server.url + COMPLETIONS, {"prompt": [5000] * too_long, "max_tokens": 1, "stream": stream})
    assert answer.status == 400
    assert answer.error["code"] == "context_length_exceeded"
    assert str(CONTEXT) in answer.error["message"]
    assert str(too_long) in answer.error["message"]


def test_unknown_paths_and_methods(server: RunningServer):
    assert post(f"{server.url}/v1/nothing", {}).status == 404
    answer = request("GET", server.url + CHAT)
    assert answer.status == 405
    assert answer.error["message"]


@pytest.mark.parametrize(
    ("options", "code", "param"),
    [
        ({"prompt": "a", "max_tokens": 0}, "invalid_request", "max_tokens"),
        ({"prompt": "a", "temperature": 9.0}, "invalid_request", "temperature"),
        ({"messages": []}, "invalid_request", "messages"),
        ({"ids": []}, "invalid_request", "prompt"),
        ({"ids": [4_000_000_000]}, "invalid_request", ""),
        ({"ids": [5] * (CONTEXT + 1)}, "prompt_too_long", "prompt"),
        ({"prompt": "a", "model": "other"}, "model_not_found", "model"),
        ({"prompt": "a", "stop": [""]}, "invalid_request", "stop"),
        ({"prompt": "a", "timeout": -1.0}, "invalid_request", "timeout"),
        ({"prompt": "a", "top_k": -2}, "invalid_request", "top_k"),
        ({"prompt": "a", "logit_bias": {49_152: 1.0}}, "invalid_request", "logit_bias"),
        ({"prompt": "a", "stop_token_ids": [49_152]}, "invalid_request", "stop_token_ids"),
        ({"prompt": "a", "min_tokens": 2, "max_tokens": 1}, "invalid_request", "min_tokens"),
        ({"prompt": "a", "logprobs": 21}, "invalid_request", "logprobs"),
        ({"prompt": "a", "repetition_penalty": 0.0}, "invalid_request", "repetition_penalty"),
    ],
)
def test_a_wrong_request_over_zmq_is_rejected(client: Client, options: dict[str, Any], code: str, param: str):
    with pytest.raises(RequestRejected) as refusal:
        client.generate(**options).text()
    assert refusal.value.code == code
    assert param in refusal.value.param


def test_garbage_over_zmq_harms_nobody(server: RunningServer):
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = connect_dealer(context, server.endpoint)
    try:
        with refusals.Bystander(server) as bystander:
            for frames in (
                [b""],
                [b"\x00" * 1000],
                [b"\xc1"],
                [b"\x93" * 500],
                [encode([999, 1, 2])],
                [encode([3, "ref", None])],
                [encode(Generate(1, SamplingParams(), prompt="before hello"))],
                [b"a", b"b", b"c"],
                [encode(Hello(PROTOCOL_VERSION))],
                [encode(Generate(1, SamplingParams(), ids=b"\x01\x02\x03"))],
                [encode(Generate(2, SamplingParams(max_tokens=2), ids=pack_ids([5]), messages=[]))],
                [encode([5, [1, 2], [3]])],
                [encode([4, -1])],
                [b"\xff" * 100_000],
                [encode(Ping(1))],
            ):
                dealer.send_multipart(frames)
            replies = []

            def answered() -> bool:
                while dealer.poll(0):
                    replies.append(server_codec.decode(dealer.recv()))
                return any(type(reply).__name__ == "Pong" for reply in replies)

            wait_until(answered, 10, "the server answers a ping after all that")
        assert any(isinstance(reply, Welcome) for reply in replies)
        assert bystander.undisturbed
    finally:
        dealer.close(linger=0)
        context.term()


def test_another_protocol_version_is_refused_with_both_numbers(server: RunningServer):
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = connect_dealer(context, server.endpoint)
    try:
        dealer.send(encode(Hello(PROTOCOL_VERSION + 41)))
        assert dealer.poll(5000)
        reply = server_codec.decode(dealer.recv())
        assert isinstance(reply, Refused)
        assert str(PROTOCOL_VERSION) in reply.message
        assert str(PROTOCOL_VERSION + 41) in reply.message
    finally:
        dealer.close(linger=0)
        context.term()
