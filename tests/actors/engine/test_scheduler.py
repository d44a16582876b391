"""The scheduler against a simulated batch: whatever arrives, aborts and stops, each row ends once and in bounds."""

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engine.scheduler import BLOCK, MIN_CHUNK, MIN_PIECE, PART, PASSES, Limits, Plan, Scheduler, chunk_tokens

EOS = 2


def one_byte_a_token(length: int) -> int:
    return length


class Device:
    """Carries out plans as the engine does, one step in flight, and checks each of them."""

    def __init__(self, limits: Limits, holds: list[tuple[int, int]] | None = None) -> None:
        """`holds`, by row in turn: for how many turns it is held, and how many percent of it are found then."""
        self.limits = limits
        self.holds = holds or [(0, 0)]
        self.held: dict[int, int] = {}  # the turn in which a row goes on
        self.scheduler = Scheduler(limits, self._hold)
        self.submitted: list[int] = []
        self.admitted: list[int] = []
        self.lengths: dict[int, int] = {}
        self.budgets: dict[int, int] = {}
        self.computed: dict[int, int] = {}  # rows in prefill
        self.decoding: list[int] = []
        self.in_flight: deque[list[int]] = deque()
        self.aborted: set[int] = set()
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, str] = {}
        self.gone_since: dict[int, int] = {}
        self.launched: dict[int, int] = {}  # steps since it was admitted
        self.resumed: dict[int, int] = {}  # tokens it had when it was admitted
        self.turns = 0

    def _hold(self, rid: int) -> bool:
        turns, _ = self.holds[rid % len(self.holds)]
        if turns:
            self.held[rid] = self.turns + turns
        return turns > 0

    def _release(self) -> None:
        for rid, turn in list(self.held.items()):
            if turn <= self.turns:
                del self.held[rid]
                found = (
                    (self.length(rid) - 1) * self.holds[rid % len(self.holds)][1] // 100 if rid in self.computed else 0
                )
                self.scheduler.go_on(rid, found)
                if rid in self.computed:
                    self.computed[rid] = found

    def submit(
        self, rid: int, length: int, budget: int, ignore_eos: bool = False, priority: int = 0, turn: int = 0
    ) -> None:
        stop_ids = frozenset() if ignore_eos else frozenset({EOS})
        self.scheduler.add(rid, length, budget, stop_ids=stop_ids, priority=priority, turn=turn)
        self.submitted.append(rid)
        self.lengths[rid], self.budgets[rid], self.tokens[rid] = length, budget, []

    def abort(self, rids: list[int]) -> None:
        self.scheduler.abort(rids)
        for rid in rids:
            if rid in self.tokens and rid not in self.ended:
                self.aborted.add(rid)
                self.gone_since.setdefault(rid, self.turns)

    def turn(self, prefill_tokens: int = 1 << 20, stops: frozenset[int] = frozenset()) -> Plan:
        """One turn; rows in `stops` draw the end-of-sequence id."""
        self._release()
        gone = self.scheduler.leaving
        running = [self.length(rid) + self.launched[rid] + 1 for rid in self.decoding if rid not in gone]
        plan = self.scheduler.plan(prefill_tokens, sum(map(self.limits.row_bytes, running)))
        self._check(plan, prefill_tokens)
        step_before = bool(self.in_flight)
        if plan.decode:
            assert plan.decode == len(self.decoding)
            self.in_flight.append(self.decoding.copy())
            for rid in self.decoding:
                self.launched[rid] += 1
        held = [self.length(rid) for rid in self.computed]
        held += [self.length(rid) + self.launched[rid] for rid in self.decoding]
        if len(held) > 1:
            assert sum(map(self.limits.row_bytes, held)) <= self.limits.cache_bytes
        if step_before:
            rids = self.in_flight.popleft()
            drawn = [EOS if rid in stops else 7 for rid in rids]
            taken = self.scheduler.take(rids, drawn)
            for rid, token in zip(taken.rids, taken.tokens, strict=True):
                assert rid not in self.ended
                assert rid not in self.aborted
                self.tokens[rid].append(token)
            for rid, reason in zip(taken.ended, taken.reasons, strict=True):
                assert rid not in self.ended
                self.ended[rid] = reason
                self.gone_since[rid] = self.turns
        self.turns += 1
        for rid, since in self.gone_since.items():
            if self.turns - since > 2:
                assert rid not in self.decoding, "a row that ended is still in the batch two steps later"
                assert rid not in self.computed
        return plan

    def _check(self, plan: Plan, prefill_tokens: int) -> None:
        for rid in plan.drop:
            assert (rid in self.computed) != (rid in self.decoding), "a drop of a row that the batch doesn't hold"
            self.computed.pop(rid, None)
            if rid not in plan.admit:
                self.held.pop(rid, None)
            if rid in self.decoding:
                self.decoding.remove(rid)
        for rid in plan.admit:
            assert rid not in self.aborted
            if rid not in self.admitted:
                self.admitted.append(rid)
            self.computed[rid] = 0
            self.launched[rid] = 0
            self.resumed[rid] = len(self.tokens[rid])
        for chunk in plan.chunks:
            assert chunk.rid not in self.held
            assert 0 < chunk.tokens <= self.limits.prefill_step_size
            assert chunk.start == self.computed[chunk.rid]
            self.computed[chunk.rid] += chunk.tokens
            end, last = self.computed[chunk.rid], self.length(chunk.rid) - 1
            assert end <= last
            assert chunk.whole == (chunk.start == 0 and end == last and chunk.rid in plan.join)
            border = chunk.start + BLOCK - chunk.start % BLOCK
            assert chunk.start % BLOCK == 0 or end <= border, "a chunk that begins inside a block and leaves it"
        for rid in plan.join:
            assert rid not in self.held
            assert self.computed.pop(rid) == self.length(rid) - 1
            self.decoding.append(rid)
        assert plan.prefill_tokens <= max(prefill_tokens, MIN_CHUNK)
        assert plan.decode + plan.prefill_tokens <= self.limits.max_num_batched_tokens
        assert len(self.computed) + len(self.decoding) <= self.limits.max_num_seqs

    def length(self, rid: int) -> int:
        """Ids to compute: the prompt and what a parked row had generated."""
        return self.lengths[rid] + self.resumed[rid]

    def finish(self) -> None:
        """Run until nothing is left; every row must have come to one end."""
        work = sum(self.lengths.values()) + sum(self.budgets.values()) + 10
        bound = self.turns + 2 * work + sum(turns for turns, _ in self.holds) * len(self.submitted) * 4
        while self.scheduler.busy or self.in_flight:
            self.turn()
            assert self.turns < bound, "no end in sight"
        assert not self.computed
        assert not self.decoding
        for rid in self.submitted:
            assert (rid in self.ended) != (rid in self.aborted)
            if self.ended.get(rid) == "length":
                assert len(self.tokens[rid]) == self.budgets[rid]
            if self.ended.get(rid) == "stop":
                assert self.tokens[rid][-1] == EOS


limits = st.builds(
    Limits,
    max_num_seqs=st.integers(1, 12),
    max_num_batched_tokens=st.one_of(st.integers(1, 40), st.integers(300, 4000)),
    prefill_step_size=st.one_of(st.integers(1, 300), st.just(2048)),
    depth_cost=st.sampled_from([0.0, 1 / 3000, 1 / 20]),
)
events = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(1, 900), st.integers(1, 6), st.booleans()), max_size=3),  # arrivals
        st.lists(st.integers(0, 40), max_size=2),  # aborts
        st.frozensets(st.integers(0, 40), max_size=3),  # stops
        st.integers(0, 2000),  # prefill tokens
    ),
    max_size=25,
)


holds = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 100)), min_size=1, max_size=5)


@given(limits, events, holds)
@settings(max_examples=300, deadline=None)
def test_every_row_ends_once_and_no_bound_is_passed(limits: Limits, events: list, holds: list) -> None:
    device = Device(limits, holds)
    rid = 0
    for arrivals, aborts, stops, prefill_tokens in events:
        for length, budget, ignore_eos in arrivals:
            device.submit(rid, length, budget, ignore_eos)
            rid += 1
        device.abort(aborts)
        device.turn(prefill_tokens, stops)
    device.finish()
    started = [rid for rid in device.submitted if rid in set(device.admitted)]
    assert device.admitted == started, "admitted out of order"


tight_limits = st.builds(
    Limits,
    max_num_seqs=st.integers(1, 12),
    max_num_batched_tokens=st.integers(300, 4000),
    cache_bytes=st.integers(1200, 4000),
    row_bytes=st.just(one_byte_a_token),
    depth_cost=st.sampled_from([0.0, 1 / 300]),
)


@given(tight_limits, events, holds)
@settings(max_examples=300, deadline=None)
def test_rows_are_parked_and_come_back_when_memory_is_short(limits: Limits, events: list, holds: list) -> None:
    device = Device(limits, holds)
    rid = 0
    for arrivals, aborts, stops, prefill_tokens in events:
        for length, budget, ignore_eos in arrivals:
            device.submit(rid, length, budget * 40, ignore_eos)
            rid += 1
        device.abort(aborts)
        device.turn(prefill_tokens, stops)
    device.finish()


def test_a_held_row_keeps_its_seat_and_goes_on_behind_what_was_found() -> None:
    device = Device(Limits(max_num_seqs=2), holds=[(2, 100), (0, 0)])
    device.submit(0, 600, 2)
    device.submit(1, 300, 1)
    device.submit(2, 300, 1)
    plan = device.turn()
    assert (plan.admit, plan.join) == ([0, 1], [1])
    assert device.turn().chunks == []
    plan = device.turn()
    assert (plan.chunks, plan.join) == ([], [0])
    device.finish()


def test_only_held_rows_leave_nothing_to_do() -> None:
    scheduler = Scheduler(Limits(), lambda rid: True)
    assert scheduler.idle
    scheduler.add(1, 600, 3)
    assert not scheduler.idle
    scheduler.plan(512, 0)
    scheduler.add(2, 1, 1)
    scheduler.abort([2])
    assert scheduler.idle
    assert scheduler.busy
    with pytest.raises(ValueError, match="600"):
        scheduler.go_on(1, 600)
    scheduler.go_on(1, 599)
    scheduler.go_on(7, 3)
    assert not scheduler.idle
    assert scheduler.plan(512, 0).join == [1]


def test_the_newest_row_is_parked_and_goes_on_with_what_it_had() -> None:
    device = Device(Limits(cache_bytes=1000, row_bytes=one_byte_a_token))
    device.submit(0, 200, 400, ignore_eos=True)
    device.submit(1, 200, 400, ignore_eos=True)
    device.finish()
    assert device.scheduler.parkings > 0
    assert device.ended == {0: "length", 1: "length"}
    assert device.resumed[0] == 0
    assert device.resumed[1] > 0


def test_a_row_that_fits_runs_when_nothing_else_does() -> None:
    device = Device(Limits(cache_bytes=300, row_bytes=one_byte_a_token))
    device.submit(0, 290, 5)
    device.finish()
    assert device.ended == {0: "length"}


def test_lower_priority_numbers_go_first() -> None:
    device = Device(Limits(max_num_seqs=1))
    device.submit(0, 4, 1)
    device.submit(1, 4, 1, priority=5)
    device.submit(2, 4, 1, priority=-5)
    device.finish()
    assert device.admitted == [2, 0, 1]


def test_rows_of_equal_priority_go_by_their_turn() -> None:
    device = Device(Limits(max_num_seqs=1))
    for rid, turn in enumerate([0, 1, 2, 1, 0]):
        device.submit(rid, 4, 1, turn=turn)
    device.submit(5, 4, 1, priority=-1, turn=9)
    device.finish()
    assert device.admitted == [5, 0, 4, 1, 3, 2]


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    device = Device(Limits())
    device.submit(0, 16_000, 1)
    device.turn(prefill_tokens=512)
    device.submit(1, 100, 1)
    plan = device.turn(prefill_tokens=512)
    assert plan.join == [1]
    assert {chunk.rid for chunk in plan.chunks} == {0, 1}


@pytest.mark.parametrize("depth_cost", [0.0, 1 / 3000, 1 / 300])
@pytest.mark.parametrize("prefill_tokens", [0, 32, 57, 100])
def test_on_a_slow_model_neither_waits_for_the_other(prefill_tokens: int, depth_cost: float) -> None:
    device = Device(Limits(depth_cost=depth_cost))
    device.submit(0, 8000, 1)
    while device.computed.get(0, 0) < 6000:
        device.turn(prefill_tokens=4000)
    deep = device.computed[0]
    device.submit(1, 138, 1)
    turns = 0
    while 1 not in device.ended:
        plan = device.turn(prefill_tokens=prefill_tokens)
        if 1 not in plan.drop:
            assert plan.prefill_cost <= max(prefill_tokens, MIN_CHUNK) + MIN_PIECE * (1 + depth_cost * 8000)
        turns += 1
        assert turns < 15
    assert device.computed[0] >= deep + (turns - 3) * MIN_PIECE


def test_what_a_turn_costs_is_counted_by_depth() -> None:
    scheduler = Scheduler(Limits(depth_cost=1 / 1000))
    scheduler.add(0, 5000, 1)
    first = scheduler.plan(1550, 0)
    assert first.prefill_tokens == 1024  # for 1024 * (1 + 0.512), on a border
    assert first.prefill_cost == pytest.approx(1024 * 1.512)
    deeper = scheduler.plan(1180, 0)
    assert deeper.prefill_tokens == 512
    assert deeper.prefill_cost == pytest.approx(512 * (1 + 1.024 + 0.256))


def test_equal_prompts_are_computed_whole_whatever_a_turn_has_time_for() -> None:
    """Each piece of one would be a forward of its own, and no group's."""
    for tokens in (573, 600, 1024, 1234, 3000, 4096):
        device = Device(Limits(depth_cost=1 / 360))
        for rid in range(40):
            device.submit(rid, 220, 4)
        while len(device.ended) < 40:
            plan = device.turn(prefill_tokens=tokens)
            assert all(chunk.whole for chunk in plan.chunks)
            assert plan.prefill_cost <= tokens


def test_of_prompts_too_long_for_a_turn_one_is_begun_beside_the_first() -> None:
    device = Device(Limits(depth_cost=1 / 360))
    for rid in range(8):
        device.submit(rid, 220, 4)
    begun: set[int] = set()
    while len(device.ended) < 8:
        plan = device.turn(prefill_tokens=400)
        fresh = {chunk.rid for chunk in plan.chunks if not chunk.whole} - begun
        begun |= fresh
        assert len(fresh) <= 2


def test_a_row_that_others_wait_for_goes_as_early_as_they_would() -> None:
    scheduler = Scheduler(Limits(max_num_batched_tokens=512))
    scheduler.add(0, 4000, 1, priority=9)
    for rid in (1, 2, 3):
        scheduler.add(rid, 3000, 1)
    assert {chunk.rid for chunk in scheduler.plan(1 << 20, 0).chunks} == {1, 2}
    scheduler.lift(0, -1)
    scheduler.lift(7, -1)
    chunks = scheduler.plan(1 << 20, 0).chunks
    assert sum(chunk.tokens for chunk in chunks if chunk.rid == 0) == 256
    scheduler.lift(0, 5)
    assert 0 in {chunk.rid for chunk in scheduler.plan(1 << 20, 0).chunks}


def test_endless_short_prompts_leave_a_long_one_half_of_each_turn() -> None:
    device = Device(Limits())
    device.submit(0, 16_000, 1)
    turns = 0
    while 0 not in device.ended:
        for _ in range(5):
            device.submit(1 + turns * 5 + _, 300, 1)
        device.turn(prefill_tokens=512)
        turns += 1
    assert turns <= 16_000 / 256 + 5


def test_prompts_are_computed_whole_where_a_turn_has_room_for_whole_ones() -> None:
    scheduler = Scheduler(Limits())
    scheduler.add(1, 10, 100)
    scheduler.plan(1000, 0)
    for rid in range(2, 12):
        scheduler.add(rid, 220, 100)
    joined: list[int] = []
    while len(joined) < 10:
        plan = scheduler.plan(1000, 0)
        assert all(chunk.whole for chunk in plan.chunks)
        assert len(plan.join) >= 2
        joined += plan.join
    assert sorted(joined) == [*range(2, 12)]
    assert scheduler.plan(100, 0).chunks == []


def test_one_that_is_too_long_for_a_turn_is_cut() -> None:
    scheduler = Scheduler(Limits())
    scheduler.add(1, 10, 100)
    scheduler.plan(1000, 0)
    for rid in range(2, 5):
        scheduler.add(rid, 220, 100)
    joined: list[int] = []
    for _ in range(20):
        joined += scheduler.plan(100, 0).join
    assert sorted(joined) == [2, 3, 4]


def test_thousands_of_rows_come_through() -> None:
    device = Device(Limits(max_num_seqs=64))
    for rid in range(3000):
        device.submit(rid, 1 + rid * 37 % 500, 1 + rid % 5)
        if rid % 10 == 0:
            device.turn()
            device.abort([rid - 7, rid])
    device.finish()
    assert len(device.ended) + len(device.aborted) == 3000


def test_chunks_run_beside_decoding() -> None:
    device = Device(Limits(max_num_batched_tokens=512))
    device.submit(0, 1, 50)
    device.turn()
    device.submit(1, 1500, 1)
    plans = [device.turn() for _ in range(6)]
    assert [plan.prefill_tokens for plan in plans[:3]] == [384, 384, 384]
    assert all(plan.decode for plan in plans)


@given(st.integers(0, 3000), st.integers(0, 3000), st.integers(0, 2048))
def test_chunks_of_a_long_prompt_are_of_useful_size(computed: int, left: int, room: int) -> None:
    count = chunk_tokens(computed, left, room)
    assert 0 <= count <= min(left, room)
    ahead = min(BLOCK - computed % BLOCK, left)
    if left <= room:
        assert count == left
    elif room >= ahead:
        assert room - count < PART  # little of the room is left unused …
        assert (count - ahead) % PART == 0  # … and a block is not begun with a sliver
    elif room:
        parts = -(-ahead // room)
        assert parts * count >= ahead > parts * (count - 1)


def test_a_long_prompt_with_room_for_less_than_a_block_falls_into_equal_parts() -> None:
    device = Device(Limits())
    device.submit(0, 2000, 1)
    chunks = [device.turn(prefill_tokens=200).chunks for _ in range(8)]
    assert [(chunk.start, chunk.tokens) for turn in chunks for chunk in turn] == [(n * 128, 128) for n in range(8)]


def test_a_chunk_across_a_border_is_cut_there() -> None:
    device = Device(Limits())
    device.submit(0, 3000, 1)
    device.turn(prefill_tokens=400)
    chunks = device.turn(prefill_tokens=1000).chunks
    assert [(chunk.start, chunk.tokens) for chunk in chunks] == [(384, 128), (512, 768)]


def test_a_row_that_fits_joins_in_the_same_turn() -> None:
    device = Device(Limits())
    device.submit(0, 10, 3)
    plan = device.turn()
    assert (plan.admit, plan.join, plan.decode) == ([0], [0], 1)
    assert plan.chunks == [(0, 0, 9, True)]


def test_a_budget_of_one_takes_one_step() -> None:
    device = Device(Limits())
    device.submit(0, 4, 1)
    assert device.turn().decode == 1
    plan = device.turn()
    assert (plan.drop, plan.decode) == ([0], 0)
    assert device.ended == {0: "length"}


def test_stop_wins_over_length_and_ignore_eos_over_stop() -> None:
    device = Device(Limits())
    device.submit(0, 4, 1)
    device.submit(1, 4, 2, ignore_eos=True)
    for _ in range(4):
        device.turn(stops=frozenset({0, 1}))
    assert device.ended == {0: "stop", 1: "length"}
    assert device.tokens == {0: [EOS], 1: [EOS, EOS]}


def test_a_small_time_budget_still_admits_a_chunk() -> None:
    device = Device(Limits())
    device.submit(0, 5000, 1)
    assert device.turn(prefill_tokens=0).prefill_tokens == MIN_CHUNK


def adapters_in(scheduler: Scheduler, rows: list[tuple[int, str]]) -> list[int]:
    """Queue rows, and the rows that the next plan admits."""
    for rid, adapter in rows:
        scheduler.add(rid, 4, 100, adapter=adapter)
    return scheduler.plan(1000, 0).admit


def test_rows_have_so_many_adapters_at_most_and_others_pass() -> None:
    scheduler = Scheduler(Limits(max_loras=2))
    assert adapters_in(scheduler, [(1, "a"), (2, "b"), (3, "c"), (4, ""), (5, "a"), (6, "d")]) == [1, 2, 4, 5]
    scheduler.abort([1])
    assert scheduler.plan(1000, 0).admit == [], "row 5 has the same"
    scheduler.abort([5])
    assert scheduler.plan(1000, 0).admit == [3]
    scheduler.abort([2, 3])
    assert scheduler.plan(1000, 0).admit == [6]


def test_a_row_whose_adapter_finds_no_place_is_passed_only_so_often() -> None:
    scheduler = Scheduler(Limits(max_loras=1))
    adapters_in(scheduler, [(0, "a"), (1, "b")])
    for rid in range(2, 2 + PASSES):
        assert adapters_in(scheduler, [(rid, "a")]) == [rid]
    assert adapters_in(scheduler, [(100, "a"), (101, "")]) == [101]
    scheduler.abort(range(2 + PASSES))
    assert scheduler.plan(1000, 0).admit == [100], "row 1 was aborted, too"
    adapters_in(scheduler, [(102, "b"), (103, "a")])
    scheduler.abort([100, 103])
    assert scheduler.plan(1000, 0).admit == [102]


def test_aborts_of_unknown_and_gone_rows_are_normal() -> None:
    device = Device(Limits())
    device.submit(0, 4, 1)
    device.scheduler.abort([5])
    device.finish()
    device.scheduler.abort([0, 0, 5])
    assert not device.scheduler.busy


def test_a_row_number_in_use_is_refused() -> None:
    scheduler = Scheduler(Limits())
    scheduler.add(1, 3, 3)
    with pytest.raises(ValueError, match="in use"):
        scheduler.add(1, 3, 3)
    with pytest.raises(ValueError, match="budget"):
        scheduler.add(2, 3, 0)
