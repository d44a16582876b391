"""The pace of prefill settles where a turn takes the time it may take."""

import pytest

from actors.engine.pace import LONE_TARGET, MOST_TARGETS, Pace

STALL_TARGET = 0.1


def settle(speed: float, step_seconds: float, turns: int = 30) -> tuple[Pace, float]:
    """A machine with this speed of prefill and length of step; the prefill time of its last turn."""
    pace = Pace(STALL_TARGET)
    for _ in range(12):
        pace.observe_step(step_seconds)
    tokens = 0
    for _ in range(turns):
        tokens = pace.tokens(running=8)
        pace.observe_step(step_seconds)
        pace.observe_prefill(tokens, tokens / speed)
    return pace, tokens / speed


@pytest.mark.parametrize("speed", [200.0, 5_000.0, 1_000_000.0])
def test_prefill_beside_running_rows_takes_the_stall_target(speed: float) -> None:
    _, seconds = settle(speed, 0.02)
    assert seconds == pytest.approx(STALL_TARGET - 0.02, rel=0.1)


def test_prefill_gets_as_much_as_a_step_that_takes_most_of_the_target() -> None:
    _, seconds = settle(1000.0, 0.08)
    assert seconds == pytest.approx(0.08, rel=0.1)


def test_beside_steps_that_are_slow_by_themselves_prompts_get_what_they_get_alone() -> None:
    _, seconds = settle(1000.0, 0.2)
    assert seconds == pytest.approx(LONE_TARGET, rel=0.1)
    _, seconds = settle(1000.0, 2.0)
    assert seconds == pytest.approx(2.0, rel=0.1)  # neither starves


def test_beside_slow_steps_a_burst_gets_more() -> None:
    pace, _ = settle(1000.0, 0.2)
    few, many, most = (pace.seconds(running=8, waiting=waiting) for waiting in (8, 12, 1000))
    assert few == LONE_TARGET
    assert many == pytest.approx(1.5 * LONE_TARGET)
    assert most == MOST_TARGETS * LONE_TARGET


def test_a_target_that_is_shorter_than_quick_steps_lends_prompts_no_more_than_those() -> None:
    pace = Pace(stall_target=0.01)
    for _ in range(12):
        pace.observe_step(0.03)
    assert pace.seconds(running=1, waiting=100) == pytest.approx(0.03, rel=0.1)


def test_with_nothing_running_a_turn_may_take_longer() -> None:
    pace, _ = settle(10_000.0, 0.02)
    assert pace.tokens(running=0) == pytest.approx(10_000 * LONE_TARGET, rel=0.1)


def test_a_few_tokens_hardly_change_the_speed() -> None:
    pace, _ = settle(10_000.0, 0.02)
    pace.observe_prefill(3, 0.03)
    assert pace.prefill_speed > 9_000


def test_one_step_that_was_slow_by_chance_stalls_nobody() -> None:
    pace, _ = settle(1000.0, 0.01)
    for seconds in (3.0, 0.01, 0.01, 0.01):
        pace.observe_step(seconds)
        assert pace.seconds(running=8, waiting=100) == pytest.approx(STALL_TARGET - 0.01)
    for _ in range(2):  # two of three are no chance
        pace.observe_step(3.0)
    assert pace.seconds(running=8, waiting=100) > LONE_TARGET


def test_the_first_short_prompts_of_a_slow_machine_are_believed() -> None:
    """On one of 20 tokens per second the first guess alone would make a turn of most of a minute."""
    pace = Pace(STALL_TARGET)
    for _ in range(2):
        pace.observe_prefill(8, 8 / 20.0)
    assert pace.tokens(running=0) < 2 * 20 * LONE_TARGET
    pace.observe_prefill(1000, 0.1)
    fast = pace.prefill_speed
    pace.observe_prefill(8, 8 / 20.0)  # later ones say little
    assert pace.prefill_speed > 0.9 * fast
