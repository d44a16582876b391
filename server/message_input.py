"""Anthropic's conversations, with their blocks, as chat messages.

Pure; used by `server.messages`.
"""

import json
from typing import Any

from server.errors import invalid
from server.schemas_messages import MessageParam

Message = dict[str, Any]


def chat_messages(given: list[MessageParam], system: str | list[dict[str, Any]] | None) -> list[Message]:
    """Chat messages of a conversation. Raises ApiError naming the block that can't be taken."""
    if not given:
        raise invalid("messages must not be empty", "messages")
    messages: list[Message] = []
    if system:
        messages.append({"role": "system", "content": _text(system, "system")})
    for i, message in enumerate(given):
        place = f"messages[{i}]"
        if message.role not in ("user", "assistant", "system"):
            raise invalid(f"{place}.role must be user or assistant, not {message.role!r}", f"{place}.role")
        if isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            messages.append(_assistant(message.content, f"{place}.content"))
        else:
            messages += _user(message.role, message.content, f"{place}.content")
    return messages


def _assistant(blocks: list[dict[str, Any]], place: str) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        match block.get("type"):
            case "text":
                texts.append(_word(block, "text", f"{place}[{i}]"))
            case "thinking":
                thoughts.append(_word(block, "thinking", f"{place}[{i}]"))
            case "redacted_thinking":
                pass
            case "tool_use":
                name, call_id = _word(block, "name", f"{place}[{i}]"), _word(block, "id", f"{place}[{i}]")
                function = {"name": name, "arguments": json.dumps(block.get("input") or {}, ensure_ascii=False)}
                calls.append({"id": call_id, "type": "function", "function": function})
            case kind:
                raise _unsupported(kind, f"{place}[{i}]")
    message: Message = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _user(role: str, blocks: list[dict[str, Any]], place: str) -> list[Message]:
    """Results of tools come as messages of their own, before the text."""
    results: list[Message] = []
    texts: list[str] = []
    for i, block in enumerate(blocks):
        match block.get("type"):
            case "text":
                texts.append(_word(block, "text", f"{place}[{i}]"))
            case "tool_result":
                call_id = _word(block, "tool_use_id", f"{place}[{i}]")
                text = _text(block.get("content") or "", f"{place}[{i}].content")
                if block.get("is_error"):
                    text = f"Error: {text}"
                results.append({"role": "tool", "tool_call_id": call_id, "content": text})
            case kind:
                raise _unsupported(kind, f"{place}[{i}]")
    if texts or not results:
        results.append({"role": role, "content": "\n".join(texts)})
    return results


def _text(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"{place} must be a string or a list of blocks", place)
    texts = []
    for i, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind != "text":
            raise _unsupported(kind, f"{place}[{i}]")
        texts.append(_word(block, "text", f"{place}[{i}]"))
    return "\n".join(texts)


def _word(block: dict[str, Any], key: str, place: str) -> str:
    value = block.get(key)
    if not isinstance(value, str):
        raise invalid(f"{place}.{key} must be a string", f"{place}.{key}")
    return value


def _unsupported(kind: Any, place: str) -> Exception:
    return invalid(f"{place}.type: blocks of type {kind!r} are not supported", f"{place}.type")
