"""The streamer's way to the engine: one socket per engine incarnation, with the epoch checked on every message.

Owned by the streamer's one thread.
"""

from collections.abc import Callable
from enum import Enum

import structlog
import zmq

from actors.base import Actor, Socket
from protocol.codec import CodecError, encode, step_codec
from protocol.messages import Abort, ActorState, Attach, EngineCommand, Step, Submit
from protocol.sockets import connect_dealer

log = structlog.get_logger()


class Loss(Enum):
    """How an engine went."""

    DEATH = "death"
    PLANNED = "planned"


class EngineLink:
    """Connection to the current engine, if there is one. `on_step` gets every step that belongs to us."""

    def __init__(self, actor: Actor, on_step: Callable[[Step], None]) -> None:
        self._actor = actor
        self._on_step = on_step
        self._socket: Socket | None = None
        self.epoch = 0

    @property
    def ready(self) -> bool:
        """Whether an engine is there to take requests."""
        return self._socket is not None

    def lost(self, actors: list[ActorState]) -> Loss | None:
        """Let go of the engine when it is gone, after reading what it still sent. None while there is nothing new."""
        if self._socket is None:
            return None
        ours = next((a for a in actors if a.role == "engine" and a.epoch == self.epoch), None)
        if ours is not None and ours.state == "ready":
            return None
        self._receive()
        if self._socket is not None:
            self._actor.remove_socket(self._socket)
            self._socket = None
        return Loss.PLANNED if ours is not None and ours.state == "stopping" else Loss.DEATH

    def found(self, actors: list[ActorState]) -> bool:
        """Attach to an engine that is ready when we have none. True when there is one now that wasn't before."""
        current = next((a for a in actors if a.role == "engine" and a.state == "ready"), None)
        if self._socket is not None or current is None:
            return False
        self.epoch = current.epoch
        self._socket = connect_dealer(self._actor.context, current.endpoint)
        self._actor.add_socket(self._socket, self._receive)
        self._send(Attach(self.epoch, self._actor.me.epoch))
        return True

    def close(self) -> None:
        """Let go of the engine."""
        if self._socket is not None:
            self._actor.remove_socket(self._socket)
            self._socket = None

    def submit(self, message: Submit) -> None:
        """Hand a request to the engine."""
        self._send(message)

    def abort(self, rids: list[int]) -> None:
        """Have rows dropped; a no-op without an engine."""
        if rids and self._socket is not None:
            self._send(Abort(self.epoch, self._actor.me.epoch, rids))

    def _send(self, message: EngineCommand) -> None:
        assert self._socket is not None
        self._socket.send(encode(message), zmq.NOBLOCK)

    def _receive(self) -> None:
        while self._socket is not None:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                step = step_codec.decode(frame)
            except CodecError as error:
                log.error("bad step from the engine", error=str(error))
                continue
            if step.epoch == self.epoch and step.streamer == self._actor.me.epoch:
                self._on_step(step)
