"""`DecodeBatch`: all running rows, in groups of similar length, and the step in flight.

Used by `actors.engine.engine` on the engine's one thread. A step is one forward per group. Rows are in one group
unless padding the short ones to the longest costs more than reading the weights once more: the price of a group is
taken as the bytes that its step reads, weights and padded caches.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from actors.engine.constraints import Constraints
from actors.engine.device import Lane
from actors.engine.logprobs import LogProbs
from actors.engine.model import Model
from actors.engine.prefill import Joining
from actors.engine.row_group import FREE, RowGroup
from actors.engine.sampler import Drawn
from actors.engine.solo_row import SoloRow

MERGE_EVERY = 64  # steps between looks for groups that have become alike
SMALL_ROW = 256 << 10  # bytes up to which rows may be padded, whatever their own length
MARGIN = 64  # tokens by which a row may be taken to grow when its place is chosen


class RowLogprobs(NamedTuple):
    """Natural log-probability of a row's token, and the most probable ones: uint32-LE ids, float32-LE values."""

    chosen: float
    top_ids: bytes
    top: bytes


class Collected(NamedTuple):
    """One step that has come back: a token for each of `rids`, and log-probabilities of rows that asked."""

    rids: list[int]
    tokens: list[int]
    logprobs: dict[int, RowLogprobs]


class _Step(NamedTuple):
    slots: list[list[int]]
    drawn: list[Drawn]


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

    def __init__(self, model: Model, lane: Lane, constraints: Constraints | None = None) -> None:
        self._model = model
        self._lane = lane
        self._constraints = constraints
        self._groups: list[RowGroup] = []
        self._solo: list[SoloRow] = []
        self._in_flight: deque[_Step] = deque()
        self._steps = 0

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
        for joining in groups:
            if not self._model.batches_rows:
                self._join_alone(joining)
                continue
            for group, places in self._choose(joining).items():
                rows = len(group) + len(places)
                # Not for all at once: those to come may be of another length, and go elsewhere.
                group.reserve(rows + min(expected, 3 * rows))
                group.join(joining, places)

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

    def launch(self, before: Callable[[], None]) -> None:
        """Start one decode step of all rows. `before` is called when its graph is built, just before it starts."""
        self._steps += 1
        if self._steps % MERGE_EVERY == 0:
            self._merge()
        for group in self._groups:
            group.compact()
        every = self._every
        if not every:
            return
        slots = [group.slots() for group in every]
        if any(group.constrained for group in every):
            drawn = self._launch_constrained(every, before)
        else:
            drawn = [group.step() for group in every]
            before()
            self._lane.dispatch([(step.tokens, _arrays(step.logprobs)) for step in drawn])
        self._in_flight.append(_Step(slots, drawn))

    def _launch_constrained(self, every: list[RowGroup | SoloRow], before: Callable[[], None]) -> list[Drawn]:
        """Start a step in two parts: the forward, and behind it the draw, whose masks need the tokens of the step
        before. They are computed while the forward runs."""
        assert self._constraints is not None
        steps = {group: group.step() for group in every if not group.constrained}
        logits = {group: group.forward() for group in every if group.constrained}
        before()
        self._lane.wait()
        wanted = [row for group in logits for row in group.wanted()]
        masks = self._constraints.start(wanted)
        self._lane.dispatch([[(step.tokens, _arrays(step.logprobs)) for step in steps.values()], [*logits.values()]])
        allowed = masks.result()
        taken = 0
        for group, these in logits.items():
            rows = group.constrained
            steps[group] = group.draw(these, mx.array(allowed[taken : taken + rows]))
            taken += rows
        self._lane.follow([(steps[group].tokens, _arrays(steps[group].logprobs)) for group in logits])
        return [steps[group] for group in every]

    def collect(self) -> Collected:
        """Wait for the oldest step in flight and read it."""
        step = self._in_flight.popleft()
        mx.eval([(drawn.tokens, _arrays(drawn.logprobs)) for drawn in step.drawn])
        collected = Collected([], [], {})
        for rids, drawn in zip(step.slots, step.drawn, strict=True):
            tokens = np.array(drawn.tokens).tolist()
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
        self._in_flight.clear()

    def _choose(self, joining: Joining) -> dict[RowGroup, list[int]]:
        """The group of each row of `joining`, by place. Longer rows choose first."""
        chosen: dict[RowGroup, list[int]] = {}
        planned = {group: (len(group), group.longest) for group in self._groups}
        places = sorted(range(len(joining.rows)), key=lambda place: -len(joining.rows[place].ids))
        for place in places:
            length = len(joining.rows[place].ids) + MARGIN
            alone = self._price(1, length)
            best, least = None, alone
            for group, (rows, longest) in planned.items():
                if rows and not self._alike(longest, length):
                    continue
                more = self._price(rows + 1, max(longest, length)) - self._price(rows, longest)
                if more < least or (more == least and best is None):
                    best, least = group, more
            if best is None:
                best = RowGroup(self._model)
                self._groups.append(best)
                planned[best] = (0, 0)
            rows, longest = planned[best]
            planned[best] = (rows + 1, max(longest, length))
            chosen.setdefault(best, []).append(place)
        return {group: sorted(places) for group, places in chosen.items()}

    def _alike(self, longest: int, length: int) -> bool:
        # The memory guard counts on rows that are padded to twice their own bytes at most.
        size = self._model.row_memory.bytes
        return size(max(longest, length)) <= max(2 * size(min(longest, length)), SMALL_ROW)

    def _price(self, rows: int, longest: int) -> float:
        return self._model.step_bytes + rows * self._model.row_memory.bytes(longest) if rows else 0.0

    def _merge(self) -> None:
        """Join two groups into one where that has become cheaper."""
        groups = sorted(self._groups, key=len)
        for small in groups:
            for large in groups:
                if small is large or len(small) > len(large) or not len(small):
                    continue
                apart = self._price(len(small), small.longest) + self._price(len(large), large.longest)
                if not self._alike(large.longest, small.longest):
                    continue
                if self._price(len(small) + len(large), max(small.longest, large.longest)) < 0.9 * apart:
                    large.take_over(small)
                    break
        self._groups = [group for group in self._groups if len(group)]
