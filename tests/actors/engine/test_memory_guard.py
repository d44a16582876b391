"""When rows need memory, cached prefixes go before a row is parked, and may come back; what is pinned stays."""

from functools import partial

import structlog.testing
from hypothesis import given
from hypothesis import strategies as st

from actors.engine.memory import Pool
from actors.engine.memory_guard import MemoryGuard
from actors.engine.model import Model
from actors.engine.row_memory import row_bytes
from actors.engine.scheduler import Limits
from cache_store.store import PrefixStore

BUDGET = 100
BLOCKS = 40


class Bytes:
    """A block of ten bytes."""

    layout = "bytes"
    nbytes = 10

    def tensors(self) -> list:
        return []


@given(st.lists(st.tuples(st.integers(0, 140), st.integers(0, 5), st.booleans()), max_size=30))
def test_blocks_get_what_rows_leave_and_never_more_than_their_own_budget(turns: list) -> None:
    store: PrefixStore[Bytes] = PrefixStore(memory_bytes=BLOCKS)
    guard = MemoryGuard(BUDGET, store, Pool(1 << 30))
    gone = put = 0
    for rows, new, pinned in turns:
        kept = guard.make_room(rows + guard.pinned_bytes)
        allowed = max(min(BLOCKS, BUDGET - rows), guard.pinned_bytes)
        assert store.nbytes <= allowed
        assert rows + kept <= BUDGET or kept == 0
        for _ in range(new):
            key = b"%d" % (put := put + 1)
            store.put(key, None, b"", Bytes())
            if pinned and guard.pinned_bytes < 20:
                store.pin([key])
        assert store.nbytes <= allowed
        gone = store.stats().evicted_blocks
    guard.make_room(guard.pinned_bytes)
    assert guard.yielded <= 10 * gone
    assert store.stats().memory_limit_bytes == BLOCKS


def test_the_log_says_once_that_prefixes_make_room_and_the_free_pool_is_cleared() -> None:
    now = 0.0
    store: PrefixStore[Bytes] = PrefixStore(memory_bytes=BLOCKS)
    pool = Pool(1 << 30)
    guard = MemoryGuard(BUDGET, store, pool, clock=lambda: now)
    pool.after_turn(prefilled=True)
    with structlog.testing.capture_logs() as log:
        for number, rows in enumerate((0, 70, 80, 90, 100)):
            store.put(b"%d" % number, None, b"", Bytes())
            guard.make_room(rows)
        assert [line["event"] for line in log] == ["cached prefixes make room for requests"]
        now = 60.0
        store.keep_within(BLOCKS)
        store.put(b"more", None, b"", Bytes())
        guard.make_room(100)
    assert len(log) == 2
    for _ in range(15):
        pool.after_turn(prefilled=True)
    assert not pool.used


def test_cached_blocks_go_before_a_row_is_parked_and_come_back(model: Model, make_request, start_run) -> None:
    size = partial(row_bytes, model.row_memory)
    old = [make_request(100 + rid, range(10 + rid, 400 + rid), 1) for rid in range(4)]
    requests = [make_request(rid, range(10 + rid, 200 + rid), 70, temperature=[0.0, 0.9][rid % 2]) for rid in range(6)]
    free = start_run(model).all(requests)

    def run(blocks: int):
        tight = start_run(
            model,
            Limits(cache_bytes=blocks * size(256), row_bytes=size),
            store=PrefixStore(memory_bytes=12 * size(256)),
        )
        for each in old:
            tight.all([each])
        assert tight.engine.stats.prefix.memory_bytes == 4 * size(256)
        tokens = tight.all(requests)
        assert {rid: tokens[rid] for rid in free} == free
        return tight

    # Rows fit, though not beside all blocks.
    stats = run(16).engine.stats
    assert stats.parked == 0
    assert stats.prefix.yielded >= 3 * size(256)
    # Rows alone don't fit: all blocks have gone before one is parked.
    tight = run(10)
    stats = tight.engine.stats
    assert stats.parked > 0
    assert stats.prefix.yielded >= 4 * size(256)
    for rid in (200, 201):
        tight.all([make_request(rid, range(10, 400), 1)])
    assert tight.cached == {201: 256}


def test_warm_prompts_that_do_not_fit_are_told_of_once(model: Model, make_request, start_run) -> None:
    store: PrefixStore = PrefixStore(memory_bytes=2 * row_bytes(model.row_memory, 256))
    run = start_run(model, store=store)
    with structlog.testing.capture_logs() as log:
        run.all([make_request(0, range(10, 410), 1, warm=True), make_request(1, [5] * 1100, 1, warm=True)])
    (line,) = (line for line in log if line["log_level"] == "warning")
    assert line["event"] == "warm prompts take more memory than there is for prefixes"
    assert store.pinned_bytes == store.nbytes


def test_pinned_blocks_stay_and_count_for_what_can_fit(model: Model, make_request, start_run) -> None:
    size = partial(row_bytes, model.row_memory)
    store: PrefixStore = PrefixStore(memory_bytes=4 * size(256))
    run = start_run(model, Limits(cache_bytes=12 * size(256), row_bytes=size), store=store)
    stem = range(10, 310)
    run.all([make_request(0, stem, 1, warm=True)])
    assert store.pinned_bytes == size(256)
    run.all([make_request(rid, range(10 + rid, 200 + rid), 150) for rid in range(1, 8)])
    assert run.engine.stats.parked > 0
    run.all([make_request(20, stem, 1)])
    assert run.cached[20] == 256
    run.all([make_request(30, [7] * 1300, 1)])
    assert run.reasons[30] == "prompt_too_long"
