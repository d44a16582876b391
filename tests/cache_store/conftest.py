"""Blocks without a model: bytes made from a seed, and stores that are closed when a test ends."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.plain_blocks import PlainBlock, fill, plain_chain
from cache_store.block import Read
from cache_store.ssd import SsdStore
from cache_store.store import PrefixStore
from cache_store.ticket import Ticket

FINGERPRINT = b"\x11" * 32

Store = PrefixStore[PlainBlock]


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Callable[..., Store]]:
    """Open a store on the test's directory, ready and with a model."""
    stores: list[Store] = []

    def open_(memory_bytes: int = 64 << 20, directory: Path | None = None, **options: Any) -> Store:
        ssd = SsdStore(directory or tmp_path / "cache", write_bytes_per_second=1e12, **options)
        store: Store = PrefixStore(memory_bytes=memory_bytes, ssd=ssd)
        stores.append(store)
        store.set_model(FINGERPRINT, "model")
        until(lambda: ssd.ready)
        return store

    yield open_
    for store in stores:
        store.close()


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
