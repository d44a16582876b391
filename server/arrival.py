"""When a request came to this machine, before the event loop of an HTTP worker got round to reading it.

Called by `server.connection` on the event loop, as a request's first bytes are read.
"""

import asyncio
import contextlib
import socket
import struct
import time

from starlette.types import Scope

LAST_DATA = 52  # where Linux' `struct tcp_info` says how many milliseconds ago data came
_MILLISECONDS = struct.Struct("I")
LONGEST = 60.0  # seconds; what is said to be older than this isn't believed


def arrival(transport: asyncio.Transport) -> float:
    """When the data that was just read had come, in seconds of the monotonic clock.

    Linux knows, in steps of 1 to 10 ms, which even out over many requests; it counts what waited for `accept`, too.
    Elsewhere it is now.
    """
    info = b""
    connection = transport.get_extra_info("socket")
    if connection is not None and hasattr(socket, "TCP_INFO"):
        with contextlib.suppress(OSError):
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, LAST_DATA + _MILLISECONDS.size)
    return time.monotonic() - waited(info)


def waited(info: bytes) -> float:
    """Seconds since data came, by the beginning of a `struct tcp_info`; 0 when it doesn't say."""
    if len(info) < LAST_DATA + _MILLISECONDS.size:
        return 0.0
    seconds: float = _MILLISECONDS.unpack_from(info, LAST_DATA)[0] / 1000
    return seconds if seconds <= LONGEST else 0.0


def arrival_of(scope: Scope) -> float:
    """When the request in `scope` came; now for one that came by no connection of ours."""
    found: float = scope.get("state", {}).get("arrived", 0.0)
    return found or time.monotonic()
