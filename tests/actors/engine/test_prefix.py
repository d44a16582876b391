"""Prefixes in the engine: found, waited for, restored and committed, and never another token because of it."""

import random
from collections.abc import Iterable

import numpy as np
import pytest

from actors.engine.block_cuts import PackedBlock
from actors.engine.model import Model
from actors.engine.scheduler import Limits
from cache_store.keys import chain_keys
from cache_store.store import PrefixStore
from protocol.messages import Submit

VOCABULARY = 512


def memory(megabytes: int = 256) -> PrefixStore[PackedBlock]:
    return PrefixStore(memory_bytes=megabytes << 20)


def prompt(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(10, VOCABULARY) for _ in range(length)]


def test_miss_hit_miss_hit(model: Model, make_request, start_run) -> None:
    run = start_run(model, store=memory())
    first, other = prompt(700), prompt(700, 1)
    cold = run.all([make_request(0, first, 8)])[0]
    for rid, ids in ((1, first), (2, other), (3, first)):
        run.all([make_request(rid, ids, 8)])
    assert run.cached == {1: 512, 3: 512}
    assert run.tokens[1] == run.tokens[3] == cold


KINDS = [("plain", None), ("sliding", None), ("plain", 300), ("recurrent", None), ("list", None), ("hybrid", None)]
KINDS += [("quantized", None), ("chunked", None)]
LENGTHS = [255, 256, 257, 511, 512, 513, 514, 900]


@pytest.mark.parametrize(("kind", "window"), KINDS)
def test_a_hit_changes_no_token_around_block_borders(
    kind: str, window: int | None, kind_model, make_request, start_run
) -> None:
    model = kind_model(kind, window)
    whole = prompt(LENGTHS[-1])
    requests = [
        make_request(rid, whole[:length], 6, temperature=[0.0, 0.8][rid % 2]) for rid, length in enumerate(LENGTHS)
    ]
    cold, warm = start_run(model), start_run(model, store=memory())
    warm.all([make_request(99, whole, 1)])
    for each in requests:
        cold.all([each])
        warm.all([each])
        length = len(each.ids) // 4
        expected = (length - 1) // 256 * 256
        if model.block_layout.trims and length % 256 == 0:
            expected = length - 1
        if not model.block_layout.has_snapshots:
            assert warm.cached.get(each.rid, 0) == expected
        elif expected and (LENGTHS[each.rid - 1] - 1) // 256 == expected // 256:
            assert warm.cached[each.rid] == expected
    for each in requests:
        assert cold.tokens[each.rid] == warm.tokens[each.rid]


@pytest.mark.parametrize(("kind", "length"), [("plain", 256), ("quantized", 256), ("hybrid", 2048)])
def test_a_block_that_ends_with_a_prompt_whose_last_forward_brings_its_first_token(
    kind: str, length: int, kind_model, make_request, start_run
) -> None:
    """The block is cut behind a step that was a draw alone."""
    model = kind_model(kind)
    ids = prompt(length + 40)
    run = start_run(model, Limits(prefill_step_size=64), store=memory())
    run.all([make_request(0, ids[:length], 3)])
    run.all([make_request(1, ids, 4)])
    assert run.cached[1] == length
    cold = start_run(model)
    cold.all([make_request(0, ids[:length], 3), make_request(1, ids, 4)])
    assert run.tokens == cold.tokens


def test_the_next_turn_of_a_chat_hits_what_was_generated(model: Model, make_request, start_run) -> None:
    run = start_run(model, store=memory())
    ids = prompt(200)
    tokens = run.all([make_request(0, ids, 400)])[0]
    run.all([make_request(1, [*ids, *tokens, 5, 6, 7], 4)])
    assert run.cached == {1: 512}


def test_an_immediate_repeat_hits_while_the_first_still_generates(model: Model, make_request, start_run) -> None:
    run = start_run(model, store=memory())
    ids = prompt(600)
    run.engine.submit(make_request(0, ids, 50))
    while 0 not in run.tokens:
        run.turn()
    run.engine.submit(make_request(1, ids, 5))
    while 1 not in run.reasons:
        run.turn()
    assert 0 not in run.reasons
    assert run.cached == {1: 512}
    run.finish()
    assert run.tokens[1] == run.tokens[0][:5]


@pytest.mark.parametrize("kind", ["plain", "hybrid"])
def test_many_with_one_prefix_at_once_compute_it_once(kind: str, kind_model, make_request, start_run) -> None:
    model = kind_model(kind)
    shared = prompt(2048)
    requests = [make_request(rid, [*shared, *prompt(40, rid)], 4) for rid in range(5)]
    alone = start_run(model).all(requests)
    run = start_run(model, store=memory())
    assert run.all(requests) == alone
    assert run.cached == dict.fromkeys(range(1, 5), 2048)
    assert run.engine.stats.prefilled == 2048 + 5 * 39
    blocks = run.engine.stats.prefix.memory_blocks
    assert blocks <= 8 + (kind == "hybrid")


def drain(run, rids: Iterable[int]) -> None:
    while not set(rids) <= set(run.reasons):
        run.turn()


def test_the_first_waiter_takes_over_when_the_owner_is_cancelled(model: Model, make_request, start_run) -> None:
    ids = prompt(2500)
    run = start_run(model, Limits(prefill_step_size=256, max_num_batched_tokens=257), store=memory())
    for rid in range(3):
        run.engine.submit(make_request(rid, ids, 4))
    for _ in range(5):
        run.turn()
    assert run.engine.stats.prefilled < 2000
    run.engine.abort([0])
    drain(run, [1, 2])
    assert run.tokens[1] == run.tokens[2] == start_run(model).all([make_request(0, ids, 4)])[0]
    assert run.cached[1] > 0
    assert run.cached[2] == 2304
    assert run.engine.stats.prefilled <= 2500 + 256 + 250


def test_who_is_waited_for_gets_the_priority_of_those_who_wait(model: Model, make_request, start_run) -> None:
    run = start_run(model, Limits(prefill_step_size=256, max_num_batched_tokens=513), store=memory())
    ids = prompt(2500)
    run.engine.submit(make_request(0, ids, 1, priority=1 << 30))
    run.turn()
    for rid in range(1, 5):
        run.engine.submit(make_request(rid, prompt(2000, rid), 1))
    run.engine.submit(make_request(5, ids, 1, priority=-1))
    while 5 not in run.tokens:
        run.turn()
    assert set(run.tokens) <= {0, 1, 2, 5}
    assert run.cached == {5: 2304}
    run.finish()


def test_a_slow_owner_is_not_waited_for_for_ever(model: Model, make_request, start_run, monkeypatch) -> None:
    monkeypatch.setattr("actors.engine.prefix.PATIENCE_S", 0.0)
    monkeypatch.setattr("actors.engine.prefix.PATIENCE_BLOCKS", 1e-9)
    ids = prompt(600)
    run = start_run(model, store=memory())
    run.engine._prefix.claims.claim(99, chain_keys(np.array(ids, np.uint32)))
    assert len(run.all([make_request(0, ids, 4)])[0]) == 4
    assert run.engine.stats.prefilled == 599


def test_of_those_who_waited_too_long_one_computes_it(model: Model, make_request, start_run) -> None:
    ids = prompt(600)
    run = start_run(model, store=memory())
    now = 0.0
    run.engine._prefix._clock = lambda: now
    run.engine._prefix.claims.claim(99, chain_keys(np.array(ids, np.uint32)))
    for rid in range(3):
        run.engine.submit(make_request(rid, ids, 4))
    run.turn()
    assert run.engine.stats.prefilled == 0
    now = 1000.0
    drain(run, range(3))
    assert run.cached == {1: 512, 2: 512}
    assert run.engine.stats.prefilled == 599 + 2 * (599 - 512)


def test_what_an_aborted_request_computed_stays(model: Model, make_request, start_run) -> None:
    ids = prompt(2500)
    run = start_run(model, Limits(prefill_step_size=256, max_num_batched_tokens=257), store=memory())
    run.engine.submit(make_request(0, ids, 4))
    for _ in range(6):
        run.turn()
    run.engine.abort([0])
    run.finish()
    run.all([make_request(1, ids, 4)])
    assert run.cached[1] >= 1024
    assert run.tokens[1] == start_run(model).all([make_request(0, ids, 4)])[0]


def test_tenants_with_other_salts_share_nothing(model: Model, make_request, start_run) -> None:
    run = start_run(model, store=memory())
    ids = prompt(600)
    for rid, salt in enumerate(["", "a", "b", "a"]):
        run.all([make_request(rid, ids, 4, cache_salt=salt)])
    assert run.cached == {3: 512}


def test_a_pool_too_small_for_a_prompt_serves_it_all_the_same(model: Model, make_request, start_run) -> None:
    run = start_run(model, store=PrefixStore(memory_bytes=300_000))
    requests = [make_request(rid, prompt(1500, rid % 2), 4) for rid in range(6)]
    assert run.all(requests) == start_run(model).all(requests)


def test_with_joins_leaves_and_aborts_nobody_gets_other_tokens(
    model: Model, make_request, start_run, same_as_plain
) -> None:
    draw = random.Random(5)
    stems = [prompt(1100, seed) for seed in range(3)]
    requests: list[Submit] = []
    for rid in range(24):
        ids = stems[rid % 3][: draw.choice([255, 256, 257, 511, 512, 513, 700, 1100])] + prompt(rid % 4, rid)
        requests.append(make_request(rid, ids, 20, temperature=[0.0, 0.8, 1.0][rid % 3], top_p=[1.0, 0.9][rid % 2]))
    run = start_run(model, Limits(max_num_seqs=8), store=memory(2))
    for number, each in enumerate(requests):
        run.engine.submit(each)
        run.turn()
        if number % 7 == 6:
            run.engine.abort([number - 2])
    run.finish()
    kept = [each for each in requests if each.rid in run.reasons]
    assert len(kept) >= 20
    same_as_plain(model, kept, run.tokens)
    assert run.cached


@pytest.mark.parametrize("leaves", ["short", "deep", "first of two deep"])
def test_rows_that_share_turns_with_a_deep_one_may_go_at_any_time(
    model: Model, make_request, start_run, monkeypatch: pytest.MonkeyPatch, leaves: str
) -> None:
    """Turns are short, so each has a piece of both; the deep one goes on behind blocks that it found."""
    deep = prompt(3000)
    requests = [make_request(1, deep, 3), make_request(2, prompt(138, 2), 3), make_request(3, prompt(138, 3), 3)]
    requests += [make_request(4, [*deep[:2900], 11], 3)] if leaves == "first of two deep" else []
    gone = 2 if leaves == "short" else 1
    run = start_run(model, Limits(depth_cost=1 / 360), store=memory())
    run.all([make_request(0, deep[:1025], 1)])
    with monkeypatch.context() as short_turns:
        short_turns.setattr(run.engine._pace, "tokens", lambda *_: 100)
        for each in requests:
            run.engine.submit(each)
        before = run.engine.stats.prefilled
        for _ in range(3):
            run.turn()
        assert 0 < run.engine.stats.prefilled - before < 400
        run.engine.abort([gone])
        for _ in range(3):
            run.turn()
    run.finish()
    left = [each for each in requests if each.rid != gone]
    assert {rid: run.tokens[rid] for rid in run.tokens if rid not in (0, gone)} == start_run(model).all(left)
    assert gone not in run.reasons
    assert run.cached.get(1, 1024) == 1024
