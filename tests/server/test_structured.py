"""What a request wants its text to be becomes one grammar, or an error that names the field."""

from typing import Any

import pytest
from parsed import APIS, fault, parsed

from protocol.messages import Grammar

SCHEMA = {"type": "object"}
TEXT = '{"type": "object"}'
KINDS: dict[str, tuple[Any, str]] = {
    "json": (SCHEMA, TEXT),
    "regex": ("a+", "a+"),
    "choice": (["yes", "no"], '["yes", "no"]'),
    "grammar": ('start: "a"', 'start: "a"'),
}
WORDED = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


@pytest.mark.parametrize("api", ["chat", "completions"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_older_names(api: str, kind: str) -> None:
    given, text = KINDS[kind]
    assert parsed(api, **{f"guided_{kind}": given}).params.grammar == Grammar(kind, text, f"guided_{kind}")


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("kind", KINDS)
def test_structured_outputs(api: str, kind: str) -> None:
    given, text = KINDS[kind]
    grammar = parsed(api, structured_outputs={kind: given}).params.grammar
    assert grammar == Grammar(kind, text, f"structured_outputs.{kind}")


def test_a_schema_may_be_a_text() -> None:
    for fields in ({"guided_json": TEXT}, {"structured_outputs": {"json": TEXT}}):
        grammar = parsed("chat", **fields).params.grammar
        assert grammar is not None
        assert (grammar.kind, grammar.text) == ("json", TEXT)


@pytest.mark.parametrize(
    ("wanted", "grammar"),
    [
        ({"json_object": True}, ("json_object", "")),
        ({"json_object": True, "disable_any_whitespace": True}, ("json_line", TEXT)),
        ({"json": SCHEMA, "disable_any_whitespace": True}, ("json_line", TEXT)),
        ({"json": SCHEMA, "disable_any_whitespace": False, "disable_fallback": True}, ("json", TEXT)),
        ({"regex": "a", "structural_tag": None, "whitespace_pattern": None, "json_object": False}, ("regex", "a")),
    ],
)
def test_its_other_keys(wanted: dict[str, Any], grammar: tuple[str, str]) -> None:
    found = parsed("chat", structured_outputs=wanted).params.grammar
    assert found is not None
    assert (found.kind, found.text) == grammar


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("wanted", [{}, {"json": None}, {"json_object": False}, {"disable_any_whitespace": True}])
def test_it_must_ask_for_something(api: str, wanted: dict[str, Any]) -> None:
    error = fault(api, structured_outputs=wanted)
    assert error.param == "structured_outputs"
    assert "needs one of json, regex" in error.message


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("key", ["structural_tag", "schema", "json_schema", "a\nb"])
def test_a_key_that_is_not_known_is_named(api: str, key: str) -> None:
    error = fault(api, structured_outputs={key: "x", "regex": "a+"})
    assert error.param == f"structured_outputs.{key}"
    assert key in error.message


@pytest.mark.parametrize(
    ("api", "fields", "param"),
    [
        ("chat", {"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex"),
        ("chat", {"guided_choice": ["a"], "structured_outputs": {"regex": "a"}}, "guided_choice"),
        ("chat", {"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ("chat", {"response_format": WORDED, "guided_grammar": "x"}, "guided_grammar"),
        ("chat", {"response_format": {"type": "json_object"}, "guided_json": SCHEMA}, "guided_json"),
        ("completions", {"guided_grammar": "x", "guided_regex": "a"}, "guided_grammar"),
        (
            "responses",
            {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
            "structured_outputs.regex",
        ),
        (
            "messages",
            {"output_format": {"type": "json_schema", "schema": SCHEMA}, "structured_outputs": {"regex": "a"}},
            "structured_outputs.regex",
        ),
    ],
)
def test_several_at_once_are_refused(api: str, fields: dict[str, Any], param: str) -> None:
    error = fault(api, **fields)
    assert error.param == param
    assert "can't be combined with" in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": 5}, "guided_json"),
        ({"guided_regex": ["a"]}, "guided_regex"),
        ({"guided_choice": "yes"}, "guided_choice"),
        ({"guided_choice": [5]}, "guided_choice[0]"),
        ({"guided_grammar": {}}, "guided_grammar"),
        ({"structured_outputs": {"choice": ["a", 5]}}, "structured_outputs.choice[1]"),
        ({"structured_outputs": "json"}, "structured_outputs"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    assert fault("chat", **fields).param == param


@pytest.mark.parametrize("where", ["output_config", "output_format"])
def test_the_format_of_a_message(where: str) -> None:
    def asked(form: Any) -> dict[str, Any]:
        return {where: {"format": form} if where == "output_config" else form}

    field = "output_config.format" if where == "output_config" else where
    grammar = parsed("messages", **asked({"type": "json_schema", "schema": SCHEMA})).params.grammar
    assert grammar == Grammar("json", TEXT, f"{field}.schema")
    assert parsed("messages", **asked({"type": "text"})).params.grammar is None
    for form in ({"type": "json_schema"}, {"type": "json_object"}, {"type": "json_schema", "schema": None}):
        assert fault("messages", **asked(form)).param == field


def test_the_format_of_a_response() -> None:
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA}
    grammar = parsed("responses", text={"format": form}).params.grammar
    assert grammar == Grammar("json", TEXT, "text.format.schema")
    assert parsed("responses", text={"format": {"type": "text"}}).params.grammar is None
    assert fault("responses", text={"format": {"type": "json_schema", "name": "x"}}).param == "text.format.schema"
    assert fault("responses", text={"format": {"type": "yaml"}}).param == "text.format"
