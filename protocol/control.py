"""An actor's side of the control channel, and the lifeline to the supervisor.

Used by every child process of the supervisor (actors and HTTP workers). The channel is a DEALER to the
supervisor's ROUTER at `<run_dir>/control`; it belongs to the process's main loop, so that an answer to a
probe proves that this loop turns.
"""

import contextlib
import os
import threading
from pathlib import Path

import zmq

from protocol.codec import CodecError, encode, order_codec
from protocol.endpoints import ipc_endpoint
from protocol.messages import ActorReport, SupervisorOrder
from protocol.sockets import connect_dealer


class ControlChannel:
    """Reports of one actor incarnation to the supervisor, and the supervisor's orders."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", run_dir: Path, role: str, index: int, epoch: int
    ) -> None:
        self.socket = connect_dealer(context, ipc_endpoint(run_dir, "control"), f"{role}-{index}-{epoch}".encode())

    def report(self, message: ActorReport) -> None:
        """Send without waiting; a full or broken channel is ignored, the supervisor notices by itself."""
        try:
            self.socket.send(encode(message), zmq.NOBLOCK)
        except zmq.ZMQError:
            pass

    def orders(self) -> list[SupervisorOrder]:
        """All orders that have arrived, oldest first; frames that are none are passed over. Never waits."""
        arrived: list[SupervisorOrder] = []
        while True:
            try:
                frame = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return arrived
            with contextlib.suppress(CodecError):
                arrived.append(order_codec.decode(frame))

    def close(self, linger_ms: int = 1000) -> None:
        """Close, giving what was reported last up to `linger_ms` to leave."""
        self.socket.close(linger=linger_ms)


def hold_lifeline(fd: int) -> None:
    """Exit this process as soon as the supervisor is gone, however it died.

    `fd` is the read end of a pipe whose only write end the supervisor holds. A daemon thread blocks on it.
    """

    def wait() -> None:
        try:
            os.read(fd, 1)
        finally:
            os._exit(1)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()
