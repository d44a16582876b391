"""What is made of a run's figures: fits, shares of samples, the engine's parts, the page, parity with solo runs."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.growth import doubling, fits
from bench.growth_report import markdown
from bench.load.driver import Progress, run_load
from bench.load.fit import error, fit, value
from bench.load.outcome import Outcome
from bench.load.page import page
from bench.load.parity import compare_solo, first_difference, solo_plan
from bench.load.plan import Ask, Plan
from bench.load.plots import engine_shares, run_plots
from bench.load.sampled import outside, parts
from bench.load.summary import summarize
from bench.load.timeline import Sample, Timeline

PLAN = Plan(via="zmq", streams=4, requests=8, prompt_tokens=4, max_tokens=6, aborts=0.3, record=True, turns=2)


class Counting:
    """A load without a server: token i of a prompt is a function of the prompt and i; `wrong` breaks one request."""

    def __init__(self, wrong: int = -1) -> None:
        self.wrong = wrong

    async def __aenter__(self) -> "Counting":
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def run(self, ask: Ask, outcome: Outcome) -> None:
        outcome.begin()
        for number in range(ask.max_tokens):
            outcome.token()
            outcome.ids.append(sum(ask.ids) + number + (ask.index == self.wrong and number == 2))
            await asyncio.sleep(0)
            if outcome.arrivals == ask.leaves:
                outcome.leave()
                return
        outcome.prompt_tokens, outcome.completion_tokens = len(ask.ids), ask.max_tokens
        outcome.end()


def ran(load: Counting, plan: Plan = PLAN) -> list[Outcome]:
    return asyncio.run(run_load(load, Progress(plan)))


def test_parity_finds_the_stream_that_differs_and_no_other():
    outcomes = ran(Counting())
    assert any(outcome.left for outcome in outcomes)
    assert asyncio.run(compare_solo(Counting(), PLAN, outcomes)) == (len(outcomes), [])
    whole = next(outcome.index for outcome in outcomes if not outcome.left)
    broken = ran(Counting(whole))
    _, differences = asyncio.run(compare_solo(Counting(), solo_plan(PLAN), broken))
    first = next(found for found in differences if found.index == whole)
    assert (first.place, first.got) == (2, first.wanted + 1)
    assert first.ids == broken[whole].prompt + broken[whole].ids[:2]


def test_a_stream_that_is_too_short_or_too_long_differs():
    alone = Outcome(0, ids=[1, 2, 3])
    assert first_difference(Outcome(0, ids=[1, 2, 3]), alone) is None
    assert first_difference(Outcome(0, ids=[1, 2], left=True), alone) is None
    for ids in ([1, 2], [1, 2, 3, 4], [1, 9, 3]):
        assert first_difference(Outcome(0, ids=ids), alone) is not None
    assert first_difference(Outcome(0, text="ab"), Outcome(0, text="abc")) is not None


def test_a_chat_goes_on_from_its_own_answer():
    outcomes = ran(
        Counting(), Plan(via="zmq", streams=1, requests=2, prompt_tokens=4, max_tokens=3, turns=2, record=True)
    )
    first, second = outcomes
    assert second.prompt[:7] == first.prompt + first.ids
    assert len(second.prompt) == 11


def test_an_open_loop_starts_requests_at_their_times_whatever_is_unfinished():
    class Never(Counting):
        async def run(self, ask: Ask, outcome: Outcome) -> None:
            outcome.begin()
            await asyncio.Event().wait()

    plan = Plan(via="zmq", streams=1, requests=3, prompt_tokens=1, max_tokens=1, arrivals="bursts:3:1")
    progress = Progress(plan)
    outcomes = asyncio.run(run_load(Never(), progress, cut=0.05))
    assert [outcome.error for outcome in outcomes] == ["cut after 0.05 s"] * 3
    assert summarize(plan, outcomes).failures == {"cut after 0.05 s": 3}


@given(st.lists(st.floats(0.01, 50), min_size=2, max_size=3))
def test_a_fit_finds_the_powers_it_was_made_from(terms: list[float]):
    powers = list(range(len(terms)))
    xs = [1, 3, 10, 50, 300]
    ys = [value(x, powers, terms) for x in xs]
    found = fit(xs, ys, powers)
    assert error(xs, ys, powers, found) < 1e-6


def test_a_fit_has_no_negative_terms():
    assert fit([1, 2, 4, 8], [1, 4, 16, 64], [0, 1, 2]) == pytest.approx([0, 0, 1], abs=1e-9)
    with pytest.raises(ValueError, match="too few"):
        fit([1], [1], [0, 1])


def test_doubling_ends_at_the_last():
    assert doubling(1, 1000) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000]
    assert doubling(16, 16) == [16]


RUN = "run (actors/base.py:90);turn (/x/actors/engine/actor.py:191)"
STACKS = [
    f"MainThread;{RUN};turn (actors/engine/engine.py:300);Lane.dispatch (actors/engine/device.py:30) 60",
    f"MainThread;{RUN};turn (actors/engine/engine.py:300);Model.forward (actors/engine/model.py:9);put (slots.py:3) 10",
    f"MainThread;{RUN};turn (actors/engine/engine.py:300);step (actors/engine/batch.py:12) 20",
    f"MainThread;{RUN};_send (actors/engine/actor.py:240);encode (protocol/codec.py:12) 6",
    "MainThread;run (actors/base.py:95);poll (zmq/sugar/poll.py:106) 4",
    "thread (0x1);keeper (cache_store/keeper.py:1);wait (threading.py:300) 900",
]


def test_samples_are_sorted_by_the_innermost_part_of_the_loop():
    assert parts(STACKS) == {"model": 0.7, "turn": 0.2, "sockets and messages": 0.06, "the loop around turns": 0.04}
    assert parts(STACKS[-1:]) == {}
    inner = {
        "step in actors/engine/batch.py": 0.2,
        "encode in protocol/codec.py": 0.06,
        "poll in zmq/sugar/poll.py": 0.04,
    }
    assert outside(STACKS) == inner


def sample(at: float, step: int, model: float, python: float) -> Sample:
    engine: dict[str, Any] = {"step": step, "running": 2, "prefilling": 0, "waiting": 1}
    engine |= {"seconds_in_model": model, "seconds_in_python": python, "seconds_in_sockets": 0.0}
    return Sample(at, {"client": 1 << 20, "engine": 5 << 20}, {"client": at / 2, "engine": at}, int(at), 2, 0.0, engine)


SAMPLES = [sample(0.0, 1, 0.0, 0.0), sample(1.0, 2, 0.8, 0.2), sample(2.0, 2, 0.8, 0.2), sample(3.0, 5, 1.7, 0.3)]


def test_the_engine_s_time_is_split_between_looks_that_saw_steps():
    assert engine_shares(SAMPLES)["model"] == ([3.0], [pytest.approx(0.9)])
    timeline = Timeline({})
    timeline.samples += SAMPLES
    summary = summarize(PLAN, ran(Counting()), timeline)
    assert summary.engine == {"model": 0.85, "python": 0.15, "sockets": 0.0}
    assert summary.engine_steps == 4
    assert summary.peak_memory_mib == {"engine": 5.0}
    assert summary.processor_seconds == {"client": 1.5, "engine": 3.0}
    assert summary.harness is not None
    assert summary.harness.busy == 0.5


def test_the_page_stands_alone_and_escapes_what_it_shows():
    plots = run_plots(ran(Counting()), SAMPLES)
    text = page("a < b", [("<script>", "1")], plots, {"cpu": "x"})
    assert text.count("<svg") == len(plots) == 7
    assert "<script>" not in text
    assert "src=" not in text
    assert 'href="http' not in text


def test_the_first_limits_are_named_from_the_figures():
    streams = [
        {"streams": n, "decoding_tokens_per_second": 1000 * n / (5 + n), "step_ms": 5.0 + n, "model_ms": 4.0 + n}
        | {"ttft_p99_ms": 1.0, "engine_mib": 100.0 + n / 2, "cache_mib_per_stream": 0.5}
        for n in (1, 2, 4, 8, 16)
    ]
    lengths = [
        {"prompt_tokens": n, "ttft_ms": 3 + n / 10 + n * n / 1000, "context": n, "step_ms": 1.0, "model_ms": 0.5}
        | {"cache_mib_per_stream": n / 100}
        for n in (16, 64, 256, 1024)
    ]
    figures: dict[str, Any] = {"streams": streams, "lengths": lengths}
    figures |= {"fits": fits(figures), "machine": {"cpu": "x", "cores": 2, "memory_gib": 1.0, "system": "y"}}
    text = markdown(figures)
    assert "One stream: a step takes 6.00 ms, 83% of it in the model, the rest around it." in text
    assert "from 8 to 16 throughput grows by 1.24 only; a step of 16 takes 21 ms, 95% of it in the model" in text
    assert "0.50 MiB of the engine's process per stream; all memory here is 2,048." in text
    assert "from 100 tokens on the square of the length rules" in text
