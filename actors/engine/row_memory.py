"""What a row of so many tokens takes in the caches, measured on the caches of a real row.

Used by the engine's memory guard and by the batch, which weighs padding against another group.
"""

from typing import Any

import msgspec

GROW = 256  # room for keys and values is a multiple of so many tokens


class RowMemory(msgspec.Struct):
    """What one row takes in the caches: `per_token` bytes for each token, `windows` (size in tokens, bytes per
    token) of layers that keep only the last ones, and `fixed` bytes of recurrent states."""

    per_token: int = 0
    windows: list[tuple[int, int]] = []
    fixed: int = 0

    def bytes(self, length: int) -> int:
        """Bytes of a row of `length` tokens."""
        return (
            self.per_token * length
            + sum(min(length, size) * per_token for size, per_token in self.windows)
            + self.fixed
        )


def rounded_room(tokens: int) -> int:
    """Room that is made for rows of so many tokens."""
    return -(-tokens // GROW) * GROW


def row_bytes(of_row: RowMemory, length: int) -> int:
    """Bytes that a row of `length` tokens takes, in caches of its own or in a slot."""
    return of_row.bytes(rounded_room(length))


def row_memory(caches: list[Any]) -> RowMemory:
    """Measure it on the caches of one row that have seen a few tokens."""
    memory = RowMemory()
    for cache in caches:
        if (parts := getattr(cache, "caches", None)) is not None:
            part = row_memory(list(parts))
            memory.per_token += part.per_token
            memory.windows += part.windows
            memory.fixed += part.fixed
            continue
        keys = getattr(cache, "keys", None)
        if keys is None:
            memory.fixed += cache.nbytes
            continue
        quantized = isinstance(keys, tuple | list)
        planes: list[Any] = [*keys, *cache.values] if quantized else [keys, cache.values]
        per_token = sum(int(plane.nbytes) // int(plane.shape[2]) for plane in planes)
        if (size := getattr(cache, "max_size", None)) is not None:
            memory.windows.append((size, per_token))
        else:
            memory.per_token += per_token
    return memory
