"""`HttpConnection`: uvicorn's HTTP/1.1 protocol with limits of ours, one object per connection, on the event loop.

uvicorn bounds neither the size of a header nor the time a client may take for it, and words errors as plain text.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from protocol.errors import INVALID_REQUEST
from server.errors import ErrorBody, ErrorDetail
from server.sse import encode_json


def abort_of(scope: Scope) -> Callable[[], None]:
    """Closes the connection of the request in `scope` at once, whatever is still unsent."""
    abort: Callable[[], None] = scope["state"]["abort"]
    return abort


def http_connection(max_header_bytes: int, idle_timeout: float) -> type[HttpToolsProtocol]:
    """The protocol class with limits: bytes of a request's line and headers, and seconds until they are there."""

    class HttpConnection(HttpToolsProtocol):
        """See the module's text."""

        _header_bytes = 0
        _in_header = True
        _header_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn does
            super().connection_made(transport)
            self._await_header()

        def connection_lost(self, exc: Exception | None) -> None:
            self._header_came()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            was_in_header = self._in_header
            super().data_received(data)
            if was_in_header and self._in_header:
                self._header_bytes += len(data)
                if self._header_bytes > max_header_bytes:
                    self._refuse(431, f"the request's headers are larger than {max_header_bytes} bytes")

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._in_header = True
            self._header_bytes = 0
            self._await_header()
            self.scope["state"]["abort"] = self.transport.abort

        def on_headers_complete(self) -> None:
            self._in_header = False
            self._header_came()
            super().on_headers_complete()

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
