"""KV events: a subscriber that follows them knows what is in memory, also when it missed some."""

import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from actors.engine.kv_events import END, BlockRemoved, BlockStored, KVEventBatch, KvEvents
from cache_store.block import Tensor
from cache_store.keys import BLOCK_SIZE, chain_keys
from cache_store.store import PrefixStore


class Block:
    """A block of 100 bytes."""

    nbytes = 100
    layout = "test"

    def tensors(self) -> list[Tensor]:
        return []


class Router:
    """What a prefix-aware router does: rebuilds the tree of blocks from the events."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, tuple[bytes | None, list[int]]] = {}
        self.next = 0

    def take(self, number: bytes, batch: bytes) -> None:
        assert int.from_bytes(number, "big") == self.next
        self.next += 1
        _, events, *_ = msgspec.msgpack.decode(batch)
        for name, *fields in events:
            if name == "AllBlocksCleared":
                self.blocks.clear()
            elif name == "BlockRemoved":
                for key in fields[0]:
                    del self.blocks[key]
            else:
                (key,), parent, ids, size = fields[:4]
                assert name == "BlockStored"
                assert len(ids) == size == BLOCK_SIZE
                self.blocks[key] = (parent, ids)


@pytest.fixture
def sockets(tmp_path: Path) -> Iterator[tuple[KvEvents, "zmq.Socket[bytes]", "zmq.Socket[bytes]"]]:
    context = zmq.Context()
    addresses = "inproc://events", "inproc://replay"
    events = KvEvents(context, *addresses)
    subscriber, asker = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    subscriber.subscribe(b"")
    for socket, address in zip((subscriber, asker), addresses, strict=True):
        socket.rcvtimeo = 5000
        socket.connect(address)
    yield events, subscriber, asker
    events.close()
    context.destroy(linger=0)


def test_who_follows_and_asks_for_what_was_missed_knows_the_tree(
    sockets: tuple[KvEvents, "zmq.Socket[bytes]", "zmq.Socket[bytes]"],
):
    events, subscriber, asker = sockets
    store: PrefixStore[Block] = PrefixStore(memory_bytes=2000, watcher=events)
    draw = random.Random(3)
    prompts = [np.array([draw.randrange(50) for _ in range(BLOCK_SIZE * 6)], "<u4") for _ in range(8)]
    for prompt in prompts[1:4]:
        prompt[: BLOCK_SIZE * 3] = prompts[0][: BLOCK_SIZE * 3]
    for _ in range(60):
        prompt = draw.choice(prompts)
        keys = chain_keys(prompt)
        for i, key in enumerate(keys[: draw.randrange(1, 7)]):
            span = prompt[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE]
            store.put(key, keys[i - 1] if i else None, span.tobytes(), Block())
        events.publish()
    heard = []
    while subscriber.poll(200):
        heard.append(subscriber.recv_multipart())
    follower = Router()
    first = int.from_bytes(heard[0][1], "big")  # what was sent before the subscription took hold is missed
    asker.send_multipart([b"", (0).to_bytes(8, "big")])
    events.answer()
    while (again := asker.recv_multipart())[1] != END:
        if follower.next < first:
            follower.take(*again[1:])
    for _, number, batch in heard:
        follower.take(number, batch)
    kept = {entry.key: (entry.parent, entry.ids) for entry in store.entries()}
    assert {key: (parent, np.array(ids, "<u4").tobytes()) for key, (parent, ids) in follower.blocks.items()} == kept
    assert 0 < len(kept) <= 20
    assert all(parent is None or parent in kept for parent, _ in kept.values())


def test_a_new_engine_says_first_that_nothing_is_there_any_more():
    context = zmq.Context()
    follower = Router()
    for engine in range(2):
        addresses = f"inproc://events-{engine}", f"inproc://replay-{engine}"  # as closing frees them some time later
        events = KvEvents(context, *addresses)
        asker = context.socket(zmq.DEALER)
        asker.rcvtimeo = 5000
        asker.connect(addresses[1])
        events.publish()  # at the engine's first turn, whether there are blocks or not
        follower.next = 0  # what a follower does that sees a lower number than the last
        if not engine:
            events.stored(b"k", None, bytes(4 * BLOCK_SIZE), "")
            events.publish()
        asker.send_multipart([b"", (0).to_bytes(8, "big")])
        events.answer()
        first = asker.recv_multipart()
        assert msgspec.msgpack.decode(first[2])[1] == [["AllBlocksCleared"]]
        follower.take(*first[1:])
        assert follower.blocks == {}
        while (again := asker.recv_multipart())[1] != END:
            follower.take(*again[1:])
        assert list(follower.blocks) == [b"k"][engine:]
        events.close()
        asker.close(linger=0)
    context.destroy(linger=0)


def test_blocks_of_an_adapter_have_its_number_and_name():
    context = zmq.Context()
    events = KvEvents(context, "inproc://events-lora", "inproc://replay-lora", ["fr", "de"])
    with context.socket(zmq.DEALER) as asker:
        asker.rcvtimeo = 5000
        asker.connect("inproc://replay-lora")
        store: PrefixStore[Block] = PrefixStore(memory_bytes=2000, watcher=events)
        for number, adapter in enumerate(("", "fr", "de")):
            store.put(b"%d" % number, None, bytes(4 * BLOCK_SIZE), Block(), adapter=adapter)
        events.publish()
        asker.send_multipart([b"", (0).to_bytes(8, "big")])
        events.answer()
        _, *stored = msgspec.msgpack.decode(asker.recv_multipart()[2])[1]
    assert [event[5:] for event in stored] == [[None, "GPU", None], [1, "GPU", "fr"], [2, "GPU", "de"]]
    events.close()
    context.destroy(linger=0)


def test_the_form_is_vllms():
    stored = [BlockStored([b"k"], None, [1], 1, medium="GPU"), BlockStored([b"l"], b"k", [2], 1, 3, "GPU", "fr")]
    batch = KVEventBatch(1.5, [*stored, BlockRemoved([b"k"], "GPU")])
    events = [
        ["BlockStored", [b"k"], None, [1], 1, None, "GPU", None],
        ["BlockStored", [b"l"], b"k", [2], 1, 3, "GPU", "fr"],
        ["BlockRemoved", [b"k"], "GPU"],
    ]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(batch)) == [1.5, events, None]
