"""Rows with grammars in the engine: right in any batch, after a resume, when parked; and choices of one prompt."""

import json
import re
import time
from functools import partial
from pathlib import Path

import msgspec
import pytest

from actors.engine.engine import Engine
from actors.engine.model import Model
from actors.engine.row_memory import row_bytes
from actors.engine.scheduler import Limits
from actors.engine.step_log import Joined, Replay, StepRecord
from actors.tokenizer.text_tokenizer import load_tokenizer
from cache_store.store import PrefixStore
from protocol.ids import pack_ids, unpack_ids
from protocol.messages import Grammar, SamplingParams, Submit, Thinking

REGEX = Grammar("regex", "([a-z]{2,4} ){3}end")
SCHEMA = Grammar("json", '{"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}')
EOS = 2


@pytest.fixture(scope="module")
def decode(tiny_model: Path):
    tokenizer = load_tokenizer(tiny_model)
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)


def finish(run) -> dict[int, list[int]]:
    """Turn until all is done, the grammars that are being built included."""
    until = time.monotonic() + 60
    while run.engine.busy or run.engine.building:
        assert time.monotonic() < until
        run.turn()
    return run.tokens


def held(make_request, rid: int, grammar: Grammar | None, budget: int = 60, **more) -> Submit:
    params = SamplingParams(grammar=grammar, **more.pop("params", {}))
    return make_request(rid, [700 + rid, 800], budget, params=params, temperature=0.9, **more)


def test_held_and_free_rows_share_a_batch_and_free_rows_keep_their_tokens(
    model: Model, make_request, start_run, decode
) -> None:
    run, alone = start_run(model), start_run(model)
    requests = [held(make_request, rid, [REGEX, None, SCHEMA][rid % 3], 40) for rid in range(12)]
    for each in requests:
        run.engine.submit(each)
    tokens = finish(run)
    for each in requests[:3]:
        alone.engine.submit(each)
    assert {rid: finish(alone)[rid] for rid in (0, 1, 2)} == {rid: tokens[rid] for rid in (0, 1, 2)}
    for rid in range(0, 12, 3):
        assert run.reasons[rid] == "stop"
        assert tokens[rid][-1] == EOS
        assert re.fullmatch(REGEX.text, decode(tokens[rid]))
    assert all(len(tokens[rid]) == 40 for rid in range(1, 12, 3))
    for rid in range(2, 12, 3):
        if run.reasons[rid] == "stop":
            assert json.loads(decode(tokens[rid]))["a"] in ("x", "y")


def test_a_resumed_row_goes_on_under_its_grammar(model: Model, make_request, start_run) -> None:
    whole = start_run(model)
    first = held(make_request, 1, REGEX)
    whole.engine.submit(first)
    tokens = finish(whole)[1]
    for at in (1, 4, len(tokens) - 1):
        resumed = start_run(model)
        ids = [*unpack_ids(first.ids), *tokens[:at]]
        resumed.engine.submit(msgspec.structs.replace(first, ids=pack_ids(ids), budget=first.budget - at))
        assert finish(resumed)[1] == tokens[at:]


def test_parked_rows_go_on_under_their_grammars(model: Model, make_request, start_run, decode) -> None:
    size = partial(row_bytes, model.row_memory)
    limits = Limits(max_num_seqs=6, cache_bytes=9 * size(256), row_bytes=size)
    run, roomy = start_run(model, limits), start_run(model)
    long = Grammar("regex", "([a-z]{2,4} ){120}end")
    for rid in range(6):
        for each in (run, roomy):
            params = SamplingParams(grammar=long)
            ids = range(1000 + rid, 1190 + rid)
            each.engine.submit(make_request(rid, ids, 400, params=params, temperature=0.9))
    finish(run)
    finish(roomy)
    assert run.engine.stats.parked > 0
    assert all(re.fullmatch(long.text, decode(run.tokens[rid])) for rid in range(6))


def test_min_tokens_gives_way_to_a_grammar_that_is_at_its_end(model: Model, make_request, start_run, decode) -> None:
    run = start_run(model)
    run.engine.submit(held(make_request, 1, Grammar("regex", "[ab]{1,6}"), params={"min_tokens": 4}))
    run.engine.submit(held(make_request, 2, Grammar("regex", "a"), params={"min_tokens": 4}))
    tokens = finish(run)
    assert len(tokens[1]) > 2
    assert decode(tokens[2]) == "a"
    assert run.reasons == {1: "stop", 2: "stop"}


def test_a_grammar_that_cannot_be_built_rejects_its_row_alone(model: Model, make_request, start_run) -> None:
    run = start_run(model)
    run.engine.submit(held(make_request, 1, Grammar("regex", "(a")))
    run.engine.submit(held(make_request, 2, None, 5))
    finish(run)
    assert run.reasons == {1: "invalid_request", 2: "length"}
    assert "unclosed" in run.errors[1]


def test_a_row_is_dropped_while_its_grammar_is_built(model: Model, make_request, start_run) -> None:
    run = start_run(model)
    run.engine.submit(held(make_request, 1, REGEX))
    run.engine.abort([1])
    finish(run)
    assert run.reasons == run.tokens == {}


def test_the_reasoning_is_free_and_its_budget_holds(model: Model, make_request, start_run, decode) -> None:
    run = start_run(model)
    thinking = Thinking([10], [11, 12], open=True)
    more = {"thinking": thinking, "params": {"thinking_budget": 5}}
    run.engine.submit(held(make_request, 1, REGEX, **more))
    tokens = finish(run)[1]
    assert tokens[5:7] == [11, 12]
    assert re.fullmatch(REGEX.text, decode(tokens[7:]))


@pytest.mark.parametrize("grammar", [None, REGEX])
def test_min_tokens_holds_while_a_row_reasons_and_without_a_grammar(model: Model, make_request, start_run, grammar):
    run = start_run(model)
    thinking = Thinking([10], [11, 12], open=True)
    params = {"thinking_budget": 30, "min_tokens": 12, "logit_bias": {EOS: 100.0}}
    run.engine.submit(held(make_request, 1, grammar, thinking=thinking, params=params, ignore_eos=False))
    params |= {"thinking_budget": 5}
    run.engine.submit(held(make_request, 2, None, thinking=thinking, params=params, ignore_eos=False))
    tokens = finish(run)
    assert run.reasons == {1: "stop", 2: "stop"}
    for rid in (1, 2):
        assert tokens[rid].index(EOS) == 12, "as soon as it may, and no sooner"
    assert tokens[2][5:7] == [11, 12]


def test_ignore_eos_holds_beside_a_thinking_budget(model: Model, make_request, start_run):
    run = start_run(model)
    more = {"thinking": Thinking([10], [11, 12], open=True), "ignore_eos": True}
    params = {"thinking_budget": 5, "logit_bias": {EOS: 100.0}}
    run.engine.submit(held(make_request, 1, None, 20, params=params, **more))
    tokens = finish(run)
    assert run.reasons == {1: "length"}
    assert tokens[1] == [EOS] * 5 + [11, 12] + [EOS] * 13


def choices(make_request, count: int, **more) -> list[Submit]:
    ids = list(range(1000, 1300))
    return [
        make_request(rid, ids, 8, seed=5, choice=rid - 1, like=0 if rid == 1 else 1, temperature=0.9, **more)
        for rid in range(1, count + 1)
    ]


def test_choices_compute_their_prompt_once(model: Model, make_request, start_run, same_as_plain) -> None:
    run = start_run(model)
    requests = choices(make_request, 4)
    tokens = run.all(requests)
    assert run.engine.stats.prefilled == 299
    assert sorted(run.admitted) == [1, 2, 3, 4]
    assert len({tuple(row) for row in tokens.values()}) == 4
    same_as_plain(model, requests, tokens)


def test_choices_outlive_the_first_of_them(model: Model, make_request, start_run, same_as_plain) -> None:
    run = start_run(model, Limits(prefill_step_size=64, max_num_batched_tokens=64))
    requests = choices(make_request, 4)
    for each in requests:
        run.engine.submit(each)
    run.turn()
    run.engine.abort([1, 2])
    run.finish()
    assert run.reasons == {3: "length", 4: "length"}
    same_as_plain(model, requests[2:], run.tokens)


def test_choices_that_find_no_seat_wait_like_others(model: Model, make_request, start_run, same_as_plain) -> None:
    run = start_run(model, Limits(max_num_seqs=2))
    requests = choices(make_request, 5)
    same_as_plain(model, requests, run.all(requests))


def test_choices_under_a_grammar(model: Model, make_request, start_run, decode) -> None:
    run = start_run(model)
    for each in choices(make_request, 3, params=SamplingParams(grammar=REGEX)):
        run.engine.submit(msgspec.structs.replace(each, budget=60))
    tokens = finish(run)
    assert all(re.fullmatch(REGEX.text, decode(row)) for row in tokens.values())
    assert len({tuple(row) for row in tokens.values()}) == 3


def test_choices_start_from_a_restored_prefix_and_leave_blocks_of_their_own(
    model: Model, make_request, start_run
) -> None:
    run, plain = start_run(model, store=PrefixStore(memory_bytes=64 << 20)), start_run(model)
    ids = list(range(1000, 1700))
    run.all([make_request(9, ids, 2)])
    choices = [
        make_request(rid, ids, 100, seed=5, choice=rid - 1, like=0 if rid == 1 else 1, temperature=0.9)
        for rid in (1, 2, 3)
    ]
    tokens = run.all(choices)
    assert {rid: tokens[rid] for rid in (1, 2, 3)} == plain.all(choices)
    assert {rid: run.cached[rid] for rid in (1, 2, 3)} == dict.fromkeys((1, 2, 3), 512)
    # Each has crossed a border at 768 tokens on its own way.
    for rid in (1, 2, 3):
        run.all([make_request(10 + rid, [*ids, *tokens[rid][:99]], 2)])
        assert run.cached[10 + rid] == 768


def test_a_row_with_a_grammar_leaves_blocks_that_hold_what_it_computed(
    model: Model, make_request, start_run, decode
) -> None:
    run = start_run(model, store=PrefixStore(memory_bytes=64 << 20))
    grammar = Grammar("regex", "([a-z]{2,4} ){120}end")
    ids = list(range(1000, 1500))
    run.engine.submit(make_request(1, ids, 400, params=SamplingParams(grammar=grammar), temperature=0.9))
    run.engine.submit(make_request(2, [*ids[:300], 5], 300, temperature=0.9))
    tokens = finish(run)
    assert re.fullmatch(grammar.text, decode(tokens[1]))
    for rid, prompt in ((1, ids), (2, [*ids[:300], 5])):
        longer = [*prompt, *tokens[rid][:290]]
        again = make_request(10 + rid, longer, 8)
        run.all([again])
        assert run.cached[10 + rid] == (len(longer) - 1) // 256 * 256
        assert run.tokens[10 + rid] == start_run(model).all([again])[10 + rid]


def test_a_recorded_run_with_choices_played_again_has_the_same_plans(model: Model, make_request) -> None:
    size = partial(row_bytes, model.row_memory)
    limits = Limits(max_num_seqs=6, cache_bytes=9 * size(256), row_bytes=size)
    records: list[StepRecord] = []
    engine = Engine(model, limits, on_step=records.append)
    for first in (1, 11):
        for choice in range(4):
            like = first if choice else 0
            ids = range(10, 200 + first)
            engine.submit(make_request(first + choice, ids, 90, seed=1, choice=choice, like=like, temperature=0.9))
    while engine.busy:
        engine.turn(lambda outcome: None)
    assert engine.stats.parked > 0
    lines = msgspec.json.encode(records)
    assert any(isinstance(told, Joined) for record in records for told in record.told)
    replay = Replay(limits)
    for record in msgspec.json.decode(lines, type=list[StepRecord]):
        assert replay.plan(record) == record.plan
