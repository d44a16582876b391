"""Splitting a reply into text, reasoning and tool calls, however its text comes in pieces."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.streamer.reply import Reply, State
from actors.streamer.tool_format import ToolFormat
from protocol.messages import ToolChoice

THINK = ("<think>", "</think>")
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def split(pieces: list[str], *, think=THINK, tools=TOOLS, parser="json_tools", choice=None, thinking=False) -> tuple:
    """Text, reasoning, and calls as (name, arguments)."""
    dialect = SimpleNamespace(think=think, tools=ToolFormat(parser), specials={})
    reply = Reply(dialect, tools, choice or ToolChoice(), thinking=thinking)
    for piece in pieces:
        reply.push(piece)
    reply.flush()
    calls: dict[int, list[str]] = {}
    for call in reply.calls:
        name_and_arguments = calls.setdefault(call.index, ["", ""])
        name_and_arguments[0] += call.name
        name_and_arguments[1] += call.arguments
        assert bool(call.id) == bool(call.name)
    return "".join(reply.texts), "".join(reply.reasoning), [tuple(call) for call in calls.values()]


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "}{\\"", "b": [1, {"c": 2}]}}\n</tool_call>'
ARGUMENTS = '{"a": "}{\\"", "b": [1, {"c": 2}]}'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello", ("Hello", "", [])),
        ("<think>\nHm.\n</think>\n\nHello", ("Hello", "Hm.", [])),
        ("<think>cut", ("", "cut", [])),
        (f"I'll look.\n{CALL}", ("I'll look.", "", [("f", ARGUMENTS)])),
        (f"<think>x</think>{CALL}\n{CALL}\n", ("", "x", [("f", ARGUMENTS)] * 2)),
        ("a < b and <thin", ("a < b and <thin", "", [])),
        ("<tool_call>\nnot json\n</tool_call>", ("<tool_call>\nnot json\n</tool_call>", "", [])),
        ('<tool_call>{"arguments": {"a": 1}, "name": "g"}</tool_call>', ("", "", [("g", '{"a": 1}')])),
        ('<tool_call>{"name": "f"', ('<tool_call>{"name": "f"', "", [])),
    ],
)
@given(data=st.data())
def test_the_same_however_it_is_cut(text, expected, data):
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert split(pieces) == expected


@given(st.lists(st.text(alphabet="<think>/ \nab"), max_size=8))
def test_text_that_has_no_marks_is_left_alone(pieces):
    text = "".join(pieces)
    if "<think>" not in text:
        assert split(pieces, tools=[])[0] == text.lstrip()
    assert split(pieces, think=None, tools=[])[0] == text


def test_a_prompt_that_ends_in_reasoning():
    assert split(["Hm.", "</think>Hi"], thinking=True) == ("Hi", "Hm.", [])


def test_without_parallel_calls_the_first_counts():
    assert split([CALL, CALL], choice=ToolChoice(parallel=False))[2] == [("f", ARGUMENTS)]


def test_calls_are_text_when_no_tool_may_be_called():
    assert split([CALL], choice=ToolChoice("none")) == (CALL, "", [])


@given(st.data())
def test_forced_calls_are_bare_json(data):
    text = '[{"name": "f", "arguments": {"a": 1}}, {"name":"g","arguments":{}}]'
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=9)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert split(pieces, choice=ToolChoice("required")) == ("", "", [("f", '{"a": 1}'), ("g", "{}")])
    named = split(["<think>x</think>", '{"a":', "1}"], choice=ToolChoice("named", "f"))
    assert named == ("", "x", [("f", '{"a":1}')])


def test_json_arguments_come_while_they_are_written():
    dialect = SimpleNamespace(think=None, tools=ToolFormat("json_tools"), specials={})
    reply = Reply(dialect, TOOLS, ToolChoice())
    reply.push('<tool_call>{"name": "f", "arguments": {"a": "lo')
    assert [(call.name, call.arguments) for call in reply.calls] == [("f", ""), ("", '{"a": "lo')]


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>"),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": "x"}'),
        ("pythonic", "<|tool_call_start|>[f(a='x')]<|tool_call_end|>"),
        ("glm47", "<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value></tool_call>"),
        (
            "minimax_m2",
            '<minimax:tool_call><invoke name="f"><parameter name="a">x</parameter></invoke></minimax:tool_call>',
        ),
    ],
)
def test_dialects_of_mlx_lm(parser, text):
    said, _, calls = split(["Well. ", *text], parser=parser, think=None)
    assert said == "Well."
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("f", {"a": "x"})]


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("pythonic", "<|tool_call_start|>[f(a=b'x')]<|tool_call_end|>"),
        ("pythonic", "<|tool_call_start|>[f(a={1, 2})]<|tool_call_end|>"),
        ("pythonic", "<|tool_call_start|>[f(a=1e999)]<|tool_call_end|>"),
        ("pythonic", "<|tool_call_start|>[f(a=...)]<|tool_call_end|>"),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": NaN}'),
    ],
)
def test_calls_that_json_cant_hold_are_text(parser, text):
    assert split([*text], parser=parser, think=None) == (text, "", [])


@pytest.mark.parametrize(
    ("parser", "text", "name", "value"),
    [
        ("mistral", r'[TOOL_CALLS]f[ARGS]{"a": "\ud800"}', "f", "\ufffd"),
        ("mistral", r'[TOOL_CALLS]f[ARGS]{"a": "\ud83d\ude00"}', "f", "😀"),
        ("pythonic", r"<|tool_call_start|>[f(a='\ud800')]<|tool_call_end|>", "f", "\ufffd"),
        ("json_tools", r'<tool_call>{"name": "\ud83d", "arguments": {"a": "x"}}</tool_call>', "\ufffd", "x"),
    ],
)
def test_lone_surrogates_of_a_call_are_replaced(parser, text, name, value):
    _, _, [(called, arguments)] = split([*text], parser=parser, think=None)
    assert (called, json.loads(arguments)) == (name, {"a": value})
    assert (called + arguments).encode()


@pytest.mark.parametrize(
    ("parser", "begin", "over_and_over"),
    [
        ("json_tools", "<tool_call>", " "),
        ("json_tools", "<tool_call>", "{"),
        ("gemma4", "<|tool_call>", "call:f{"),
        ("glm47", "<tool_call>", "<arg_key>a</arg_key>"),
    ],
)
def test_nonsense_in_a_call_is_not_searched_again_and_again(parser, begin, over_and_over):
    # These would take minutes, and all other streams would stand still.
    text = begin + over_and_over * (300_000 // len(over_and_over))
    assert split([text[at : at + 50] for at in range(0, len(text), 50)], think=None, parser=parser)[2] == []


def test_a_call_is_found_behind_nonsense():
    text = "<tool_call>" + "{ " * 5_000 + '{"name": "f", "arguments": {"a": 1}}</tool_call>'
    assert split([*text], think=None)[2] == [("f", '{"a": 1}')]


def test_special_tokens_count_where_they_are_marks():
    dialect = SimpleNamespace(think=THINK, tools=ToolFormat("mistral"), specials={5: "[TOOL_CALLS]", 6: "<pad>"})
    reply = Reply(dialect, TOOLS, ToolChoice())
    assert (reply.special(5), reply.special(6), reply.special(7)) == ("[TOOL_CALLS]", "", "")
    reply.push(reply.special(5))
    assert reply.state is State.CALL
    assert reply.special(6) == "<pad>"
