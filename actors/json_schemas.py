"""How the JSON schemas of requests are read, where users of other servers expect more than the standard says.

Pure; used by `actors.grammars`, in the tokenizer and the engine.

- An object that names its properties has no others, unless the schema says so: by the standard it may have any, and a
  small model then invents keys until it is cut off. llama.cpp and xgrammar (vLLM's and Ollama's backends) read it so.
- An unknown `format` of a text says nothing, which is what the standard wants.
"""

from typing import Any
from urllib.parse import unquote

# llguidance has these.
KNOWN_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
)
_SAYS_OTHERS = ("additionalProperties", "patternProperties", "unevaluatedProperties")


def strict(schema: Any) -> Any:
    """The schema, changed in place. Raises ValueError when it is nested too deep.

    Objects whose properties come from several places (`allOf`, or a `$ref` beside others) stay open, as each of these
    would refuse the others' properties.
    """
    merged: set[str] = set()  # pointers to schemas that others are merged with
    try:
        while True:
            reading = _Reading(merged)
            reading.visit(schema, "#", False)
            if reading.found <= merged:
                break
            merged |= reading.found
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    for node in reading.closed:
        node["additionalProperties"] = False
    return schema


class _Reading:
    """One walk over a schema: the objects to be closed, and what references lead to schemas merged with others."""

    def __init__(self, merged: set[str]) -> None:
        self.closed: list[dict[str, Any]] = []
        self.found: set[str] = set()
        self._merged = merged

    def visit(self, node: Any, at: str, merged: bool) -> None:
        """Look at the schema `node`, which stands `at` this pointer."""
        if not isinstance(node, dict):
            return
        if isinstance(node.get("format"), str) and node["format"] not in KNOWN_FORMATS:
            del node["format"]
        own = isinstance(node.get("properties"), dict)
        merged = merged or at in self._merged or own + _sources(node) > 1
        if own and not merged and not any(key in node for key in _SAYS_OTHERS):
            self.closed.append(node)
        if merged and isinstance(node.get("$ref"), str):
            self.found.add(unquote(node["$ref"]))
        for key, value in node.items():
            if key in ("allOf", "anyOf", "oneOf"):
                self._each(value, f"{at}/{key}", merged)
            elif key in ("properties", "patternProperties", "$defs", "definitions", "prefixItems"):
                self._each(value, f"{at}/{key}", False)
            elif key in ("items", "additionalProperties"):
                self.visit(value, f"{at}/{key}", False)

    def _each(self, parts: Any, at: str, merged: bool) -> None:
        if isinstance(parts, dict):
            for name, part in parts.items():
                self.visit(part, f"{at}/{name.replace('~', '~0').replace('/', '~1')}", merged)
        elif isinstance(parts, list):
            for place, part in enumerate(parts):
                self.visit(part, f"{at}/{place}", merged)


def _sources(node: dict[str, Any]) -> int:
    """From how many places beside its own `properties` a schema may get some."""
    every = node.get("allOf")
    count = sum(_names_properties(part) for part in every) if isinstance(every, list) else 0
    for key in ("anyOf", "oneOf"):
        some = node.get(key)
        count += isinstance(some, list) and any(_names_properties(part) for part in some)
    return count + ("$ref" in node)


def _names_properties(node: Any) -> bool:
    return isinstance(node, dict) and ("properties" in node or _sources(node) > 0)
