"""The input of the Responses API, and its output as history, as chat messages.

Pure; used by `server.responses`.
"""

from typing import Any

from server.errors import invalid
from server.schemas_responses import FunctionCallItem, MessageItem, OutputItem, ReasoningItem

Message = dict[str, Any]


def input_messages(given: str | list[dict[str, Any]]) -> list[Message]:
    """Chat messages of an `input`. Raises ApiError naming the item that can't be taken."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[Message] = []
    for i, item in enumerate(given):
        _add(messages, item, f"input[{i}]")
    return messages


def output_messages(output: list[OutputItem]) -> list[Message]:
    """What a response said, as the one message that it is in a chat."""
    message: Message = {"role": "assistant", "content": ""}
    for item in output:
        match item:
            case MessageItem():
                message["content"] += "".join(part.text for part in item.content)
            case ReasoningItem():
                message["reasoning_content"] = "".join(part.text for part in item.content)
            case FunctionCallItem():
                message.setdefault("tool_calls", []).append(_call(item.call_id, item.name, item.arguments))
    return [message]


def _add(messages: list[Message], item: dict[str, Any], place: str) -> None:
    match item.get("type", "message"):
        case "message":
            role = item.get("role")
            if not isinstance(role, str) or not role:
                raise invalid(f"{place}.role is required", f"{place}.role")
            messages.append({"role": role, "content": _text(item.get("content"), f"{place}.content")})
        case "function_call":
            name, call_id, arguments = (_word(item, key, place) for key in ("name", "call_id", "arguments"))
            _open_turn(messages).setdefault("tool_calls", []).append(_call(call_id, name, arguments))
        case "function_call_output":
            text = _text(item.get("output"), f"{place}.output")
            messages.append({"role": "tool", "tool_call_id": _word(item, "call_id", place), "content": text})
        case "reasoning":
            parts = item.get("content") or item.get("summary") or []
            messages.append({"role": "assistant", "content": "", "reasoning_content": _text(parts, f"{place}.content")})
        case kind:
            raise invalid(f"{place}.type: items of type {kind!r} are not supported", f"{place}.type")


def _open_turn(messages: list[Message]) -> Message:
    """The assistant's turn that a call belongs to, begun if need be."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _word(item: dict[str, Any], key: str, place: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise invalid(f"{place}.{key} must be a string", f"{place}.{key}")
    return value


def _text(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"{place} must be a string or a list of parts", place)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("input_text", "output_text", "text", "reasoning_text", "summary_text"):
            raise invalid(f"{place}[{i}].type: parts of type {kind!r} are not supported", f"{place}[{i}].type")
        if not isinstance(part.get("text"), str):
            raise invalid(f"{place}[{i}].text must be a string", f"{place}[{i}].text")
        texts.append(part["text"])
    return "\n".join(texts)
