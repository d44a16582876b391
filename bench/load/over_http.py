"""The HTTP side of the load: one POST per connection, its answer read as server-sent events.

Written on asyncio's protocols and httptools, so that hundreds of streams cost the machine little beside the
server. Runs on the event loop of the load process.
"""

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import cast
from urllib.parse import urlsplit

import httptools
import msgspec

from bench.load.manners import ABORTS, SLOW, SLOW_PAUSE
from bench.load.outcome import Outcome
from bench.load.plan import Ask, Plan


class Choice(msgspec.Struct):
    """What we read of a choice in a chunk of `/v1/completions`."""

    text: str = ""
    finish_reason: str | None = None


class UsageBody(msgspec.Struct):
    """OpenAI's token counts."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class ErrorBody(msgspec.Struct):
    """OpenAI's error object."""

    message: str = ""
    code: str | int | None = None


class Event(msgspec.Struct):
    """One event of a stream, or the body of an error response."""

    choices: list[Choice] = []
    usage: UsageBody | None = None
    error: ErrorBody | None = None


_decode_event = msgspec.json.Decoder(Event).decode


def error_text(error: ErrorBody) -> str:
    """An error object as one line."""
    return f"{error.code}: {error.message}" if error.code else error.message


class Exchange(asyncio.Protocol):
    """One request and its response on a connection of its own.

    `on_data` gets the payload of each `data:` line as it arrives. `finished` resolves once the response is
    complete, or with the error that ended it early. After each piece it rests for `pause` seconds before the next.
    `on_sending` is called right before the request is sent.
    """

    def __init__(
        self,
        request: bytes,
        on_data: Callable[[bytes], None],
        pause: float = 0.0,
        on_sending: Callable[[], None] = lambda: None,
    ) -> None:
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.status = 0
        self.headers: dict[str, str] = {}  # names in lower case
        self.body = bytearray()
        self._request = request
        self._on_data = on_data
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._pause = pause
        self._on_sending = on_sending

    def abort(self) -> None:
        """Close the connection at once, as a client does that vanishes."""
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Close the connection in order, as a client does that has read enough."""
        if self._transport is not None:
            self._transport.close()

    def _go_on(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    @property
    def _ends_by_closing(self) -> bool:
        # As HTTP/1.0 servers do; whether all came is then for the payload to say.
        return self.status == 200 and not self.headers.keys() & {"content-length", "transfer-encoding"}

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._on_sending()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except Exception as error:
            self._fail(ConnectionError(f"unreadable response: {error!r}"))
        if self._pause and self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()
            asyncio.get_running_loop().call_later(self._pause, self._go_on)

    def connection_lost(self, error: Exception | None) -> None:
        if error is None and self._ends_by_closing and not self.finished.done():
            self.finished.set_result(None)
            return
        self._fail(ConnectionError(f"connection closed before the end ({error or 'by the server'})"))

    # Called by the parser.

    def on_status(self, _: bytes) -> None:
        self.status = self._parser.get_status_code()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self.body += body
        if self.status != 200:
            return
        while (end := self.body.find(b"\n")) >= 0:
            line = bytes(self.body[:end]).rstrip(b"\r")
            del self.body[: end + 1]
            if line.startswith(b"data:"):
                self._on_data(line[5:].strip())

    def on_message_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if not self.finished.done():
            self.finished.set_result(None)
        if self._transport is not None:
            self._transport.close()

    def _fail(self, error: Exception) -> None:
        if not self.finished.done():
            self.finished.set_exception(error)
            self.finished.exception()  # who gave the request up need not ask for it
        self.abort()


def build_request(url: str, path: str, body: bytes) -> bytes:
    """The bytes of one POST of JSON."""
    parts = urlsplit(url)
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\naccept: text/event-stream\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


class HttpLoad:
    """Runs requests of a plan over HTTP. `open` maps the index of a request in flight to its connection."""

    def __init__(self, plan: Plan, url: str) -> None:
        self.plan = plan
        self.url = url
        self.open: dict[int, Exchange] = {}
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80

    async def __aenter__(self) -> "HttpLoad":
        return self

    async def __aexit__(self, *_: object) -> None:
        for exchange in list(self.open.values()):
            exchange.abort()

    def prompt(self, ask: Ask) -> list[int] | str:
        """The prompt of a request."""
        return ask.ids

    def request(self, ask: Ask) -> bytes:
        """The bytes of a request."""
        plan = self.plan
        body = {
            "model": plan.model,
            "prompt": self.prompt(ask),
            "max_tokens": ask.max_tokens,
            "temperature": plan.temperature,
            "top_p": plan.top_p,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if plan.temperature:
            body["seed"] = ask.index  # some servers don't batch requests that have one
        if plan.cache_salt:
            body["cache_salt"] = plan.cache_salt
        if not plan.model:
            del body["model"]
        return build_request(self.url, "/v1/completions", msgspec.json.encode(body))

    async def run(self, ask: Ask, outcome: Outcome) -> None:
        """Run one request to its end, or to where its client leaves, and write down how it went."""
        finish_reason: str | None = None
        done = False
        exchange: Exchange | None = None

        def on_data(data: bytes) -> None:
            nonlocal finish_reason, done
            if data == b"[DONE]":
                done = True
                return
            if outcome.left:
                return
            event = _decode_event(data)
            if event.error is not None:
                outcome.error = outcome.error or error_text(event.error)
            if event.usage is not None:
                outcome.prompt_tokens = event.usage.prompt_tokens
                outcome.completion_tokens = event.usage.completion_tokens
            for choice in event.choices:
                if choice.text:
                    outcome.token()
                    if self.plan.record:
                        outcome.text += choice.text
                finish_reason = choice.finish_reason or finish_reason
            if outcome.arrivals >= ask.leaves > 0 and exchange is not None:
                outcome.leave()
                (exchange.close if ask.manner == ABORTS else exchange.abort)()

        error = ""
        request = self.request(ask)
        pause = SLOW_PAUSE if ask.manner == SLOW else 0.0
        outcome.begin()
        try:
            loop = asyncio.get_running_loop()
            make = partial(Exchange, request, on_data, pause)
            if self.plan.connected:
                make = partial(make, on_sending=outcome.begin)
            _, exchange = await loop.create_connection(make, self._host, self._port)
            self.open[ask.index] = exchange
            await exchange.finished
        except OSError as problem:
            error = f"{type(problem).__name__}: {problem}"
        finally:
            self.open.pop(ask.index, None)
            if exchange is not None:
                exchange.abort()
        if outcome.left:
            return
        if exchange is not None and not error:
            error = self._judge(exchange, finish_reason, done)
        outcome.end(outcome.error or error)

    def _judge(self, exchange: Exchange, finish_reason: str | None, done: bool) -> str:
        if exchange.status != 200:
            text = bytes(exchange.body[:300]).decode(errors="replace")
            with contextlib.suppress(msgspec.DecodeError):
                body = msgspec.json.decode(exchange.body, type=Event).error
                text = error_text(body) if body else text
            return f"HTTP {exchange.status} {text}"
        if not done:
            return "the stream ended without [DONE]"
        if finish_reason != "length":
            return f"finish_reason is {finish_reason}, not length"
        return ""
