"""`Actor`: what every actor process has in common — its sockets, its main loop, the control channel.

One thread runs `Actor.run`: it blocks in one poller over all sockets, hands what is readable to handlers, and
lets the subclass do a `turn` of its own work. The control channel is served by this same loop, so an answered
probe proves that the loop turns. Subclasses override the `on_…` methods, `turn` and `wait_ms`.
"""

import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog
import zmq

from actors.config import CastConfig
from protocol.control import ControlChannel
from protocol.endpoints import ipc_endpoint
from protocol.messages import (
    Alive,
    Drain,
    EngineStats,
    ModelCard,
    Probe,
    Ready,
    Stop,
    SupervisorOrder,
    SystemState,
)

log = structlog.get_logger()

Socket = zmq.Socket[bytes]


class Incarnation(msgspec.Struct, frozen=True):
    """Which actor this process is: its role, its index among equals, and the epoch of this start."""

    run_dir: Path
    role: str
    index: int
    epoch: int

    @property
    def name(self) -> str:
        """Name for people, such as `tokenizer0` or `engine`."""
        return f"{self.role}{self.index}" if self.role in ("tokenizer", "http") else self.role

    def endpoint(self) -> str:
        """The ipc endpoint of this incarnation alone; no path is ever used twice in a run."""
        return ipc_endpoint(self.run_dir, f"{self.name}-{self.epoch}")


class StartError(Exception):
    """An actor can't start; the text is shown to the user as it is."""


class Actor:
    """Base of tokenizer, streamer and engine. Everything runs on the thread that calls `run`."""

    def __init__(self, incarnation: Incarnation, config: CastConfig, control: ControlChannel) -> None:
        self.me = incarnation
        self.config = config
        self.control = control
        self.context: zmq.Context[Socket] = zmq.Context.instance()
        self.poller = zmq.Poller()
        self._handlers: dict[Socket, Callable[[], None]] = {}
        self.running = True
        self._busy_poll = 0.0 if incarnation.role == "tokenizer" else config.busy_poll
        self._busy_until = 0.0  # with busy polling: until when it goes on without a message
        self.abandoned = False  # after `close`: a thread still works, so the process can only be left as it is
        self.add_socket(control.socket, self._serve_control)

    # What subclasses override.

    def start(self) -> tuple[str, ModelCard | None]:
        """Get ready to serve; return the endpoint bound ("" for none) and, for the engine, the model's card.

        Raises StartError with a text for the user.
        """
        raise NotImplementedError

    def turn(self) -> None:
        """Do one turn of the actor's own work, after the sockets were read. Must not block for long."""

    def wait_ms(self) -> float | None:
        """How long the poller may block before the next turn: 0 with work at hand, None for ever."""
        return None

    def on_system(self, state: SystemState) -> None:
        """The supervisor reports the state of all actors."""

    def on_drain(self, order: Drain) -> None:
        """Refuse new work from now on and finish what runs."""

    def on_stop(self, order: Stop) -> None:
        """End every open stream with the given error; the loop ends after this turn."""

    def open_streams(self) -> int:
        """Streams that are not ended yet (for draining)."""
        return 0

    def ended_streams(self) -> int:
        """Streams and calls that are over, since the start."""
        return 0

    def stats(self) -> EngineStats | None:
        """The engine's load; None for other actors."""
        return None

    def close(self) -> None:
        """Release what `start` took. Called once, also after a failure in the loop."""

    # The loop.

    def add_socket(self, socket: Socket, handler: Callable[[], None]) -> None:
        """Call `handler` whenever `socket` is readable; it has to read until there is nothing left."""
        self.poller.register(socket, zmq.POLLIN)
        self._handlers[socket] = handler

    def remove_socket(self, socket: Socket) -> None:
        """Stop polling `socket` and close it without waiting for what was queued to its peer."""
        self.poller.unregister(socket)
        del self._handlers[socket]
        socket.close(linger=0)

    def run(self) -> None:
        """Start, report readiness, and serve until a `Stop` order. Raises what `start` raises."""
        began = time.monotonic()
        endpoint, card = self.start()
        self.control.report(
            Ready(self.me.role, self.me.index, self.me.epoch, os.getpid(), endpoint=endpoint, card=card)
        )
        log.info("ready", seconds=round(time.monotonic() - began, 2))
        try:
            while self.running:
                for socket, _ in self._poll():
                    handler = self._handlers.get(socket)
                    if handler is not None:
                        handler()
                self.turn()
        finally:
            self.close()

    def _poll(self) -> list[tuple[Socket, int]]:
        """Wait for what is readable, no longer than the next turn may be away."""
        wait = self.wait_ms()
        if self._busy_until:
            # Sleeping and being woken costs tens of microseconds; whoever asked for it pays with a core instead.
            ready = self.poller.poll(0)
            now = time.monotonic()
            if ready:
                self._busy_until = now + self._busy_poll
            if ready or wait == 0 or now < self._busy_until:
                return ready
            self._busy_until = 0.0
        ready = self.poller.poll(None if wait is None else math.ceil(wait))
        if ready and self._busy_poll:
            self._busy_until = time.monotonic() + self._busy_poll
        return ready

    def _serve_control(self) -> None:
        for order in self.control.orders():
            self._obey(order)

    def _obey(self, order: SupervisorOrder) -> None:
        match order:
            case Probe(seq=seq):
                me, streams, ended = self.me, self.open_streams(), self.ended_streams()
                self.control.report(Alive(me.role, me.index, me.epoch, seq, streams, self.stats(), ended=ended))
            case SystemState():
                self.on_system(order)
            case Drain():
                self.on_drain(order)
            case Stop():
                self.on_stop(order)
                self.running = False
