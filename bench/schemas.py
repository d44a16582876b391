"""A hundred JSON schemas, wide in features, for the checks of structured output. Pure.

Texts and lists are bounded, so that a small model that goes on and on comes to an end.
"""

from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string", "maxLength": 12}
WORD: Schema = {"type": "string", "pattern": "^[a-z]{1,8}$"}
DIGIT: Schema = {"type": "integer", "minimum": 0, "maximum": 9}


def closed(required: Schema, optional: Schema | None = None, **more: Any) -> Schema:
    """An object with these properties and no others."""
    properties = {**required, **(optional or {})}
    return {
        "type": "object",
        "properties": properties,
        "required": [*required],
        "additionalProperties": False,
        **more,
    }


def listed(items: Schema, low: int = 0, high: int = 3) -> Schema:
    """A list of so many items."""
    return {"type": "array", "items": items, "minItems": low, "maxItems": high}


def _values() -> Iterator[Schema]:
    """Single values."""
    yield from ({"type": kind} for kind in ("boolean", "null"))
    yield from (
        DIGIT,
        {"type": "integer", "minimum": -20, "maximum": -3},
        {"type": "integer", "exclusiveMinimum": 99, "maximum": 120},
    )
    yield from (
        {"type": "number", "minimum": 0, "maximum": 1},
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 2},
    )
    yield from (
        {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 5},
        {"type": ["integer", "null"], "minimum": 0, "maximum": 50},
    )
    yield from (TEXT, WORD, {"type": "string", "minLength": 3, "maxLength": 6}, {"type": "string", "maxLength": 0})
    yield from (
        {"type": "string", "pattern": pattern}
        for pattern in (r"^\d{3}-\d{4}$", "^(north|south)-(east|west)$", "^[A-Z][a-z]{2,6}$", r"^#[0-9a-f]{6}$")
    )
    formats = ("date", "time", "date-time", "email", "ipv4", "uuid", "duration", "hostname")
    yield from ({"type": "string", "format": name} for name in formats)
    yield from (
        {"enum": ["a", "b", "ü", 'q"q']},
        {"enum": [1, 2.5, None, True, "x"]},
        {"const": "fixed"},
        {"const": {"a": [1, 2]}},
    )
    yield from (
        {"anyOf": [DIGIT, WORD]},
        {"oneOf": [{"type": "boolean"}, {"type": "integer", "minimum": 5, "maximum": 6}]},
    )
    yield from ({"anyOf": [{"type": "null"}, closed({"a": DIGIT})]}, {"type": ["boolean", "null"]})


def _lists() -> Iterator[Schema]:
    """Lists."""
    yield from (
        listed(DIGIT),
        listed(WORD, 2, 2),
        listed(TEXT, 1, 4),
        listed({"enum": ["x", "y"]}, 3, 5),
        listed({"type": "boolean"}, 0, 0),
    )
    yield from (
        listed(listed(DIGIT, 1, 2), 1, 2),
        listed(closed({"k": WORD, "v": DIGIT}), 1, 2),
        listed({"anyOf": [DIGIT, WORD]}, 2, 3),
    )
    yield {"type": "array", "prefixItems": [DIGIT, WORD], "items": False, "minItems": 2}
    yield {"type": "array", "prefixItems": [WORD], "items": DIGIT, "minItems": 1, "maxItems": 3}
    yield {"type": "array", "prefixItems": [{"const": "point"}, DIGIT, DIGIT], "items": False, "minItems": 3}


def _objects() -> Iterator[Schema]:
    """Objects."""
    yield from (closed({}), closed({"a": DIGIT}), closed({"a": DIGIT, "b": WORD}), closed({}, {"a": DIGIT, "b": WORD}))
    yield from (
        closed({"a": WORD}, {"b": DIGIT, "c": {"type": "boolean"}}),
        closed({"nested": closed({"deep": closed({"deeper": DIGIT})})}),
    )
    yield from (
        closed(
            {
                "name": TEXT,
                "age": {"type": "integer", "minimum": 0, "maximum": 120},
                "email": {"type": "string", "format": "email"},
            }
        ),
    )
    yield from (
        closed({"a b": DIGIT, 'q"': WORD, "ü": WORD, "": DIGIT}),
        closed({"when": {"type": "string", "format": "date"}, "done": {"type": "boolean"}}),
    )
    yield from (closed({"tags": listed(WORD, 1, 3), "score": {"type": "number", "minimum": 0, "maximum": 10}}),)
    yield from (
        closed(
            {
                "choice": {
                    "anyOf": [closed({"kind": {"const": "a"}, "a": DIGIT}), closed({"kind": {"const": "b"}, "b": WORD})]
                }
            }
        ),
    )
    yield from (
        closed({"value": {"type": ["integer", "null"], "minimum": 1, "maximum": 3}}),
        closed({"v": {"const": None}}),
    )
    yield {
        "type": "object",
        "properties": {"a": DIGIT},
        "required": ["a"],
        "additionalProperties": False,
        "title": "T",
        "description": "D",
        "default": {},
    }
    yield {"type": "object", "additionalProperties": DIGIT, "maxProperties": 2, "minProperties": 1}
    yield {
        "type": "object",
        "patternProperties": {"^x_[a-z]$": DIGIT},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 2,
    }
    yield {"allOf": [closed({"a": DIGIT, "b": WORD}), {"type": "object", "properties": {"a": {"minimum": 5}}}]}


def _references() -> Iterator[Schema]:
    """Schemas with definitions, some of them recursive."""
    yield {"$defs": {"d": DIGIT}, **closed({"a": {"$ref": "#/$defs/d"}, "b": {"$ref": "#/$defs/d"}})}
    yield {"definitions": {"w": WORD}, **listed({"$ref": "#/definitions/w"}, 1, 2)}
    leaf = closed({"value": DIGIT})
    yield {"$defs": {"leaf": leaf}, **closed({"left": {"$ref": "#/$defs/leaf"}, "right": {"$ref": "#/$defs/leaf"}})}
    tree = closed({"value": DIGIT}, {"child": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/leaf"}]}})
    yield {"$defs": {"leaf": leaf}, **tree}
    yield {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"enum": ["one", "two"]}}, "$ref": "#/$defs/a"}


def _made() -> Iterator[Schema]:
    """Combinations, until there are enough."""
    kinds: list[Schema] = [
        DIGIT,
        WORD,
        {"type": "boolean"},
        {"enum": ["low", "high"]},
        {"type": "string", "format": "date"},
    ]
    count = 0
    while True:
        first, second = kinds[count % 5], kinds[count // 5 % 5]
        match count % 4:
            case 0:
                yield closed({f"p{count}": first, "q": second})
            case 1:
                yield closed({"items": listed(closed({"x": first}, {"y": second}), 1, 2)})
            case 2:
                yield closed({"either": {"anyOf": [closed({"l": first}), closed({"r": second})]}}, {"note": WORD})
            case _:
                yield listed({"anyOf": [first, listed(second, 1, 2)]}, 1, 3)
        count += 1


def schemas(count: int = 100) -> list[Schema]:
    """So many schemas, all kinds early among them."""
    written = [list(kind) for kind in (_values(), _lists(), _objects(), _references())]
    mixed: list[Schema] = []
    # Kinds take turns, so that a few schemas have many features, too.
    for place in range(max(map(len, written))):
        mixed += [kind[place] for kind in written if place < len(kind)]
    made = _made()
    while len(mixed) < count:
        mixed.append(next(made))
    return mixed[:count]


UNSUPPORTED: dict[str, Schema] = {
    "not": {"not": {"type": "string"}},
    "uniqueItems": {"type": "array", "items": DIGIT, "uniqueItems": True},
    "contains": {"type": "array", "contains": DIGIT},
    "if": {"if": {"type": "integer"}, "then": {"minimum": 3}},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "^a"}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
}
