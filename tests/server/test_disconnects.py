"""Clients that leave: every stream of theirs is cancelled at once, whatever the request was doing."""

import json
import socket
import struct

import pytest
from fake_streamer import FakeStream
from http_worker import HttpWorker, chat, post, read_answer, read_until


def reset(raw: socket.socket) -> None:
    """Close with RST, as a killed client with unread data does."""
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raw.close()


@pytest.mark.parametrize("leave", [socket.socket.close, reset])
@pytest.mark.parametrize("stream", [False, True])
def test_while_waiting_for_a_token(worker: HttpWorker, stream: bool, leave: object) -> None:
    worker.streamer.on_generate = FakeStream.accept
    raw = worker.connect()
    post(raw, "/v1/chat/completions", chat(stream=stream))
    one = worker.streamer.stream()
    leave(raw)  # type: ignore[operator]
    worker.streamer.wait_for(lambda: one.cancelled)
    line = worker.wait_log(event="request", request_id=one.request.label)
    assert (line["status"], line["reason"], line["stream"]) == (499, "client_gone", stream)
    assert worker.supervisor.probe().streams == 0


def test_mid_stream(worker: HttpWorker) -> None:
    worker.streamer.on_generate = FakeStream.accept
    raw = worker.connect()
    post(raw, "/v1/chat/completions", chat(stream=True))
    one = worker.streamer.stream()
    one.text("Hello")
    assert b"200 OK" in raw.recv(65536)
    raw.close()
    worker.streamer.wait_for(lambda: one.cancelled)


def test_before_it_is_accepted(worker: HttpWorker) -> None:
    worker.streamer.on_generate = lambda stream: None
    raw = worker.connect()
    post(raw, "/v1/chat/completions", chat())
    one = worker.streamer.stream()
    raw.close()
    worker.streamer.wait_for(lambda: one.cancelled)


@pytest.mark.parametrize("stream", [False, True])
def test_every_prompt_of_a_request(worker: HttpWorker, stream: bool) -> None:
    worker.streamer.on_generate = FakeStream.accept
    raw = worker.connect()
    post(raw, "/v1/completions", {"prompt": ["a", "b", "c"], "stream": stream})
    worker.streamer.stream(count=3)
    raw.close()
    worker.streamer.wait_for(lambda: all(one.cancelled for one in worker.streamer.streams))


def test_while_its_answer_waits_to_be_read(worker: HttpWorker) -> None:
    worker.streamer.on_generate = FakeStream.accept
    raw = worker.connect(receive_buffer=16384)
    post(raw, "/v1/chat/completions", chat(stream=True))
    one = worker.streamer.stream()
    one.text(*["x" * 200_000] * 60)
    assert worker.streamer.never(lambda: one.credit >= 64, seconds=0.3)
    raw.close()
    worker.streamer.wait_for(lambda: one.cancelled)


def test_while_sending_the_body(worker: HttpWorker) -> None:
    raw = worker.connect()
    raw.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: test\r\ncontent-length: 1000\r\n\r\n{")
    worker.wait_until(lambda: worker.supervisor.probe().streams == 1)
    raw.close()
    worker.wait_until(lambda: worker.supervisor.probe().streams == 0)
    assert worker.streamer.streams == []


def test_half_of_many(worker: HttpWorker) -> None:
    count = 200
    worker.streamer.on_generate = FakeStream.accept
    connections = [worker.connect() for _ in range(count)]
    for i, raw in enumerate(connections):
        post(raw, "/v1/chat/completions", chat(str(i), stream=True))
    worker.streamer.stream(count=count)
    for raw in connections[::2]:
        raw.close()
    worker.streamer.wait_for(lambda: sum(one.cancelled for one in worker.streamer.streams) == count // 2)
    numbers = [int((one.request.messages or [{}])[0]["content"]) for one in worker.streamer.streams if one.cancelled]
    assert sorted(numbers) == list(range(0, count, 2))
    for one in worker.streamer.streams:
        if not one.cancelled:
            one.text("Hello")
            one.finish()
    for raw in connections[1::2]:
        assert b'"finish_reason":"stop"' in read_until(raw, b"[DONE]")
        raw.close()


def test_a_cancel_that_is_never_answered_waits_for_nobody(worker: HttpWorker) -> None:
    """The connection is free again though the streamer says nothing."""
    worker.streamer.on_generate = FakeStream.accept
    worker.streamer.cancels_are_answered = False
    try:
        raw = worker.connect()
        post(raw, "/v1/chat/completions", chat())
        one = worker.streamer.stream()
        raw.close()
        worker.streamer.wait_for(lambda: one.cancelled)
        assert worker.client.get("/health").status_code == 200
        one.finish()
        worker.wait_until(lambda: worker.supervisor.probe().streams == 0)
    finally:
        worker.streamer.cancels_are_answered = True


def test_a_finished_request_is_not_cancelled(worker: HttpWorker) -> None:
    with worker.connect() as raw:
        post(raw, "/v1/chat/completions", chat())
        status, body = read_answer(raw)
        assert status == 200
        assert json.loads(body)["choices"]
    one = worker.streamer.stream()
    assert worker.wait_log(event="request", request_id=one.request.label)["reason"] == "stop"
    assert not one.cancelled
