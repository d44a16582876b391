"""`KvEvents`: tells others which prefix blocks are in this engine's memory, in the form of vLLM's KV cache events.

Prefix-aware routers follow them to send a prompt where its beginning is. A PUB socket sends batches as
`[topic, sequence number (8 bytes, big-endian), MessagePack]`; who missed some asks a ROUTER socket for those from a
number on, and gets them, then one whose number is -1. Owned by the engine's one thread; nothing ever waits.
"""

import time
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec
import structlog
import zmq

from actors.base import Socket
from cache_store.keys import BLOCK_SIZE
from protocol.ids import unpack_ids

log = structlog.get_logger()

MEMORY = "GPU"  # vLLM's name for the memory that the model computes in
KEPT = 10_000  # batches that can be asked for again
END = (-1).to_bytes(8, "big", signed=True)


class _Event(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, tag=True):
    """Tagged with the name of its class, as vLLM's are."""


class BlockStored(_Event, frozen=True, tag=True):
    """Blocks that follow one another are there now. `token_ids` are those of all of them; `lora_id` is the number, from
    1, of the LoRA adapter that they were computed with."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None


class BlockRemoved(_Event, frozen=True, tag=True):
    """Blocks are gone."""

    block_hashes: list[bytes]
    medium: str | None = None


class AllBlocksCleared(_Event, frozen=True, tag=True):
    """Nothing is there any more: an engine has just started."""


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What changed in one turn. `ts` is in Unix seconds."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class KvEvents:
    """Binds `endpoint` to publish and `replay` to answer; `adapters` are numbered in their order. Raises zmq.ZMQError
    when the endpoints are taken."""

    def __init__(
        self, context: "zmq.Context[Socket]", endpoint: str, replay: str, adapters: Iterable[str] = (), topic: str = ""
    ) -> None:
        self._topic = topic.encode()
        self._numbers = {name: number for number, name in enumerate(adapters, 1)}
        self._sequence = 0
        self._events: list[BlockStored | BlockRemoved | AllBlocksCleared] = [AllBlocksCleared()]
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=KEPT)
        self._encode = msgspec.msgpack.Encoder().encode
        self._pub = context.socket(zmq.PUB)
        self._pub.sndhwm = KEPT
        self.replay = context.socket(zmq.ROUTER)
        try:
            self._pub.bind(endpoint)
            self.replay.bind(replay)
        except zmq.ZMQError:
            self.close()
            raise

    def stored(self, key: bytes, parent: bytes | None, ids: bytes, adapter: str) -> None:
        """A block has come to memory; `ids` are uint32-LE, `adapter` is "" for the model itself."""
        number = self._numbers.get(adapter)
        self._events.append(BlockStored([key], parent, unpack_ids(ids), BLOCK_SIZE, number, MEMORY, adapter or None))

    def removed(self, keys: Sequence[bytes]) -> None:
        """Blocks have left memory."""
        self._events.append(BlockRemoved([*keys], MEMORY))

    def publish(self) -> None:
        """Send what has changed since the last time."""
        if not self._events:
            return
        batch = self._encode(KVEventBatch(time.time(), self._events))
        self._events = []
        self._kept.append((self._sequence, batch))
        try:
            self._pub.send_multipart([self._topic, self._sequence.to_bytes(8, "big"), batch], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # subscribers see the gap, and can ask for it
            log.warning("KV events not sent", error=str(error))
        self._sequence += 1

    def answer(self) -> None:
        """Send again what is asked for."""
        while True:
            try:
                frames = self.replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 3 or len(frames[2]) != 8:
                continue
            client, start = frames[0], int.from_bytes(frames[2], "big")
            try:
                for number, batch in self._kept:
                    if number >= start:
                        self.replay.send_multipart([client, b"", number.to_bytes(8, "big"), batch], zmq.NOBLOCK)
                self.replay.send_multipart([client, b"", END, b""], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                log.warning("KV events not sent again", error=str(error))

    def close(self) -> None:
        """Close both sockets."""
        self._pub.close(linger=0)
        self.replay.close(linger=0)
