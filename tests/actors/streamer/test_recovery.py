"""Who goes back to a new engine, in which order, and who is blamed for a death."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from actors.streamer.recovery import ON_TRIAL, PASSED, REPEATS, TOGETHER, Recovery


def started(*rids, seats=8):
    recovery = Recovery(seats)
    recovery.engine_up()
    for rid in rids:
        recovery.add(rid)
    assert recovery.due() == list(rids)
    return recovery


def step(recovery, *rids):
    recovery.decoded(rids)
    return recovery.due()


def passes(recovery, *rids):
    """Steps until these, which have gone back, are beyond the place where the engine died."""
    for _ in range(PASSED - 1):
        recovery.decoded(rids)
    return step(recovery, *rids)


def test_everything_is_due_at_once_while_nothing_has_gone_wrong():
    recovery = Recovery(8)
    recovery.add(1)
    assert recovery.due() == []
    recovery.engine_up()
    assert recovery.due() == [1]
    recovery.add(2)
    assert recovery.due() == [2]
    assert recovery.due() == []


def test_decoding_streams_go_back_at_once_and_few_suspects_one_at_a_time():
    recovery = started(1, 2, 3, 4)
    step(recovery, 1, 2)
    assert recovery.engine_down() == []
    recovery.add(5)
    assert recovery.due() == []
    recovery.engine_up()
    assert recovery.due() == [1, 2]
    assert recovery.due() == []  # until the engine has shown that it can step
    assert passes(recovery, 1) == [3]
    assert step(recovery, 1, 2) == []
    assert step(recovery, 3) == []  # 2 is not beyond its place yet
    assert passes(recovery, 2) == [4]
    assert recovery.suspicious
    assert step(recovery, 4) == [5]
    assert step(recovery, 5) == []
    assert not recovery.suspicious


def test_suspects_begin_at_once_when_nothing_else_runs():
    recovery = started(1, 2)
    recovery.engine_down()
    recovery.engine_up()
    assert recovery.due() == [1]
    recovery.remove(1)
    assert recovery.due() == [2]


def test_a_death_on_trial_is_charged_to_the_suspect_alone_and_the_second_gives_it_up():
    recovery = started(1, 2, 3)
    step(recovery, 1)
    recovery.engine_down()
    recovery.engine_up()
    assert recovery.due() == [1]
    assert passes(recovery, 1) == [2]
    assert recovery.engine_down() == []  # 2 is charged, and goes last
    recovery.engine_up()
    assert recovery.due() == [1]
    assert passes(recovery, 1) == [3]
    assert step(recovery, 3) == [2]
    assert recovery.engine_down() == [2]
    assert 2 not in recovery
    recovery.engine_up()
    assert recovery.due() == [1, 3]


def test_the_next_suspect_follows_when_the_one_before_is_admitted():
    recovery = started(1, 2, 3, 4)
    step(recovery, 1)
    recovery.engine_down()
    recovery.engine_up()
    assert recovery.due() == [1]
    assert passes(recovery, 1) == [2]
    recovery.admitted([2])
    assert recovery.due() == [3]
    recovery.admitted([3])
    assert recovery.due() == [4]


def test_one_more_group_is_on_its_way_after_each_turn():
    recovery = started(*range(1, 11), seats=16)
    step(recovery, 1)
    recovery.engine_down()
    recovery.engine_up()
    assert recovery.due() == [1]
    assert passes(recovery, 1) == [2, 3, 4]  # the root of nine is three
    assert recovery.due() == []  # not two groups in one turn
    recovery.admitted([])
    assert recovery.due() == [5, 6, 7]
    recovery.admitted([2, 3])
    assert recovery.due() == []  # two groups are on their way
    recovery.admitted([4])
    assert recovery.due() == [8, 9, 10]


def test_so_many_groups_are_on_trial_at_once_and_no_more():
    suspects = range(2, 2 + TOGETHER * (ON_TRIAL + 1))
    groups = [list(suspects[at : at + TOGETHER]) for at in range(0, len(suspects), TOGETHER)]
    recovery = started(1, *suspects, seats=64)
    step(recovery, 1)
    recovery.engine_down()
    recovery.engine_up()
    recovery.due()
    assert passes(recovery, 1) == groups[0]
    for before, group in pairwise(groups[:ON_TRIAL]):
        recovery.admitted(before)
        assert recovery.due() == group
    recovery.admitted(groups[ON_TRIAL - 1])
    assert recovery.due() == []
    assert step(recovery, *groups[0][1:]) == []
    assert step(recovery, groups[0][0]) == groups[ON_TRIAL]


def test_of_those_on_trial_the_trail_tells_which_it_was():
    recovery = started(1, 2, 3, 4)
    step(recovery, 1)
    recovery.engine_down()
    recovery.engine_up()
    recovery.due()
    assert passes(recovery, 1) == [2]
    recovery.admitted([])
    assert recovery.due() == [3]
    assert recovery.engine_down(trail={2}) == []  # 2 is charged, 3 had not been begun
    recovery.engine_up()
    recovery.due()
    assert passes(recovery, 1) == [3]
    recovery.admitted([3])
    assert recovery.due() == [4]
    recovery.decoded([3])
    assert step(recovery, 4) == [2]
    assert recovery.engine_down(trail={2}) == [2]


def test_two_on_trial_are_not_charged_and_are_tried_alone_later():
    recovery = started(1, 2, 3, 4)
    step(recovery, 1)
    recovery.engine_down()
    recovery.engine_up()
    recovery.due()
    assert passes(recovery, 1) == [2]
    recovery.admitted([2])
    assert recovery.due() == [3]
    assert recovery.engine_down() == []
    recovery.engine_up()
    assert recovery.due() == [1]
    assert passes(recovery, 1) == [4]
    recovery.admitted([4])
    assert recovery.due() == []  # 2 wants to be alone
    assert step(recovery, 4) == [2]
    recovery.admitted([2])
    assert recovery.due() == []
    assert recovery.engine_down() == []
    recovery.engine_up()
    recovery.due()
    assert passes(recovery, 1) == [3]
    recovery.admitted([3])
    assert step(recovery, 3) == [2]
    assert recovery.engine_down() == [2]


def test_of_a_group_in_which_two_kill_both_are_found_and_nobody_else():
    good, bad = (1, 2, 5, 6, 7, 8, 9, 10), (3, 4)
    recovery = started(*sorted(good + bad), seats=16)
    step(recovery, 1)
    assert recovery.engine_down(trail=set(range(2, 11))) == []
    recovery.engine_up()
    assert recovery.due() == [1]
    assert passes(recovery, 1) == [2, 3, 4]
    recovery.admitted([2, 3, 4])  # computed in one forward, so that the trail has all of them
    assert recovery.due() == [5, 6, 7]
    assert recovery.engine_down(trail={2, 3, 4}) == []
    recovery.engine_up()
    assert recovery.due() == [1]
    assert passes(recovery, 1) == [5, 6, 7]
    recovery.admitted([5, 6, 7])
    assert recovery.due() == [8, 9, 10]
    recovery.admitted([8, 9, 10])
    assert recovery.due() == []
    assert step(recovery, 5, 6, 7, 8, 9, 10) == [2]
    assert step(recovery, 2) == [3]
    assert recovery.engine_down(trail={3}) == []
    recovery.engine_up()
    back = recovery.due()
    assert sorted(back) == sorted(good)
    assert passes(recovery, *back) == [4]  # 3 goes last: it has been charged
    assert recovery.engine_down(trail={4}) == []
    for killer in (4, 3):
        recovery.engine_up()
        back = recovery.due()
        assert sorted(back) == sorted(good)
        assert passes(recovery, *back) == [killer]
        assert recovery.engine_down(trail={killer}) == [killer]
    recovery.engine_up()
    assert sorted(recovery.due()) == sorted(good)


def test_the_only_suspect_is_charged_for_the_first_death_already():
    recovery = started(1, 2, 3)
    step(recovery, 1, 2)
    assert recovery.engine_down() == []
    recovery.engine_up()
    assert recovery.due() == [1, 2]
    assert passes(recovery, 2) == [3]
    assert recovery.engine_down() == [3]


def test_a_suspect_that_decodes_is_cleared():
    recovery = started(1)
    recovery.engine_down()
    recovery.engine_up()
    assert recovery.due() == [1]
    step(recovery, 1)
    for _ in range(5):
        assert recovery.engine_down() == []
        recovery.engine_up()
        assert recovery.due() == [1]
        passes(recovery, 1)


def test_a_charge_is_forgotten_when_the_stream_decodes():
    recovery = started(1)
    for _ in range(4):
        assert recovery.engine_down() == []  # without a step: the only one there is charged
        recovery.engine_up()
        assert recovery.due() == [1]
        passes(recovery, 1)
        recovery.engine_down()
        recovery.engine_up()
        assert recovery.due() == [1]


def dies_near(recovery, *rids):
    """The engine comes up, these decode a token, and it dies."""
    recovery.engine_up()
    assert recovery.due() == list(rids)
    step(recovery, *rids)
    return recovery.engine_down(trail=set())


def test_a_stream_that_kills_at_one_place_while_it_decodes_is_found_in_groups():
    recovery = started(*range(1, 10), seats=16)
    step(recovery, *range(1, 10))
    assert recovery.engine_down(trail=set()) == []
    for _ in range(REPEATS):
        assert recovery.suspects == 0
        assert dies_near(recovery, *range(1, 10)) == []
    assert recovery.suspects == 9
    recovery.add(10)
    recovery.engine_up()
    assert recovery.due() == [1, 2, 3]
    assert recovery.suspicious
    assert passes(recovery, 1, 2, 3) == [4, 5, 6]
    assert recovery.engine_down(trail=set()) == []
    recovery.engine_up()
    assert recovery.due() == [1, 2, 3]
    assert passes(recovery, 1, 2, 3) == [7, 8]  # the root of six is two
    assert passes(recovery, 7, 8) == [9]
    assert passes(recovery, 9) == [4]
    assert passes(recovery, 4) == [5]
    assert recovery.engine_down(trail=set()) == []
    recovery.engine_up()
    assert recovery.due() == [1, 2, 3, 4, 7, 8, 9]
    assert passes(recovery, 1, 2, 3, 4, 7, 8, 9) == [6]
    assert passes(recovery, 6) == [5]
    step(recovery, 5)  # one token is not enough
    assert recovery.engine_down(trail=set()) == [5]
    recovery.engine_up()
    assert recovery.due() == [1, 2, 3, 4, 6, 7, 8, 9]
    assert passes(recovery, 1, 2, 3, 4, 6, 7, 8, 9) == [10]


def test_the_only_stream_that_kills_while_it_decodes_is_given_up():
    recovery = started(1)
    step(recovery, 1)
    assert recovery.engine_down() == []
    for _ in range(REPEATS):
        assert dies_near(recovery, 1) == []
    assert dies_near(recovery, 1) == [1]


def test_nobody_is_charged_for_a_death_beside_streams_that_are_near_their_place():
    recovery = started(1, 2)
    step(recovery, 1)
    assert recovery.engine_down() == []  # 2 is charged: it is the only one that was new
    recovery.engine_up()
    recovery.due()
    assert passes(recovery, 1) == [2]
    recovery.engine_down(planned=True)
    recovery.engine_up()
    assert recovery.due() == [1]
    step(recovery, 1)
    assert recovery.engine_down() == []
    recovery.engine_up()
    assert passes(recovery, *recovery.due()) == [2]


def test_resumed_streams_are_suspects_only_after_a_death_without_a_step():
    recovery = started(1, 2)
    step(recovery, 1, 2)
    recovery.engine_down()
    recovery.engine_up()
    assert recovery.due() == [1, 2]
    step(recovery, 1)
    recovery.engine_down()
    recovery.engine_up()
    assert recovery.due() == [1, 2]
    recovery.engine_down()
    recovery.engine_up()
    assert recovery.due() == [1]
    assert passes(recovery, 1) == [2]


def test_streams_that_had_no_seat_are_no_suspects_and_wait_for_those():
    recovery = started(1, 2, 3, 4, 5, seats=3)
    recovery.admitted([1, 2])
    step(recovery, 1)
    recovery.engine_down()
    recovery.engine_up()
    assert recovery.due() == [1]
    assert passes(recovery, 1) == [2]
    assert passes(recovery, 2) == [3]  # one more could have been admitted in the turn that it died in
    assert step(recovery, 3) == [4, 5]


def test_a_row_that_kills_while_it_waits_for_a_seat_is_found_without_a_trail():
    recovery = started(1, 2, 3, seats=1)
    recovery.admitted([1])
    step(recovery, 1)
    recovery.engine_down()
    recovery.engine_up()
    assert recovery.due() == [1]
    assert passes(recovery, 1) == [2]
    assert recovery.engine_down() == []
    recovery.engine_up()
    assert recovery.due() == [1]
    assert passes(recovery, 1) == [3]
    assert step(recovery, 3) == [2]
    assert recovery.engine_down() == [2]


def test_the_trail_of_the_engine_tells_the_suspects_from_those_that_waited():
    recovery = started(1, 2, 3, 4)
    recovery.admitted([1, 2, 3, 4])
    step(recovery, 1)
    recovery.engine_down(trail={1, 3})
    recovery.engine_up()
    assert recovery.due() == [1]
    assert passes(recovery, 1) == [3]
    assert step(recovery, 3) == [2, 4]


def test_a_resumed_stream_off_the_trail_is_no_suspect():
    recovery = started(1, 2)
    step(recovery, 1, 2)
    recovery.engine_down()
    recovery.engine_up()
    assert recovery.due() == [1, 2]
    assert recovery.engine_down(trail={2}) == []
    recovery.engine_up()
    assert recovery.due() == [1]
    assert passes(recovery, 1) == [2]
    assert recovery.engine_down(trail={2}) == [2]


def test_the_engine_admits_by_priority():
    recovery = Recovery(1)
    recovery.engine_up()
    recovery.add(1, priority=5)
    recovery.add(2, priority=0)
    recovery.due()
    recovery.engine_down()
    recovery.engine_up()
    assert recovery.due() == [2]
    assert recovery.suspicious


def test_a_planned_replacement_blames_nobody():
    recovery = started(1, 2, 3)
    step(recovery, 1)
    for _ in range(3):
        assert recovery.engine_down(planned=True) == []
        recovery.engine_up()
        assert recovery.due() == [1, 2, 3]


def test_an_idle_engine_that_dies_blames_nobody():
    recovery = started()
    assert not recovery.suspicious
    assert recovery.engine_down() == []


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "step", "admit", "remove", "down", "down", "up", "planned"]), st.integers(0, 9)
    ),
    max_size=80,
)


@given(EVENTS, st.sets(st.integers(0, 9), max_size=2), st.booleans())
@settings(max_examples=200)
def test_no_stream_is_lost_or_given_twice_and_poison_alone_is_given_up(events, bad, with_trail):
    """Streams whose number ends in one of `bad` kill the engine when they are admitted; others never do. In the end
    every good one decodes, however often the engine died."""
    recovery = Recovery(4)
    alive: set[int] = set()
    decoded: set[int] = set()
    engine: set[int] | None = None
    numbers = iter(range(10_000))

    def submit():
        due = recovery.due()
        assert not due or engine is not None
        for rid in due:
            assert rid in alive
            assert rid not in engine
            engine.add(rid)

    def die(planned=False):
        nonlocal engine
        if engine is None:
            return
        trail = {rid for rid in engine if rid % 10 in bad} | set(sorted(engine)[:2]) if with_trail else None
        engine = None
        for rid in recovery.engine_down(planned, trail):
            assert rid % 10 in bad or deaths_from_outside
            alive.discard(rid)

    def turn(rids):
        """One step of the engine for these; it dies of what is bad."""
        if engine is None:
            return
        if any(rid % 10 in bad for rid in engine):
            die()
            return
        now = [rid for rid in rids if rid in engine]
        decoded.update(now)
        recovery.decoded(now)

    deaths_from_outside = False
    for what, number in events:
        if what == "add":
            rid = next(numbers)
            alive.add(rid)
            recovery.add(rid)
        elif what == "step" and engine:
            turn(sorted(engine)[: number + 1])
        elif what == "admit" and engine:
            recovery.admitted(sorted(engine)[:4])
        elif what == "remove" and alive:
            rid = sorted(alive)[number % len(alive)]
            alive.discard(rid)
            recovery.remove(rid)
            if engine is not None:
                engine.discard(rid)
        elif what == "down":
            deaths_from_outside = True
            die()
        elif what == "planned":
            die(planned=True)
        elif what == "up" and engine is None:
            engine = set()
            recovery.engine_up()
        submit()
    for _ in range(6 * len(alive) + 6):
        if engine is None:
            engine = set()
            recovery.engine_up()
        submit()
        turn(sorted(engine))
        if engine is not None:
            submit()
    good = {rid for rid in alive if rid % 10 not in bad}
    assert good <= decoded
    assert good <= (engine or set())
    assert alive == good, "poison is given up"


LENGTH = 16  # tokens of each stream


class Rows:
    """An engine of rows. Token `kills[rid]` of a row kills it (0: its prefill does), `lag` steps unsent."""

    def __init__(self, recovery, kills, lag):
        self.recovery = recovery
        self.kills = kills
        self.lag = lag
        self.got = {}  # tokens that the streamer has of each stream
        self.deaths = 0
        self.given_up = []
        self.rows = {}  # in the engine: tokens computed, negative while it prefills
        self.late = []
        self.touched = []
        self.up = False

    def start(self):
        self.recovery.engine_up()
        self.rows, self.late, self.touched, self.up = {}, [], [set(), set()], True
        self.submit()

    def submit(self):
        for rid in self.recovery.due():
            assert rid not in self.rows
            self.rows[rid] = -1 - rid % 3
            self.touched[-1].add(rid)

    def turn(self):
        """A step of all rows: those that prefill get nearer, others a token; the tokens of `lag` steps ago are told."""
        prefilling = {rid for rid, tokens in self.rows.items() if tokens < 0}
        trail = prefilling.union(*self.touched)
        self.touched = [self.touched[-1], prefilling]
        self.recovery.admitted(prefilling)
        step = []
        for rid in self.rows:
            if self.rows[rid] < 0:
                self.rows[rid] += 1
                if self.rows[rid]:
                    continue
                self.rows[rid] = self.got.get(rid, 0)
                if self.kills.get(rid) == 0:
                    return self.die(trail)
            if self.rows[rid] < LENGTH:
                self.rows[rid] += 1
                step.append(rid)
                if self.rows[rid] == self.kills.get(rid):
                    return self.die(trail)
        self.late.append(step)
        if len(self.late) > self.lag:
            self.tell(self.late.pop(0))
        self.submit()

    def tell(self, rids):
        self.recovery.decoded(rids)
        for rid in rids:
            self.got[rid] = self.got.get(rid, 0) + 1
            if self.got[rid] == LENGTH:
                self.recovery.remove(rid)
                del self.rows[rid]

    def die(self, trail):
        self.up = False
        self.deaths += 1
        self.given_up += self.recovery.engine_down(trail=trail)


@given(
    st.integers(1, 40),
    st.integers(0, LENGTH),
    st.integers(0, 39),
    st.sets(st.integers(0, 39), max_size=3),
    st.integers(0, 2),
    st.integers(0, 6),
)
@settings(max_examples=60)
def test_a_stream_that_kills_while_it_decodes_is_given_up_alone(count, place, killer, poison, lag, spread):
    """`count` streams come, `spread` turns between two of them; one kills at a place, up to three at their prompts."""
    kills = {rid: 0 for rid in poison if rid < count} | ({killer: place} if killer < count else {})
    rows = Rows(Recovery(64), kills, lag)
    for turn in range(3000):
        if not rows.up:
            rows.start()
        rid, due = divmod(turn, spread + 1)
        if not due and rid < count:
            rows.recovery.add(rid)
            rows.submit()
        if rid >= count and not rows.rows:
            break
        rows.turn()
    assert sorted(rows.given_up) == sorted(kills)
    assert {rid for rid, got in rows.got.items() if got == LENGTH} == set(range(count)) - set(kills)
    assert rows.deaths <= len(kills) * (REPEATS + 5)
