"""Content of messages as the APIs nest it: a text, or a list of parts that hold texts.

Pure; used by `server.message_input` and `server.response_input`. All raise ApiError naming the place.
"""

from collections.abc import Collection
from typing import Any

from server.errors import ApiError, invalid


def text_of(content: Any, place: str, kinds: Collection[str]) -> str:
    """The text of `content`; its parts, which are of these `kinds`, are joined by line breaks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"{place} must be a string or a list of parts", place)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds:
            raise unsupported(kind, f"{place}[{i}]")
        key = "refusal" if kind == "refusal" else "text"
        texts.append(word_of(part, key, f"{place}[{i}]"))
    return "\n".join(texts)


def word_of(part: dict[str, Any], key: str, place: str) -> str:
    """What stands under `key`, which must be a text."""
    value = part.get(key)
    if not isinstance(value, str):
        raise invalid(f"{place}.{key} must be a string", f"{place}.{key}")
    return value


def unsupported(kind: Any, place: str) -> ApiError:
    """The error for a part of a kind that isn't served."""
    return invalid(f"{place}.type: {kind!r} is not supported here", f"{place}.type")
