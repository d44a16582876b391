"""The index against a plain model: counters, order of eviction, reservations, and that it notices contradictions."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from cache_store.directory import CacheDirectory
from cache_store.index import SLACK, Index, IndexReplaced
from cache_store.opening import open_index
from cache_store.records import Model, Record

FINGERPRINT = b"\x11" * 32
PAGE = 4096


def name(number: int) -> bytes:
    return FINGERPRINT + number.to_bytes(32, "big")


def record(size: int = PAGE, used: int = 0, parent: bytes | None = None) -> Record:
    return Record(size, b"c" * 16, used, used, False, parent)


class IndexMachine(RuleBasedStateMachine):
    """Blocks come, are used and go; the model is a dictionary of records."""

    names = Bundle("names")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.index = open_index(CacheDirectory(self.folder), 1 << 40)
        self.model: dict[bytes, Record] = {}
        self.reserved: dict[bytes, int] = {}
        self.clock = 0
        self.number = 0

    def teardown(self) -> None:
        self.index.close()
        shutil.rmtree(self.folder)

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def leaves(self) -> list[bytes]:
        parents = {each.parent for each in self.model.values()}
        found = [key for key in self.model if key[32:] not in parents]
        return sorted(found, key=lambda key: (self.model[key].used, key))

    @rule(target=names, parent=st.none() | names, pages=st.integers(1, 5))
    def add(self, parent: bytes | None, pages: int) -> bytes:
        self.number += 1
        added = record(pages * PAGE, self.tick(), parent[32:] if parent else None)
        with self.index.write() as transaction:
            assert transaction.add(name(self.number), added)
            assert not transaction.add(name(self.number), added)
        self.model[name(self.number)] = added
        return name(self.number)

    @rule(key=names)
    def add_again(self, key: bytes) -> None:
        if key not in self.model:
            added = record(PAGE, self.tick())
            with self.index.write() as transaction:
                assert transaction.add(key, added)
            self.model[key] = added

    @rule(key=names)
    def remove(self, key: bytes) -> None:
        with self.index.write() as transaction:
            assert transaction.remove(key) == (key in self.model)
        self.model.pop(key, None)

    @rule(key=names)
    def touch(self, key: bytes) -> None:
        used = self.tick()
        with self.index.write() as transaction:
            transaction.touch(key, used)
        if key in self.model:
            self.model[key] = self.model[key]._replace(used=used)

    @rule(sizes=st.lists(st.integers(1, 5), max_size=3))
    def reserve(self, sizes: list[int]) -> None:
        with self.index.write() as transaction:
            reservation, room = transaction.reserve([PAGE * size for size in sizes], ())
        assert room == len(sizes)
        self.reserved[reservation] = PAGE * sum(sizes)

    @rule()
    def release(self) -> None:
        if self.reserved:
            reservation, _ = self.reserved.popitem()
            with self.index.write() as transaction:
                transaction.release(reservation)

    @rule(most=st.integers(0, 4))
    def evict(self, most: int) -> None:
        expected = []
        for _ in range(most):
            if self.model:
                expected.append(self.leaves()[0])
                del self.model[expected[-1]]
        with self.index.write() as transaction:
            assert transaction.evict(lambda _, used: True, most) == len(expected)

    @invariant()
    def agrees(self) -> None:
        with self.index.read() as view:
            assert dict(view.records()) == self.model
            assert list(view.leaves()) == self.leaves()
            assert view.used == sum(each.size for each in self.model.values()) + sum(self.reserved.values())
            found: list[str] = []
            view.contradictions(found.append)
            assert found == []
        keys = [key[32:] for key in self.model]
        assert self.index.leading(FINGERPRINT, [*keys, bytes(32)]) == len(keys)


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=15, stateful_step_count=30, deadline=None)


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    opened = open_index(CacheDirectory(tmp_path), 1 << 30)
    yield opened
    opened.close()


def test_room_is_made_by_evicting_the_oldest_tails(index: Index):
    with index.write() as transaction:
        for number in range(10):
            transaction.add(name(number), record(PAGE, number, name(number - 1)[32:] if number % 5 else None))
        transaction.limit = index.overhead() + 10 * PAGE
        assert transaction.make_room(3 * PAGE)
        assert [key for key, _ in transaction.records()] == [name(number) for number in (0, 1, 5, 6, 7, 8, 9)]
        assert transaction.make_room(0)


def test_what_cannot_be_removed_does_not_wedge_eviction(index: Index):
    # A folder where the file should be can't be unlinked.
    index.directory.block_path(FINGERPRINT, name(1)[32:]).mkdir(parents=True)
    with index.write() as transaction:
        for number in (1, 2, 3):
            transaction.add(name(number), record(PAGE, number))
        transaction.limit = index.overhead() + 3 * PAGE
        assert transaction.make_room(2 * PAGE)
        assert [key for key, _ in transaction.records()] == [name(1)]
        assert not transaction.make_room(3 * PAGE)


def test_a_chain_does_not_eat_its_own_tail(index: Index):
    with index.write() as transaction:
        transaction.add(name(1), record())
        transaction.limit = index.overhead() + PAGE
        _, room = transaction.reserve([PAGE], {name(1)})
        assert room == 0
        assert transaction.get(name(1)) is not None


def test_reserving_more_than_the_budget_takes_what_fits(index: Index):
    with index.write() as transaction:
        transaction.limit = index.overhead() + 2 * PAGE
        reservation, room = transaction.reserve([PAGE] * 5, ())
        assert (room, transaction.used) == (2, 2 * PAGE)
        transaction.release(reservation)
        transaction.release(reservation)
        assert transaction.used == 0


def test_quarantined_files_go_first(index: Index):
    (index.directory.quarantine / "bad").write_bytes(bytes(PAGE))
    with index.write() as transaction:
        transaction.enter_quarantine("bad", PAGE)
        transaction.add(name(1), record())
        transaction.limit = index.overhead() + 2 * PAGE
        assert transaction.make_room(PAGE)
        assert transaction.quarantined() == {}
        assert transaction.get(name(1)) is not None
    assert not (index.directory.quarantine / "bad").exists()


def test_a_failed_transaction_changes_nothing(index: Index):
    def fail() -> None:
        with index.write() as transaction:
            transaction.add(name(1), record())
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    with index.read() as view:
        assert (view.count(), view.used) == (0, 0)


def test_models_are_told_apart(index: Index):
    with index.write() as transaction:
        transaction.set_model(FINGERPRINT, Model("a", 1, 2, 3))
        transaction.add(name(1), record())
    assert index.leading(FINGERPRINT, [name(1)[32:]]) == 1
    assert index.leading(b"\x12" * 32, [name(1)[32:]]) == 0
    with index.read() as view:
        assert view.model(FINGERPRINT) == Model("a", 1, 2, 3)
        assert list(view.records(b"\x12" * 32)) == []


def test_an_index_that_is_gone_or_cut_short_is_not_read(index: Index):
    with index.write() as transaction:
        transaction.add(name(1), record())
    key = [name(1)[32:]]
    assert index.leading(FINGERPRINT, key) == 1
    file = index.directory.index / "data.mdb"
    file.rename(file.with_name("moved"))
    assert index.leading(FINGERPRINT, key) == 0
    with pytest.raises(IndexReplaced), index.write():
        pass
    file.with_name("moved").rename(file)
    assert index.leading(FINGERPRINT, key) == 1
    index.close()
    assert index.leading(FINGERPRINT, key) == 0


@pytest.mark.parametrize(
    ("database", "key", "value"),
    [
        ("blocks", name(2), None),
        ("leaves", bytes(8) + name(2), None),
        ("leaves", bytes(8) + name(1), b""),
        ("meta", b"used", bytes(8)),
        ("children", name(1), None),
    ],
)
def test_contradictions_are_noticed(index: Index, database: str, key: bytes, value: bytes | None):
    with index.write() as transaction:
        transaction.add(name(1), record())
        transaction.add(name(2), record(parent=name(1)[32:]))
    opened = index.env.open_db(database.encode(), create=False, dupsort=database == "children")
    with index.env.begin(write=True) as raw:
        assert raw.delete(key, db=opened) if value is None else raw.put(key, value, db=opened)
    found: list[str] = []
    with index.read() as view:
        view.contradictions(found.append)
    assert found


def test_slack_leaves_room_for_the_index_itself(index: Index):
    assert index.overhead() >= SLACK + (index.directory.index / "data.mdb").stat().st_size
