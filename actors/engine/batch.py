"""`DecodeBatch`: all running rows, in groups of similar length, and the step in flight.

Used by `actors.engine.engine` on the engine's one thread. A step is one forward per group. Rows are in one group
unless padding the short ones to the longest costs more than reading the weights once more: the price of a group is
taken as the bytes that its step reads, weights and padded caches.

A row joins a group that has a free slot for it, or a further group. No group is copied for that, unless all of the
batch is small. Groups get more slots, or more room for their rows' tokens, between steps, a piece at a time, where that
is found wanting; then what had to go to a further group is moved in, a few rows at a time.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from actors.engine.constraints import Constraints
from actors.engine.cutter import Cutter
from actors.engine.device import Lane
from actors.engine.logprobs import LogProbs
from actors.engine.model import Model
from actors.engine.prefill import Joining
from actors.engine.row_group import FREE, RowGroup
from actors.engine.row_memory import rounded_room
from actors.engine.sampler import Drawn
from actors.engine.slots import NO_BOUND
from actors.engine.solo_row import SoloRow

MERGE_EVERY = 64  # steps between looks for groups that have become alike
SMALL_BATCH = 128 << 20  # bytes of a batch that is copied without further thought: less time than a step takes
RESERVED = 256 << 20  # bytes of slots that are made for rows on their way; more beside large weights
MOST_RESERVED = 1 << 30
PIECE = 32 << 20  # bytes of a larger one's caches that are made anew in one turn, if one array isn't more
PIECE_SHARE = 8  # a larger piece is as cheap where a step reads so many times as many bytes of weights
MOVED = 8 << 20  # bytes of rows that are moved in one turn, if one row isn't more
AHEAD = 64  # tokens before its rows need more room that a group begins to get it
MANY_GROUPS = 8  # with more than these, turns with joins are used for such work, too
SMALL_ROW = 256 << 10  # bytes up to which rows may be padded, whatever their own length
MARGIN = 64  # tokens by which a row may be taken to grow when its place is chosen


class RowLogprobs(NamedTuple):
    """Natural log-probability of a row's token, and the most probable ones: uint32-LE ids, float32-LE values."""

    chosen: float
    top_ids: bytes
    top: bytes


class Collected(NamedTuple):
    """One step that has come back: a token for each of `rids`, and log-probabilities of rows that asked.

    `forwarded`: there was a forward in it, and not only the draw behind the only row's prompt.
    """

    rids: list[int]
    tokens: list[int]
    logprobs: dict[int, RowLogprobs]
    forwarded: bool


class _Step(NamedTuple):
    slots: list[list[int]]
    drawn: list[Drawn]
    forwarded: bool


def _arrays(logprobs: LogProbs | None) -> list[mx.array]:
    return [] if logprobs is None else [logprobs.chosen, logprobs.top_ids, logprobs.top]


def _read(rids: list[int], logprobs: LogProbs) -> dict[int, RowLogprobs]:
    chosen = np.array(logprobs.chosen).tolist()
    top_ids = np.array(logprobs.top_ids).astype("<u4")
    top = np.array(logprobs.top).astype("<f4")
    return {
        rids[slot]: RowLogprobs(value, top_ids[row, :count].tobytes(), top[row, :count].tobytes())
        for row, (slot, count, value) in enumerate(zip(logprobs.slots, logprobs.counts, chosen, strict=True))
        if rids[slot] != FREE
    }


class DecodeBatch:
    """Groups of rows. A row stays in its group until it leaves, or two groups are merged."""

    def __init__(
        self, model: Model, lane: Lane, cutter: Cutter | None = None, constraints: Constraints | None = None
    ) -> None:
        self._model = model
        self._cutter = cutter
        self._lane = lane
        self._constraints = constraints
        self._groups: list[RowGroup] = []
        self._solo: list[SoloRow] = []
        self._in_flight: deque[_Step] = deque()
        self._unwritten: list[RowGroup] = []  # groups whose last step was a draw alone
        self._uncut = 0  # the dispatch that was the last step, if no blocks were cut behind it
        self._steps = 0
        self._joined = False  # since the last step
        self._expected = 0  # rows on their way
        self._wanted: dict[RowGroup, int] = {}  # slots that joining rows would have liked to find
        self._merging: tuple[RowGroup, RowGroup] | None = None  # a group, and the one that takes its rows over
        self._limit = NO_BOUND  # bytes
        self._reserved = max(RESERVED, min(model.step_bytes, MOST_RESERVED))

    def __len__(self) -> int:
        return sum(len(group) for group in self._every)

    @property
    def in_flight(self) -> int:
        """Steps that were launched and not collected."""
        return len(self._in_flight)

    @property
    def nbytes(self) -> int:
        """Bytes of all caches, free slots included."""
        return sum(group.nbytes for group in self._every)

    @property
    def _every(self) -> list[RowGroup | SoloRow]:
        return [*self._groups, *self._solo]

    def join(self, groups: list[Joining], expected: int = 0) -> None:
        """Take in rows that are ready to decode; `expected` more are about to come."""
        self._expected = expected
        for joining in groups:
            if not self._model.batches_rows:
                self._join_alone(joining)
                continue
            self._joined = True
            for group, places in self._choose(joining).items():
                rows = len(group) + len(places)
                longest = max(len(joining.rows[place].ids) for place in places)
                if len(places) > group.free or longest > group.room:
                    room = max(group.room, rounded_room(longest + MARGIN))
                    # Not for all at once, unless that is little: those to come may be of another length, and go
                    # elsewhere.
                    little = SMALL_BATCH // 2 // self._size(room) if self._size(room) <= SMALL_ROW else 0
                    spare = min(expected, max(3 * max(rows, len(self)), little), self._reserved // self._size(room))
                    if len(group):
                        spare = max(spare, len(group))  # it is copied: seldom
                    group.aim_at(max(group.capacity, rows + self._affordable(rows, spare, room)), room)
                    group.approach()
                group.join(joining, places)

    def _affordable(self, slots: int, spare: int, room: int) -> int:
        """How many of `spare` slots there may be beyond `slots` new ones."""
        return int(max(0, min(spare, (self._limit - self.nbytes) // self._size(room) - slots)))

    def _size(self, tokens: int) -> int:
        return max(1, self._model.row_memory.bytes(tokens))

    def keep_within(self, limit: int) -> None:
        """All caches may take so many bytes: give back at once what rows don't need, if it must be, and make nothing
        beyond their needs that doesn't fit."""
        self._limit = limit
        if self.nbytes <= limit:
            return
        for group in sorted(self._groups, key=lambda group: group.needed() - group.nbytes):
            group.tighten()
            if self.nbytes <= limit:
                return

    def needed(self, leaving: Iterable[int] = ()) -> int:
        """Bytes that the rows take, those that are `leaving` aside, in groups of the shape that they need for the next
        step; and those of an array that is made anew."""
        gone = frozenset(leaving)
        largest = max((group.largest_array for group in self._groups), default=0)
        return largest + sum(group.needed(gone) for group in self._every)

    def _join_alone(self, joining: Joining) -> None:
        for place in range(len(joining.rows)):
            solo = SoloRow(self._model)
            solo.join(joining, place)
            self._solo.append(solo)

    def remove(self, rids: Iterable[int]) -> None:
        """Let these rows go; those that are not in the batch are normal. Steps in flight keep them."""
        gone = set(rids)
        if not gone:
            return
        for group in self._every:
            group.remove(gone)
        self._groups = [group for group in self._groups if len(group)]
        self._solo = [row for row in self._solo if len(row)]
        # A group that is gone keeps its caches as long as anything knows it, and there may be no next step.
        self._wanted = {group: slots for group, slots in self._wanted.items() if len(group)}
        if self._merging is not None and not all(map(len, self._merging)):
            self._merging = None
        self._unwritten = [group for group in self._unwritten if len(group)]

    def launch(self, before: Callable[[], None]) -> None:
        """Start one decode step of all rows. `before` is called when its graph is built, just before it starts."""
        self._steps += 1
        self._keep_house()
        every = self._every
        if not every:
            return
        slots = [group.slots() for group in every]
        forwarded = not all(group.has_logits for group in every)
        self._unwritten = [group for group in self._groups if group.has_logits]
        if any(group.constrained for group in every):
            drawn = self._launch_constrained(every, before)
        else:
            drawn = [group.step() for group in every]
            cuts = self._cuts(every)
            before()
            # Cuts come last in their step, and read the caches.
            early = self._lane.begun == self._uncut
            self._lane.dispatch([cuts, [(step.tokens, _arrays(step.logprobs)) for step in drawn]], early=early)
            if not any(cuts):
                self._uncut = self._lane.begun
        self._in_flight.append(_Step(slots, drawn, forwarded))

    def _launch_constrained(self, every: list[RowGroup | SoloRow], before: Callable[[], None]) -> list[Drawn]:
        """Start a step in two parts: the forward, and behind it the draw, whose masks need the tokens of the step
        before. They are computed while the forward runs."""
        assert self._constraints is not None
        steps = {group: group.step() for group in every if not group.constrained}
        logits = {group: group.forward() for group in every if group.constrained}
        cuts = self._cuts(every)
        before()
        self._lane.wait()
        wanted = [row for group in logits for row in group.wanted()]
        masks = self._constraints.start(wanted)
        drawn = [(step.tokens, _arrays(step.logprobs)) for step in steps.values()]
        self._lane.dispatch([cuts, drawn, [*logits.values()]])
        allowed = masks.result()
        taken = 0
        for group, these in logits.items():
            rows = group.constrained
            steps[group] = group.draw(these, mx.array(allowed[taken : taken + rows]))
            taken += rows
        self._lane.follow([(steps[group].tokens, _arrays(steps[group].logprobs)) for group in logits])
        return [steps[group] for group in every]

    @property
    def has_unwritten(self) -> bool:
        """Whether `write_slots` has something to do."""
        return bool(self._unwritten)

    def write_slots(self) -> None:
        """Have rows written into their slots whose first step needed only a draw. Until then their prompts' own caches
        are kept, too."""
        groups, self._unwritten = self._unwritten, []
        self._lane.dispatch([group.arrays() for group in groups])

    def _cuts(self, every: list[RowGroup | SoloRow]) -> list[list[mx.array]]:
        """Prefix blocks that end with the forwards just built; they are dispatched together with these."""
        return [group.cut(self._cutter) for group in every] if self._cutter is not None else []

    def collect(self) -> Collected:
        """Wait for the oldest step in flight and read it."""
        step = self._in_flight.popleft()
        mx.eval([(drawn.tokens, _arrays(drawn.logprobs)) for drawn in step.drawn])
        collected = Collected([], [], {}, step.forwarded)
        for rids, drawn in zip(step.slots, step.drawn, strict=True):
            tokens: list[int] = drawn.tokens.tolist()  # type: ignore[assignment]  # of one dimension
            live = [(rid, token) for rid, token in zip(rids, tokens, strict=True) if rid != FREE]
            collected.rids.extend(rid for rid, _ in live)
            collected.tokens.extend(token for _, token in live)
            if drawn.logprobs is not None:
                collected.logprobs.update(_read(rids, drawn.logprobs))
        return collected

    def clear(self) -> None:
        """Let all rows go, and the steps in flight with them."""
        self._groups = []
        self._solo = []
        self._wanted.clear()
        self._unwritten = []
        self._merging = None
        self._in_flight.clear()

    def _choose(self, joining: Joining) -> dict[RowGroup, list[int]]:
        """The group of each row of `joining`, by place. Longer rows choose first."""
        chosen: dict[RowGroup, list[int]] = {}
        planned = {group: (len(group), group.longest + MARGIN) for group in self._groups}
        copied = self.nbytes <= SMALL_BATCH
        places = sorted(range(len(joining.rows)), key=lambda place: -len(joining.rows[place].ids))
        for place in places:
            ids = len(joining.rows[place].ids)
            length = ids + MARGIN
            best, full = None, None
            least = self._price(1, length)
            for group, (rows, longest) in planned.items():
                if rows and not self._alike(longest, length):
                    continue
                more = self._price(rows + 1, max(longest, length)) - self._price(rows, longest)
                if not (copied or (group in chosen and not len(group))):
                    if ids > group.room:
                        continue
                    if rows - len(group) >= group.free:
                        if more < least and (full is None or len(group) < len(full)):
                            full = group
                        continue
                if more < least or (more == least and best is None):
                    best, least = group, more
            if best is None and full is not None:
                self._wanted[full] = self._wanted.get(full, 0) + 1
            if best is None:
                best = RowGroup(self._model)
                self._groups.append(best)
                planned[best] = (0, 0)
            rows, longest = planned[best]
            planned[best] = (rows + 1, max(longest, length))
            chosen.setdefault(best, []).append(place)
        return {group: sorted(places) for group, places in chosen.items()}

    def _keep_house(self) -> None:
        """Bring the groups nearer to the shapes that they should have. Bounded work, unless the batch is small."""
        joined, self._joined = self._joined, False
        if not self._groups:
            return
        small = self.nbytes <= SMALL_BATCH
        quiet = not joined or small or len(self._groups) > MANY_GROUPS
        for group in self._groups:
            self._make_room(group)
        if quiet:
            self._add_slots()
            self._merge(NO_BOUND if small else MOVED)
            for group in self._groups:
                group.compact(NO_BOUND if small else MOVED)
        if self._steps % MERGE_EVERY == 0 and not self._expected:
            self._cut_slots()
        left = NO_BOUND if small else max(PIECE, self._model.step_bytes // PIECE_SHARE)
        for group in self._groups:
            if left > 0 and (quiet or group.longest + AHEAD // 2 > group.room):
                left -= group.approach(left)

    def _make_room(self, group: RowGroup) -> None:
        slots, room = group.aim
        if group.longest + AHEAD > room:
            more = rounded_room(room + room // 4 + 1)
            if self.nbytes + slots * (self._size(more) - self._size(room)) > self._limit:
                more = rounded_room(group.longest + 1)
            group.aim_at(slots, max(room, more))
        if group.longest >= group.room:
            group.approach()  # it was not done in time

    def _add_slots(self) -> None:
        """Where a row had to go to a further group, unless that has become as good."""
        for group, wanted in self._wanted.items():
            slots, room = group.aim
            if group in self._groups and slots == group.capacity and self._better_as_one(group, wanted, group.longest):
                group.aim_at(slots + self._affordable(0, wanted + slots // 2, room), room)
        if self._wanted and self._merging is None:
            self._merging = self._find_merge()
        self._wanted.clear()

    def _cut_slots(self) -> None:
        for group in self._groups:
            slots, room = group.aim
            if 4 * group.span < slots:
                group.aim_at(2 * group.span, room)

    def _alike(self, longest: int, length: int) -> bool:
        return self._size(max(longest, length)) <= max(2 * self._size(min(longest, length)), SMALL_ROW)

    def _price(self, rows: int, longest: int) -> float:
        return self._model.step_bytes + rows * self._model.row_memory.bytes(longest) if rows else 0.0

    def _better_as_one(self, group: RowGroup, rows: int, longest: int) -> bool:
        """Whether so many more rows are better in this group than in one of their own."""
        if not self._alike(group.longest, longest):
            return False
        apart = self._price(len(group), group.longest) + self._price(rows, longest)
        return self._price(len(group) + rows, max(group.longest, longest)) < 0.9 * apart

    def _find_merge(self) -> tuple[RowGroup, RowGroup] | None:
        groups = sorted(self._groups, key=lambda group: (len(group), group.aim))
        for place, small in enumerate(groups):
            for large in groups[place + 1 :]:
                short = max(0, len(small) - large.free)
                room = max(large.room, rounded_room(small.longest + 1))
                fits = short == self._affordable(0, short, room)
                if fits and len(small) and self._better_as_one(large, len(small), small.longest):
                    return small, large
        return None

    def _merge(self, allowance: int) -> None:
        """Move rows into a group with which they have become cheaper, once it has slots for them."""
        if self._merging is None and self._steps % MERGE_EVERY == 0:
            self._merging = self._find_merge()
        if self._merging is None:
            return
        small, large = self._merging
        if not (len(small) and len(large) and small in self._groups and large in self._groups):
            self._merging = None
            return
        slots, room = large.aim
        more = max(0, len(large) + len(small) - slots)
        room = max(room, rounded_room(small.longest + 1))
        if more > self._affordable(0, more, room):
            self._merging = None
            return
        large.aim_at(slots + more, room)
        if allowance == NO_BOUND:
            large.approach()
        if large.free and small.longest < large.room:
            large.take_over(small, allowance)
            self._groups = [group for group in self._groups if len(group)]
