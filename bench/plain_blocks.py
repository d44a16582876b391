"""Blocks without a model, for checks and tests of the store: their bytes are a function of their key."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cache_store.block import Tensor
from cache_store.keys import BLOCK_SIZE, chain_keys


@dataclass(frozen=True)
class PlainBlock:
    """Two tensors of bytes that together are `data`."""

    data: bytes
    layout: str = "plain"

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return len(self.data)

    def tensors(self) -> list[Tensor]:
        """A third as U8, the rest as BF16."""
        cut = len(self.data) // 3
        cut += (len(self.data) - cut) % 2
        view = memoryview(self.data)
        return [
            Tensor("bytes", "U8", (cut,), view[:cut]),
            Tensor("halves", "BF16", ((len(self.data) - cut) // 2,), view[cut:]),
        ]


def content(key: bytes, size: int) -> bytes:
    """The data of the block `key`."""
    seed = int.from_bytes(hashlib.sha256(key).digest()[:8], "little")
    return np.random.default_rng(seed).bytes(size)


def plain_chain(seed: int, blocks: int, size: int) -> Iterator[tuple[bytes, bytes | None, bytes, PlainBlock]]:
    """Key, parent, ids and block, from the head on."""
    ids = np.random.default_rng(seed).integers(0, 1 << 16, blocks * BLOCK_SIZE, dtype=np.uint32)
    parent: bytes | None = None
    for number, key in enumerate(chain_keys(ids)):
        own = ids[number * BLOCK_SIZE : (number + 1) * BLOCK_SIZE].astype("<u4").tobytes()
        yield key, parent, own, PlainBlock(content(key, size))
        parent = key


def fill(data: bytearray) -> list[memoryview]:
    """Pieces of uneven sizes that cover `data`, to read into."""
    view = memoryview(data)
    pieces, at, step = [], 0, 1
    while at < len(data):
        pieces.append(view[at : at + step])
        at += step
        step = step * 3 + 1
    return pieces
