"""Anthropic's conversations, with their blocks, as chat messages.

Pure; used by `server.messages`.
"""

import json
from typing import Any

from server.content import text_of, unsupported, word_of
from server.errors import invalid
from server.schemas_messages import MessageParam

Message = dict[str, Any]
_TEXT = ("text",)


def chat_messages(given: list[MessageParam], system: str | list[dict[str, Any]] | None) -> list[Message]:
    """Chat messages of a conversation. Raises ApiError naming the block that can't be taken."""
    if not given:
        raise invalid("messages must not be empty", "messages")
    messages: list[Message] = []
    if system:
        messages.append({"role": "system", "content": text_of(system, "system", _TEXT)})
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
                texts.append(word_of(block, "text", f"{place}[{i}]"))
            case "thinking":
                thoughts.append(word_of(block, "thinking", f"{place}[{i}]"))
            case "redacted_thinking":
                pass
            case "tool_use":
                name, call_id = word_of(block, "name", f"{place}[{i}]"), word_of(block, "id", f"{place}[{i}]")
                function = {"name": name, "arguments": json.dumps(block.get("input") or {}, ensure_ascii=False)}
                calls.append({"id": call_id, "type": "function", "function": function})
            case kind:
                raise unsupported(kind, f"{place}[{i}]")
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
                texts.append(word_of(block, "text", f"{place}[{i}]"))
            case "tool_result":
                call_id = word_of(block, "tool_use_id", f"{place}[{i}]")
                text = text_of(block.get("content") or "", f"{place}[{i}].content", _TEXT)
                if block.get("is_error"):
                    text = f"Error: {text}"
                results.append({"role": "tool", "tool_call_id": call_id, "content": text})
            case kind:
                raise unsupported(kind, f"{place}[{i}]")
    if texts or not results:
        results.append({"role": role, "content": "\n".join(texts)})
    return results
