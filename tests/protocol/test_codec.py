"""The wire format: round trips, recorded frames, and input that is no message."""

import json
import struct
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import messages as m
from protocol.codec import (
    CodecError,
    client_codec,
    command_codec,
    encode,
    job_codec,
    model_answer_codec,
    model_order_codec,
    order_codec,
    report_codec,
    result_codec,
    server_codec,
    step_codec,
)
from protocol.figures import PrefixChain, PrefixTree
from protocol.ids import pack_floats, pack_ids, unpack_floats, unpack_ids

RECORDED = Path(__file__).parent / "frames-v1.json"

CHAIN = PrefixChain("00ff00ff00ff", -1, 0, 256, 1, 1000, 1, 1100, 1.7e9, 3, True)
EVERY_OPTION = m.SamplingParams(
    *(0.5, 0.9, 3, 10, True, ["a"], 40, 0.1, 1.1, 0.5, -0.5, {5: -100.0, 6: 1.5}, 2, [7], 0.5, 0.1, 5, -1)
)

A_MODEL = m.ModelState(
    *("demo", "ready", ["gpt"], "", 1.0, 1 << 30, 1 << 29, True, 300.0, 12.5, 0.0, 2, 1, "ipc:///x", "generate"),
    *(["fr"], 1 << 28),
)

EXAMPLES = [
    (client_codec, m.Hello(1, "test")),
    (client_codec, m.Ping(7)),
    (client_codec, m.Generate(1, m.SamplingParams(0.5, 0.9, 3, 10, True, ["a"]), prompt="hi", label="x")),
    (client_codec, m.Generate(2, m.SamplingParams(), messages=[{"role": "user", "content": "hi"}])),
    (client_codec, m.Generate(3, m.SamplingParams(), ids=b"\1\0\0\0", return_ids=True, return_text=False)),
    (client_codec, m.Cancel(1)),
    (client_codec, m.Credit([1, 2], [16, 3])),
    (client_codec, m.Tokenize(4, "text")),
    (client_codec, m.Detokenize(5, b"\1\0\0\0")),
    (client_codec, m.ListModels(6)),
    (server_codec, m.Welcome(1, 99, 64, [m.ModelCard("demo", 8192, 49152, True, 1)])),
    (server_codec, m.Refused(1, "no")),
    (server_codec, m.Pong(7, 99)),
    (server_codec, m.Accepted(1, 10, 5)),
    (
        server_codec,
        m.Deltas(
            [1],
            ["Hé"],
            [b""],
            [2],
            [m.End(1, "finished", "stop", usage=m.Usage(5, 2, 0), timing=m.Timing(0.1, 0.2, 0.3, 0.4, 0.5))],
        ),
    ),
    (server_codec, m.Tokenized(4, b"\1\0\0\0")),
    (server_codec, m.Detokenized(5, "x")),
    (server_codec, m.Models(6, [])),
    (server_codec, m.CallFailed(4, "invalid_request", "no", "text")),
    (job_codec, m.Encode(1, 2, "text")),
    (job_codec, m.Decode(1, 3, b"")),
    (result_codec, m.Encoded(1, 2, b"\1\0\0\0")),
    (result_codec, m.Decoded(1, 3, "x")),
    (command_codec, m.Attach(1, 2)),
    (command_codec, m.Submit(1, 2, 3, b"\1\0\0\0", 1, 10, 0.0, 1.0, 42)),
    (command_codec, m.Abort(1, 2, [3, 4])),
    (step_codec, m.Step(1, 2, [3], b"\5\0\0\0", [3], [3], ["stop"], [""], m.EngineStats(9, 1, 0, 0, 100))),
    (report_codec, m.Ready("engine", 0, 1, 123, "ipc:///x", m.ModelCard("demo"))),
    (report_codec, m.StartFailed("engine", 0, 1, "no")),
    (report_codec, m.Alive("engine", 0, 1, 5, 2, m.EngineStats(9))),
    (order_codec, m.Probe(5)),
    (order_codec, m.SystemState("ok", "demo", [m.ActorState("engine", "engine", 0, 123, "ready", 1, "ipc:///x")])),
    (order_codec, m.Drain(30.0)),
    (order_codec, m.Stop("server_stopped", "bye")),
    (client_codec, m.Generate(1, EVERY_OPTION, prompt="hi")),
    (command_codec, m.Submit(1, 2, 3, b"\1\0\0\0", 1, 10, 0.5, 0.9, 42, 0, True, EVERY_OPTION, -1)),
    (
        step_codec,
        m.Step(
            *(1, 2, [3, 4], b"\5\0\0\0\6\0\0\0"),
            logprob_rids=[4],
            logprobs=[-0.5],
            top_ids=[b"\6\0\0\0"],
            top_logprobs=[pack_floats([-0.5])],
        ),
    ),
    (
        server_codec,
        m.Deltas(
            *([1, 2], ["", "é"], [b"", b""], [1, 2]),
            logprobs=[[], [m.TokenLogprobs(6, -0.5, b"\6\0\0\0", pack_floats([-0.5]), b"\xc3", [b"\xc3"], 9)]],
        ),
    ),
    (report_codec, m.EngineUse(7, True, False)),
    (
        client_codec,
        m.Generate(
            *(1, m.SamplingParams(grammar=m.Grammar("regex", "a+", "guided_regex"), thinking_budget=5)),
            messages=[{"role": "user", "content": "hi"}],
            template_kwargs={"enable_thinking": False},
            tools=[{"type": "function", "function": {"name": "f"}}],
            tool_choice=m.ToolChoice("named", "f", False),
            split_reply=True,
            more_refs=[2, 3],
        ),
    ),
    (client_codec, m.Tokenize(4, messages=[{"role": "user", "content": "hi"}], template_kwargs={"a": 1}, tools=[{}])),
    (client_codec, m.CancelLabel(7, "x")),
    (client_codec, m.Keep(8, "response:x", b"{}")),
    (client_codec, m.Recall(9, "response:x")),
    (client_codec, m.Forget(10, "response:x")),
    (client_codec, m.Embed(11, ["a"], [b"\1\0\0\0"])),
    (client_codec, m.Rank(12, "q", ["d"], "i")),
    (server_codec, m.Done(7, 1)),
    (server_codec, m.Kept(9, None)),
    (server_codec, m.Embedded(11, [pack_floats([0.5])], [1])),
    (server_codec, m.Ranked(12, [0.5], [9])),
    (
        server_codec,
        m.Deltas(
            *([1], ["a"], [b""], [1]),
            ends=[m.End(1, "finished", "tool_calls", usage=m.Usage(5, 2, 0, 1), stop="x")],
            reasoning=["hm"],
            tool_calls=[[m.ToolCallDelta(0, "call_1", "f", "{}")]],
        ),
    ),
    (job_codec, m.Encode(1, 2, "text", tools=[{}], grammar=m.Grammar("json_object"))),
    (
        command_codec,
        m.Submit(*(1, 2, 3, b"\1\0\0\0", 1, 10, 0.0, 1.0, 42), thinking=m.Thinking([1], [2], True), like=2),
    ),
    (command_codec, m.Submit(*(1, 2, 3, b"\1\0\0\0", 1, 1, 0.0, 1.0, 0), pool=m.Pool("last", True, [5, 6]))),
    (step_codec, m.Step(1, 2, [], b"", pooled_rids=[3], pooled=[pack_floats([0.5])])),
    (command_codec, m.Submit(*(1, 2, 3, b"\1\0\0\0", 1, 10, 0.0, 1.0, 42), adapter="fr")),
    (report_codec, m.Ready("engine", 0, 1, 1, "ipc:///x", m.ModelCard("demo", adapters={"fr": "adapters/fr"}))),
    (client_codec, m.Generate(1, m.SamplingParams(), ids=b"\1\0\0\0", trace=True)),
    (server_codec, m.Deltas([], [], [], [], [m.End(1, "finished", "stop", trace=m.Trace(0.5, in_model=0.25))])),
    (result_codec, m.Encoded(1, 2, b"\1\0\0\0", began=0.5, ended=0.75)),
    (command_codec, m.Submit(1, 2, 3, b"\1\0\0\0", 1, 10, 0.0, 1.0, 42, turn=7, trace=True)),
    (step_codec, m.Step(1, 2, [3], b"\5\0\0\0", traces=[m.EngineTrace(3, 0.5, 0.75, 0.25, 0.125, 0.0625)])),
    (order_codec, m.ModelsState([A_MODEL, m.ModelState("other", "unloaded")], 3 << 30, 1 << 30)),
    (report_codec, m.WantModel("demo", 3, 300.0)),
    (report_codec, m.CastUse(4, 2, 100, 1 << 30)),
    (model_order_codec, m.ModelOrder(1, "load", "demo", -1.0)),
    (model_answer_codec, m.ModelAnswer(1, "", "", [A_MODEL], "ipc:///x")),
    (client_codec, m.Generate(1, m.SamplingParams(), ids=b"\1\0\0\0", received=12.5)),
    (client_codec, m.Credit([1], [2], [0.25])),
    (client_codec, m.AskPrefixes(9)),
    (command_codec, m.TellPrefixes(2, 1)),
    (step_codec, m.Step(2, 1, [], b"", prefixes=PrefixTree([CHAIN], 1, 1, 7, 1))),
    (server_codec, m.Prefixes(9, PrefixTree([CHAIN], 1, 1, 7, 1, True))),
]


@pytest.mark.parametrize(("codec", "message"), EXAMPLES, ids=lambda value: type(value).__name__)
def test_round_trip(codec, message):
    assert codec.decode(encode(message)) == message


def test_frames_recorded_with_version_1_still_decode():
    recorded = {name: bytes.fromhex(frame) for name, frame in json.loads(RECORDED.read_text()).items()}
    names = {f"{type(message).__name__}-{i}" for i, (_, message) in enumerate(EXAMPLES)}
    assert recorded.keys() == names
    for i, (codec, message) in enumerate(EXAMPLES):
        name = f"{type(message).__name__}-{i}"
        if name in recorded:
            assert codec.decode(recorded[name]) == message


def test_fields_of_a_later_version_are_ignored():
    frame = msgspec.msgpack.encode([*msgspec.msgpack.decode(encode(m.Cancel(5))), "new", {"later": 1}])
    assert client_codec.decode(frame) == m.Cancel(5)


@given(st.binary(max_size=200))
def test_garbage_is_a_codec_error_or_a_message(data):
    for codec in (client_codec, server_codec, command_codec, step_codec, report_codec, order_codec):
        try:
            message = codec.decode(data)
        except CodecError:
            continue
        assert isinstance(message, msgspec.Struct)


def test_a_lone_surrogate_has_no_wire_form():
    with pytest.raises(CodecError, match="surrogate"):
        encode(m.Tokenize(1, "a\ud800b"))


def test_deep_nesting_is_a_codec_error():
    with pytest.raises(CodecError):
        client_codec.decode(b"\x91" * 100_000)


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_ids_round_trip(ids):
    assert unpack_ids(pack_ids(ids)) == ids
    assert pack_ids(ids) == b"".join(i.to_bytes(4, "little") for i in ids)


@given(st.lists(st.floats(width=32, allow_nan=False)))
def test_floats_round_trip(values):
    assert unpack_floats(pack_floats(values)) == values
    assert pack_floats(values) == b"".join(struct.pack("<f", value) for value in values)
    with pytest.raises(ValueError, match="4 bytes"):
        unpack_floats(pack_floats(values) + b"1")


def test_ids_outside_uint32_and_odd_lengths_are_refused():
    with pytest.raises(OverflowError):
        pack_ids([-1])
    with pytest.raises(OverflowError):
        pack_ids([2**32])
    with pytest.raises(ValueError, match="4 bytes"):
        unpack_ids(b"123")
