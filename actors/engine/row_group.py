"""`RowGroup`: rows of similar length that decode in one forward, each in a slot of its own.

Used by `actors.engine.batch` on the engine's one thread. Everything here is lazy but `compact` and `take_over`,
which wait for the rows they move. A free slot in the middle is computed along with the others until a row joins
there; when too many are free, rows move down from the end.

A group has so many slots, each with room for so many tokens. Another shape means writing all of it anew, so that is
done one array after the other, a few per turn (`aim`, `approach`): what a join or a step needs is there before.
"""

from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import numpy as np

from actors.engine.constraints import Wanted
from actors.engine.cutter import Cutter
from actors.engine.model import Cache, Model
from actors.engine.prefill import Joining, Row
from actors.engine.row_memory import rounded_room
from actors.engine.sampler import Drawn, Sampler
from actors.engine.scheduler import BLOCK
from actors.engine.slots import NO_BOUND, Positions, SlotCache, SlotKV

FREE = -1
MAX_FREE = 0.125  # of the slots computed


class RowGroup:
    """Slots, the rows in them, and the length of each in tokens."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._caches: list[SlotCache] = model.new_slots()
        self._sampler = Sampler(model.vocab_size)
        self._rids: list[int] = []  # by slot, FREE where there is none
        self._lengths = np.zeros(0, np.int64)
        self._slots: dict[int, int] = {}
        self.capacity = 0  # slots
        self.room = 0  # tokens
        self._aim = (0, 0)  # slots and room that it has, or is on its way to
        self._there = True
        self._inputs = mx.zeros((0,), mx.uint32)  # each slot's last token; may still be in computation
        self._logits: mx.array | None = None  # of the next step, when they came with the only row's prompt

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, rid: int) -> bool:
        return rid in self._slots

    @property
    def rids(self) -> list[int]:
        """The rows here."""
        return list(self._slots)

    @property
    def longest(self) -> int:
        """Tokens in the caches of the longest row."""
        return int(self._lengths.max(initial=0))

    @property
    def nbytes(self) -> int:
        """Bytes of all caches."""
        return sum(cache.nbytes for cache in self._caches)

    def arrays(self) -> list[mx.array]:
        """What all slots are in."""
        return [array for cache in self._caches for array in cache.every_array()]

    @property
    def largest_array(self) -> int:
        """Bytes of the largest of its arrays."""
        return max((cache.largest_array for cache in self._caches), default=0)

    def needed(self, leaving: frozenset[int] = frozenset()) -> int:
        """Bytes of its rows without those that are `leaving`, in a group of the shape that they need."""
        if not leaving:
            return len(self._slots) * self._model.row_memory.bytes(rounded_room(self.longest + 1))
        stay = [slot for rid, slot in self._slots.items() if rid not in leaving]
        if not stay:
            return 0
        return len(stay) * self._model.row_memory.bytes(rounded_room(int(self._lengths[stay].max()) + 1))

    @property
    def span(self) -> int:
        """Slots that a step computes: up to the last one with a row in it."""
        return len(self._rids)

    @property
    def free(self) -> int:
        """Rows that can join, or be taken over."""
        return self.capacity - len(self._slots)

    @property
    def aim(self) -> tuple[int, int]:
        """Slots and room that it has, or is on its way to."""
        return self._aim

    def aim_at(self, slots: int, room: int) -> None:
        """Have other slots and another room; `approach` gets there. The rows must fit in."""
        if (slots, room) != self._aim:
            self._aim = slots, room
            self._there = False
        self.capacity, self.room = min(self.capacity, slots), min(self.room, room)

    def approach(self, allowance: int = NO_BOUND) -> int:
        """Write so many bytes at most (one array at least) towards what is aimed at; returns how many."""
        if self._there:
            return 0
        slots, room = self._aim
        written = 0
        for cache in self._caches:
            if written >= allowance:
                return written
            written += cache.reshape(slots, room, allowance - written)
        if written < allowance:  # else the last cache may not be through
            self.capacity, self.room = slots, room
            self._there = True
        return written

    def tighten(self) -> None:
        """Give back all that its rows don't need, at once. Waits for it, an array at a time."""
        self.compact(max_free=0)
        self.aim_at(len(self._rids), rounded_room(self.longest + 1))
        while self.approach(allowance=1):
            mx.eval(self.arrays())

    def join(self, joining: Joining, places: list[int]) -> None:
        """Take in these rows of `joining`. There must be free slots, with room for their next tokens."""
        run = self._as_run(joining, places)
        if run is not None:
            self._load_run(joining, run)
            return
        for place in places:
            slot = self._take_slot(joining.rows[place])
            for mine, theirs in zip(self._caches, joining.row_caches(place), strict=True):
                mine.load(slot, theirs)
        if joining.logits is not None:
            assert self.span == 1
            self._logits = joining.logits

    def _as_run(self, joining: Joining, places: list[int]) -> slice | None:
        # Neighbours of a right-padded batch that fit behind the last slot are one write per array.
        last = places[-1] + 1
        neighbours = len(places) > 1 and last - places[0] == len(places)
        fits = len(self._rids) + len(places) <= self.capacity
        plain = joining.right_padded and all(isinstance(cache, SlotKV) for cache in self._caches)
        return slice(places[0], last) if neighbours and fits and plain else None

    def _load_run(self, joining: Joining, run: slice) -> None:
        slot = len(self._rids)
        rows = joining.rows[run]
        for row in rows:
            self._append(row)
        length = max(len(row.ids) - 1 for row in rows)
        for mine, theirs in zip(self._caches, joining.caches, strict=True):
            assert isinstance(mine, SlotKV)
            mine.load_rows(slot, theirs, run, length)

    def _take_slot(self, row: Row) -> int:
        if FREE not in self._rids:
            return self._append(row)
        slot = self._rids.index(FREE)
        self._rids[slot] = row.rid
        self._slots[row.rid] = slot
        self._lengths[slot] = len(row.ids) - 1
        self._sampler.set(slot, row.options, row.prompt, row.generated)
        self._set_input(slot, mx.array(row.ids[-1:]))
        return slot

    def _append(self, row: Row) -> int:
        slot = len(self._rids)
        self._rids.append(row.rid)
        self._slots[row.rid] = slot
        self._lengths = np.append(self._lengths, len(row.ids) - 1)
        self._sampler.append(row.options, row.prompt, row.generated)
        self._inputs = mx.concatenate([self._inputs, mx.array(row.ids[-1:])])
        return slot

    def _set_input(self, slot: int, token: mx.array) -> None:
        # Not in place: the step in flight has yet to be read from this very array.
        self._inputs = mx.concatenate([self._inputs[:slot], token, self._inputs[slot + 1 :]])

    def remove(self, rids: Iterable[int]) -> None:
        """Free the slots of these rows; those that are not here are normal."""
        for rid in rids:
            slot = self._slots.pop(rid, None)
            if slot is not None:
                self._rids[slot] = FREE
                self._lengths[slot] = 0
                self._sampler.clear(slot)
        self._cut_end()

    def _cut_end(self) -> None:
        rows = len(self._rids)
        while rows and self._rids[rows - 1] == FREE:
            rows -= 1
        if rows < len(self._rids):
            del self._rids[rows:]
            self._lengths = self._lengths[:rows].copy()
            self._sampler.cut(rows)
            self._inputs = self._inputs[:rows]

    def compact(self, allowance: int = NO_BOUND, max_free: float = MAX_FREE) -> None:
        """Move rows from the end into free slots when too much is computed for nobody: `allowance` bytes at most, and
        one row at least."""
        free = len(self._rids) - len(self._slots)
        if free <= max_free * len(self._rids):
            return
        holes = [slot for slot, rid in enumerate(self._rids[: len(self._slots)]) if rid == FREE]
        tail = [slot for slot in range(len(self._slots), len(self._rids)) if self._rids[slot] != FREE]
        moves = list(zip(reversed(tail), holes, strict=True))[: max(1, allowance // self._bytes_of(self.longest))]
        contents = [self._copy(source) for source, _ in moves]
        mx.eval([content for content, _ in contents], self._inputs)
        for (source, target), (content, length) in zip(moves, contents, strict=True):
            rid = self._rids[source]
            self._rids[source], self._rids[target] = FREE, rid
            self._slots[rid] = target
            self._lengths[target], self._lengths[source] = length, 0
            self._sampler.move(source, target)
            self._set_input(target, self._inputs[source : source + 1])
            self._paste(target, content)
        self._cut_end()

    def take_over(self, other: "RowGroup", allowance: int = NO_BOUND) -> None:
        """Move rows of `other` here, `allowance` bytes of them at most, and one at least. There must be free slots."""
        behind = self.capacity - len(self._rids)
        if not behind:
            self.compact(allowance, max_free=0)
            return
        moved = list(other._slots.items())[: min(behind, max(1, allowance // self._bytes_of(other.longest)))]
        contents = [other._copy(slot) for _, slot in moved]
        mx.eval([content for content, _ in contents], other._inputs, self._inputs)
        for (rid, source), (content, length) in zip(moved, contents, strict=True):
            target = len(self._rids)
            self._rids.append(rid)
            self._slots[rid] = target
            self._lengths = np.append(self._lengths, length)
            self._sampler.adopt(other._sampler, source)
            self._inputs = mx.concatenate([self._inputs, other._inputs[source : source + 1]])
            self._paste(target, content)
        other.remove([rid for rid, _ in moved])

    def _bytes_of(self, length: int) -> int:
        return max(1, self._model.row_memory.bytes(length))

    def _copy(self, slot: int) -> tuple[list[list[Any]], int]:
        length = int(self._lengths[slot])
        return [cache.copy_row(slot, length) for cache in self._caches], length

    def _paste(self, slot: int, content: list[list[Any]]) -> None:
        for cache, row in zip(self._caches, content, strict=True):
            cache.paste_row(slot, row)

    @property
    def has_logits(self) -> bool:
        """Whether the next step needs no forward."""
        return self._logits is not None

    @property
    def constrained(self) -> int:
        """How many rows need a mask."""
        return len(self._sampler.constrained)

    def wanted(self) -> list[Wanted]:
        """The rows whose next token needs a mask. Waits for the last token of each when there are any."""
        constrained = self._sampler.constrained
        if not constrained:
            return []
        last = np.array(self._inputs)
        return [Wanted(self._rids[slot], index, int(last[slot])) for slot, index in constrained]

    def step(self) -> Drawn:
        """Build one decode step of all slots; returns what was drawn, not yet computed."""
        return self.draw(self.forward())

    def forward(self) -> mx.array:
        """Build the logits of one decode step, (slots, vocabulary); `draw` must follow."""
        assert self.longest < self.room
        live = list(self._slots.values())
        if self._logits is not None:
            logits, self._logits = self._logits, None
            self._lengths[live] += 1
            return logits
        at = Positions(self._lengths, live)
        for cache in self._caches:
            cache.step(at)
        logits = self._model.forward(self._inputs[:, None], list[Cache](self._caches), self._rids)
        self._lengths[live] += 1
        return logits[:, -1, :]

    def draw(self, logits: mx.array, allowed: mx.array | None = None) -> Drawn:
        """Build the draw of the step whose logits these are, under the masks of the rows in `wanted`."""
        drawn = self._sampler.draw(logits, allowed)
        self._inputs = drawn.tokens
        return drawn

    def cut(self, cutter: Cutter) -> list[mx.array]:
        """Take the blocks of rows that the forward just built brings to a block's border."""
        slots = np.flatnonzero(self._lengths % BLOCK == 0)
        return [
            array
            for slot in slots.tolist()
            if self._rids[slot] != FREE
            for array in cutter.of_slot(self._rids[slot], self._caches, slot, int(self._lengths[slot]))
        ]

    def slots(self) -> list[int]:
        """The rid in each slot, FREE where there is none."""
        return self._rids.copy()
