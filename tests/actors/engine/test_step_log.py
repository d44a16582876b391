"""What `--log-steps` prints is enough to play a run again: the same plans, turn by turn."""

import json
from functools import partial

import msgspec

from actors.engine.engine import Engine
from actors.engine.model import Model
from actors.engine.row_memory import row_bytes
from actors.engine.scheduler import Limits
from actors.engine.step_log import RecordedScheduler, Replay, StepRecord, described, rebuilt


def recorded(model: Model, make_request) -> list[str]:
    """Log lines of a run in which rows wait, are parked, aborted, and stop."""
    size = partial(row_bytes, model.row_memory)
    limits = Limits(max_num_seqs=6, cache_bytes=9 * size(256), row_bytes=size)
    lines = [json.dumps(described(limits, model.row_memory))]
    engine = Engine(model, limits, on_step=lambda record: lines.append(msgspec.json.encode(record).decode()))
    for rid in range(9):
        engine.submit(make_request(rid, range(10, 200 + rid), 90, priority=rid % 2))
    turns = 0
    while engine.busy:
        engine.turn(lambda outcome: None)
        turns += 1
        if turns == 30:
            engine.abort([1, 4, 77])
    assert engine.stats.parked > 0
    return lines


def test_a_recorded_run_played_again_has_the_same_plans(model: Model, make_request) -> None:
    first, *lines = recorded(model, make_request)
    records = [msgspec.json.decode(line, type=StepRecord) for line in lines]
    assert sum(len(record.plan.admit) for record in records) > 9
    replay = Replay(rebuilt(json.loads(first)))
    for record in records:
        assert replay.plan(record) == record.plan

    other = Replay(msgspec.structs.replace(rebuilt(json.loads(first)), max_num_seqs=4))
    assert any(other.plan(record) != record.plan for record in records)


def test_rows_that_are_held_are_held_again() -> None:
    records: list[StepRecord] = []
    scheduler = RecordedScheduler(Limits(), records.append, lambda rid: rid == 1)
    for rid in range(3):
        scheduler.add(rid, 600, 4)
    scheduler.plan(10_000, 0)
    scheduler.go_on(1, 512)
    scheduler.lift(0, -3)
    scheduler.plan(10_000, 0)
    assert [record.held for record in records] == [[1], []]
    replay = Replay(Limits())
    for record in msgspec.json.decode(msgspec.json.encode(records), type=list[StepRecord]):
        assert replay.plan(record) == record.plan
