"""Batches of prompts: what is asked for when, and whole answers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.client.requests import Delta
from protocol.client.results import Batch, Result, StreamStats, as_prompt, whole
from protocol.errors import RequestFailed, RequestRejected
from protocol.messages import End, Timing, Usage

BUSY = Result(error=RequestRejected("queue_full", "busy", retry_after=2.0))


@given(st.integers(0, 30), st.integers(1, 8), st.data())
def test_every_prompt_gets_its_own_result_and_no_more_are_open_than_wanted(count, at_once, data):
    batch = Batch([[n] for n in range(count)], at_once)
    under_way: list[int] = []
    refusals = 0
    while True:
        while (wanted := batch.next()) is not None:
            number, prompt = wanted
            assert prompt == {"ids": [number]}
            assert number not in under_way
            under_way.append(number)
        assert len(under_way) == batch.open <= at_once
        if not under_way:
            break
        number = under_way.pop(data.draw(st.integers(0, len(under_way) - 1)))
        if refusals < 20 and data.draw(st.booleans()):
            refusals += 1
            pause = batch.done(number, BUSY)
            assert (pause == 2.0) == (not under_way)
        else:
            assert batch.done(number, Result(str(number))) == 0.0
    assert [result.text for result in batch.results()] == [str(n) for n in range(count)]


def test_a_server_that_stays_busy_is_given_up():
    batch = Batch(["x"])
    for _ in range(1000):
        wanted = batch.next()
        if wanted is None:
            break
        batch.done(wanted[0], BUSY)
    assert batch.results() == [BUSY]


def test_other_errors_are_results():
    failed = Result(error=RequestFailed("timeout", "too slow"))
    batch = Batch(["x", "y"], 1)
    assert batch.next() == (0, {"prompt": "x"})
    assert batch.next() is None
    batch.done(0, failed)
    assert batch.next() == (1, {"prompt": "y"})
    batch.done(1, Result("b"))
    assert batch.results() == [failed, Result("b")]


def test_prompts_are_texts_ids_or_chats():
    chat = [{"role": "user", "content": "x"}]
    assert as_prompt("x") == {"prompt": "x"}
    assert as_prompt([1, 2]) == {"ids": [1, 2]}
    assert as_prompt(chat) == {"messages": chat}
    for wrong in (None, 5, [1, "x"], [{"role": "user"}, 1]):
        with pytest.raises(TypeError):
            as_prompt(wrong)  # type: ignore[arg-type]  # that is the point
    with pytest.raises(ValueError, match="at_once"):
        Batch([], 0)


def test_a_whole_answer_has_all_pieces_and_the_figures():
    usage, timing = Usage(5, 3, 4, 1), Timing(0.1, 0.2, 0.3, 0.6, 1.6)
    result = whole(
        [Delta("a", [1], 1), Delta("b", [2, 3], 2, reasoning="r")], End(1, "finished", "stop", "", "", usage, timing)
    )
    assert (result.text, result.ids, result.reason, result.reasoning) == ("ab", [1, 2, 3], "stop", "r")
    assert result.stats == StreamStats(5, 3, 4, 1, 0.1, 0.2, 0.3, 0.6, 1.6)
    assert result.stats.tokens_per_second == pytest.approx(2.0)
    assert whole([], None) == Result()
