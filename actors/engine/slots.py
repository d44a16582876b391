"""Batched caches with a fixed slot per row: what mlx-lm's models see of the rows that decode together.

Used by `actors.engine.row_group` on the engine's one thread. Each class here stands for one kind of mlx-lm cache
and has the interface that mlx-lm's models expect (`update_and_fetch`, `make_mask`, `offset`, …), for decode steps
alone: one new token per row. Rows are left-aligned: a row's token at position p lies at index p (in a window: at
p's place in the ring), whatever its neighbours hold, so joining writes one row, leaving writes nothing, and neither
copies the batch.

    slot      0   | a a a a a a · · · |      lengths 6, 3, 9: each row has an offset of its own, and a mask
              1   | b b b · · · · · · |      hides what lies beyond it
              2   | c c c c c c c c c |

All writes are lazy and of the form that MLX carries out in place when nobody else holds the buffer. See
`actors.engine.batch` for what that demands of the order of things.
"""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

Lengths = npt.NDArray[np.int64]

NO_BOUND = 1 << 62  # bytes


class Positions:
    """Where the rows of one decode step stand; shared by the caches of all layers.

    `lengths[i]` tokens of slot i are in the caches before the step, so its new token gets that position. When the slots
    `live` (all unless given) stand at the `same` position, the others are taken to stand there, too: then nothing needs
    a mask, and a write is one slice.
    """

    def __init__(self, lengths: Lengths, live: list[int] | None = None) -> None:
        self.rows = len(lengths)
        used = lengths if live is None else lengths[live]
        self.same = int(used[0]) if len(used) and (used == used[0]).all() else None
        self.longest = int(lengths.max()) + 1  # with the new token
        self.before = mx.array(lengths.astype(np.int32))
        self.after = self.before + 1
        self.places: mx.array | int = self.before if self.same is None else self.same
        self.slots = mx.arange(self.rows)
        self.column = self.before[:, None, None, None]
        self._masks: dict[tuple[int | None, int, int], mx.array] = {}

    def causal(self, limit: int, window: int | None) -> mx.array:
        """Mask (rows, 1, 1, limit), true where a row may look; of the last `window` positions alone if given."""
        key = (window, limit, 0)
        mask = self._masks.get(key)
        if mask is None:
            places = mx.arange(limit)
            mask = places <= self.column
            if window is not None:
                mask = mask & (places > self.column - window)
            self._masks[key] = mask
        return mask

    def ring(self, limit: int, size: int, keep: int, window: int | None) -> mx.array:
        """Mask (rows, 1, 1, limit) of a ring of `size` places, the first `keep` of which hold still."""
        key = (window, limit, size)
        mask = self._masks.get(key)
        if mask is None:
            places = mx.arange(limit)
            turn = size - keep
            held = self.column - (self.column - places) % turn  # the last position written to each place
            mask = held >= keep
            if window is not None:
                mask = mask & (held > self.column - window)
            if keep:
                mask = mx.where(places < keep, places <= self.column, mask)
            self._masks[key] = mask
        return mask


class SlotCache:
    """Base of the kinds. `step` begins a decode step; `load` fills a slot from a row's own mlx-lm cache."""

    _at: Positions
    _written = False

    def step(self, at: Positions) -> None:
        """The next forward is for these rows."""
        self._at = at
        self._written = False

    @property
    def offset(self) -> mx.array | int:
        """Position of each row's next token, int32 (rows,); one number when it is the same for all."""
        at = self._at
        if at.same is not None:
            return at.same + self._written
        return at.after if self._written else at.before

    def load(self, slot: int, cache: Any) -> None:
        """Copy a prefilled row, the only one in mlx-lm's `cache`, into `slot`."""
        raise NotImplementedError

    def copy_row(self, slot: int, length: int) -> list[Any]:
        """The `length` tokens in the slot, detached from the batch. Evaluate them before `paste_row`."""
        raise NotImplementedError

    def paste_row(self, slot: int, content: list[Any]) -> None:
        """Put a copied row into `slot`."""
        raise NotImplementedError

    def reshape(self, slots: int, room: int, allowance: int = NO_BOUND) -> int:
        """Bring the arrays to so many slots with room for so many tokens, keeping what the first ones hold.

        One array after the other, until those made anew take `allowance` bytes; returns how many bytes they take.
        0 says that all have that shape. Until then the lesser of the old and the new shape can be used.
        """
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(array.nbytes for array in self.every_array())

    @property
    def largest_array(self) -> int:
        """Bytes of the largest array."""
        return max((array.nbytes for array in self.every_array()), default=0)

    def every_array(self) -> Iterator[mx.array]:
        """What all slots are in."""
        raise NotImplementedError


class _Planes:
    """Arrays (slots, heads, tokens, width), such as keys and values."""

    def __init__(self, limit: int | None = None) -> None:
        self.arrays: list[mx.array] = []
        self.limit = limit
        self._slots = 0  # of arrays to come
        self._room = 0

    def like(self, samples: list[mx.array]) -> None:
        """Set up for rows of this kind."""
        if not self.arrays:
            shape = self._slots, self._room
            self.arrays = [mx.zeros((shape[0], a.shape[1], shape[1], a.shape[3]), dtype=a.dtype) for a in samples]

    def reshape(self, slots: int, room: int, allowance: int) -> int:
        self._slots, self._room = slots, room if self.limit is None else min(room, self.limit)
        written = 0
        for index, array in enumerate(self.arrays):
            if (array.shape[0], array.shape[2]) == (self._slots, self._room):
                continue
            if written >= allowance:
                break
            self.arrays[index] = _reshaped(array, self._slots, self._room)
            written += self.arrays[index].nbytes
        return written

    def put(self, at: Positions, places: mx.array | int, news: list[mx.array]) -> None:
        """Write one token per row: `news` are (rows, heads, 1, width), `places` (rows,) along the tokens, or one."""
        for array, new in zip(self.arrays, news, strict=True):
            if isinstance(places, int):
                array[: at.rows, :, places : places + 1] = new
            else:
                array[at.slots, :, places] = new[:, :, 0]

    def view(self, rows: int, limit: int) -> list[mx.array]:
        return [a[:rows, :, :limit] for a in self.arrays]

    def copy_row(self, slot: int, tokens: int) -> list[Any]:
        return [mx.contiguous(a[slot : slot + 1, :, :tokens]) for a in self.arrays]

    def paste_row(self, slot: int, content: list[Any]) -> None:
        if not content:
            return
        if not self.arrays:  # not zeros first, and then the row on top
            self.arrays = [_reshaped(row, self._slots, self._room, slot) for row in content]
            return
        for array, row in zip(self.arrays, content, strict=True):
            array[slot : slot + row.shape[0], :, : row.shape[2]] = row


class _PlanarCache(SlotCache):
    """What the kinds that hold a token per place have in common."""

    def __init__(self, limit: int | None = None) -> None:
        self._planes = _Planes(limit)

    def copy_row(self, slot: int, length: int) -> list[Any]:
        tokens = length if self._planes.limit is None else min(length, self._planes.limit)
        return self._planes.copy_row(slot, tokens)

    def cut(self, slot: int, start: int, stop: int) -> list[mx.array]:
        """These places of a slot, lazy: (1, heads, stop - start, width) each. For `actors.engine.block_cuts`."""
        return [a[slot : slot + 1, :, start:stop] for a in self._planes.arrays]

    def paste_row(self, slot: int, content: list[Any]) -> None:
        self._planes.paste_row(slot, content)

    def reshape(self, slots: int, room: int, allowance: int = NO_BOUND) -> int:
        return self._planes.reshape(slots, room, allowance)

    def empty(self) -> bool:
        """mlx-lm asks this of a cache; a batch that decodes is never empty."""
        return False

    def every_array(self) -> Iterator[mx.array]:
        yield from self._planes.arrays


class SlotKV(_PlanarCache):
    """Stands for `KVCache`."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Take one token per row, (rows, heads, 1, width); returns all keys and values up to the longest row."""
        at, planes = self._at, self._planes
        planes.like([keys, values])
        planes.put(at, at.places, [keys, values])
        self._written = True
        k, v = planes.view(at.rows, at.longest)
        return k, v

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        """See `Positions.causal`; None where it would hide nothing, as mlx-lm has it."""
        assert n == 1
        if self._at.same is not None and window_size is None:
            return None
        return self._at.causal(self._at.longest, window_size)

    def load(self, slot: int, cache: Any) -> None:
        if cache.keys is not None:
            self.paste_row(slot, [a[:, :, : cache.offset] for a in (cache.keys, cache.values)])

    def load_rows(self, slot: int, cache: Any, rows: slice, length: int) -> None:
        """Copy neighbouring rows of a right-padded batch, `length` tokens each, into the slots from `slot` on."""
        if length:
            self.paste_row(slot, [a[rows, :, :length] for a in (cache.keys, cache.values)])


class SlotWindow(_PlanarCache):
    """Stands for `RotatingKVCache`: a ring of `size` places per row, the first `keep` of which hold still.

    A token at position p lies at p while p < size, later at keep + (p - keep) mod (size - keep).
    """

    def __init__(self, size: int, keep: int) -> None:
        super().__init__(limit=size)
        self._size = size
        self._keep = keep

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Take one token per row, (rows, heads, 1, width); returns the rings up to the last place in use."""
        at, planes = self._at, self._planes
        planes.like([keys, values])
        planes.put(at, self._places(at), [keys, values])
        self._written = True
        k, v = planes.view(at.rows, self._limit)
        return k, v

    @property
    def _limit(self) -> int:
        return min(self._at.longest, self._size)

    def _places(self, at: Positions) -> mx.array | int:
        if at.same is not None:
            return at.same if at.same < self._size else self._keep + (at.same - self._keep) % (self._size - self._keep)
        if at.longest <= self._size:
            return at.before
        turned = self._keep + (at.before - self._keep) % (self._size - self._keep)
        return mx.where(at.before < self._size, at.before, turned)

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        """See `Positions.ring`; None where it would hide nothing, as mlx-lm has it."""
        assert n == 1
        if self._at.same is not None and (window_size is None or window_size >= self._size):
            return None
        if self._at.longest <= self._size:
            return self._at.causal(self._limit, window_size)
        return self._at.ring(self._limit, self._size, self._keep, window_size)

    def load(self, slot: int, cache: Any) -> None:
        if cache.keys is None:
            return
        held = min(cache.offset, self._size)
        # mlx-lm's own order of time: the kept tokens, then the latest. A multi-token prefill may hold more.
        arrays = [self._in_ring(cache._temporal_order(a), cache.offset, held) for a in (cache.keys, cache.values)]
        self.paste_row(slot, arrays)

    def _in_ring(self, rows: mx.array, offset: int, held: int) -> mx.array:
        keep = min(self._keep, held)
        kept, latest = rows[:, :, :keep], rows[:, :, rows.shape[2] - (held - keep) :]
        turn = self._size - keep
        shift = (offset - keep) % turn if offset > self._size else 0
        if shift:
            latest = mx.concatenate([latest[:, :, turn - shift :], latest[:, :, : turn - shift]], axis=2)
        return mx.concatenate([kept, latest], axis=2) if keep else latest


Quantized = tuple[mx.array, mx.array, mx.array]


class SlotQuantizedKV(_PlanarCache):
    """Stands for `QuantizedKVCache`; the attention of mlx-lm looks for `bits` and `group_size`."""

    def __init__(self, group_size: int, bits: int) -> None:
        super().__init__()
        self.group_size = group_size
        self.bits = bits

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Quantized, Quantized]:
        """Take one token per row, (rows, heads, 1, width); returns packed, scales and biases of keys and values."""
        at, planes = self._at, self._planes
        news = [
            part for plain in (keys, values) for part in mx.quantize(plain, group_size=self.group_size, bits=self.bits)
        ]
        planes.like(news)
        planes.put(at, at.places, news)
        self._written = True
        parts = planes.view(at.rows, at.longest)
        return (parts[0], parts[1], parts[2]), (parts[3], parts[4], parts[5])

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        """See `Positions.causal`; None where it would hide nothing, as mlx-lm has it."""
        assert n == 1
        if self._at.same is not None and window_size is None:
            return None
        return self._at.causal(self._at.longest, window_size)

    def load(self, slot: int, cache: Any) -> None:
        if cache.keys is None:
            return
        arrays = [part[:, :, : cache.offset] for parts in (cache.keys, cache.values) for part in parts]
        self.paste_row(slot, arrays)


class SlotStates(SlotCache):
    """Stands for `ArraysCache`: recurrent states, which each step writes anew for all rows."""

    left_padding = None
    lengths = None

    def __init__(self, count: int) -> None:
        self._states: list[mx.array | None] = [None] * count
        self._slots = 0

    def __getitem__(self, index: int) -> mx.array | None:
        state = self._states[index]
        return None if state is None else state[: self._at.rows]

    def __setitem__(self, index: int, value: mx.array) -> None:
        spare = self._slots - value.shape[0]
        if spare:
            value = mx.concatenate([value, mx.zeros((spare, *value.shape[1:]), value.dtype)])
        self._states[index] = value

    def make_mask(self, n: int) -> None:
        """Nothing is padded."""
        return

    def advance(self, n: int) -> None:
        """Nothing is counted here."""

    def load(self, slot: int, cache: Any) -> None:
        self.paste_row(slot, cache.cache)

    def copy_row(self, slot: int, length: int) -> list[Any]:
        return [None if s is None else mx.contiguous(s[slot : slot + 1]) for s in self._states]

    def cut(self, slot: int) -> list[mx.array | None]:
        """The states of a slot, lazy. For `actors.engine.block_cuts`."""
        return [None if s is None else s[slot : slot + 1] for s in self._states]

    def paste_row(self, slot: int, content: list[Any]) -> None:
        for index, row in enumerate(content):
            state = self._states[index]
            if row is None:
                if state is not None:
                    state[slot : slot + 1] = mx.zeros((1, *state.shape[1:]), state.dtype)
                continue
            if state is None:
                state = self._states[index] = mx.zeros((self._slots, *row.shape[1:]), row.dtype)
            state[slot : slot + 1] = row

    def reshape(self, slots: int, room: int, allowance: int = NO_BOUND) -> int:
        written = 0
        for index, state in enumerate(self._states):
            if state is not None and state.shape[0] != slots:
                kept = state[:slots]
                more = mx.zeros((slots - kept.shape[0], *state.shape[1:]), state.dtype)
                self._states[index] = grown = mx.concatenate([kept, more])
                written += grown.nbytes
        self._slots = slots
        return written

    def empty(self) -> bool:
        """mlx-lm asks this of a cache: whether it holds nothing yet."""
        return self._states[0] is None

    def every_array(self) -> Iterator[mx.array]:
        yield from (state for state in self._states if state is not None)


class SlotList(SlotCache):
    """Stands for `CacheList`: several caches of one layer."""

    def __init__(self, parts: list[SlotCache]) -> None:
        self.caches = parts

    def __getitem__(self, index: int) -> SlotCache:
        return self.caches[index]

    def step(self, at: Positions) -> None:
        for part in self.caches:
            part.step(at)

    def load(self, slot: int, cache: Any) -> None:
        for part, theirs in zip(self.caches, cache.caches, strict=True):
            part.load(slot, theirs)

    def copy_row(self, slot: int, length: int) -> list[Any]:
        return [part.copy_row(slot, length) for part in self.caches]

    def paste_row(self, slot: int, content: list[Any]) -> None:
        for part, row in zip(self.caches, content, strict=True):
            part.paste_row(slot, row)

    def reshape(self, slots: int, room: int, allowance: int = NO_BOUND) -> int:
        written = 0
        for part in self.caches:
            if written >= allowance:
                break
            written += part.reshape(slots, room, allowance - written)
        return written

    def empty(self) -> bool:
        """mlx-lm asks this of a cache."""
        return all(part.empty() for part in self.caches)  # type: ignore[attr-defined]

    def every_array(self) -> Iterator[mx.array]:
        for part in self.caches:
            yield from part.every_array()


def _reshaped(array: mx.array, slots: int, room: int, first: int = 0) -> mx.array:
    """The array with so many slots and so much room, its own first slot at `first`; written once."""
    kept = array[: slots - first, :, :room]
    margins = [(first, slots - first - kept.shape[0]), (0, 0), (0, room - kept.shape[2]), (0, 0)]
    return mx.pad(kept, margins) if any(map(any, margins)) else mx.contiguous(kept)


def slot_cache(cache: Any) -> SlotCache | None:
    """The kind that stands for mlx-lm's `cache` in a batch; None for a kind that we don't know."""
    name = type(cache).__name__
    if name == "KVCache":
        return SlotKV()
    if name == "RotatingKVCache":
        return SlotWindow(cache.max_size, cache.keep)
    if name == "QuantizedKVCache":
        return SlotQuantizedKV(cache.group_size, cache.bits)
    if name == "ArraysCache":
        return SlotStates(len(cache.cache))
    if name == "CacheList":
        parts = [slot_cache(part) for part in cache.caches]
        known = [part for part in parts if part is not None]
        return SlotList(known) if len(known) == len(parts) else None
    return None
