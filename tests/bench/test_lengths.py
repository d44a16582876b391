"""Lengths of prompts and answers, and what clients do: as asked, and the same each time."""

import statistics
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.load.lengths import check_lengths, draw_length
from bench.load.manners import ABORTS, READS, SLOW, VANISHES, leaves_after, manner
from bench.load.plan import Plan, make_ask

PLAN = Plan(via="zmq", streams=2, requests=4, prompt_tokens=8, max_tokens=5)


def drawn(lengths: str, count: int = 600) -> list[int]:
    return [draw_length(lengths, key) for key in range(count)]


@given(st.integers(1, 10**6), st.integers())
def test_a_number_is_itself(length: int, key: int):
    assert draw_length(str(length), key) == length


@given(st.integers(1, 500), st.integers(0, 500), st.integers())
def test_uniform_stays_between_its_ends(low: int, more: int, key: int):
    length = draw_length(f"uniform:{low}:{low + more}", key)
    assert low <= length <= low + more
    assert length == draw_length(f"uniform:{low}:{low + more}", key)


def test_distributions_have_their_middles_and_spreads():
    assert statistics.mean(drawn("normal:200:20")) == pytest.approx(200, rel=0.02)
    assert statistics.stdev(drawn("normal:200:20")) == pytest.approx(20, rel=0.1)
    spread = drawn("lognormal:200:0.8")
    assert statistics.median(spread) == pytest.approx(200, rel=0.15)
    assert max(spread) > 1000
    assert max(drawn("lognormal:200:0.8:400")) == 400
    counts = Counter(drawn("choice:16x3,4000"))
    assert set(counts) == {16, 4000}
    assert counts[16] / counts[4000] == pytest.approx(3, rel=0.2)
    assert min(drawn("normal:1:50")) == 1


WRONG = (
    "- 0 -3 a 1.5 uniform:3 uniform:9:3 uniform:0:3 normal:0:1 lognormal:5 gamma:1:2 choice: choice:0 choice:5x0 "
    "lognormal:5:nan normal:5:-1"
)


@pytest.mark.parametrize("lengths", WRONG.split())
def test_anything_else_is_refused_with_the_forms(lengths: str):
    with pytest.raises(ValueError, match="none of N, uniform"):
        check_lengths(lengths)


def test_manners_come_in_their_shares():
    counts = Counter(manner(key, aborts=0.2, vanish=0.1, slow=0.3) for key in range(3000))
    for name, share in ((ABORTS, 0.2), (VANISHES, 0.1), (SLOW, 0.3), (READS, 0.4)):
        assert counts[name] / 3000 == pytest.approx(share, abs=0.03)


@given(st.integers(), st.integers(1, 100))
def test_a_client_that_leaves_has_had_tokens_and_not_all(key: int, tokens: int):
    assert 1 <= leaves_after(key, tokens) <= max(1, tokens - 1)


@given(st.integers(0, 50), st.lists(st.integers(0, 9), max_size=20))
def test_a_request_is_the_same_each_time_and_goes_on_from_its_chat(index: int, history: list[int]):
    ask = make_ask(PLAN, index, history)
    assert ask == make_ask(PLAN, index, history)
    assert ask.ids[: len(history)] == history
    assert len(ask.ids) == len(history) + PLAN.prompt_tokens
    assert ask.max_tokens == PLAN.max_tokens


@pytest.mark.parametrize(
    "wrong",
    [{"turns": 0}, {"aborts": -0.1}, {"aborts": 0.6, "slow": 0.6}, {"arrivals": "x"}, {"prompt_lengths": "x"}],
)
def test_a_plan_that_makes_no_sense_is_refused(wrong: dict[str, object]):
    with pytest.raises(ValueError, match=r"must|none of"):
        Plan(**({"via": "zmq", "streams": 1, "requests": 1, "prompt_tokens": 1, "max_tokens": 1} | wrong))
