"""Bounds of what one request may hold, for HTTP and raw clients alike; `protocol.sampling` has those of sampling."""

from typing import Any

from protocol.sampling import InvalidParam

MAX_MESSAGES = 4096  # chat messages of one request
MAX_DEPTH = 64  # nested arrays and objects in a free-form value


def too_deep(value: Any) -> bool:
    """Whether arrays and objects are nested more than MAX_DEPTH deep in a decoded value."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return False
    return True


def check_messages(messages: list[dict[str, Any]]) -> None:
    """Check the number and the depth of chat messages. Raises InvalidParam."""
    if not messages:
        raise InvalidParam("messages", "messages must not be empty")
    if len(messages) > MAX_MESSAGES:
        raise InvalidParam("messages", f"messages may hold {MAX_MESSAGES} messages, not {len(messages)}")
    if too_deep(messages):
        raise InvalidParam("messages", f"messages are nested more than {MAX_DEPTH} deep")
