"""The streamer's way to the engine: one socket per engine incarnation, with the epoch checked on every message.

Owned by the streamer's one thread. A frame from the engine that can't be read breaks the link for good: what was in it
is lost, so nothing that follows may be read. The engine is then to be replaced, and the streams go on with another.
"""

from collections.abc import Callable
from enum import Enum

import structlog
import zmq

from actors.base import Actor, Socket
from protocol.codec import CodecError, encode, step_codec
from protocol.messages import Abort, ActorState, Attach, EngineCommand, Step, Submit, TellPrefixes
from protocol.sockets import connect_dealer

log = structlog.get_logger()


class Loss(Enum):
    """How an engine went."""

    DEATH = "death"
    PLANNED = "planned"


class EngineLink:
    """Connection to the current engine, if there is one. `on_step` gets every step that belongs to us, `on_broken` is
    called with the reason when the link to the engine `epoch` is broken."""

    def __init__(self, actor: Actor, on_step: Callable[[Step], None], on_broken: Callable[[str], None]) -> None:
        self._actor = actor
        self._on_step = on_step
        self._on_broken = on_broken
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
        if self._socket is not None or current is None or current.epoch == self.epoch:
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

    def tell_prefixes(self) -> None:
        """Ask for the prefix blocks; the engine must be ready."""
        self._send(TellPrefixes(self.epoch, self._actor.me.epoch))

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
                self._break(f"the engine sent a step that can't be read: {error}")
                return
            if step.epoch != self.epoch or step.streamer != self._actor.me.epoch:
                continue
            if fault := fault_of(step):
                self._break(fault)
                return
            self._on_step(step)

    def _break(self, why: str) -> None:
        log.error("the link to the engine is broken", why=why, epoch=self.epoch)
        self.close()
        self._on_broken(why)


def fault_of(step: Step) -> str:
    """Why a step that could be decoded can't be used, "" for nothing."""
    if step.unread:
        return "the engine could not read a command"
    columns = (
        (len(step.tokens), 4 * len(step.rids)),
        (len(step.reasons), len(step.ended)),
        (len(step.cached_tokens), len(step.cached_rids)),
        (len(step.pooled), len(step.pooled_rids)),
        (len(step.logprobs), len(step.logprob_rids)),
        (len(step.top_ids), len(step.logprob_rids)),
        (len(step.top_logprobs), len(step.logprob_rids)),
    )
    return "" if all(a == b for a, b in columns) else "the engine sent a step whose columns don't match"
