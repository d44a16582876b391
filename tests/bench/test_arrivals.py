"""When requests leave: rates, ramps and bursts are what they say."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.load.arrivals import arrival_times


def test_a_closed_loop_has_no_times():
    assert arrival_times("closed", 5) is None


@given(st.floats(0.1, 1000), st.integers(0, 99))
def test_poisson_keeps_its_rate(rate: float, seed: int):
    times = arrival_times(f"poisson:{rate}", 400, seed)
    assert times is not None
    assert all(a <= b for a, b in pairwise([0.0, *times]))
    assert 0.7 < 400 / (times[-1] * rate) < 1.4
    assert times == arrival_times(f"poisson:{rate}", 400, seed)


def test_gaps_of_poisson_spread_as_exponential_ones_do():
    times = arrival_times("poisson:10", 4000) or []
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert 0.9 < deviation / mean < 1.1


@pytest.mark.parametrize(("first", "last"), [(1, 50), (50, 1), (0, 40), (20, 20)])
def test_a_ramp_has_as_many_arrivals_as_its_rates_say(first: int, last: int):
    count = int((first + last) / 2 * 20)
    times = arrival_times(f"ramp:{first}:{last}:20", count + 200) or []
    within = sum(time <= 20 for time in times)
    assert within == pytest.approx(count, rel=0.15)
    early = sum(time <= 10 for time in times)
    wanted = 10 * first + (last - first) / 20 * 50
    assert early == pytest.approx(wanted, rel=0.3)
    assert all(a <= b for a, b in pairwise(times))


def test_bursts_come_together():
    assert arrival_times("bursts:3:5", 7) == [0, 0, 0, 5, 5, 5, 10]


WRONG = (
    "- open closed:1 poisson poisson:0 poisson:-1 poisson:x poisson:nan poisson:inf ramp:1:2 ramp:1:2:0 ramp:5:0:1 "
    "bursts:0:1 bursts:2"
)


@pytest.mark.parametrize("arrivals", WRONG.split())
def test_anything_else_is_refused_with_the_forms(arrivals: str):
    with pytest.raises(ValueError, match="none of closed, poisson"):
        arrival_times(arrivals, 3)
