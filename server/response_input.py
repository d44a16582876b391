"""The input of the Responses API, and its output as history, as chat messages.

Pure; used by `server.responses`.
"""

from typing import Any

from server.content import text_of, unsupported, word_of
from server.errors import invalid
from server.schemas_responses import FunctionCallItem, MessageItem, OutputItem, ReasoningItem

Message = dict[str, Any]
_TEXTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")


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
            text = text_of(item.get("content"), f"{place}.content", _TEXTS)
            if role == "assistant" and messages and _only_thought(messages[-1]):
                messages[-1]["content"] = text
            else:
                messages.append({"role": role, "content": text})
        case "function_call":
            name, call_id, arguments = (word_of(item, key, place) for key in ("name", "call_id", "arguments"))
            _open_turn(messages).setdefault("tool_calls", []).append(_call(call_id, name, arguments))
        case "function_call_output":
            text = text_of(item.get("output"), f"{place}.output", _TEXTS)
            messages.append({"role": "tool", "tool_call_id": word_of(item, "call_id", place), "content": text})
        case "reasoning":
            parts = item.get("content") or item.get("summary") or []
            messages.append(
                {"role": "assistant", "content": "", "reasoning_content": text_of(parts, f"{place}.content", _TEXTS)}
            )
        case kind:
            raise unsupported(kind, place)


def _only_thought(message: Message) -> bool:
    """Whether a message is reasoning whose answer, another item, is still to come."""
    return "reasoning_content" in message and not message["content"] and "tool_calls" not in message


def _open_turn(messages: list[Message]) -> Message:
    """The assistant's turn that a call belongs to, begun if need be."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
