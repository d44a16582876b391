"""`FakeRouter`: a ROUTER socket on a thread of its own, the base of the fake streamer and the fake supervisor.

A test tool: what arrives is kept, tests wait for a condition instead of sleeping, and any thread may send.
"""

import socket as stdlib_socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

from protocol.codec import encode
from protocol.sockets import bind_router

PATIENCE = 10.0  # seconds a test waits for something that should happen at once


class FakeRouter:
    """Subclasses handle `on_frame`, on the router's thread, with `self.changed` held."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.changed = threading.Condition()
        self._outbox: deque[tuple[bytes, bytes]] = deque()
        self._wake_out, self._wake_in = stdlib_socket.socketpair()
        self._wake_out.setblocking(False)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = bind_router(self._context, endpoint)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=type(self).__name__, daemon=True)
        self._thread.start()

    def on_frame(self, identity: bytes, frame: bytes) -> None:
        """Handle a message of one peer."""
        raise NotImplementedError

    def send(self, identity: bytes, message: Any) -> None:
        """Send a message to a peer, from any thread."""
        self._outbox.append((identity, encode(message)))
        self._wake_in.send(b"\0")

    def wait_for(self, condition: Callable[[], Any], patience: float = PATIENCE) -> Any:
        """Wait until `condition` holds and return what it gave."""
        with self.changed:
            assert self.changed.wait_for(condition, patience), "what was waited for did not happen"
            return condition()

    def never(self, condition: Callable[[], Any], seconds: float) -> bool:
        """Whether `condition` does not come to hold within `seconds`."""
        with self.changed:
            return not self.changed.wait_for(condition, seconds)

    def close(self) -> None:
        """End the thread and free the endpoint. Idempotent."""
        if not self._closing:
            self._closing = True
            self._wake_in.send(b"\0")
            self._thread.join()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake_out.fileno(), zmq.POLLIN)
        while not self._closing:
            poller.poll()
            try:
                while self._wake_out.recv(4096):
                    pass
            except BlockingIOError:
                pass
            while True:
                try:
                    identity, frame = self._router.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                with self.changed:
                    self.on_frame(identity, frame)
                    self.changed.notify_all()
            while self._outbox:
                identity, frame = self._outbox.popleft()
                try:
                    self._router.send_multipart([identity, frame], zmq.NOBLOCK)
                except zmq.ZMQError:
                    pass  # the peer is gone
        self._router.close(linger=200)
        self._context.term()
        self._wake_out.close()
        self._wake_in.close()
