"""Grammars of forced tool calls: what a reply must be when `tool_choice` is required or names a tool.

Pure. Called by the streamer; `actors.streamer.reply` takes apart what the grammar lets through.
"""

import json
from typing import Any

from protocol.messages import Grammar, ToolChoice

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def forced_calls(tools: list[dict[str, Any]], choice: ToolChoice) -> Grammar | None:
    """The grammar of a reply that must call a tool; None when it may do without.

    A named tool's reply is its arguments, a required one's a list of objects with name and arguments. Raises
    ValueError when there is no such tool, or when the tools' parameters are no schemas.
    """
    if choice.mode not in ("required", "named"):
        return None
    if choice.mode == "named":
        for tool in tools:
            if tool["function"]["name"] == choice.name:
                return Grammar("json_line", _written(_parameters(tool)), "tools")
        raise ValueError(f"tool_choice names {choice.name!r}, which is not among the tools")
    shared: dict[str, dict[str, Any]] = {"$defs": {}, "definitions": {}}
    calls = [_call(tool, shared) for tool in tools]
    schema: dict[str, Any] = {"type": "array", "items": {"anyOf": calls}, "minItems": 1}
    if not choice.parallel:
        schema["maxItems"] = 1
    schema |= {key: named for key, named in shared.items() if named}
    return Grammar("json_line", _written(schema), "tools")


def _written(schema: dict[str, Any]) -> str:
    try:
        return json.dumps(schema)
    except TypeError as error:  # MessagePack has more than JSON
        raise ValueError(f"the tools' parameters are no JSON: {error}") from None


def _parameters(tool: dict[str, Any]) -> dict[str, Any]:
    return tool["function"].get("parameters") or _NO_PARAMETERS


def _call(tool: dict[str, Any], shared: dict[str, dict[str, Any]]) -> dict[str, Any]:
    name = tool["function"]["name"]
    parameters = dict(_parameters(tool))
    for key, all_named in shared.items():
        # References are looked up from the root of a schema, which is elsewhere now.
        named = parameters.pop(key, None) or {}
        if not isinstance(named, dict):
            raise ValueError(f"{key} of the tool {name!r} must be an object")
        for part, schema in named.items():
            if all_named.setdefault(part, schema) != schema:
                raise ValueError(f"two tools define {part!r} in {key} differently; call one of them by name")
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
