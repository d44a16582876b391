"""Stores of plain blocks for the tests beside this file."""

import time
from collections.abc import Callable, Sequence

from bench.plain_blocks import PlainBlock, fill, plain_chain
from cache_store.block import Read
from cache_store.store import PrefixStore
from cache_store.ticket import Ticket

FINGERPRINT = b"\x11" * 32

Store = PrefixStore[PlainBlock]
Open = Callable[..., Store]


def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Wait for something that another thread or process brings about."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.002)


def put_chain(store: Store, seed: int, blocks: int, size: int = 100_000) -> list[bytes]:
    """Put a chain in; its keys."""
    keys = []
    for key, parent, ids, block in plain_chain(seed, blocks, size):
        store.put(key, parent, ids, block)
        keys.append(key)
    return keys


def load(store: Store, keys: Sequence[bytes], size: int = 100_000) -> tuple[int, list[bytes]]:
    """Read blocks from the SSD: how many were good, and what was read."""
    memory = [bytearray(size) for _ in keys]
    layout = PlainBlock.layout
    reads = [Read(key, layout, fill(data)) for key, data in zip(keys, memory, strict=True)]
    ticket: Ticket = store.load(reads)
    until(lambda: ticket.finished)
    return ticket.done, [bytes(data) for data in memory[: ticket.done]]
