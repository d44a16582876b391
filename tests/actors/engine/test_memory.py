"""When the pool of free buffers is cleared."""

import pytest

from actors.engine.memory import (
    CLEAR_EVERY,
    FULL_POOL_REST,
    HEAP_REST,
    LOOK_EVERY,
    Heap,
    Pool,
    available_for_weights,
    clearing_due,
    in_use,
    pool_limit,
)

LIMIT = 1000


@pytest.mark.parametrize(
    ("age", "held", "prefilled", "due"),
    [
        (1, LIMIT, False, False),  # never eagerly
        (15, LIMIT, False, False),
        (16, LIMIT, False, True),  # a full pool is stuck
        (16, LIMIT // 2, False, False),
        (16, LIMIT, True, False),  # prefill would fill it again at once
        (64, LIMIT, True, True),
        (1023, 0, False, False),
        (1024, 0, False, True),  # now and then in any case
    ],
)
def test_clearing(age: int, held: int, prefilled: bool, due: bool) -> None:
    assert clearing_due(age, held, LIMIT, prefilled=prefilled) is due


def test_the_pool_holds_several_sets_of_logits() -> None:
    assert pool_limit(1, 100) == 512 << 20
    assert pool_limit(1024, 150_000) == 12 * 1024 * 150_000 * 4


def test_memory_is_told_in_bytes() -> None:
    assert in_use() >= 0
    assert available_for_weights() > 10_000_000


def test_the_heap_gives_back_what_is_too_much() -> None:
    held, in_it, pooled = [100], [0], [0]
    times = []

    def trim() -> None:
        times.append(held[0])
        held[0] -= in_it[0]
        in_it[0] = 0

    heap = Heap(50, lambda: held[0], trim)

    def turns(count: int = HEAP_REST) -> None:
        for _ in range(count):
            heap.after_turn(pooled[0])

    turns()
    assert not times
    held[0], in_it[0] = 150, 40
    turns()
    assert not times  # not more than the limit
    held[0] = 151
    turns(LOOK_EVERY - 1)
    assert not times  # it isn't looked at in every turn
    turns(1)
    assert times == [151]
    assert held == [111]
    held[0] += 60
    turns(HEAP_REST - 1)
    assert times == [151]  # nor trimmed again at once
    held[0] = 161  # what could not be given back is in use: 50 on top of it are no more than the limit
    turns()
    assert times == [151]
    in_it[0], pooled[0] = 50, 1  # … and the pool counts with it
    turns()
    assert times == [151, 161]


def test_a_pool_that_is_cleared_in_the_last_turn_still_rests() -> None:
    """What was in it is in the heap then."""
    pool = Pool(1 << 40)
    assert not pool.used
    for _ in range(CLEAR_EVERY):
        pool.after_turn(prefilled=False)
    assert pool.used
    pool.rest()
    assert not pool.used


def test_when_memory_is_short_the_heap_gives_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(1 << 40)
    given: list[int] = []
    monkeypatch.setattr(pool._heap, "give_back", lambda: given.append(1))
    for _ in range(FULL_POOL_REST):
        pool.after_turn(prefilled=True)
    assert not given
    pool.want_back()
    pool.after_turn(prefilled=True)
    assert given == [1]
