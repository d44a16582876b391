"""What the supervisor decides: who is replaced and when, who is killed for hanging, and when it gives up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.supervision import (
    FAILURES,
    FIRST_DELAY,
    LAST_WORDS,
    LONGEST_DELAY,
    REPLACE_TIME,
    SILENCE_LIMIT,
    STEADY,
    GiveUp,
    Kill,
    Start,
    Supervision,
)
from actors.supervision_hangs import FIRST_STEP, LEAST, TIMES, StepWatch
from protocol.messages import Alive, EngineStats, EngineUse, ModelCard, Ready


class Rig:
    """A table with a clock, and processes that do what a test says."""

    def __init__(self, **settings):
        self.table = Supervision(tokenizers=2, http_workers=1, start_timeout=60.0, **settings)
        self.now = 0.0
        self.epochs = 0
        for slot in self.table.slots:
            self.start(slot)

    @property
    def engine(self):
        return self.table.of_role("engine")[0]

    def start(self, slot):
        self.epochs += 1
        self.table.started(slot, 1000 + self.epochs, self.epochs, self.now)

    def ready(self, slot):
        card = ModelCard("demo", 8192) if slot.role == "engine" else None
        self.table.ready(Ready(slot.role, slot.index, slot.epoch, slot.pid, f"ipc://{slot.name}", card), self.now)

    def all_ready(self):
        for slot in self.table.slots:
            self.ready(slot)
        return self

    def die(self, slot, text="was ended by SIGKILL"):
        self.table.exited(slot, text, self.now)

    def after(self, seconds):
        self.now += seconds
        return self.table.decide(self.now)

    def restart(self, slot):
        """Let a dead actor come back; returns after how many seconds it was started."""
        died = slot.exited
        while True:
            actions = self.after(0.05)
            assert not any(isinstance(action, GiveUp) for action in actions), actions
            if Start(slot) in actions:
                self.start(slot)
                return self.now - died

    def steps(self, slot, step=1, **load):
        self.table.alive(Alive("engine", 0, slot.epoch, 1, stats=EngineStats(step=step, **load)), self.now)


def test_ready_when_every_actor_is():
    rig = Rig()
    assert {slot.name for slot in rig.table.slots} == {"http0", "streamer", "tokenizer0", "tokenizer1", "engine"}
    assert not rig.table.all_ready()
    rig.all_ready()
    assert rig.table.all_ready()
    assert rig.table.card == ModelCard("demo", 8192)
    assert rig.after(1e6) == []


def test_reports_of_another_incarnation_are_dropped():
    rig = Rig()
    engine = rig.engine
    rig.table.ready(Ready("engine", 0, engine.epoch + 1, 1), 0.0)
    rig.table.failed("engine", 0, engine.epoch + 1, "no")
    rig.table.used(EngineUse(engine.epoch + 1, True, True))
    rig.table.alive(Alive("engine", 0, engine.epoch + 1, 1, stats=EngineStats(step=9)), 0.0)
    assert (engine.state, engine.error, engine.stepped, rig.table.engine.step) == ("starting", "", False, 0)


@pytest.mark.parametrize("name", ["http0", "streamer", "tokenizer0", "tokenizer1", "engine"])
def test_a_dead_actor_is_replaced_by_a_new_incarnation_once_it_is_reaped(name):
    rig = Rig().all_ready()
    slot = next(slot for slot in rig.table.slots if slot.name == name)
    epoch = slot.epoch
    rig.die(slot)
    assert rig.after(LAST_WORDS / 2) == []
    assert rig.restart(slot) < 0.5
    assert (slot.state, slot.epoch > epoch, slot.exit_text, slot.endpoint) == ("starting", True, "", "")
    rig.ready(slot)
    assert rig.table.all_ready()


def test_before_the_system_has_served_an_actor_that_says_why_ends_it():
    rig = Rig()
    rig.table.failed("engine", 0, rig.engine.epoch, "no such architecture")
    rig.die(rig.engine, "exited with code 1")
    assert rig.after(LAST_WORDS + 0.01) == [GiveUp("engine can't start: no such architecture")]


def test_a_first_start_that_takes_too_long_ends_the_system_with_a_remedy():
    rig = Rig()
    assert rig.after(59.0) == []
    kills = rig.after(2.0)
    assert {action.slot.name for action in kills} == {slot.name for slot in rig.table.slots}
    assert rig.after(1.0) == []
    rig.die(rig.engine)
    (action,) = rig.after(LAST_WORDS + 0.01)
    assert isinstance(action, GiveUp)
    assert "--start-timeout" in action.why


def test_three_failures_in_a_row_give_up_and_name_the_cause():
    rig = Rig().all_ready()
    for _ in range(FAILURES - 1):
        rig.die(rig.engine, "exited with code 1")
        rig.restart(rig.engine)
    rig.table.failed("engine", 0, rig.engine.epoch, "the weights are gone")
    rig.die(rig.engine, "exited with code 1")
    (action,) = rig.after(LAST_WORDS + 0.01)
    assert action == GiveUp("engine can't start: the weights are gone (failure 3 in a row)")


@pytest.mark.parametrize(
    ("stepped", "suspects", "counts"), [(False, False, True), (False, True, False), (True, False, False)]
)
def test_an_engine_fails_before_its_first_step_unless_a_suspect_was_in_it(stepped, suspects, counts):
    rig = Rig().all_ready()
    for _ in range(20):
        rig.table.used(EngineUse(rig.engine.epoch, stepped, suspects))
        rig.die(rig.engine)
        if any(isinstance(action, GiveUp) for action in rig.after(LAST_WORDS + 0.01)):
            break
        rig.restart(rig.engine)
        rig.ready(rig.engine)
    else:
        assert not counts
        return
    assert counts
    assert rig.engine.failures == FAILURES


def test_an_incarnation_that_has_served_ends_the_row_of_failures():
    rig = Rig().all_ready()
    for _ in range(5):
        for _ in range(FAILURES - 1):
            rig.die(rig.engine)
            rig.restart(rig.engine)
        rig.ready(rig.engine)
        rig.table.used(EngineUse(rig.engine.epoch, True, False))
        rig.die(rig.engine)
        rig.restart(rig.engine)
    assert rig.engine.failures == 0


def test_restarts_come_later_and_later_until_one_incarnation_is_steady():
    rig = Rig().all_ready()
    streamer = rig.table.of_role("streamer")[0]
    delays = []
    for _ in range(8):
        rig.die(streamer)
        delays.append(rig.restart(streamer))
        rig.ready(streamer)
    assert delays[0] < LAST_WORDS + 0.1
    assert delays[2] == pytest.approx(2 * FIRST_DELAY, abs=0.1)
    assert delays == sorted(delays)
    assert delays[-1] == pytest.approx(LONGEST_DELAY, abs=0.1)
    rig.after(STEADY)
    rig.die(streamer)
    assert rig.restart(streamer) < LAST_WORDS + 0.1


def test_a_silent_actor_is_killed_once_and_dead_for_others():
    rig = Rig().all_ready()
    streamer = rig.table.of_role("streamer")[0]
    rig.now = streamer.asked = 10.0
    assert rig.after(SILENCE_LIMIT) == []
    (action,) = rig.after(0.1)
    assert isinstance(action, Kill)
    assert action.slot is streamer
    assert next(state for state in rig.table.states() if state.name == "streamer").state == "dead"
    assert rig.after(1.0) == []
    rig.die(streamer)
    rig.restart(streamer)


def test_an_answer_clears_the_probe():
    rig = Rig().all_ready()
    streamer = rig.table.of_role("streamer")[0]
    streamer.asked = 10.0
    rig.table.alive(Alive("streamer", 0, streamer.epoch, 3, streams=2), 11.0)
    assert rig.after(1e6) == []
    assert (streamer.streams, streamer.answered) == (2, 3)


def test_a_clock_gap_is_nobodys_fault():
    rig = Rig()
    for slot in rig.table.slots:
        if slot.role != "http":
            rig.ready(slot)
    rig.steps(rig.engine, running=1)
    for slot in rig.table.slots:
        slot.asked = 1.0
    rig.table.excuse(3600.0)
    assert rig.after(3600.0) == []
    assert rig.after(59.0) != []  # time goes on counting after it


def test_an_engine_replaced_on_demand_is_no_failure_and_not_late():
    rig = Rig().all_ready()
    engine = rig.engine
    for _ in range(10):
        rig.table.stopping(engine, rig.now)
        assert next(state for state in rig.table.states() if state.name == "engine").state == "stopping"
        rig.die(engine, "exited with code 0")
        assert rig.restart(engine) < LAST_WORDS + 0.1
        rig.ready(engine)
    assert (engine.failures, engine.young) == (0, 0)


def test_an_engine_that_does_not_leave_is_killed():
    rig = Rig().all_ready()
    rig.table.stopping(rig.engine, rig.now)
    assert rig.after(REPLACE_TIME) == []
    (action,) = rig.after(0.1)
    assert isinstance(action, Kill)
    assert next(state for state in rig.table.states() if state.name == "engine").state == "stopping"


def test_an_engine_hangs_when_its_counter_stands_still_with_work_to_do():
    rig = Rig().all_ready()
    rig.steps(rig.engine, step=5, running=2)
    rig.now += LEAST
    rig.steps(rig.engine, step=5, running=2)  # its loop answers, but nothing moves
    assert rig.table.decide(rig.now) == []
    (action,) = rig.after(0.1)
    assert isinstance(action, Kill)
    assert "hangs in decode" in action.why


def test_an_engine_whose_link_to_the_streamer_is_broken_is_replaced():
    rig = Rig().all_ready()
    engine = rig.engine
    rig.table.used(EngineUse(engine.epoch, True, False, "it sends nonsense"))
    assert rig.after(0.0) == [Kill(engine, "it sends nonsense")]
    rig.die(engine)
    rig.restart(engine)
    rig.ready(engine)
    assert rig.after(1.0) == []


def test_an_idle_engine_may_stand_still_but_must_answer():
    rig = Rig().all_ready()
    rig.steps(rig.engine, step=5)
    assert rig.after(1e5) == []
    rig.engine.asked = rig.now
    assert rig.after(LEAST) == []
    assert isinstance(rig.after(0.1)[0], Kill)


def test_a_fixed_hang_timeout_goes_before_all_that_was_measured():
    rig = Rig(hang_timeout=2.0).all_ready()
    rig.steps(rig.engine, step=0, running=1)
    assert rig.after(2.0) == []
    assert isinstance(rig.after(0.1)[0], Kill)


class TestStepWatch:
    def test_deadlines_follow_the_slowest_step_of_the_phase(self):
        watch = StepWatch()
        watch.begin(0.0)
        assert watch.deadline == FIRST_STEP
        watch.answered(EngineStats(step=1, prefilling=1), 0.0, 1.0)
        assert watch.deadline == LEAST
        watch.answered(EngineStats(step=2, prefilling=1), 1.0, 4.0)  # a probe waited 3 s for the end of a step
        assert watch.deadline == TIMES * 3.0
        watch.answered(EngineStats(step=3, running=1), 0.0, 5.0)
        assert watch.deadline == LEAST
        assert watch.hangs(0.0, 5.0 + LEAST) is None
        assert "no step" in watch.hangs(0.0, 5.1 + LEAST)

    def test_what_was_learned_outlives_an_incarnation(self):
        watch = StepWatch()
        watch.begin(0.0)
        watch.answered(EngineStats(step=1, running=1), 0.0, 1.0)
        watch.answered(EngineStats(step=2, running=1), 1.0, 2.0)
        watch.begin(10.0)
        watch.answered(EngineStats(step=1, running=1), 0.0, 11.0)
        assert watch.deadline == TIMES

    def test_a_time_in_which_we_stood_still_ourselves_teaches_nothing(self):
        watch = StepWatch()
        watch.begin(0.0)
        watch.answered(EngineStats(step=1, running=1), 0.0, 1.0)
        watch.answered(EngineStats(step=2, running=1), 1.0, 601.0)  # the answer was there all the time
        assert watch.deadline == LEAST

    def test_new_work_begins_the_time_anew(self):
        watch = StepWatch(timeout=5.0)
        watch.begin(0.0)
        watch.answered(EngineStats(step=4), 0.0, 1.0)
        watch.answered(EngineStats(step=4, waiting=1), 0.0, 100.0)
        assert watch.hangs(0.0, 105.0) is None
        assert watch.hangs(0.0, 105.1)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["ready", "die", "fail", "stop", "use", "ask", "alive", "excuse", "wait"]),
        st.integers(0, 4),
        st.floats(0.0, 20.0),
    ),
    max_size=60,
)


@given(EVENTS)
def test_whatever_happens_there_is_one_process_per_slot_and_always_a_way_on(events):
    """A process is only started for a slot whose last one was reaped, and nobody is left dead for ever."""
    rig = Rig()
    table = rig.table
    alive = {slot.name for slot in table.slots}
    given_up = False

    def act(actions):
        nonlocal given_up
        for action in actions:
            match action:
                case Start(slot):
                    assert slot.name not in alive
                    rig.start(slot)
                    alive.add(slot.name)
                case Kill(slot, why):
                    assert why
                    assert slot.name in alive
                    rig.die(slot)
                    alive.discard(slot.name)
                case GiveUp(why):
                    assert why
                    given_up = True

    for what, index, seconds in events:
        slot = table.slots[index]
        if what == "ready":
            rig.ready(slot)
        elif what == "die" and slot.name in alive:
            rig.die(slot)
            alive.discard(slot.name)
        elif what == "fail":
            table.failed(slot.role, slot.index, slot.epoch, "no")
        elif what == "stop" and slot.state == "ready":
            table.stopping(slot, rig.now)
        elif what == "use":
            table.used(EngineUse(rig.engine.epoch, seconds > 10, seconds > 5))
        elif what == "ask":
            slot.asked = slot.asked or rig.now
        elif what == "alive" and slot.state == "ready":
            stats = EngineStats(step=int(seconds), running=1) if slot.role == "engine" else None
            table.alive(Alive(slot.role, slot.index, slot.epoch, 1, stats=stats), rig.now)
        elif what == "excuse":
            table.excuse(seconds)
        act(rig.after(seconds if what == "wait" else 0.0))
        if given_up:
            return
    for _ in range(8):  # from now on all behave
        for slot in table.slots:
            if slot.name in alive:
                rig.ready(slot)
                stats = EngineStats(step=99) if slot.role == "engine" else None
                table.alive(Alive(slot.role, slot.index, slot.epoch, 1, stats=stats), rig.now)
        act(rig.after(LONGEST_DELAY + LAST_WORDS))
    assert given_up or len(alive) == len(table.slots)
