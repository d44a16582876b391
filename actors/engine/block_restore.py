"""`Restore`: a row's caches put together from blocks in memory, with room for those that come from the SSD.

Made by `actors.engine.prefix` on the engine's one thread. Work goes to the device leaf by leaf, so that a turn can do
as much of it as its time allows. Blocks that come from the SSD are read by other threads straight into the finished
arrays: `targets` tells where each piece of a block's bytes goes.

    row of a plain cache     | memory block | memory block | SSD block | SSD block | room |
    row of a window                                  |  kept  | the window before the end |
"""

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx

from actors.engine.block_cuts import PackedBlock
from actors.engine.block_layout import CHUNKED, QUANTIZED, STATES, WINDOW, BlockLayout, Leaf, Pack, Spot
from actors.engine.scheduler import BLOCK


class Restore:
    """Caches of a row of `end` tokens, a whole number of blocks; `caches` are fresh ones of that row.

    `blocks[i]` is block i, or None for one that comes from the SSD or that nothing is needed of; the same for
    `snapshot`. Plain caches get room for `room` tokens.
    """

    def __init__(
        self,
        layout: BlockLayout,
        caches: list[Any],
        blocks: Sequence[PackedBlock | None],
        snapshot: PackedBlock | None,
        room: int,
    ) -> None:
        self.caches = caches
        self.end = len(blocks) * BLOCK
        self._layout = layout
        self._room = -(-max(room, self.end) // BLOCK) * BLOCK
        self._planes = [_Opened(layout.block, block) if block is not None else None for block in blocks]
        self._snapshot = _Opened(layout.snapshot, snapshot) if snapshot is not None else None
        self._built: list[list[mx.array]] = []
        self._bytes: list[list[mx.array]] = []

    @property
    def done(self) -> bool:
        """Whether every leaf was built."""
        return len(self._built) == len(self._layout.leaves)

    def build(self, budget: int, *, views: bool = False) -> list[mx.array]:
        """Build leaves of about `budget` bytes, one at least; returns what is to be dispatched.

        With `views` the bytes of the arrays can be written to once they are evaluated (see `targets`).
        """
        launched: list[mx.array] = []
        while not self.done and budget > 0:
            place = len(self._built)
            leaf = self._layout.leaves[place]
            arrays = [self._plane(place, leaf, number) for number in range(len(leaf.planes))]
            self._built.append(arrays)
            launched += arrays
            if views:
                flat = [array.reshape(-1).view(mx.uint8) for array in arrays]
                self._bytes.append(flat)
                launched += flat
            budget -= sum(array.nbytes for array in arrays)
        return launched

    def targets(self, block: int) -> list[memoryview]:
        """Where the bytes of block `block` go, in their order. What no layer needs goes to memory of its own."""
        return list(self._targets(self._layout.block, block))

    def snapshot_targets(self) -> list[memoryview]:
        """Where the bytes of the snapshot go."""
        return [memoryview(self._bytes[spot.leaf][spot.plane]) for spot in self._layout.snapshot.spots]  # type: ignore[arg-type]  # MLX's stub

    def finish(self, length: int) -> list[Any]:
        """The caches with their first `length` tokens, which is less than `end` only where every layer can be cut."""
        assert self.done
        assert length == self.end or self._layout.trims
        self._bytes.clear()  # a view would make the first write copy its array
        self._planes.clear()
        for place, (leaf, arrays) in enumerate(zip(self._layout.leaves, self._built, strict=True)):
            cache = self._cache(place)
            if leaf.kind is STATES:
                cache.cache = list(arrays)
                continue
            if leaf.kind is QUANTIZED:
                half = len(arrays) // 2
                cache.keys, cache.values = tuple(arrays[:half]), tuple(arrays[half:])
            else:
                cache.keys, cache.values = arrays
            cache.offset = length
            if leaf.kind is WINDOW:
                cache._idx = arrays[0].shape[2]
            elif leaf.kind is CHUNKED:
                cache.start_position = length - arrays[0].shape[2]
        self._built = []
        return self.caches

    def _cache(self, place: int) -> Any:
        path = self._layout.leaves[place].path
        cache = self.caches[path[0]]
        for part in path[1:]:
            cache = cache.caches[part]
        return cache

    def _plane(self, place: int, leaf: Leaf, number: int) -> mx.array:
        plane = leaf.planes[number]
        if leaf.kind is STATES:
            if self._snapshot is None:
                return mx.zeros((1, *plane.shape), plane.dtype)
            return self._snapshot.array(place, number, False, (1, *plane.shape), plane.dtype)
        parts: list[mx.array] = []
        missing = 0

        def fill() -> None:
            nonlocal missing
            if missing:
                parts.append(mx.zeros((1, plane.shape[0], missing, plane.shape[1]), plane.dtype))
                missing = 0

        def add(block: int, kept: bool, tokens: int, start: int) -> None:
            nonlocal missing
            opened = self._planes[block]
            if opened is None:
                missing += tokens - start
                return
            fill()
            shape = (1, plane.shape[0], tokens, plane.shape[1])
            array = opened.array(place, number, kept, shape, plane.dtype)
            parts.append(array[:, :, start:] if start else array)

        if leaf.keep:
            add(len(self._planes) - 1, True, leaf.keep, 0)
        first = leaf.first(self.end)
        for block in range(first // BLOCK, len(self._planes)):
            begin = (block + 1) * BLOCK - leaf.tokens
            add(block, False, leaf.tokens, max(first - begin, 0))
        if not leaf.size:
            missing += self._room - self.end
        fill()
        return mx.concatenate(parts, axis=2) if len(parts) > 1 else mx.contiguous(parts[0])

    def _targets(self, pack: Pack, block: int) -> Iterator[memoryview]:
        for spot in pack.spots:
            leaf = self._layout.leaves[spot.leaf]
            view = memoryview(self._bytes[spot.leaf][spot.plane])  # type: ignore[arg-type]  # MLX's stub
            heads, width = leaf.planes[spot.plane].shape
            token = width * leaf.planes[spot.plane].itemsize
            held = len(view) // (heads * token)
            skipped, at = self._place(leaf, spot, block)
            for head in range(heads):
                if skipped:
                    yield memoryview(bytearray(skipped * token))
                if skipped < spot.tokens:
                    start = (head * held + at) * token
                    yield view[start : start + (spot.tokens - skipped) * token]

    def _place(self, leaf: Leaf, spot: Spot, block: int) -> tuple[int, int]:
        """How many of the spot's first tokens are not needed, and the place of the next in its array."""
        if spot.kept:
            return (0, 0) if block == len(self._planes) - 1 else (spot.tokens, 0)
        begin = (block + 1) * BLOCK - leaf.tokens
        first = leaf.first(self.end)
        skipped = min(max(first - begin, 0), leaf.tokens)
        return skipped, leaf.keep + begin + skipped - first if leaf.size else begin


class _Opened:
    """A block in memory, seen by plane."""

    def __init__(self, pack: Pack, block: PackedBlock) -> None:
        self._block = block
        self._spots = {(spot.leaf, spot.plane, spot.kept): spot for spot in pack.spots}

    def array(self, leaf: int, plane: int, kept: bool, shape: tuple[int, ...], dtype: Any) -> mx.array:
        spot = self._spots[leaf, plane, kept]
        return self._block.arrays[spot.buffer][spot.at : spot.at + spot.nbytes].view(dtype).reshape(shape)


def needed(layout: BlockLayout, blocks: int) -> int:
    """The first of so many blocks that a hit at their end needs anything of: the others need not be there."""
    end = blocks * BLOCK
    firsts = [leaf.first(end) // BLOCK for leaf in layout.leaves if leaf.kind is not STATES]
    return min(firsts, default=blocks)
