"""The engine's turns: the same tokens alone, in any batch and after a resume, and each row's one end."""

import random
import time
from functools import partial
from typing import Any

import mlx.core as mx
import msgspec
import pytest

from actors.engine.engine import Outcome, find_fault
from actors.engine.model import Model
from actors.engine.row_memory import row_bytes
from actors.engine.scheduler import Limits
from protocol.ids import pack_ids
from protocol.messages import Submit

LENGTHS = [1, 2, 7, 40, 255, 256, 257, 300, 513, 700]


def mixed_requests(make_request, count: int, budget: int = 24, vocabulary: int = 49_152) -> list[Submit]:
    """Requests of all lengths, greedy and sampled, with and without top_p."""
    draw = random.Random(4)
    return [
        make_request(
            rid,
            [draw.randrange(vocabulary) for _ in range(LENGTHS[rid % len(LENGTHS)])],
            budget - rid % 5,
            temperature=[0.0, 0.8, 1.0][rid % 3],
            top_p=[1.0, 0.9][rid % 2],
            seed=draw.randrange(-(2**63), 2**63),
            choice=rid % 2,
        )
        for rid in range(count)
    ]


def test_alone_and_in_a_batch_the_tokens_are_those_of_a_plain_run(
    model: Model, make_request, start_run, same_as_plain
) -> None:
    requests = mixed_requests(make_request, 20)
    together = start_run(model)
    same_as_plain(model, requests, together.all(requests))
    assert set(together.reasons.values()) == {"length"}
    assert together.admitted == [each.rid for each in requests]
    alone = {each.rid: start_run(model).all([each])[each.rid] for each in requests[:6]}
    same_as_plain(model, requests[:6], alone)


def test_rows_that_join_leave_and_are_aborted_change_nobody_elses_tokens(
    model: Model, make_request, start_run, same_as_plain
) -> None:
    requests = mixed_requests(make_request, 30)
    run = start_run(model, Limits(max_num_seqs=8))
    aborted = {2, 5, 11, 17, 23, 29}
    for number, each in enumerate(requests):
        run.engine.submit(each)
        run.turn()
        if number - 3 in aborted:
            run.engine.abort([number - 3])
    run.engine.abort([29])
    run.finish()
    kept = [each for each in requests if each.rid not in aborted]
    assert set(run.reasons) == {each.rid for each in kept}
    same_as_plain(model, kept, run.tokens)


@pytest.mark.parametrize(
    "limits",
    [
        Limits(prefill_step_size=64),
        Limits(max_num_batched_tokens=290),
        Limits(max_num_batched_tokens=20, max_num_seqs=4),
    ],
)
def test_a_prompt_in_chunks_gives_the_tokens_of_a_whole_one(
    model: Model, make_request, start_run, same_as_plain, limits: Limits
) -> None:
    requests = mixed_requests(make_request, 10, budget=8)
    same_as_plain(model, requests, start_run(model, limits).all(requests))


def test_a_resumed_row_goes_on_with_the_same_tokens(model: Model, make_request, start_run) -> None:
    requests = mixed_requests(make_request, 6)
    whole = start_run(model).all(requests)
    rest = []
    for each in requests:
        done = 3 + 2 * each.rid
        ids = each.ids + pack_ids(whole[each.rid][:done])
        rest.append(msgspec.structs.replace(each, ids=ids, budget=each.budget - done))
    resumed = start_run(model).all(rest)
    for each in requests:
        assert resumed[each.rid] == whole[each.rid][3 + 2 * each.rid :]


def test_a_step_is_timed_without_the_prompt_behind_it(
    model: Model, make_request, start_run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start_run(model)
    run.engine.submit(make_request(1, [5, 6, 7], 20))
    run.turn()
    run.turn()
    engine = run.engine
    dispatched: list[float] = []
    ended: list[float] = []
    dispatch = engine._lane.dispatch

    def dispatch_and_note(arrays: Any, *, early: bool = False) -> None:
        dispatch(arrays, early=early)
        dispatched.append(engine._lane.began)

    monkeypatch.setattr(engine._lane, "dispatch", dispatch_and_note)
    monkeypatch.setattr(engine._pace, "observe_step", lambda seconds: ended.append(engine._step_began + seconds))
    engine.submit(make_request(2, [9] * 200, 2))
    run.turn()
    first = ended[0]
    assert first == pytest.approx(dispatched[0], abs=1e-6)
    assert len(dispatched) > 1


def with_eos(model: Model, eos: set[int]) -> Model:
    """The same model, with other end-of-sequence ids."""
    files = msgspec.structs.replace(model.files, eos_token_ids=tuple(eos))
    return Model(model._network, files)


def test_a_row_ends_with_the_eos_token_and_nothing_comes_after_it(model: Model, make_request, start_run) -> None:
    requests = [make_request(rid, [rid + 3, 50, 7], 20, temperature=1.0) for rid in range(8)]
    free = start_run(model).all(requests)
    eos = {free[rid][rid + 2] for rid in range(4)}
    run = start_run(with_eos(model, eos))
    obeying = [msgspec.structs.replace(each, ignore_eos=each.rid == 3) for each in requests]
    stopped = run.all(obeying)
    for rid in range(8):
        first = next((i for i, token in enumerate(free[rid]) if token in eos), None)
        if rid == 3 or first is None:
            assert stopped[rid] == free[rid]
            assert run.reasons[rid] == "length"
        else:
            assert stopped[rid] == free[rid][: first + 1]
            assert run.reasons[rid] == "stop"
    assert [run.reasons[rid] for rid in range(4)] == ["stop", "stop", "stop", "length"]


def test_an_aborted_row_is_out_of_the_batch_within_two_steps(model: Model, make_request, start_run) -> None:
    run = start_run(model)
    for rid in range(4):
        run.engine.submit(make_request(rid, [1, 2, 3], 100))
    for _ in range(5):
        run.turn()
    before = len(run.tokens[2])
    run.engine.abort([2])
    for _ in range(2):
        run.turn()
    assert run.engine.stats.running == 3
    assert len(run.engine._batch) == 3
    assert len(run.tokens[2]) == before
    run.finish()
    assert set(run.reasons) == {0, 1, 3}


def test_a_reset_drops_every_row_and_the_numbers_may_be_used_again(model: Model, make_request, start_run) -> None:
    run = start_run(model, Limits(max_num_seqs=3))
    for rid in range(6):
        run.engine.submit(make_request(rid, [5] * (1 + 400 * (rid % 2)), 50))
    for _ in range(4):
        run.turn()
    run.engine.reset()
    run.tokens.clear()
    again = make_request(1, [9, 8, 7], 5)
    run.engine.submit(again)
    run.finish()
    assert run.tokens == start_run(model).all([again])
    assert set(run.reasons) == {1}


def test_a_bad_request_ends_alone(model: Model, make_request, start_run) -> None:
    good = make_request(1, [4, 5, 6], 5)
    run = start_run(model)
    run.all([good, make_request(2, [4, 49_152], 5), make_request(3, [], 5), good])
    assert run.reasons == {1: "length", 2: "invalid_request", 3: "invalid_request"}
    assert run.errors[2] == "id 49152 is outside the vocabulary of 49152"
    assert run.errors[1] == ""
    assert len(run.tokens[1]) == 5


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"ids": b"\0\0\0"}, "whole number"),
        ({"ids": b""}, "no ids"),
        ({"ids": pack_ids([1] * 100)}, "100 ids leave no room to generate in the model's context of 100 tokens"),
        ({"ids": pack_ids([70])}, "id 70 is outside the vocabulary of 64"),
        ({"budget": 0}, "budget"),
        ({"prompt_tokens": 4}, "prompt tokens"),
        ({"prompt_tokens": -1}, "prompt tokens"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
    ],
)
def test_faults_are_found(make_request, changes: dict, fault: str) -> None:
    good = make_request(1, [1, 2, 3], 5)
    assert find_fault(good, 64, 100) == ""
    assert fault in find_fault(msgspec.structs.replace(good, **changes), 64, 100)


def test_the_budget_ends_at_the_context(model: Model, make_request, start_run) -> None:
    small = Model(model._network, msgspec.structs.replace(model.files, context=10))
    run = start_run(small)
    run.all([make_request(1, [1, 2, 3, 4, 5, 6], 100)])
    assert len(run.tokens[1]) == 4
    assert run.reasons == {1: "length"}


def test_stats_tell_the_load(model: Model, make_request, start_run) -> None:
    run = start_run(model, Limits(max_num_seqs=2))
    for rid in range(5):
        run.engine.submit(make_request(rid, [1, 2], 10))
    assert run.engine.stats.waiting == 5
    run.turn()
    stats = run.engine.stats
    assert (stats.running, stats.prefilling, stats.waiting, stats.step) == (2, 0, 3, 1)
    assert stats.memory > 25_000_000
    run.finish()
    stats = run.engine.stats
    assert (stats.running, stats.prefilling, stats.waiting) == (0, 0, 0)
    assert run.engine._batch.nbytes == 0
    assert not run.engine._requests


def test_tokens_behind_which_nothing_is_launched_come_in_their_own_turn(model: Model, make_request, start_run) -> None:
    run = start_run(model)
    outcomes: list[Outcome] = []
    run.engine.submit(make_request(0, range(10, 30), 1))
    before = time.monotonic()
    run.engine.turn(outcomes.append)
    (outcome,) = outcomes
    assert (outcome.admitted, outcome.rids, outcome.ended) == ([0], [0], [0])
    assert before <= outcome.admitted_at <= time.monotonic()
    run.engine.submit(make_request(1, range(10, 30), 3))
    run.engine.turn(outcomes.append)
    assert [each.rids for each in outcomes[1:]] == [[1]]  # nobody else's next step is to be built
    run.engine.turn(outcomes.append)
    run.engine.submit(make_request(2, range(10, 30), 1))
    run.engine.turn(outcomes.append)
    # The step that was in flight is told by itself, then what ends here.
    assert [each.rids for each in outcomes[2:]] == [[1], [1, 2]]


def test_stats_add_up_what_was_done(model: Model, make_request, start_run) -> None:
    run = start_run(model)
    tokens = run.all([make_request(0, range(10, 30), 7), make_request(1, [5], 3)])
    stats = run.engine.stats
    assert stats.decoded == sum(map(len, tokens.values())) == 10
    assert stats.prefilled == 19
    assert stats.in_model > 0
    assert stats.in_python > 0


def test_rows_that_are_parked_for_memory_get_the_same_tokens(model: Model, make_request, start_run) -> None:
    requests = [make_request(rid, range(10 + rid, 200 + rid), 120, temperature=[0.0, 0.9][rid % 2]) for rid in range(6)]
    free = start_run(model).all(requests)
    size = partial(row_bytes, model.row_memory)
    tight = start_run(model, Limits(cache_bytes=10 * size(256), row_bytes=size))
    assert tight.all(requests) == free
    assert tight.engine.stats.parked > 0
    assert tight.engine.stats.cache == 0


def test_a_prompt_that_can_never_fit_is_refused_with_numbers(model: Model, make_request, start_run) -> None:
    run = start_run(model, Limits(cache_bytes=700 << 20, row_bytes=lambda length: length << 20))
    run.engine.submit(make_request(0, range(10, 310), 5))
    run.engine.submit(make_request(1, range(10, 20), 5))
    run.finish()
    assert run.reasons == {0: "prompt_too_long", 1: "length"}
    assert "300 tokens" in run.errors[0]
    assert "--memory-limit" in run.errors[0]


def test_beside_slow_steps_prompts_are_taken_in_large_turns_and_aborts_hurt_nobody(
    model: Model, make_request, start_run, same_as_plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of a model that is large for its machine takes longer than the stall target by itself."""
    forward = model.forward

    def slow_forward(ids: mx.array, *args: Any) -> mx.array:
        if ids.shape[1] == 1:
            time.sleep(0.13)
        return forward(ids, *args)

    decoding = [make_request(rid, range(100 + rid, 110 + rid), 14, temperature=0.7) for rid in (1, 2)]
    prompts = [make_request(rid, range(rid, rid + 300), 3) for rid in range(10, 16)]
    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", slow_forward)
        run = start_run(model)
        for each in decoding:
            run.engine.submit(each)
        for _ in range(6):  # the steps' length is learned
            run.turn()
        for each in prompts:
            run.engine.submit(each)
        run.turn()
        assert run.engine.stats.prefilled > 256  # in one turn
        run.engine.abort([2, 12])
        for _ in range(2):
            run.turn()
        assert run.engine.stats.prefilling + run.engine.stats.waiting == 0
        run.finish()
    kept = [decoding[0], *(each for each in prompts if each.rid != 12)]
    assert set(run.reasons) == {each.rid for each in kept}
    same_as_plain(model, kept, {each.rid: run.tokens[each.rid] for each in kept})


@pytest.mark.parametrize(
    ("length", "forwards"),
    [(1, 1), (2, 1), (40, 1), (64, 1), (65, 2), (560, 3), (576, 3), (577, 4), (700, 4)],
)
def test_a_short_prompt_alone_takes_one_forward_to_its_first_token(
    model: Model, make_request, start_run, monkeypatch: pytest.MonkeyPatch, length: int, forwards: int
) -> None:
    """A step of its own for the last token would read all weights once more."""
    seen: list[int] = []
    built = model._built

    def counted(build: Any, rids: Any) -> mx.array:
        seen.append(1)
        return built(build, rids)

    monkeypatch.setattr(model, "_built", counted)
    run = start_run(model)
    run.all([make_request(1, range(100, 100 + length), 1)])
    assert len(run.tokens[1]) == 1
    assert len(seen) == forwards


@pytest.mark.parametrize("length", [2, 40, 300])
def test_the_first_token_of_a_row_alone_does_not_wait_for_its_second_step(
    model: Model, make_request, start_run, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """On a CPU a dispatch comes back only when it is nearly done, so it would come a step late."""
    run = start_run(model)
    had: list[int] = []
    built = model._built

    def counted(build: Any, rids: Any) -> mx.array:
        had.append(len(run.tokens.get(1, [])))
        return built(build, rids)

    monkeypatch.setattr(model, "_built", counted)
    run.all([make_request(1, range(100, 100 + length), 5)])
    assert len(run.tokens[1]) == 5
    steps = had[-4:]  # those behind the first token
    assert steps[0] == 1
    assert all(tokens == 0 for tokens in had[:-4])


def test_a_reset_while_the_first_token_of_a_row_alone_is_delivered(model: Model, make_request, start_run) -> None:
    """The streamer is gone in that very moment. The next one's rids begin anew, and nothing of the old row is left."""
    run = start_run(model)
    run.engine.submit(make_request(1, range(100, 140), 5))
    resets: list[Outcome] = []

    def deliver(outcome: Outcome) -> None:
        if outcome.rids:
            resets.append(outcome)
            run.engine.reset()

    run.engine.turn(deliver)
    assert [each.rids for each in resets] == [[1]]
    assert run.engine.stats.running == 0
    again = [make_request(1, range(200, 230), 5), make_request(2, range(300, 340), 5)]
    assert run.all(again) == start_run(model).all(again)
