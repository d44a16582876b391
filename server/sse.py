"""`SseWriter`: one response as server-sent events, written straight to ASGI.

Used by `server.generation` on the event loop, one writer per streamed request. A text event costs one JSON escape
and one join: what surrounds the text is encoded once per stream (`split_template`).
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import msgspec
from starlette.types import Send

from server.errors import ApiError

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
COMMIT_AFTER = 3  # intervals after which headers go out though the request is not accepted yet

EVENTS = "text/event-stream; charset=utf-8"

_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

encode_json = msgspec.json.Encoder().encode


def event(data: bytes) -> bytes:
    """One event with `data`, which holds no line break (JSON never does)."""
    return b"data: " + data + b"\n\n"


def named_event(name: str, data: bytes) -> bytes:
    """One event with a name, as the Responses and Anthropic's API have them."""
    return b"event: " + name.encode() + b"\n" + event(data)


def failed(error: ApiError) -> bytes:
    """The end of a response that has begun and failed, as OpenAI words it."""
    return event(error.body()) + DONE


def split_template(chunk: bytes, marker: str) -> tuple[bytes, bytes]:
    """What comes before and after a text in an event like `chunk`, JSON that holds `marker` in the text's place.

    `marker` must occur once.
    """
    before, after = event(chunk).split(encode_json(marker))
    return before, after


class SseWriter:
    """Writes events. Every `write` waits until the client's connection takes more, so a slow reader slows its own
    stream and no other. `start` sends the headers; until then the request can still end with an error status.

    With another `media_type` than that of events nothing is sent to keep the connection alive but the headers."""

    def __init__(
        self,
        send: Send,
        keepalive_interval: float,
        send_timeout: float,
        abort: Callable[[], None],
        media_type: str = EVENTS,
    ) -> None:
        self.started = False
        self._headers = [(b"content-type", media_type.encode()), *_HEADERS]
        self._keep_alive_bytes = KEEP_ALIVE if media_type == EVENTS else b""
        self._send = send
        self._interval = keepalive_interval
        self._send_timeout = send_timeout
        self._abort = abort
        self._starting = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._last = self._began = self._loop.time()
        self._sending = 0

    async def start(self) -> None:
        """Send status and headers, once."""
        async with self._starting:
            if not self.started:
                await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
                self.started = True

    async def write(self, data: bytes) -> None:
        """Send whole events."""
        if not self.started:
            await self.start()
        self._last = self._loop.time()
        self._sending += 1
        try:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
        finally:
            self._sending -= 1

    async def finish(self, data: bytes) -> None:
        """Send the last events and end the response."""
        if not self.started:
            await self.start()
        with self._watched():
            await self._send({"type": "http.response.body", "body": data, "more_body": False})

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Close the connection of a client that lets this one write wait longer than the send time-out."""
        timer = self._loop.call_later(self._send_timeout, self._abort)
        try:
            yield
        finally:
            timer.cancel()

    def keep_alive(self, accepted: Callable[[], bool]) -> Coroutine[Any, Any, None]:
        """To be run as a task beside the writing, and cancelled before `finish`.

        Writes a comment whenever nothing was written for the interval, beginning when the request is accepted, and
        closes the connection of a client that leaves one write waiting longer than the send time-out.
        """
        return self._keep_alive(accepted)

    async def _keep_alive(self, accepted: Callable[[], bool]) -> None:
        while True:
            now = self._loop.time()
            idle = now - self._last
            if self._sending:
                if idle >= self._send_timeout:
                    self._abort()
                    return
                await asyncio.sleep(min(self._interval, self._send_timeout - idle))
            elif idle < self._interval:
                await asyncio.sleep(self._interval - idle)
            elif self.started or accepted() or now - self._began >= COMMIT_AFTER * self._interval:
                with self._watched():  # while this task itself waits, it can't look after the writes
                    await self.write(self._keep_alive_bytes)
            else:
                await asyncio.sleep(self._interval)
