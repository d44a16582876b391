"""The tools of a chat request and which of them may be called, as the protocol words them.

Pure; used by the adapters of the APIs.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from protocol.messages import ToolCallDelta, ToolChoice
from protocol.sampling import MAX_TOOLS
from server.errors import invalid
from server.schemas import FunctionCallBody, NamedToolChoice, ToolCallBody, ToolSpec

Tools = list[dict[str, Any]]


def parse_tools(
    specs: list[ToolSpec] | None, choice: str | NamedToolChoice | None, parallel: bool | None
) -> tuple[Tools, ToolChoice]:
    """Tools and choice of a chat request. Raises ApiError naming what is wrong."""
    check_count(specs)
    for i, spec in enumerate(specs or ()):
        if spec.type != "function":
            raise invalid(f"tools[{i}].type: tools of type {spec.type!r} are not supported", f"tools[{i}].type")
    tools = [tool_of(spec) for spec in specs or ()]
    together = parallel is not False
    if choice is None or choice in ("auto", "none", "required"):
        if choice == "required" and not tools:
            raise invalid("tool_choice is required, but there are no tools", "tool_choice")
        return tools, ToolChoice(str(choice or "auto"), "", together)
    if isinstance(choice, str):
        raise invalid(f"tool_choice must be auto, none, required or an object, not {choice!r}", "tool_choice")
    if choice.type == "function" and choice.function is not None:
        _check_named(tools, choice.function.name)
        return tools, ToolChoice("named", choice.function.name, together)
    if choice.type == "allowed_tools" and choice.allowed_tools is not None:
        check_count(choice.allowed_tools.tools)
        allowed = {_name_of(tool) for tool in choice.allowed_tools.tools}
        for name in allowed:
            _check_named(tools, name)
        if choice.allowed_tools.mode not in ("auto", "required"):
            raise invalid("tool_choice.allowed_tools.mode must be auto or required", "tool_choice")
        kept = [tool for tool in tools if tool["function"]["name"] in allowed]
        return kept, ToolChoice(choice.allowed_tools.mode, "", together)
    raise invalid(f"tool_choice of type {choice.type!r} is not supported, or holds no function", "tool_choice")


def check_count(specs: Sequence[object] | None) -> None:
    """Refuse more tools than a request may have, before anything is made of them. Raises ApiError."""
    if specs is not None and len(specs) > MAX_TOOLS:
        raise invalid(f"at most {MAX_TOOLS} tools, not {len(specs)}", "tools")


def tool_of(spec: ToolSpec) -> dict[str, Any]:
    """A tool as chat templates expect it: what is absent is left out."""
    function = {name: value for name, value in msgspec.structs.asdict(spec.function).items() if value is not None}
    return {"type": "function", "function": function}


def _name_of(tool: dict[str, Any]) -> str:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else tool.get("name")
    return name if isinstance(name, str) else ""


def _check_named(tools: Tools, name: str) -> None:
    if not any(tool["function"]["name"] == name for tool in tools):
        raise invalid(f"tool_choice names {name!r}, which is not among the tools", "tool_choice")


def join_calls(deltas: list[ToolCallDelta]) -> list[ToolCallBody]:
    """Whole calls from their pieces."""
    calls: dict[int, ToolCallBody] = {}
    for delta in deltas:
        call = calls.setdefault(delta.index, ToolCallBody("", FunctionCallBody("", "")))
        call.id = call.id or delta.id
        call.function.name = call.function.name or delta.name
        call.function.arguments += delta.arguments
    return [calls[index] for index in sorted(calls)]


def arguments_of(call: ToolCallBody) -> dict[str, Any]:
    """The arguments of a whole call. What is no object in JSON, as when a length limit cut it off, is passed on as the
    text that it is, under `arguments`."""
    text = call.function.arguments
    try:
        value = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):  # a model wrote it
        value = None
    return value if isinstance(value, dict) else {"arguments": text}
