"""The streamer's clients: who is connected, when each was last heard, and what this turn sends to whom.

Owned by the streamer's one thread. Deltas of one turn are gathered per connection and leave as one message each.
"""

from collections.abc import Iterable, Iterator

import structlog
import zmq

from actors.base import Socket
from protocol.codec import CodecError, encode
from protocol.errors import INTERNAL_ERROR
from protocol.messages import Deltas, End, ServerMessage, TokenLogprobs, ToolCallDelta

log = structlog.get_logger()

SILENCE_LIMIT = 3.0  # seconds without a word until a client's streams are cancelled
FAILED = "the server failed to serve this request; its log says more"
FORGET_AFTER = 60.0  # seconds without a word until its connection is forgotten

# One entry of each column of `Deltas`.
Delta = tuple[int, str, bytes, int, list[TokenLogprobs], str, list[ToolCallDelta]]


class ClientConnection:
    """One connection. `streams` maps the client's refs of its open streams to our rids; `turns` is kept for `Turns`."""

    def __init__(self, identity: bytes, name: str, now: float) -> None:
        self.identity = identity
        self.name = name
        self.heard = now
        self.streams: dict[int, int] = {}
        self.turns: dict[int, int] = {}
        self.refs: list[int] = []
        self.texts: list[str] = []
        self.ids: list[bytes] = []
        self.counts: list[int] = []
        self.logprobs: list[list[TokenLogprobs]] = []
        self.reasoning: list[str] = []
        self.calls: list[list[ToolCallDelta]] = []
        self.ends: list[End] = []

    def add(
        self,
        ref: int,
        text: str,
        ids: bytes,
        count: int,
        logprobs: list[TokenLogprobs],
        reasoning: str,
        calls: list[ToolCallDelta],
    ) -> None:
        """Gather one delta for this turn's message."""
        self.refs.append(ref)
        self.texts.append(text)
        self.ids.append(ids)
        self.counts.append(count)
        self.logprobs.append(logprobs)
        self.reasoning.append(reasoning)
        self.calls.append(calls)

    def take(self) -> Deltas:
        """This turn's message; the next turn starts empty."""
        logprobs = self.logprobs if any(self.logprobs) else []
        reasoning = self.reasoning if any(self.reasoning) else []
        calls = self.calls if any(self.calls) else []
        message = Deltas(self.refs, self.texts, self.ids, self.counts, self.ends, logprobs, reasoning, calls)
        self.refs, self.texts, self.ids, self.counts, self.logprobs, self.ends = [], [], [], [], [], []
        self.reasoning, self.calls = [], []
        return message


class Clients:
    """All connections and the socket they share."""

    def __init__(self, socket: Socket) -> None:
        self._socket = socket
        self._by_identity: dict[bytes, ClientConnection] = {}
        self._dirty: dict[bytes, ClientConnection] = {}
        self.send_faults = 0

    def __len__(self) -> int:
        return len(self._by_identity)

    def __iter__(self) -> Iterator[ClientConnection]:
        return iter(self._by_identity.values())

    def add(self, identity: bytes, name: str, now: float) -> ClientConnection:
        """Greet a connection; a second hello only renames it."""
        client = self._by_identity.get(identity)
        if client is None:
            client = self._by_identity[identity] = ClientConnection(identity, name, now)
        client.name = name
        return client

    def get(self, identity: bytes) -> ClientConnection | None:
        """The connection with this identity, if it has said hello."""
        return self._by_identity.get(identity)

    def named(self, name: str) -> list[ClientConnection]:
        """All connections that introduced themselves as `name`."""
        return [client for client in self._by_identity.values() if client.name == name]

    def with_streams(self, asking: ClientConnection) -> int:
        """How many connections have open streams, with the one that is asking."""
        return sum(bool(client.streams) or client is asking for client in self._by_identity.values())

    def gather(self, identity: bytes, delta: Delta | None, end: End | None) -> None:
        """Add a delta, an end, or both to what this turn sends to the connection."""
        client = self._by_identity.get(identity)
        if client is None:
            return
        if delta is not None:
            client.add(*delta)
        if end is not None:
            client.ends.append(end)
        self._dirty[identity] = client

    def flush(self) -> tuple[list[ClientConnection], list[ClientConnection]]:
        """Send what was gathered. Returns the connections that turned out to be gone, and those whose message could not
        be written, by a fault of ours: its deltas are lost, and streams that ended in it have failed."""
        gone, garbled = [], []
        dirty, self._dirty = self._dirty, {}
        for client in dirty.values():
            message = client.take()
            try:
                if not self.send(client.identity, message):
                    gone.append(client)
            except CodecError as error:
                log.error("a message can't be written", client=client.name, error=str(error))
                client.ends = [End(end.ref, "failed", code=INTERNAL_ERROR, message=FAILED) for end in message.ends]
                self._dirty[client.identity] = client
                garbled.append(client)
        return gone, garbled

    def send(self, identity: bytes, message: ServerMessage) -> bool:
        """Send one message without waiting. False when the peer is gone or takes nothing any more.

        Raises CodecError when it can't be written.
        """
        try:
            self._socket.send_multipart([identity, encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self.send_faults += 1
            log.debug("client unreachable", error=str(error))
            return False
        return True

    def forget(self, client: ClientConnection) -> None:
        """Drop a connection whose streams are ended."""
        self._by_identity.pop(client.identity, None)
        self._dirty.pop(client.identity, None)

    def silent(self, now: float) -> Iterable[ClientConnection]:
        """Connections not heard for `SILENCE_LIMIT` that have open streams; long-silent ones are forgotten."""
        silent = []
        for client in list(self._by_identity.values()):
            if now - client.heard > FORGET_AFTER and not client.streams:
                self.forget(client)
            elif now - client.heard > SILENCE_LIMIT and client.streams:
                silent.append(client)
        return silent

    def excuse(self, seconds: float) -> None:
        """The streamer itself stood still for so long: nobody is to blame for silence in that time."""
        for client in self._by_identity.values():
            client.heard += seconds
