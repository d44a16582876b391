"""Grammars: what is refused and how, and what a row may generate under one."""

import json
from pathlib import Path

import pytest

from actors.engine.constraint import Constraint
from actors.grammars import Grammars, InvalidGrammar
from actors.json_schemas import strict
from actors.model_files import read_model_files
from actors.tokenizer.text_tokenizer import load_tokenizer
from protocol.messages import Grammar, Thinking

EOS = 2


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path):
    return load_tokenizer(tiny_model)


@pytest.fixture(scope="module")
def grammars(tiny_model: Path, tokenizer):
    return Grammars(read_model_files(tiny_model), lambda: tokenizer.backend)


@pytest.mark.parametrize(
    ("kind", "text", "named"),
    [
        ("json", '{"not": {"type": "string"}}', "not"),
        ("json", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json", '{"if": {}, "then": {}}', "if"),
        ("json", '{"$ref": "http://127.0.0.1/x"}', "not present"),
        ("json", '{"type": "nothing"}', "nothing"),
        ("json", "[1]", "object"),
        ("json", "{", "not valid JSON"),
        ("regex", "(a", "unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", r"(a)\1", "backreferences"),
        ("choice", "[]", "choices"),
        ("choice", '["a", 1]', "texts"),
        ("grammar", "start: missing", "missing"),
    ],
)
def test_what_is_not_supported_is_named(grammars, kind, text, named):
    with pytest.raises(InvalidGrammar) as caught:
        grammars.check(Grammar(kind, text, "the_field"))
    assert caught.value.field == "the_field"
    assert named in str(caught.value)
    assert str(caught.value).startswith("the_field")


def test_a_grammar_that_is_too_large_is_refused(grammars):
    schema: dict = {"type": "string"}
    for _ in range(14):
        schema = {"type": "object", "properties": {"a": schema, "b": schema}}
    with pytest.raises(InvalidGrammar, match="large"):
        grammars.check(Grammar("json", json.dumps(schema), "f"))


def follow(grammars, tokenizer, grammar: Grammar, text: str) -> bool:
    """Whether `text` and then the end are allowed."""
    constraint = Constraint(grammars.matcher(grammar))
    for token in [*tokenizer.encode(text, add_special_tokens=False), EOS]:
        mask = constraint.matcher.compute_bitmask()
        if not mask[token // 8] >> token % 8 & 1:
            return False
        constraint.consume([token])
    return not constraint.error


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (Grammar("json_object"), '{"a": 1}', "[1]"),
        (Grammar("json", '{"type": "integer"}'), "42", "4.2"),
        (Grammar("json_line", '{"type": "array", "items": {"type": "integer"}}'), "[1, 2]", "[1,2]"),
        (Grammar("regex", r"\d{3}-\d{4}"), "555-1234", "55-1234"),
        (Grammar("choice", '["red", "dark \\"red\\""]'), 'dark "red"', "dark"),
        (Grammar("grammar", 'start: "a" "b"+'), "abbb", "a"),
        (Grammar("grammar", 'root ::= "yes" | "no"'), "no", "maybe"),
    ],
)
def test_every_kind(grammars, tokenizer, grammar, good, bad):
    grammars.check(grammar)
    assert follow(grammars, tokenizer, grammar, good)
    assert not follow(grammars, tokenizer, grammar, bad)


def test_a_grammar_begins_behind_the_reasoning(grammars, tokenizer):
    matcher = grammars.matcher(Grammar("choice", '["yes"]'))
    constraint = Constraint(matcher, Thinking([7], [8, 9]))
    assert constraint.asks_grammar
    assert constraint.also == 7
    constraint.consume([7])
    assert not constraint.asks_grammar
    constraint.consume([100, 8, 100, 8])
    assert not constraint.asks_grammar
    constraint.consume([9])
    assert constraint.asks_grammar
    constraint.consume([*tokenizer.encode("yes", add_special_tokens=False), EOS])
    assert constraint.error == ""


def test_a_budget_ends_the_reasoning():
    constraint = Constraint(None, Thinking([7], [8, 9], open=True), budget=2)
    assert constraint.only is None
    constraint.consume([100])
    assert constraint.only is None
    constraint.consume([100])
    assert constraint.only == 8
    constraint.consume([8])
    assert constraint.only == 9
    constraint.consume([9])
    assert constraint.only is None


def test_no_budget_is_no_reasoning():
    assert Constraint(None, Thinking([7], [8], open=True), budget=0).only == 8
    assert Constraint(None, Thinking([7], [8]), budget=0).also is None


def test_replaying_gives_the_same_mask(grammars, tokenizer):
    grammar = Grammar("json", '{"type": "object", "properties": {"a": {"enum": ["b", "c"]}}, "required": ["a"]}')
    ids = tokenizer.encode('{"a": "', add_special_tokens=False)
    stepped, replayed = Constraint(grammars.matcher(grammar)), Constraint(grammars.matcher(grammar))
    for token in ids:
        stepped.matcher.compute_bitmask()
        stepped.consume([token])
    replayed.consume(ids)
    assert stepped.matcher.compute_bitmask() == replayed.matcher.compute_bitmask()
    assert stepped.consumed == replayed.consumed == len(ids)


def test_preparing_ahead_is_all_that_the_first_grammar_would_wait_for(tiny_model: Path, tokenizer):
    loads: list[int] = []

    def load():
        loads.append(1)
        return tokenizer.backend

    prepared = Grammars(read_model_files(tiny_model), load)
    assert prepared.mask_words == 0
    prepared.prepare()
    prepared.prepare()
    prepared.check(Grammar("regex", "a+", "regex"))
    assert prepared.mask_words > 0
    assert len(loads) == 1


def test_a_model_that_can_have_no_grammars_is_left_alone(tiny_model: Path):
    none = Grammars(read_model_files(tiny_model), lambda: None)
    none.prepare()
    with pytest.raises(InvalidGrammar, match="written in Python"):
        none.check(Grammar("regex", "a+", "regex"))


NAMED = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
OTHER = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
EXTRA = '{"a": 1, "x": 2}'


@pytest.mark.parametrize(
    ("schema", "text", "allowed"),
    [
        (NAMED, '{"a": 1}', True),
        (NAMED, EXTRA, False),
        (NAMED | {"additionalProperties": True}, EXTRA, True),
        (NAMED | {"additionalProperties": {"type": "integer"}}, EXTRA, True),
        (NAMED | {"patternProperties": {"^x$": {"type": "integer"}}}, EXTRA, True),
        ({"type": "object"}, EXTRA, True),
        ({"type": "array", "items": NAMED}, f"[{EXTRA}]", False),
        ({"anyOf": [NAMED, {"type": "null"}]}, EXTRA, False),
        ({"anyOf": [NAMED, OTHER]}, '{"b": 1}', True),
        (NAMED | {"anyOf": [{"required": ["a"]}, {"minProperties": 1}]}, EXTRA, False),
        (NAMED | {"anyOf": [OTHER]}, '{"a": 1, "b": 2}', True),
        ({"allOf": [NAMED, OTHER]}, '{"a": 1, "b": 2}', True),
        (
            {"$defs": {"N": NAMED}, "properties": {"n": {"$ref": "#/$defs/N"}}, "type": "object"},
            f'{{"n": {EXTRA}}}',
            False,
        ),
        ({"$defs": {"N": NAMED}, "allOf": [{"$ref": "#/$defs/N"}], "description": "x"}, EXTRA, False),
        ({"$defs": {"N": NAMED}, "allOf": [{"$ref": "#/$defs/N"}, OTHER]}, '{"a": 1, "b": 2}', True),
        (
            {"$defs": {"N/M": NAMED, "L": {"$ref": "#/$defs/N~1M"}}, "allOf": [{"$ref": "#/$defs/L"}, OTHER]},
            '{"a": 1, "b": 2}',
            True,
        ),
        ({"type": "string", "format": "path"}, '"/x"', True),
        ({"type": "string", "format": "ipv4"}, '"x"', False),
        ({"type": "object", "properties": {"format": {"type": "string"}}}, '{"format": "zip"}', True),
    ],
)
def test_objects_have_the_properties_that_they_name(grammars, tokenizer, schema, text, allowed):
    grammar = Grammar("json_line", json.dumps(schema), "f")
    grammars.check(grammar)
    assert follow(grammars, tokenizer, grammar, text) is allowed


def test_a_schema_that_refers_to_itself():
    tree = {"type": "object", "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}}}
    assert strict(json.loads(json.dumps(tree))) == tree | {"additionalProperties": False}


def test_a_long_chain_of_references_takes_no_longer_than_it_is():
    count = 20_000
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)} | {f"d{count}": dict(NAMED)}
    read = strict({"$defs": chain, "allOf": [{"$ref": "#/$defs/d0"}, dict(OTHER)]})
    assert "additionalProperties" not in read["$defs"][f"d{count}"]
