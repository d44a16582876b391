"""`HttpConnection`: uvicorn's HTTP/1.1 protocol with limits of ours, one object per connection, on the event loop.

uvicorn bounds neither the size of a header nor the time a client may take for it, nor what comes around a body: the
fields behind a chunked one, which it keeps, and whatever follows an answer that did not wait for it. And it words
errors as plain text.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from protocol.errors import INVALID_REQUEST
from server.arrival import arrival
from server.errors import ErrorBody, ErrorDetail
from server.sse import encode_json

CHUNK_OVERHEAD = 8  # bytes around each byte of a body that comes in chunks of one


def abort_of(scope: Scope) -> Callable[[], None]:
    """Closes the connection of the request in `scope` at once, whatever is still unsent."""
    abort: Callable[[], None] = scope["state"]["abort"]
    return abort


def http_connection(max_header_bytes: int, idle_timeout: float, body_timeout: float) -> type[HttpToolsProtocol]:
    """The protocol class with limits: bytes of a request's line and headers, seconds until they are there, and seconds
    that a body may still take when it has been answered already."""

    class HttpConnection(HttpToolsProtocol):
        """See the module's text."""

        _header_bytes = 0
        _in_header = True
        _header_timer: asyncio.TimerHandle | None = None
        _requests = 0
        _in_message = False
        _body_bytes = 0  # of this request so far
        _around_bytes = 0  # what came beside its header and body
        _rest_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn does
            super().connection_made(transport)
            self._await_header()

        def connection_lost(self, exc: Exception | None) -> None:
            self._header_came()
            self._rest_came()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            requests, was_in_header, body_before = self._requests, self._in_header, self._body_bytes
            super().data_received(data)
            if was_in_header and self._in_header:
                self._header_bytes += len(data)
                if self._header_bytes > max_header_bytes:
                    self._refuse(431, f"the request's headers are larger than {max_header_bytes} bytes")
            elif self._requests == requests and not (was_in_header or self._in_header):
                self._around_bytes += len(data) - (self._body_bytes - body_before)
                if self._around_bytes > max_header_bytes + CHUNK_OVERHEAD * self._body_bytes:
                    self._refuse(400, "too much comes beside the request's body")

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._requests += 1
            self._in_header = self._in_message = True
            self._header_bytes = self._body_bytes = self._around_bytes = 0
            self._rest_came()
            self._await_header()
            self.scope["state"].update(abort=self.transport.abort, arrived=arrival(self.transport))

        def on_headers_complete(self) -> None:
            self._in_header = False
            self._header_came()
            super().on_headers_complete()

        def on_header(self, name: bytes, value: bytes) -> None:
            if self._in_header:  # nobody wants those behind a body
                super().on_header(name, value)

        def on_body(self, body: bytes) -> None:
            self._body_bytes += len(body)
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._in_message = False
            self._rest_came()
            super().on_message_complete()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self._in_message and not self._in_header and self._rest_timer is None:
                self._rest_timer = self.loop.call_later(body_timeout, self.transport.abort)

        def _rest_came(self) -> None:
            if self._rest_timer is not None:
                self._rest_timer.cancel()
                self._rest_timer = None

        def timeout_keep_alive_handler(self) -> None:
            # Aborted, not closed: closing would wait for a client that left its last answer unread.
            self.transport.abort()

        def send_400_response(self, msg: str) -> None:
            self._refuse(400, msg)

        def _await_header(self) -> None:
            if self._header_timer is None:
                self._header_timer = self.loop.call_later(idle_timeout, self._header_is_late)

        def _header_is_late(self) -> None:
            self._header_timer = None
            if self._is_answering():
                self._await_header()  # of a request sent ahead, which must not end the one before it
            else:
                self.transport.abort()

        def _header_came(self) -> None:
            if self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None

        def _refuse(self, status: int, message: str) -> None:
            if self._is_answering():
                self.transport.abort()  # nothing may come into the middle of an answer
                return
            self.transport.write(_whole_response(status, message))
            self.transport.close()

        def _is_answering(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

    return HttpConnection


def _whole_response(status: int, message: str) -> bytes:
    body = encode_json(ErrorBody(ErrorDetail(message, "invalid_request_error", None, INVALID_REQUEST)))
    lines: list[Any] = [
        STATUS_LINE[status].rstrip(b"\r\n"),
        b"content-type: application/json",
        b"content-length: %d" % len(body),
        b"connection: close",
        b"",
        body,
    ]
    return b"\r\n".join(lines)
