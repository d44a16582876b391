"""Tools, which of them may be called, and what a chat tells its template, without a server."""

from typing import Any

import pytest
from parsed import APIS, fault, parsed

from protocol.messages import ToolChoice
from protocol.sampling import MAX_TOOLS

NAMES = ["paint", "sing", "wait"]
TOOLS = {
    "chat": [{"type": "function", "function": {"name": name}} for name in NAMES],
    "responses": [{"type": "function", "name": name} for name in NAMES],
    "messages": [{"name": name, "input_schema": {"type": "object"}} for name in NAMES],
}


def choice(api: str, mode: str, *names: str) -> dict[str, Any]:
    """`tool_choice` that allows these, in the words of `api`."""
    if api == "responses":
        return {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": name} for name in names]}
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_are_all_that_the_model_is_told_of(api: str, mode: str) -> None:
    asked = parsed(api, tools=TOOLS[api], tool_choice=choice(api, mode, "wait", "paint"))
    assert [tool["function"]["name"] for tool in asked.tools] == ["paint", "wait"]
    assert asked.tool_choice == ToolChoice(mode, "", True)


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_a_choice_of_what_is_not_there_is_refused(api: str) -> None:
    for wrong in (choice(api, "auto", "dance"), choice(api, "none", "sing"), {"type": "allowed_tools"}, "any"):
        assert fault(api, tools=TOOLS[api], tool_choice=wrong).param == "tool_choice"
    assert fault(api, tool_choice="required").param == "tool_choice"


@pytest.mark.parametrize(
    ("api", "named"),
    [
        ("chat", {"type": "function", "function": {"name": "sing"}}),
        ("responses", {"type": "function", "name": "sing"}),
        ("messages", {"type": "tool", "name": "sing"}),
    ],
)
def test_a_named_function(api: str, named: dict[str, Any]) -> None:
    asked = parsed(api, tools=TOOLS[api], tool_choice=named)
    assert [tool["function"]["name"] for tool in asked.tools] == NAMES
    assert asked.tool_choice == ToolChoice("named", "sing", True)
    one = {"tool_choice": {**named, "disable_parallel_tool_use": True}} if api == "messages" else {"tool_choice": named}
    together = {} if api == "messages" else {"parallel_tool_calls": False}
    assert parsed(api, tools=TOOLS[api], **one, **together).tool_choice == ToolChoice("named", "sing", False)


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_a_forced_call_and_a_grammar_exclude_each_other(api: str) -> None:
    forced: Any = {"type": "any"} if api == "messages" else "required"
    error = fault(api, tools=TOOLS[api], tool_choice=forced, structured_outputs={"regex": "a"})
    assert error.param == "tool_choice"
    assert "structured_outputs.regex" in error.message


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh", "my own"])
@pytest.mark.parametrize(
    ("api", "where"),
    [("chat", "reasoning_effort"), ("responses", "reasoning"), ("messages", "output_config")],
)
def test_an_effort_goes_to_the_template(api: str, where: str, effort: str) -> None:
    kwargs = parsed(api, **{where: effort if api == "chat" else {"effort": effort}}).template_kwargs
    assert kwargs["reasoning_effort"] == effort
    thinks = api != "messages" and effort != "none"  # there `thinking` decides
    assert kwargs["enable_thinking"] is thinks


def test_what_the_template_is_given_wins_over_an_effort() -> None:
    asked = parsed("chat", reasoning_effort="none", chat_template_kwargs={"enable_thinking": True})
    assert asked.template_kwargs == {"reasoning_effort": "none", "enable_thinking": True}
    assert fault("chat", reasoning_effort=5).param == "reasoning_effort"


def test_names_for_the_books_change_nothing() -> None:
    plain = parsed("chat")
    named = parsed("chat", metadata={"a": "b"}, store=True, user="me", prompt_cache_key="k", safety_identifier="s")
    assert (named.params, named.prompts, named.template_kwargs) == (plain.params, plain.prompts, plain.template_kwargs)
    assert named.finish is None
    for name, value in {"metadata": "x", "store": "yes", "user": 5}.items():
        assert fault("chat", **{name: value}).param == name


def test_every_api_is_here() -> None:
    assert {*TOOLS, "completions"} == APIS.keys()


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_too_many_tools_are_refused_before_anything_is_made_of_them(api: str) -> None:
    (tool, *_) = TOOLS[api]
    error = fault(api, tools=[tool] * (MAX_TOOLS + 1))
    assert (error.param, str(MAX_TOOLS) in error.message) == ("tools", True)
    if api != "messages":
        assert fault(api, tools=TOOLS[api], tool_choice=choice(api, "auto", *["sing"] * 50_000)).param == "tools"
