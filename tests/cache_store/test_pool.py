"""The memory pool against a plain model, as a state machine."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from cache_store.pool import Entry, MemoryPool

BUDGET = 100


def entry(key: bytes, parent: bytes | None = None, nbytes: int = 10, snapshot: bool = False) -> Entry[bytes]:
    return Entry(key, parent, b"", b"payload of " + key, nbytes, is_snapshot=snapshot)


class PoolMachine(RuleBasedStateMachine):
    """Chains grow, are used and held; the model is the set of entries ever put and the references given out."""

    known = Bundle("known")
    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.pool: MemoryPool[bytes] = MemoryPool(BUDGET, 0.3)
        # More than the budget is there when it became less than what is held.
        self.most, self.most_snapshots = BUDGET, 0.3 * BUDGET
        self.refs: dict[bytes, int] = {}
        self.pinned: set[bytes] = set()
        self.parents: dict[bytes, bytes | None] = {}
        self.snapshots: set[bytes] = set()
        self.number = 0

    def check_gone(self, gone: list[Entry[bytes]], spared: set[bytes]) -> None:
        left = {each.key for each in self.pool}
        for each in gone:
            assert self.refs.get(each.key, 0) == 0
            assert each.key not in self.pinned
            assert each.key not in spared
            assert each.key not in left
            if each.key not in self.snapshots:
                assert not any(self.parents[other] == each.key for other in left), "a head went before its tail"

    @rule(target=known, parent=st.none() | known, nbytes=st.integers(0, 60))
    def put(self, parent: bytes | None, nbytes: int) -> bytes:
        if parent in self.snapshots:
            parent = self.parents[parent]
        self.number += 1
        key = b"%d" % self.number
        spared = set()
        up = parent
        while up is not None and up in self.pool:
            spared.add(up)
            up = self.parents[up]
        self.parents[key] = parent
        kept, gone = self.pool.put(entry(key, parent, nbytes))
        assert kept == (key in self.pool)
        self.check_gone(gone, spared)
        return key

    @rule(target=known, block=known, nbytes=st.integers(0, 40))
    def put_snapshot(self, block: bytes, nbytes: int) -> bytes:
        key = b"s" + block
        if block in self.snapshots or key in self.pool:
            return block
        self.parents[key] = block
        self.snapshots.add(key)
        there = block in self.pool
        kept, gone = self.pool.put(entry(key, block, nbytes, snapshot=True))
        assert kept == (key in self.pool)
        assert there or not kept
        assert (block in self.pool) == there
        self.check_gone(gone, {block} if there else set())
        return key

    @rule(target=held, key=known)
    def acquire(self, key: bytes) -> bytes | None:
        if key not in self.pool:
            with pytest.raises(KeyError):
                self.pool.acquire([key])
            return None
        (found,) = self.pool.acquire([key])
        assert found.payload == b"payload of " + key
        self.refs[key] = self.refs.get(key, 0) + 1
        return key

    @rule(key=consumes(held))
    def release(self, key: bytes | None) -> None:
        if key is None:
            return
        found = self.pool.get(key)
        assert found is not None, "an entry in use has gone"
        self.pool.release(found)
        self.refs[key] -= 1

    @rule(key=known)
    def touch(self, key: bytes) -> None:
        self.pool.touch([key])

    @rule(key=known, sure=st.integers(0, 9))
    def pin(self, key: bytes, sure: int) -> None:
        if sure == 0 and key in self.pool:
            self.pool.pin([key])
            self.pinned.add(key)

    @rule(budget=st.integers(0, BUDGET))
    def resize(self, budget: int) -> None:
        before, fitted = self.pool.nbytes, self.pool.snapshot_bytes <= 0.3 * budget
        gone = self.pool.resize(budget)
        self.check_gone(gone, set())
        assert before - self.pool.nbytes == sum(each.nbytes for each in gone)
        if fitted and before <= budget:
            assert not gone
        if self.pool.nbytes > budget:
            assert all(self.kept_by_someone(each.key) for each in self.pool), "something could have gone"
        if self.pool.snapshot_bytes > 0.3 * budget:
            assert all(each.held for each in self.pool if each.is_snapshot)
        self.most = max(budget, self.pool.nbytes)
        self.most_snapshots = max(0.3 * budget, self.pool.snapshot_bytes)

    def kept_by_someone(self, key: bytes) -> bool:
        """Whether the entry, or something that hangs on it, is in use."""
        if self.refs.get(key, 0) or key in self.pinned:
            return True
        return any(self.kept_by_someone(each.key) for each in self.pool if self.parents[each.key] == key)

    @invariant()
    def budget_holds(self) -> None:
        entries = list(self.pool)
        snapshots = [each.nbytes for each in entries if each.is_snapshot]
        assert self.pool.nbytes == sum(each.nbytes for each in entries) <= self.most
        assert self.pool.snapshot_bytes == sum(snapshots) <= self.most_snapshots
        assert self.pool.pinned_bytes == sum(each.nbytes for each in entries if each.pinned)
        for each in entries:
            assert not each.is_snapshot or each.parent in self.pool


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def put_chain(pool: MemoryPool[bytes], name: str, length: int) -> list[bytes]:
    keys = [f"{name}{number}".encode() for number in range(length)]
    for number, key in enumerate(keys):
        assert pool.put(entry(key, keys[number - 1] if number else None))[0]
    return keys


def test_the_chain_used_longest_ago_loses_its_tail_first():
    pool: MemoryPool[bytes] = MemoryPool(BUDGET)
    old = put_chain(pool, "old", 5)
    new = put_chain(pool, "new", 5)
    pool.touch(old)
    gone = [pool.put(entry(b"more%d" % number))[1] for number in range(3)]
    assert [each.key for some in gone for each in some] == new[:1:-1]


def test_a_chain_longer_than_the_budget_keeps_its_head():
    pool: MemoryPool[bytes] = MemoryPool(BUDGET)
    keys = put_chain(pool, "long", 10)
    assert pool.put(entry(b"eleventh", keys[-1])) == (False, [])
    assert all(key in pool for key in keys)


def test_a_pinned_tail_keeps_its_head():
    pool: MemoryPool[bytes] = MemoryPool(BUDGET)
    keys = put_chain(pool, "warm", 3)
    pool.pin(keys[-1:])
    for number in range(30):
        pool.put(entry(b"other%d" % number))
    assert all(key in pool for key in keys)


def test_snapshots_do_not_drive_out_blocks_nor_blocks_snapshots():
    pool: MemoryPool[bytes] = MemoryPool(BUDGET, 0.3)
    keys = put_chain(pool, "a", 5)
    for key in keys:
        assert pool.put(entry(b"s" + key, key, snapshot=True))[0]
    assert (pool.block_bytes, pool.snapshot_bytes) == (50, 30)
    assert pool.put(entry(b"other1"))[0]
    assert pool.put(entry(b"other2"))[0]
    pool.touch(keys)
    assert [each.key for each in pool.put(entry(b"other3"))[1]] == [b"other1"]
    assert b"s" + keys[4] in pool


def test_releasing_too_often_is_an_error():
    pool: MemoryPool[bytes] = MemoryPool(BUDGET)
    pool.put(entry(b"a"))
    (found,) = pool.acquire([b"a"])
    pool.release(found)
    with pytest.raises(ValueError, match="more often"):
        pool.release(found)
