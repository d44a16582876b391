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
_COMBINING = ("allOf", "anyOf", "oneOf")
_LISTS = (*_COMBINING, "prefixItems")
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_SAYS_OTHERS = ("additionalProperties", "patternProperties", "unevaluatedProperties")


def strict(schema: Any) -> Any:
    """The schema, changed in place. Raises ValueError when it is nested too deep.

    Objects whose properties come from several places (`allOf`, or a `$ref` beside others) stay open, as each of these
    would refuse the others' properties.
    """
    nodes: dict[str, dict[str, Any]] = {}
    try:
        _find(schema, "#", nodes)
        merged = _merged(nodes)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    for node in nodes.values():
        if _has_own(node) and id(node) not in merged and not any(key in node for key in _SAYS_OTHERS):
            node["additionalProperties"] = False
        if isinstance(node.get("format"), str) and node["format"] not in KNOWN_FORMATS:
            del node["format"]
    return schema


def _find(node: Any, at: str, nodes: dict[str, dict[str, Any]]) -> None:
    """Put the schema `node`, which stands `at` this pointer, and all in it into `nodes`."""
    if not isinstance(node, dict):
        return
    nodes[at] = node
    for key, value in node.items():
        if key in ("items", "additionalProperties"):
            _find(value, f"{at}/{key}", nodes)
        elif key in _LISTS and isinstance(value, list):
            for place, part in enumerate(value):
                _find(part, f"{at}/{key}/{place}", nodes)
        elif key in _BY_NAME and isinstance(value, dict):
            for name, part in value.items():
                _find(part, f"{at}/{key}/{name.replace('~', '~0').replace('/', '~1')}", nodes)


def _merged(nodes: dict[str, dict[str, Any]]) -> set[int]:
    """Ids of the schemas that hold for one object together with others."""
    merged: set[int] = set()
    pending = [node for node in nodes.values() if _has_own(node) + _sources(node) > 1]
    while pending:
        node = pending.pop()
        if id(node) in merged:
            continue
        merged.add(id(node))
        for key in _COMBINING:
            parts = node.get(key)
            pending += [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
        target = nodes.get(unquote(node["$ref"])) if isinstance(node.get("$ref"), str) else None
        if target is not None:
            pending.append(target)
    return merged


def _has_own(node: dict[str, Any]) -> bool:
    return isinstance(node.get("properties"), dict)


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
