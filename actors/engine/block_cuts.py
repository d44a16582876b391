"""Cutting blocks and snapshots out of caches: of a row alone, of a padded group, and of a slot of the batch.

Called by `actors.engine.prefix` on the engine's one thread. All of it is lazy: a cut goes to the device together
with the forward that ends at its border, so that it is done before the next one writes to the caches. (A slice
that stays lazy makes each later step copy the whole cache; a ring's next step overwrites what is to be cut.)
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from actors.engine.block_layout import CHUNKED, STATES, WINDOW, BlockLayout, Leaf, Pack
from actors.engine.scheduler import BLOCK
from actors.engine.slots import SlotCache
from cache_store.block import Tensor

# As safetensors names them.
DTYPES = {
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint32: "U32",
    mx.uint8: "U8",
    mx.int8: "I8",
    mx.int32: "I32",
}

Planes = list[mx.array]  # of one leaf, each (1, heads, tokens, width), or (1, …) of a state


class CantCut(Exception):
    """A cache does not hold what the block needs, or not in the shape that the layout expects."""


class PackedBlock:
    """A block or snapshot in memory, as `cache_store.block.Block` wants it: one array of bytes per dtype."""

    __slots__ = ("_pack", "arrays", "layout", "nbytes")

    def __init__(self, arrays: list[mx.array], pack: Pack, layout: str) -> None:
        self.arrays = arrays
        self.layout = layout
        self.nbytes = pack.nbytes
        self._pack = pack

    def tensors(self) -> list[Tensor]:
        """Read-only views of the bytes; the arrays must be evaluated."""
        return [
            Tensor(f"data{i}", DTYPES[dtype], (array.nbytes // dtype.size,), memoryview(array).toreadonly())  # type: ignore[arg-type]  # MLX's stub
            for i, (array, dtype) in enumerate(zip(self.arrays, self._pack.dtypes, strict=True))
        ]


def cut_row(layout: BlockLayout, caches: Sequence[Any], end: int) -> PackedBlock:
    """The block that ends at token `end` of a row's own caches; the last forward must have reached at least there."""
    return _block(layout, [_of_row(leaf, _at(caches, leaf), end) for leaf in layout.leaves])


def cut_padded(layout: BlockLayout, caches: Sequence[Any], place: int, end: int) -> PackedBlock:
    """The block that ends at token `end` of row `place` of batched plain caches that are padded on the right."""
    row, span = slice(place, place + 1), slice(end - BLOCK, end)
    return _block(layout, [([cache.keys[row, :, span], cache.values[row, :, span]], []) for cache in caches])


def cut_slot(layout: BlockLayout, slots: Sequence[SlotCache], slot: int, end: int) -> PackedBlock:
    """The block that ends at token `end` of the row in `slot`, which must be the row's length if it has windows."""
    return _block(layout, [_of_slot(leaf, _at(slots, leaf), slot, end) for leaf in layout.leaves])


def snap_row(layout: BlockLayout, caches: Sequence[Any]) -> PackedBlock:
    """The recurrent states of a row's own caches as they are now."""
    return _snapshot(layout, [_at(caches, leaf).cache for leaf in layout.leaves if leaf.kind is STATES])


def snap_slot(layout: BlockLayout, slots: Sequence[SlotCache], slot: int) -> PackedBlock:
    """The recurrent states of the row in `slot` as they are now."""
    return _snapshot(layout, [_at(slots, leaf).cut(slot) for leaf in layout.leaves if leaf.kind is STATES])


def _at(caches: Sequence[Any], leaf: Leaf) -> Any:
    cache = caches[leaf.path[0]]
    for place in leaf.path[1:]:
        cache = cache.caches[place]
    return cache


def _of_row(leaf: Leaf, cache: Any, end: int) -> tuple[Planes, Planes]:
    if leaf.kind is STATES:
        return [], []
    if cache.keys is None or cache.offset < end:
        raise CantCut(f"a {leaf.kind} cache holds less than {end} tokens")
    if leaf.kind is WINDOW:
        ordered = [cache._temporal_order(array) for array in (cache.keys, cache.values)]
        stop = ordered[0].shape[2] - (cache.offset - end)
        kept = [array[:, :, : leaf.keep] for array in ordered] if leaf.keep else []
    elif leaf.kind is CHUNKED:
        ordered, stop, kept = [cache.keys, cache.values], end - cache.start_position, []
    else:
        quantized = isinstance(cache.keys, tuple | list)
        ordered = [*cache.keys, *cache.values] if quantized else [cache.keys, cache.values]
        stop, kept = end, []
    start = stop - leaf.tokens
    if start < 0 or stop > ordered[0].shape[2]:
        raise CantCut(f"a {leaf.kind} cache no longer holds the block before token {end}")
    return [array[:, :, start:stop] for array in ordered], kept


def _of_slot(leaf: Leaf, cache: Any, slot: int, end: int) -> tuple[Planes, Planes]:
    if leaf.kind is STATES:
        return [], []
    if leaf.kind is not WINDOW or end <= leaf.size:
        kept = cache.cut(slot, 0, leaf.keep) if leaf.keep else []
        return cache.cut(slot, end - leaf.tokens, end), kept
    turn = leaf.size - leaf.keep
    start = leaf.keep + (end - leaf.tokens - leaf.keep) % turn
    whole = min(leaf.tokens, leaf.size - start)
    planes = cache.cut(slot, start, start + whole)
    if whole < leaf.tokens:
        rest = cache.cut(slot, leaf.keep, leaf.keep + leaf.tokens - whole)
        planes = [mx.concatenate([a, b], axis=2) for a, b in zip(planes, rest, strict=True)]
    return planes, cache.cut(slot, 0, leaf.keep) if leaf.keep else []


def _block(layout: BlockLayout, parts: list[tuple[Planes, Planes]]) -> PackedBlock:
    def array(leaf: int, plane: int, kept: bool) -> mx.array:
        planes = parts[leaf][kept]
        if plane >= len(planes):
            raise CantCut("a cache holds nothing yet")
        return planes[plane]

    return _packed(layout.block, layout.description, array)


def _snapshot(layout: BlockLayout, states: list[list[mx.array | None]]) -> PackedBlock:
    places = [place for place, leaf in enumerate(layout.leaves) if leaf.kind is STATES]
    by_leaf = dict(zip(places, states, strict=True))

    def array(leaf: int, plane: int, kept: bool) -> mx.array:
        state = by_leaf[leaf][plane]
        expected = layout.leaves[leaf].planes[plane]
        if state is None or state.shape != (1, *expected.shape) or state.dtype != expected.dtype:
            raise CantCut("a recurrent state is not of the shape it had at load")
        return state

    return _packed(layout.snapshot, layout.description, array)


def _packed(pack: Pack, layout: str, array: Any) -> PackedBlock:
    """One copy per run of equal planes, and one more where a dtype has several runs."""
    runs: list[list[list[mx.array]]] = [[] for _ in pack.sizes]
    shape: tuple[int, ...] = ()
    last = -1
    for spot in pack.spots:
        part = array(spot.leaf, spot.plane, spot.kept)
        if part.nbytes != spot.nbytes:
            raise CantCut("a cache is not of the shape it had at load")
        if spot.buffer != last or part.shape != shape:
            runs[spot.buffer].append([])
        last, shape = spot.buffer, part.shape
        runs[spot.buffer][-1].append(part)
    arrays = []
    for of_dtype in runs:
        flat = [(mx.concatenate(run) if len(run) > 1 else mx.contiguous(run[0])).reshape(-1) for run in of_dtype]
        joined = (flat[0] if len(flat) == 1 else mx.concatenate(flat)).view(mx.uint8)
        # One plane alone may still lie in the cache's own buffer.
        arrays.append(joined | mx.array(0, mx.uint8) if len(of_dtype) == len(of_dtype[0]) == 1 else joined)
    return PackedBlock(arrays, pack, layout)
