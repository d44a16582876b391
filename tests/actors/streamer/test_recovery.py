"""Who goes back to a new engine, in which order, and who is blamed for a death."""

from hypothesis import given, settings
from hypothesis import strategies as st

from actors.streamer.recovery import Recovery


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


def test_everything_is_due_at_once_while_nothing_has_gone_wrong():
    recovery = Recovery(8)
    recovery.add(1)
    assert recovery.due() == []
    recovery.engine_up()
    assert recovery.due() == [1]
    recovery.add(2)
    assert recovery.due() == [2]
    assert recovery.due() == []


def test_decoding_streams_go_back_at_once_and_suspects_one_at_a_time():
    recovery = started(1, 2, 3, 4)
    step(recovery, 1, 2)
    assert recovery.engine_down() == []
    recovery.add(5)
    assert recovery.due() == []
    recovery.engine_up()
    assert recovery.due() == [1, 2]
    assert recovery.due() == []  # until the engine has shown that it can step
    assert step(recovery, 1) == [3]
    assert step(recovery, 1, 2) == []
    assert step(recovery, 3) == [4]
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
    assert step(recovery, 1) == [2]
    assert recovery.engine_down() == []  # 2 is charged, and goes last
    recovery.engine_up()
    assert recovery.due() == [1]
    assert step(recovery, 1) == [3]
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
    assert step(recovery, 1) == [2]
    recovery.admitted([2])
    assert recovery.due() == [3]
    recovery.admitted([3])
    assert recovery.due() == []
    assert step(recovery, 2) == [4]


def test_two_on_trial_are_not_charged_and_are_tried_alone_later():
    recovery = started(1, 2, 3, 4)
    step(recovery, 1)
    recovery.engine_down()
    recovery.engine_up()
    recovery.due()
    assert step(recovery, 1) == [2]
    recovery.admitted([2])
    assert recovery.due() == [3]
    assert recovery.engine_down() == []
    recovery.engine_up()
    assert recovery.due() == [1]
    assert step(recovery, 1) == [4]
    recovery.admitted([4])
    assert recovery.due() == []  # 2 wants to be alone
    assert step(recovery, 4) == [2]
    recovery.admitted([2])
    assert recovery.due() == []
    assert recovery.engine_down() == []
    recovery.engine_up()
    recovery.due()
    assert step(recovery, 1) == [3]
    recovery.admitted([3])
    assert step(recovery, 3) == [2]
    assert recovery.engine_down() == [2]


def test_the_only_suspect_is_charged_for_the_first_death_already():
    recovery = started(1, 2, 3)
    step(recovery, 1, 2)
    assert recovery.engine_down() == []
    recovery.engine_up()
    assert recovery.due() == [1, 2]
    assert step(recovery, 2) == [3]
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
        step(recovery, 1)


def test_a_charge_is_forgotten_when_the_stream_decodes():
    recovery = started(1)
    for _ in range(4):
        assert recovery.engine_down() == []  # without a step: the only one there is charged
        recovery.engine_up()
        assert recovery.due() == [1]
        step(recovery, 1)
        recovery.engine_down()
        recovery.engine_up()
        assert recovery.due() == [1]


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
    assert step(recovery, 1) == [2]


def test_streams_that_had_no_seat_are_no_suspects_and_wait_for_those():
    recovery = started(1, 2, 3, 4, 5, seats=3)
    recovery.admitted([1, 2])
    step(recovery, 1)
    recovery.engine_down()
    recovery.engine_up()
    assert recovery.due() == [1]
    assert step(recovery, 1) == [2]
    assert step(recovery, 2) == [3]  # one more could have been admitted in the turn that it died in
    assert step(recovery, 3) == [4, 5]


def test_a_row_that_kills_while_it_waits_for_a_seat_is_found_without_a_trail():
    recovery = started(1, 2, 3, seats=1)
    recovery.admitted([1])
    step(recovery, 1)
    recovery.engine_down()
    recovery.engine_up()
    assert recovery.due() == [1]
    assert step(recovery, 1) == [2]
    assert recovery.engine_down() == []
    recovery.engine_up()
    assert recovery.due() == [1]
    assert step(recovery, 1) == [3]
    assert step(recovery, 3) == [2]
    assert recovery.engine_down() == [2]


def test_the_trail_of_the_engine_tells_the_suspects_from_those_that_waited():
    recovery = started(1, 2, 3, 4)
    recovery.admitted([1, 2, 3, 4])
    step(recovery, 1)
    recovery.engine_down(trail={1, 3})
    recovery.engine_up()
    assert recovery.due() == [1]
    assert step(recovery, 1) == [3]
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
    assert step(recovery, 1) == [2]
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
