"""Below the application: malformed HTTP, header limits, and clients that take their time."""

import json
import socket
from collections.abc import Callable

import pytest
from http_worker import HttpWorker, chat, post, read_answer


def answer(raw: socket.socket) -> tuple[int, dict[str, dict[str, str]]]:
    """Read to the end of the connection: status and body."""
    data = raw.makefile("rb").read()
    head, body = data.split(b"\r\n\r\n", 1)
    return int(head.split()[1]), json.loads(body)


@pytest.mark.parametrize("garbage", [b"hello\r\n\r\n", b"GET /\xff HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00" * 20])
def test_malformed_http(worker: HttpWorker, garbage: bytes) -> None:
    with worker.connect() as raw:
        raw.sendall(garbage)
        status, body = answer(raw)
    assert status == 400
    assert body["error"]["type"] == "invalid_request_error"


def test_large_headers(worker: HttpWorker) -> None:
    with worker.connect() as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nhost: test\r\n")
        try:
            for i in range(1000):
                raw.sendall(b"x-%d: %s\r\n" % (i, b"y" * 1000))
            status, body = answer(raw)
        except ConnectionError:
            return  # closed while we still sent
    assert status == 431
    assert "headers are larger" in body["error"]["message"]


def test_one_endless_header(worker: HttpWorker) -> None:
    with worker.connect() as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nx: ")
        with pytest.raises(ConnectionError):  # noqa: PT012  # the server may close at any of these
            for _ in range(10_000):
                raw.sendall(b"y" * 10_000)
            raise AssertionError("an endless header was taken")


def test_headers_below_the_limit(worker: HttpWorker) -> None:
    assert worker.client.get("/health", headers={"x-long": "y" * 60_000}).status_code == 200


def test_silent_connections_end(start_worker: Callable[..., HttpWorker]) -> None:
    worker = start_worker(idle_timeout=1, body_timeout=0.5)
    with worker.connect() as silent, worker.connect() as slow_header, worker.connect() as slow_body:
        slow_header.sendall(b"GET /health HTT")
        slow_body.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: test\r\ncontent-length: 10\r\n\r\n{")
        status, body = read_answer(slow_body)
        assert status == 408
        assert b"body_timeout" in body
        assert silent.recv(1) == b""
        assert slow_header.recv(1) == b""
    with worker.connect() as idle:
        idle.sendall(b"GET /ready HTTP/1.1\r\nhost: test\r\n\r\n")
        assert read_answer(idle)[0] == 200
        assert idle.recv(1) == b""


def test_a_long_answer_is_no_silence(start_worker: Callable[..., HttpWorker]) -> None:
    worker = start_worker(idle_timeout=1)
    worker.streamer.on_generate = lambda stream: stream.accept()
    with worker.connect() as raw:
        post(raw, "/v1/chat/completions", chat())
        stream = worker.streamer.stream()
        raw.settimeout(1.5)
        with pytest.raises(TimeoutError):
            raw.recv(1)
        stream.text("at last")
        stream.finish()
        assert b"at last" in read_answer(raw)[1]


def test_one_connection_serves_many_requests(worker: HttpWorker) -> None:
    with worker.connect() as raw:
        for _ in range(3):
            raw.sendall(b"GET /ready HTTP/1.1\r\nhost: test\r\n\r\n")
            assert read_answer(raw) == (200, b'{"status":"ok"}')


CHUNKED = b"POST /v1/chat/completions HTTP/1.1\r\nhost: test\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("begin", "more"), [(b"0\r\n", b"x: " + b"y" * 2000 + b"\r\n"), (b"0\r\nx: ", b"y" * 2000), (b"1;", b"x=y;" * 500)]
)
def test_endless_fields_around_a_body(worker: HttpWorker, begin: bytes, more: bytes) -> None:
    with worker.connect() as raw:
        raw.sendall(CHUNKED + begin)
        with pytest.raises(ConnectionError):  # noqa: PT012  # the server may close at any of these
            for _ in range(5_000):
                raw.sendall(more)
            raise AssertionError("endless fields were taken")


def test_a_body_in_chunks_of_one_byte_is_taken(worker: HttpWorker) -> None:
    body = b'{"prompt": "' + b" " * 30_000 + b'", "max_tokens": "none"}'
    with worker.connect() as raw:
        raw.sendall(CHUNKED.replace(b"chat/", b"") + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
        status, answer = read_answer(raw)
    assert status == 400
    assert b"max_tokens" in answer


def test_a_body_that_goes_on_after_its_answer(start_worker: Callable[..., HttpWorker]) -> None:
    worker = start_worker(body_timeout=0.2)
    with worker.connect() as raw:
        raw.sendall(b"POST /nowhere HTTP/1.1\r\nhost: test\r\ncontent-length: 1000000000\r\n\r\n{")
        assert read_answer(raw)[0] == 404
        with pytest.raises(ConnectionError):  # noqa: PT012  # the server may close at any of these
            for _ in range(100_000):
                raw.sendall(b"y" * 10_000)
            raise AssertionError("an endless body was taken")
