"""What a request wants its text to be (`response_format`, vLLM's `structured_outputs` and `guided_*`), as a `Grammar`.

Pure; used by the adapters of the APIs.
"""

import json
from typing import Any

from protocol.messages import Grammar
from server.errors import invalid
from server.schemas import ResponseFormat, StructuredOutputs, TextFields


def grammar_of(fields: TextFields) -> Grammar | None:
    """The grammar of a request; None when its text is free. Raises ApiError naming the field that is wrong."""
    return one_grammar(
        *_response_format(fields.response_format),
        *structured_outputs(fields.structured_outputs),
        *_given("json", fields.guided_json, "guided_json"),
        *_given("regex", fields.guided_regex, "guided_regex"),
        *_given("choice", fields.guided_choice, "guided_choice"),
        *_given("grammar", fields.guided_grammar, "guided_grammar"),
    )


def one_grammar(*asked: Grammar) -> Grammar | None:
    """The one that was asked for, None for none. Raises ApiError when there are several."""
    if len(asked) > 1:
        raise invalid(f"{asked[1].field} can't be combined with {asked[0].field}", asked[1].field)
    return asked[0] if asked else None


def json_schema(schema: Any, field: str) -> Grammar:
    """The grammar of a JSON schema that was called `field`."""
    return Grammar("json", schema if isinstance(schema, str) else json.dumps(schema), field)


def _given(kind: str, value: Any, field: str) -> list[Grammar]:
    if value is None:
        return []
    return [Grammar(kind, value if isinstance(value, str) else json.dumps(value), field)]


def _response_format(wanted: ResponseFormat | None) -> list[Grammar]:
    if wanted is None or wanted.type == "text":
        return []
    if wanted.type == "json_object":
        return [Grammar("json_object", "", "response_format")]
    if wanted.type != "json_schema":
        text = f"response_format.type must be text, json_object or json_schema, not {wanted.type!r}"
        raise invalid(text, "response_format.type")
    if wanted.json_schema is None or wanted.json_schema.schema is None:
        raise invalid("response_format.json_schema.schema is required", "response_format.json_schema.schema")
    return [json_schema(wanted.json_schema.schema, "response_format.json_schema.schema")]


def structured_outputs(wanted: StructuredOutputs | None) -> list[Grammar]:
    """What vLLM's option asks for. Raises ApiError when that is nothing."""
    if wanted is None:
        return []
    kind = "json_line" if wanted.disable_any_whitespace else "json"
    if wanted.json_object and wanted.disable_any_whitespace:
        plain = [Grammar(kind, '{"type": "object"}', "structured_outputs.json_object")]
    else:
        plain = [Grammar("json_object", "", "structured_outputs.json_object")] if wanted.json_object else []
    asked = [
        *_given(kind, wanted.json, "structured_outputs.json"),
        *_given("regex", wanted.regex, "structured_outputs.regex"),
        *_given("choice", wanted.choice, "structured_outputs.choice"),
        *_given("grammar", wanted.grammar, "structured_outputs.grammar"),
        *plain,
    ]
    if not asked:
        raise invalid(
            "structured_outputs needs one of json, regex, choice, grammar and json_object", "structured_outputs"
        )
    return asked
