"""Server-sent events over time: keep-alives, errors after the start, slow readers, many connections at once."""

from collections.abc import Callable

import httpx
import openai
import pytest
from fake_streamer import WINDOW, FakeStream, say_hello
from http_worker import HttpWorker, chat, events, post, read_until
from hypothesis import given
from hypothesis import strategies as st

from protocol import Delta
from protocol.messages import Deltas, End, TokenLogprobs
from server.chat import ChatAnswer
from server.completions import CompletionAnswer
from server.sse import encode_json

KEEP_ALIVE = b": keep-alive\n\n"


def test_tokens_come_one_by_one(worker: HttpWorker) -> None:
    worker.streamer.on_generate = FakeStream.accept
    with worker.connect() as raw:
        post(raw, "/v1/chat/completions", chat(stream=True))
        stream = worker.streamer.stream()
        for word in (b"one", b"two", b"three"):
            stream.text(word.decode())
            assert b"data: [DONE]" not in read_until(raw, b'"' + word + b'"')
        stream.finish()
        read_until(raw, b"data: [DONE]\n\n")


def test_keep_alives_while_it_waits_and_between_tokens(worker: HttpWorker) -> None:
    worker.streamer.on_generate = FakeStream.accept
    with worker.connect() as raw:
        post(raw, "/v1/chat/completions", chat(stream=True))
        stream = worker.streamer.stream()
        data = read_until(raw, KEEP_ALIVE)
        assert b"200 OK" in data
        assert b"data:" not in data
        read_until(raw, KEEP_ALIVE)
        stream.text("word")
        read_until(raw, b'"word"')
        read_until(raw, KEEP_ALIVE)
        stream.finish()
        assert b'"finish_reason":"stop"' in read_until(raw, b"[DONE]")


def test_a_request_that_is_not_accepted_keeps_its_status(worker: HttpWorker) -> None:
    """While the prompt is being tokenized no header is sent, so that it can still be refused."""
    worker.streamer.on_generate = lambda stream: None
    with worker.connect() as raw:
        post(raw, "/v1/chat/completions", chat(stream=True))
        stream = worker.streamer.stream()
        raw.settimeout(0.4)  # twice the interval of keep-alives
        with pytest.raises(TimeoutError):
            raw.recv(1)
        raw.settimeout(10)
        stream.reject("prompt_too_long", "too long")
        assert read_until(raw, b"too long").startswith(b"HTTP/1.1 400")


def test_keep_alives_begin_after_a_while_in_any_case(worker: HttpWorker) -> None:
    worker.streamer.on_generate = lambda stream: None
    with worker.connect() as raw:
        post(raw, "/v1/chat/completions", chat(stream=True))
        read_until(raw, KEEP_ALIVE)
        worker.streamer.stream().reject("prompt_too_long", "too long")
        assert b'data: {"error":{"message":"too long"' in read_until(raw, b"[DONE]")


def test_error_after_the_start(worker: HttpWorker) -> None:
    def break_down(stream: FakeStream) -> None:
        stream.accept()
        stream.text("Hello")
        stream.fail("engine_lost", "the engine died")

    worker.streamer.on_generate = break_down
    response = worker.client.post("/v1/chat/completions", json=chat(stream=True))
    assert response.status_code == 200
    role, text, error, done = events(response.text)
    assert role["choices"][0]["delta"]["role"] == "assistant"
    assert text["choices"][0]["delta"]["content"] == "Hello"
    assert error == {
        "error": {"message": "the engine died", "type": "server_error", "param": None, "code": "engine_lost"}
    }
    assert done == "[DONE]"
    with (
        openai.OpenAI(base_url=f"{worker.url}/v1", api_key="none", max_retries=0) as client,
        client.completions.create(model="tiny", prompt="Hi", stream=True) as stream,
        pytest.raises(openai.APIError, match="the engine died"),
    ):
        list(stream)


def test_a_stream_cancelled_by_the_server_ends_with_an_error(worker: HttpWorker) -> None:
    worker.streamer.on_generate = FakeStream.accept
    with worker.connect() as raw:
        post(raw, "/v1/chat/completions", chat(stream=True))
        stream = worker.streamer.stream()
        stream.text("Hello")
        read_until(raw, b'"Hello"')
        stream.end(End(stream.ref, "cancelled", code="cancelled", message="the client was silent for 3 s"))
        data = read_until(raw, b"[DONE]")
        assert b"the client was silent" in data
        assert b'"finish_reason":"' not in data


def test_error_in_one_of_several_prompts_after_the_start(worker: HttpWorker) -> None:
    worker.streamer.on_generate = FakeStream.accept
    with worker.connect() as raw:
        post(raw, "/v1/completions", {"prompt": ["a", "b"], "stream": True})
        worker.streamer.stream(count=2)
        first, second = worker.streamer.streams
        first.text("Hello")
        read_until(raw, b'"Hello"')
        second.fail("internal_error", "the second broke")
        data = read_until(raw, b"[DONE]\n\n")
        assert data.count(b"[DONE]") == 1
        assert b"the second broke" in data
        worker.streamer.wait_for(lambda: first.cancelled)


def test_a_slow_reader_gets_no_credit_and_slows_nobody(worker: HttpWorker) -> None:
    worker.streamer.on_generate = FakeStream.accept
    piece = "x" * 200_000
    with worker.connect(receive_buffer=16384) as slow:
        post(slow, "/v1/chat/completions", chat(stream=True))
        stream = worker.streamer.stream()
        sent = 0

        def has_credit() -> bool:
            return stream.credit > 0

        # The fake sends all that its credit allows, as the streamer does, until no more credit comes back.
        while not worker.streamer.never(has_credit, seconds=0.5):
            while stream.credit > 0:
                stream.text(piece)
                sent += 1
        assert sent < 2 * WINDOW
        worker.streamer.on_generate = say_hello
        response = worker.client.post("/v1/chat/completions", json=chat())
        assert response.json()["choices"][0]["message"]["content"] == "Hello, world"
        taken = 0
        while taken < 50 * len(piece):
            taken += len(slow.recv(1 << 20))
        worker.streamer.wait_for(has_credit)
    worker.streamer.wait_for(lambda: stream.cancelled)


def test_a_reader_that_never_reads_is_dropped(start_worker: Callable[..., HttpWorker]) -> None:
    worker = start_worker(send_timeout=0.3, keepalive_interval=0.2)
    worker.streamer.on_generate = FakeStream.accept
    worker.streamer.cancels_are_answered = True
    with worker.connect(receive_buffer=16384) as raw:
        post(raw, "/v1/chat/completions", chat(stream=True))
        stream = worker.streamer.stream()
        stream.text(*["x" * 200_000] * WINDOW)
        worker.streamer.wait_for(lambda: stream.cancelled)
        worker.wait_log(event="request", reason="client_gone")
        assert worker.supervisor.probe().streams == 0


def test_300_connections_at_once(worker: HttpWorker) -> None:
    count = 300
    worker.streamer.on_generate = FakeStream.accept
    connections = [worker.connect() for _ in range(count)]
    try:
        for i, raw in enumerate(connections):
            post(raw, "/v1/chat/completions", chat(f"number {i}", stream=True))
        worker.streamer.stream(count=count)
        streams = worker.streamer.streams
        assert worker.supervisor.probe().streams == count
        refs = [stream.ref for stream in streams]
        for word in ("a", "b"):
            message = Deltas(refs, [word] * count, [b""] * count, [1] * count)
            worker.streamer.send(streams[0].identity, message)
        for stream in streams:
            stream.finish()
        for raw in connections:
            data = read_until(raw, b"[DONE]\n\n")
            assert data.startswith(b"HTTP/1.1 200")
            assert data.count(b'"content":"a"') == data.count(b'"content":"b"') == 1
    finally:
        for raw in connections:
            raw.close()


def test_connections_that_only_connect_disturb_nobody(worker: HttpWorker) -> None:
    idle = [worker.connect() for _ in range(300)]
    try:
        assert httpx.get(f"{worker.url}/health").status_code == 200
    finally:
        for raw in idle:
            raw.close()


@given(st.text())
def test_text_is_framed_as_the_struct_would_be(text: str) -> None:
    for answer in (ChatAnswer("i", "m", True, True), CompletionAnswer("i", "m", False)):
        before, after = answer.around_text(3)
        data = before + encode_json(text) + after
        assert data.count(b"\n") == 2
        (chunk,) = events(data.decode())
        choice = chunk["choices"][0]
        assert choice["index"] == 3
        assert (choice["delta"]["content"] if "delta" in choice else choice["text"]) == text
        (with_logprobs,) = events(answer.piece(3, Delta(text, [], 1, [TokenLogprobs(5, -1.0)])).decode())
        assert with_logprobs["choices"][0].pop("logprobs") is not None
        assert choice.pop("logprobs") is None
        assert with_logprobs == chunk
