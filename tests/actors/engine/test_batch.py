"""`DecodeBatch`: joins copy no group, groups change their shape a piece at a time, and memory is given back exactly."""

from collections.abc import Callable, Iterator

import mlx.core as mx
import pytest

from actors.engine import batch
from actors.engine.batch import AHEAD, DecodeBatch
from actors.engine.device import Lane
from actors.engine.model import Model
from actors.engine.row_memory import GROW, row_bytes
from bench.joins import addresses
from bench.made_rows import made_joining

TOKENS = 1000
PIECE = 1 << 20


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any batch counts as large."""
    monkeypatch.setattr(batch, "SMALL_BATCH", 0)
    monkeypatch.setattr(batch, "PIECE", PIECE)
    monkeypatch.setattr(batch, "PIECE_SHARE", 1 << 60)
    monkeypatch.setattr(batch, "MOVED", PIECE)


class Rows:
    """A batch of made-up rows, and the tokens that it gives them."""

    def __init__(self, model: Model, count: int, tokens: int = TOKENS) -> None:
        self.model = model
        self.batch = DecodeBatch(model, Lane())
        self.tokens: dict[int, list[int]] = {}
        self.next = 0
        self.join(count, tokens)

    def join(self, count: int = 1, tokens: int = TOKENS, expected: int = 0) -> None:
        rids = list(range(self.next, self.next + count))
        self.next += count
        mx.random.seed(self.next)
        self.batch.join([made_joining(self.model, rids, [tokens] * count)], expected)

    def step(self) -> None:
        self.batch.launch(lambda: None)
        while self.batch.in_flight:
            collected = self.batch.collect()
            for rid, token in zip(collected.rids, collected.tokens, strict=True):
                self.tokens.setdefault(rid, []).append(token)

    def steps(self) -> Iterator[int]:
        """Bytes of new arrays in each step to come."""
        while True:
            before = addresses(self.batch._groups)
            self.step()
            yield sum(size for at, size in addresses(self.batch._groups).items() if at not in before)

    @property
    def groups(self) -> int:
        return len(self.batch._groups)

    @property
    def slots(self) -> int:
        return sum(group.capacity for group in self.batch._groups)


@pytest.mark.usefixtures("in_pieces")
def test_a_row_that_finds_no_slot_free_copies_nobody_else(model: Model) -> None:
    rows = Rows(model, 6)
    rows.step()
    before = addresses(rows.batch._groups)
    rows.join()
    rows.step()
    after = addresses(rows.batch._groups)
    assert before.items() <= after.items()
    assert sum(after.values()) - sum(before.values()) == row_bytes(model.row_memory, TOKENS + 1 + batch.MARGIN)
    assert rows.groups == 2


@pytest.mark.usefixtures("in_pieces")
def test_a_longer_row_copies_nobody_else(model: Model) -> None:
    rows = Rows(model, 6)
    rows.step()
    before = addresses(rows.batch._groups)
    rows.join(tokens=TOKENS + 600)
    rows.step()
    assert before.items() <= addresses(rows.batch._groups).items()


@pytest.mark.usefixtures("in_pieces")
def test_groups_become_one_again_in_pieces(model: Model) -> None:
    rows = Rows(model, 6)
    rows.step()
    rows.join()
    rows.step()
    steps = rows.steps()
    largest = max(next(steps) for _ in range(20))
    assert rows.groups == 1
    assert rows.slots > 7, "there are slots for those to come"
    array = max(group.largest_array for group in rows.batch._groups)
    assert 0 < largest < PIECE + array
    before = rows.batch.nbytes
    rows.join()
    rows.step()
    assert rows.batch.nbytes == before


def test_a_small_batch_is_copied_at_once_and_seldom(model: Model) -> None:
    rows = Rows(model, 6)
    copies = 0
    for _ in range(20):
        before = addresses(rows.batch._groups)
        rows.join()
        rows.step()
        copies += not before.items() <= addresses(rows.batch._groups).items()
        assert rows.groups == 1
    assert copies <= 3


@pytest.mark.usefixtures("in_pieces")
def test_short_rows_of_a_large_model_share_a_group(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "SMALL_ROW", 1)  # as where a token takes much more than in this model
    rows = Rows(model, 4, tokens=10)
    rows.step()
    for _ in range(3):
        rows.join(tokens=8, expected=3)
        rows.step()
    assert rows.groups <= 2, "those that found a slot, and one more group until there is room for all"
    assert rows.slots < 24
    steps = rows.steps()
    for _ in range(20):
        next(steps)
    assert rows.groups == 1


def test_slots_are_made_for_rows_on_their_way(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows(model, 6)
    rows.join(1, expected=100)
    assert rows.slots == 7 + 21
    rows = Rows(model, 1)
    rows.join(1, expected=3)
    assert rows.slots == 2 + 3
    monkeypatch.setattr(batch, "SMALL_ROW", 1 << 30)  # for all of them at once, where that is little
    rows = Rows(model, 6)
    rows.join(1, expected=100)
    assert rows.slots == 7 + 100


@pytest.mark.usefixtures("in_pieces")
def test_room_for_tokens_is_there_before_rows_need_it(model: Model) -> None:
    rows = Rows(model, 6, 4 * GROW - AHEAD - 1)
    steps = rows.steps()
    made = [next(steps) for _ in range(AHEAD + 4)]
    arrays = [array for group in rows.batch._groups for cache in group._caches for array in cache.every_array()]
    assert max(made) < PIECE + arrays[0].nbytes
    assert sum(size > 0 for size in made) > 1
    assert made[AHEAD:] == [0] * 4, "nothing is left to do when the rows get there"
    assert all(array.shape[2] > 4 * GROW for array in arrays)


def test_steps_one_behind_the_other_write_in_place(model: Model) -> None:
    rows = Rows(model, 2, tokens=8000)
    rows.step()
    caches = rows.batch.nbytes
    assert caches > 16 * 2 * model.vocab_size
    for uneven in (False, True):
        if uneven:
            rows.batch.remove([0])
            rows.join(tokens=7000)
            rows.step()
        rows.batch.launch(lambda: None)
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        for _ in range(3):
            rows.batch.launch(lambda: None)
            rows.batch.collect()
        rows.batch.collect()
        assert mx.get_peak_memory() - before < caches / 8


def test_a_dispatch_is_known_to_have_ended_when_the_one_behind_it_is_waited_for() -> None:
    lane = Lane()
    for early, ended in ((False, 0), (True, 0), (True, 1), (False, 3)):
        lane.dispatch(mx.ones((4,)) + 1, early=early)
        assert lane.ended == (ended if lane._cpu else lane.begun - 1)
    lane.wait()
    assert lane.ended == 4


def together_and_apart(model: Model, patch: Callable[[str, int], None]) -> list[dict[int, list[int]]]:
    found = []
    for small in (1 << 60, 0):
        patch("SMALL_BATCH", small)
        rows = Rows(model, 5)
        for number in range(40):
            if number % 4 == 0:
                rows.join(tokens=TOKENS + 50 * number)
            if number % 9 == 8:
                rows.batch.remove([number // 3])
            rows.step()
        found.append(rows.tokens)
    return found


def test_pieces_change_no_token(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "PIECE", 1)
    monkeypatch.setattr(batch, "MOVED", 1)
    at_once, in_pieces = together_and_apart(model, lambda name, value: monkeypatch.setattr(batch, name, value))
    assert at_once == in_pieces


@pytest.mark.usefixtures("in_pieces")
def test_one_row_moves_in_a_turn_when_many_have_left(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "MOVED", 1)
    rows = Rows(model, 12)
    rows.step()
    rows.batch.remove([1, 2, 3, 4])
    (group,) = rows.batch._groups
    spans = []
    for _ in range(6):
        rows.step()
        spans.append(group.span)
    assert spans == [11, 10, 9, 9, 9, 9]  # one free slot in nine is left as it is


@pytest.mark.usefixtures("in_pieces")
def test_what_rows_need_is_what_is_left_when_memory_is_short(model: Model) -> None:
    rows = Rows(model, 8)
    rows.join(expected=8)
    for _ in range(3):
        rows.step()
    rows.batch.remove([0, 3])
    needed = rows.batch.needed()
    assert rows.batch.needed(leaving=[1]) < needed < rows.batch.nbytes
    rows.batch.keep_within(needed)
    assert rows.batch.nbytes <= needed
    exact = len(rows.batch) * row_bytes(model.row_memory, TOKENS + 4)
    rows.batch.keep_within(exact)
    assert rows.batch.nbytes == exact
    tokens = {rid: len(found) for rid, found in rows.tokens.items()}
    rows.join(expected=100)
    rows.step()
    assert rows.slots == len(rows.batch), "no slot is made beyond the limit"
    assert len(rows.tokens[1]) == tokens[1] + 1


def test_most_slots_free_are_given_back(model: Model) -> None:
    rows = Rows(model, 20)
    rows.batch.remove(range(1, 19))
    before = rows.batch.nbytes
    for _ in range(batch.MERGE_EVERY):
        rows.step()
    assert rows.slots == 4
    assert rows.batch.nbytes < before // 4


def test_needed_counts_the_room_of_the_next_token(model: Model) -> None:
    rows = Rows(model, 3, GROW - 2)
    (group,) = rows.batch._groups
    size = model.row_memory.bytes
    assert rows.batch.needed() == group.largest_array + 3 * size(GROW)
    rows.step()
    rows.step()
    assert rows.batch.needed() == group.largest_array + 3 * size(2 * GROW)


@pytest.mark.usefixtures("in_pieces")
def test_a_batch_whose_rows_leave_in_the_middle_of_a_merge_keeps_nothing(model: Model) -> None:
    mx.synchronize()
    before = mx.get_active_memory()
    rows = Rows(model, 6)
    rows.step()
    rows.join(3)
    for _ in range(10 * batch.MERGE_EVERY):
        rows.step()
        if rows.batch._merging is not None:
            break
    assert rows.batch._merging is not None
    assert mx.get_active_memory() > before + 9 * row_bytes(model.row_memory, TOKENS)
    rows.batch.remove(range(rows.next))
    assert rows.batch.nbytes == 0
    assert mx.get_active_memory() < before + row_bytes(model.row_memory, TOKENS)
