"""What the index stores about one block and one model. Data only."""

import struct
from typing import NamedTuple

import msgspec

_RECORD = struct.Struct("<Q16sQQB32s")
_NO_PARENT = bytes(32)


class Record(NamedTuple):
    """What the index knows of a block. `size` is what its file is charged for; times in µs since 1970."""

    size: int
    checksum: bytes
    used: int
    created: int
    is_snapshot: bool
    parent: bytes | None

    def pack(self) -> bytes:
        """As the index stores it."""
        parent = self.parent or _NO_PARENT
        return _RECORD.pack(self.size, self.checksum, self.used, self.created, self.is_snapshot, parent)

    @classmethod
    def unpack(cls, data: bytes) -> "Record":
        """Inverse of `pack`."""
        size, checksum, used, created, is_snapshot, parent = _RECORD.unpack(data)
        return cls(size, checksum, used, created, bool(is_snapshot), parent if parent != _NO_PARENT else None)


class Model(msgspec.Struct):
    """A model whose blocks are here. Tokens count what its prompts found, over all servers so far."""

    name: str
    created: int = 0
    hit_tokens: int = 0
    missed_tokens: int = 0
