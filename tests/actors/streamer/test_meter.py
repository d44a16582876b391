"""What the streamer counts: histograms, samples over time, and the figures of a real streamer."""

import math
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.streamer.meter import SAMPLE_INTERVAL, SECONDS, Histogram, Meter
from actors.streamer.stream import MAX_LEAD, Stream
from protocol.messages import End, EngineStats, Generate, SamplingParams, Timing, Usage

seconds = st.floats(0, 2000, allow_nan=False)


@given(st.lists(seconds, max_size=40))
def test_one_by_one_and_all_at_once_count_the_same(values: list[float]):
    single, together = Histogram(), Histogram()
    for value in values:
        single.add(value)
    if values:
        together.add_all(array("d", values))
    assert single.counts.tolist() == together.counts.tolist()
    assert single.total == pytest.approx(together.total)
    for bound, below in zip(SECONDS, single.counts.cumsum().tolist(), strict=False):
        assert below == sum(value <= bound for value in values)


def test_gaps_are_those_between_tokens_of_one_stream():
    meter = Meter(0.0)
    assert meter.step([1, 2], 1.0) == {1, 2}
    assert meter.step([2, 3], 1.5) == {3}
    assert meter.step([1, 3, 3], 4.0) == set()  # two tokens of one stream at once
    itl = meter.counts(0, 0).itl
    assert (itl.count, itl.total) == (4, pytest.approx(0.5 + 3.0 + 2.5 + 0.0))
    assert meter.counts(0, 0).generated == 7


def test_ends_and_refusals_are_counted_by_outcome():
    meter = Meter(0.0)
    meter.step([1], 1.0)
    meter.ended(1, End(1, "finished", "stop", usage=Usage(10, 4, 8, 1), timing=Timing(0.1, 0.2, 0.3, 0.6, 2.0)))
    meter.refused(End(2, "rejected", code="queue_full"))
    meter.refused(End(3, "rejected", code="queue_full"))
    counts = meter.counts(0, 0)
    assert counts.requests == {"finished stop": 1, "rejected queue_full": 2}
    assert (counts.prompt_tokens, counts.cached_tokens, counts.reasoning_tokens) == (10, 8, 1)
    assert (counts.duration.total, counts.answer_lengths.total) == (2.0, 4.0)
    assert meter.step([1], 9.0) == {1}  # nothing is remembered of a stream that has ended


def test_clients_that_were_asked_themselves_tell_the_time_to_first_token():
    meter = Meter(0.0)
    meter.begun(Timing(ttft=0.4))
    meter.begun(Timing(ttft=0.4), lead=0.25)
    meter.told([0.75, -1.0, float("nan"), float("inf")])
    meter.ended(1, End(1, "finished", "stop", timing=Timing(total=2.0)), lead=0.25)
    counts = meter.counts(0, 0)
    assert (counts.ttft.count, counts.ttft.total) == (2, pytest.approx(1.15))
    assert (counts.received.total, counts.duration.total) == (0.25, 2.25)


def test_samples_hold_what_came_since_the_one_before():
    wall = [100.0]
    meter = Meter(0.0, lambda: wall[0])
    meter.tick(SAMPLE_INTERVAL / 2)
    assert meter.samples(0.0) == []
    meter.engine = EngineStats(step=3, running=2, prefilled=7)
    meter.step([1, 2], 0.5)
    meter.step([1, 2], 0.7)
    meter.begun(Timing(ttft=0.4))
    meter.tick(SAMPLE_INTERVAL)
    wall[0] = 101.0
    meter.tick(2 * SAMPLE_INTERVAL)
    first, second = meter.samples(0.0)
    assert (first.tokens, first.running, first.prompt_tokens) == (4, 2, 7)
    assert (first.itl, first.ttft) == (pytest.approx(0.2), pytest.approx(0.4))
    assert 0.15 <= first.itl_p95 <= 0.2
    assert (second.itl, second.itl_p95, second.ttft) == (0.0, 0.0, 0.0)
    assert meter.samples(100.0) == [second]


def test_a_streamer_tells_its_figures_and_ends_a_stream_by_its_number(rig):
    client = rig.client()
    stream = client.generate("Hi", max_tokens=5, label="mine", return_text=False, return_ids=True)
    submit = rig.engine.submit()
    rig.engine.step({submit.rid: 7})
    rig.engine.step({submit.rid: 8})
    iterator = iter(stream)
    next(iterator), next(iterator)
    figures = client.figures(streams=5, since=0.0)
    assert figures.phases == {"running": 1}
    assert figures.counts.generated == 2
    assert (figures.counts.ttft.count, figures.counts.itl.count) == (1, 1)
    [live] = figures.streams
    assert (live.rid, live.label, live.phase, live.tokens, live.budget) == (submit.rid, "mine", "running", 2, 5)
    assert live.prompt_tokens == submit.prompt_tokens
    assert client.figures().streams == []
    assert client.cancel_stream(live.rid)
    assert not client.cancel_stream(live.rid)
    assert rig.engine.abort() == [submit.rid]
    list(iterator)
    assert stream.end is not None
    assert stream.end.outcome == "cancelled"
    assert client.figures().counts.requests == {"cancelled cancelled": 1}


@pytest.mark.parametrize(
    ("received", "lead"), [(9.0, 1.0), (-1.0, None), (11.0, 0.0), (-math.inf, None), (math.nan, None)]
)
def test_what_a_client_says_of_the_time_before_is_bounded(received: float, lead: float | None):
    request = Generate(1, SamplingParams(), ids=b"", received=received)
    assert Stream(1, b"", request, SamplingParams(), deadline=99.0, now=10.0).lead == lead
    late = Stream(1, b"", Generate(1, SamplingParams(), received=0.0), SamplingParams(), deadline=1e9, now=1e6)
    assert late.lead == MAX_LEAD
