"""Rate limits and token budgets of API keys."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.quotas import Quotas
from protocol.messages import CallFailed, Charge, Done, Quota

PER_MINUTE = [Quota("requests", 3, 60.0)]


def ask(quotas: Quotas, now: float, limits: list[Quota], name: str = "a") -> Done | CallFailed:
    return quotas.charge(Charge(1, name, limits, requests=1), now)


def test_requests_are_refused_beyond_the_limit_and_let_in_again():
    quotas = Quotas()
    assert all(isinstance(ask(quotas, 0.0, PER_MINUTE), Done) for _ in range(3))
    refused = ask(quotas, 0.0, PER_MINUTE)
    assert isinstance(refused, CallFailed)
    assert (refused.code, refused.retry_after) == ("rate_limit_exceeded", pytest.approx(20.0))
    assert "3 requests in a minute" in refused.message
    assert isinstance(ask(quotas, 0.0, PER_MINUTE, "b"), Done)  # another key
    assert isinstance(ask(quotas, 19.0, PER_MINUTE), CallFailed)
    assert isinstance(ask(quotas, 20.0, PER_MINUTE), Done)


def test_a_token_budget_may_be_overdrawn_once():
    quotas, budget = Quotas(), [Quota("tokens", 100, 3600.0)]
    assert isinstance(ask(quotas, 0.0, budget), Done)
    quotas.charge(Charge(1, "a", budget, tokens=280), 0.0)
    refused = ask(quotas, 0.0, budget)
    assert isinstance(refused, CallFailed)
    assert refused.retry_after == pytest.approx((180 + 1) * 36)
    assert isinstance(ask(quotas, 181 * 36.0, budget), Done)


@given(st.lists(st.floats(0, 30), max_size=60), st.integers(1, 5))
def test_never_more_than_the_limit_in_any_window(gaps: list[float], amount: int):
    quotas, limit = Quotas(), [Quota("requests", amount, 60.0)]
    now, taken = 0.0, []
    for gap in gaps:
        now += gap
        if isinstance(ask(quotas, now, limit), Done):
            taken.append(now)
    for begin in taken:
        inside = [at for at in taken if begin <= at < begin + 60.0]
        assert len(inside) <= 2 * amount  # a full bucket, and what comes in meanwhile
