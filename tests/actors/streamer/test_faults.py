"""What goes wrong with one stream, or one message, is the loss of nobody else."""

import pytest

from actors.streamer.stream import Stream
from protocol.errors import INTERNAL_ERROR, INVALID_REQUEST, RequestFailed, RequestRejected
from protocol.messages import (
    AskFigures,
    CallFailed,
    Charge,
    Deltas,
    Done,
    Figures,
    Generate,
    Hello,
    ListModels,
    Models,
    Quota,
    SamplingParams,
    ToolChoice,
    Welcome,
)


def broken(*_args, **_options):
    raise KeyError("a fault of ours")


def lives(rig, stream, submit, text=" still"):
    """The stream that was open all the while goes on to its end."""
    rig.run(submit, rig.ids_of(text))
    assert stream.text() == text


def greeted(rig):
    """A raw client that has said hello."""
    raw = rig.raw()
    raw.send(Hello(1, "raw"))
    raw.receive(Welcome)
    return raw


def begin(rig):
    """Two streams: one that goes on whatever happens, and the submit of the one that fails."""
    other = rig.client().generate("other")
    first = rig.engine.submit()
    return other, first


@pytest.mark.parametrize("where", ["push", "finish_text"])
def test_a_fault_in_a_stream_ends_that_stream(rig, monkeypatch, where):
    other, first = begin(rig)
    stream = rig.client().generate("x", label="bad")
    submit = rig.engine.submit()
    genuine = getattr(Stream, where)

    def faulty(self, *args):
        return broken() if self.label == "bad" else genuine(self, *args)

    monkeypatch.setattr(Stream, where, faulty)
    rig.engine.step({submit.rid: 8, first.rid: rig.ids_of("a")[0]}, ended=[(submit.rid, "length")])
    with pytest.raises(RequestFailed) as caught:
        stream.text()
    assert caught.value.code == INTERNAL_ERROR
    rig.run(first, rig.ids_of("bc"))
    assert other.text() == "abc"


def test_a_fault_behind_the_tokenizer_ends_that_stream(rig, monkeypatch):
    other, first = begin(rig)
    monkeypatch.setattr(Stream, "encoded", broken)
    with pytest.raises(RequestFailed) as caught:
        rig.client().generate("x").text()
    assert caught.value.code == INTERNAL_ERROR
    lives(rig, other, first)


def test_a_fault_in_a_request_is_told_for_each_choice(rig, monkeypatch):
    other, first = begin(rig)
    with monkeypatch.context() as patched:
        patched.setattr("actors.streamer.actor.find_fault", broken)
        raw = greeted(rig)
        raw.send(Generate(5, SamplingParams(), prompt="x", more_refs=[6]))
        ends = raw.receive(Deltas).ends
        assert [(end.ref, end.code) for end in ends] == [(5, INTERNAL_ERROR), (6, INTERNAL_ERROR)]
    lives(rig, other, first)


def test_a_call_that_fails_is_answered(rig, monkeypatch):
    other, first = begin(rig)
    raw = greeted(rig)
    monkeypatch.setattr("actors.streamer.actor.Models", broken)
    raw.send(ListModels(7))
    failed = raw.receive(CallFailed)
    assert (failed.ref, failed.code) == (7, INTERNAL_ERROR)
    monkeypatch.undo()
    raw.send(ListModels(8))
    assert raw.receive(Models).ref == 8
    lives(rig, other, first)


def test_a_message_that_cant_be_written_fails_the_streams_in_it(rig, monkeypatch):
    other, first = begin(rig)
    client = rig.client()
    ending, going_on = client.generate("x", label="bad"), client.generate("y")
    submits = [rig.engine.submit() for _ in range(2)]
    genuine = Stream.take

    def garbled(self):
        text, *rest = genuine(self)
        return ("\ud800" if self.label == "bad" else text, *rest)

    monkeypatch.setattr(Stream, "take", garbled)
    rig.engine.step({submit.rid: 8 for submit in submits}, ended=[(submits[0].rid, "length")])
    for stream in (ending, going_on):
        with pytest.raises(RequestFailed) as caught:
            stream.text()
        assert caught.value.code == INTERNAL_ERROR
    lives(rig, other, first)
    again = client.generate("z")
    rig.run(rig.engine.submit(), rig.ids_of("again"))
    assert again.text() == "again"


@pytest.mark.parametrize(
    "message",
    [
        Charge(7, "a", [Quota("requests", 0, 60.0)], requests=1),
        Charge(7, "a", [Quota("requests", 1, 0.0)], requests=1),
        Charge(7, "a", [Quota("requests", 1, float("nan"))], requests=1),
        Charge(7, "a", [Quota("wishes", 1, 60.0)], requests=1),
    ],
)
def test_quotas_that_make_no_sense_are_refused(rig, message):
    raw = greeted(rig)
    raw.send(message)
    failed = raw.receive(CallFailed)
    assert (failed.ref, failed.code) == (7, INVALID_REQUEST)
    raw.send(Charge(8, "a", [Quota("requests", 1, 60.0)], requests=1))
    assert raw.receive(Done).ref == 8


def test_any_number_of_streams_can_be_asked_for(rig):
    raw = greeted(rig)
    for streams in (2**63, -1, 2**64 - 1):
        raw.send(AskFigures(9, streams=streams))
        assert raw.receive(Figures).ref == 9


@pytest.mark.parametrize("mode", ["required", "named"])
@pytest.mark.parametrize("parameters", [{"$defs": [1]}, {"definitions": "x"}, {"type": b"object"}])
def test_parameters_that_are_no_schema_are_refused(rig, parameters, mode):
    other, first = begin(rig)
    raw = greeted(rig)
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    messages = [{"role": "user", "content": "x"}]
    raw.send(Generate(5, SamplingParams(), messages=messages, tools=tools, tool_choice=ToolChoice(mode, "f")))
    if mode == "named" and b"object" not in parameters.values():
        rig.engine.submit()  # it is for the grammar to say what is wrong
    else:
        assert raw.end().code == INVALID_REQUEST
    lives(rig, other, first)


@pytest.mark.parametrize("size", [2**31, 2**63])
def test_min_tokens_has_a_limit(rig, size):
    with pytest.raises(RequestRejected, match="min_tokens"):
        rig.client().generate("x", min_tokens=size).text()
