"""`PrefixCalls`: who wants to see the prefix blocks, and what the engine said last. The streamer's one thread.

The engine looks them through between two steps, so it is asked by clients' wishes alone, and not twice within `FRESH`
seconds however many look on.
"""

from collections.abc import Callable

from actors.streamer.engine_link import EngineLink
from protocol.errors import LOADING
from protocol.figures import PrefixTree
from protocol.messages import CallFailed, Prefixes

FRESH = 2.0  # seconds


class PrefixCalls:
    """`send` gives a client its answer."""

    def __init__(self, engine: EngineLink, send: Callable[[bytes, Prefixes | CallFailed], object]) -> None:
        self._engine = engine
        self._send = send
        self._waiting: list[tuple[bytes, int]] = []
        self._asked = 0  # epoch of the engine that was asked and hasn't answered
        self._known: tuple[int, float, PrefixTree] | None = None  # by which engine, when, what

    def ask(self, client: bytes, ref: int, now: float) -> None:
        """A client wants to see them."""
        if self._known is not None and self._known[0] == self._engine.epoch and now - self._known[1] < FRESH:
            self._send(client, Prefixes(ref, self._known[2]))
            return
        if not self._engine.ready:
            self._send(client, CallFailed(ref, LOADING, "there is no engine that could be asked"))
            return
        self._waiting.append((client, ref))
        if self._asked != self._engine.epoch:
            self._asked = self._engine.epoch
            self._engine.tell_prefixes()

    def take(self, tree: PrefixTree, now: float) -> None:
        """The engine has answered."""
        self._asked = 0
        self._known = self._engine.epoch, now, tree
        waiting, self._waiting = self._waiting, []
        for client, ref in waiting:
            self._send(client, Prefixes(ref, tree))

    def look(self) -> None:
        """Give up waiting for an engine that is gone. Now and then."""
        if self._asked and not (self._engine.ready and self._engine.epoch == self._asked):
            self._asked = 0
            waiting, self._waiting = self._waiting, []
            for client, ref in waiting:
                self._send(client, CallFailed(ref, LOADING, "the engine was lost"))
