"""What `--log-steps` prints: all that the scheduler is told, and what it decides, so that a run can be played again.

`RecordedScheduler` takes the scheduler's place in `actors.engine.engine`, on the engine's one thread. `described` and
`rebuilt` write limits into a log line and read them back; `Replay` drives a scheduler with what the lines say.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import msgspec

from actors.engine.row_memory import RowMemory, row_bytes
from actors.engine.scheduler import Limits, Plan, Scheduler, Taken, never_held


class _NewRow(msgspec.Struct, frozen=True, array_like=True):
    rid: int
    length: int
    budget: int
    stop_ids: list[int]
    priority: int
    adapter: str = ""
    turn: int = 0


class Added(_NewRow, frozen=True, array_like=True, tag=True):
    """A row was queued; see `Scheduler.add`."""


class Joined(_NewRow, frozen=True, array_like=True, tag=True):
    """A row joined the step of the last plan; see `Scheduler.add_running`."""


class Aborted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Rows were forgotten."""

    rids: list[int]


class TakenIn(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The tokens of a step came back."""

    rids: list[int]
    tokens: list[int]


class WentOn(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A held row was let go on."""

    rid: int
    computed: int


class Lifted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A row got the priority of one that waits for it."""

    rid: int
    priority: int


Told = Added | Joined | Aborted | TakenIn | WentOn | Lifted


class StepRecord(msgspec.Struct, frozen=True):
    """One turn: what the scheduler was `told` since the last one, in order; what it was asked, and its plan.

    `held` are admitted rows that have to wait for their prefix.
    """

    told: list[Told]
    prefill_tokens: int
    running_bytes: int
    plan: Plan
    held: list[int] = []


class RecordedScheduler(Scheduler):
    """A scheduler that hands a record of each turn to `on_step`."""

    def __init__(
        self,
        limits: Limits,
        on_step: Callable[[StepRecord], None],
        hold: Callable[[int], bool] = never_held,
    ) -> None:
        super().__init__(limits, self._ask)
        self._on_step = on_step
        self._asked = hold
        self._told: list[Told] = []
        self._held: list[int] = []

    def _ask(self, rid: int) -> bool:
        held = self._asked(rid)
        if held:
            self._held.append(rid)
        return held

    def go_on(self, rid: int, computed: int) -> None:
        """See `Scheduler.go_on`."""
        self._told.append(WentOn(rid, computed))
        super().go_on(rid, computed)

    def lift(self, rid: int, priority: int) -> None:
        """See `Scheduler.lift`."""
        self._told.append(Lifted(rid, priority))
        super().lift(rid, priority)

    def add(
        self,
        rid: int,
        length: int,
        budget: int,
        *,
        stop_ids: frozenset[int] = frozenset(),
        priority: int = 0,
        adapter: str = "",
        turn: int = 0,
    ) -> None:
        """See `Scheduler.add`."""
        super().add(rid, length, budget, stop_ids=stop_ids, priority=priority, adapter=adapter, turn=turn)
        self._told.append(Added(rid, length, budget, sorted(stop_ids), priority, adapter, turn))

    def add_running(
        self,
        rid: int,
        length: int,
        budget: int,
        *,
        stop_ids: frozenset[int] = frozenset(),
        priority: int = 0,
        adapter: str = "",
        turn: int = 0,
    ) -> bool:
        """See `Scheduler.add_running`. Only what changes something is recorded."""
        joined = super().add_running(
            rid, length, budget, stop_ids=stop_ids, priority=priority, adapter=adapter, turn=turn
        )
        if joined:
            self._told.append(Joined(rid, length, budget, sorted(stop_ids), priority, adapter, turn))
        return joined

    def abort(self, rids: Iterable[int]) -> None:
        """See `Scheduler.abort`."""
        rids = list(rids)
        super().abort(rids)
        self._told.append(Aborted(rids))

    def take(self, rids: list[int], tokens: list[int]) -> Taken:
        """See `Scheduler.take`."""
        self._told.append(TakenIn(rids, tokens))
        return super().take(rids, tokens)

    def plan(self, prefill_tokens: int, running_bytes: int) -> Plan:
        """See `Scheduler.plan`."""
        plan = super().plan(prefill_tokens, running_bytes)
        told, self._told = self._told, []
        held, self._held = self._held, []
        self._on_step(StepRecord(told, prefill_tokens, running_bytes, plan, held))
        return plan


def described(limits: Limits, of_row: RowMemory) -> dict[str, Any]:
    """The limits as fields of a log line. Their `row_bytes` is that of `of_row`."""
    fields = {name: getattr(limits, name) for name in limits.__struct_fields__ if name != "row_bytes"}
    return fields | {"row": msgspec.to_builtins(of_row)}


def rebuilt(line: dict[str, Any]) -> Limits:
    """The limits that a log line describes."""
    fields = {name: line[name] for name in Limits.__struct_fields__ if name != "row_bytes"}
    return Limits(**fields, row_bytes=partial(row_bytes, msgspec.convert(line["row"], RowMemory)))


class Replay:
    """A scheduler that is told what records say."""

    def __init__(self, limits: Limits) -> None:
        self._held: list[int] = []
        self._scheduler = Scheduler(limits, lambda rid: rid in self._held)

    def plan(self, record: StepRecord) -> Plan:
        """The plan of one more turn, which should be the record's."""
        self._held = record.held
        for told in record.told:
            self._tell(told)
        return self._scheduler.plan(record.prefill_tokens, record.running_bytes)

    def _tell(self, told: Told) -> None:
        scheduler = self._scheduler
        match told:
            case Added():
                scheduler.add(told.rid, told.length, told.budget, **_rank(told))
            case Joined():
                scheduler.add_running(told.rid, told.length, told.budget, **_rank(told))
            case Aborted():
                scheduler.abort(told.rids)
            case TakenIn():
                scheduler.take(told.rids, told.tokens)
            case WentOn():
                scheduler.go_on(told.rid, told.computed)
            case Lifted():
                scheduler.lift(told.rid, told.priority)


def _rank(told: _NewRow) -> dict[str, Any]:
    return {"stop_ids": frozenset(told.stop_ids), "priority": told.priority, "adapter": told.adapter, "turn": told.turn}
