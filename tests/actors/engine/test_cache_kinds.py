"""Every kind of cache that mlx-lm batches, on tiny random models: the same tokens alone and in a changing batch."""

import random

import pytest

from actors.engine import batch
from actors.engine.model import Model
from actors.engine.scheduler import Limits
from actors.engine.solo_row import batches_rightly

VOCABULARY = 512
UNBOUNDED = [(kind, None) for kind in ("plain", "sliding", "gemma3", "recurrent", "list", "hybrid", "quantized")]
WINDOWED = [(kind, 64) for kind in ("plain", "sliding", "gemma3", "hybrid")]  # the others have no plain caches


@pytest.mark.parametrize(("kind", "window"), UNBOUNDED + WINDOWED)
def test_a_changing_batch_gives_the_tokens_of_plain_runs(
    kind: str, window: int | None, kind_model, make_request, start_run, same_as_plain
) -> None:
    model = kind_model(kind, window)
    assert batches_rightly(model)
    changing_batch(model, make_request, start_run, same_as_plain)


@pytest.mark.parametrize("kind", [kind for kind, _ in UNBOUNDED])
def test_groups_that_change_their_shape_in_pieces_give_the_same_tokens(
    kind: str, kind_model, make_request, start_run, same_as_plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = kind_model(kind)
    model.step_bytes = 1 << 40  # one group is always better than two
    monkeypatch.setattr(batch, "SMALL_BATCH", 0)
    monkeypatch.setattr(batch, "PIECE", 1)
    monkeypatch.setattr(batch, "PIECE_SHARE", 1 << 60)
    monkeypatch.setattr(batch, "MOVED", 1)
    monkeypatch.setattr(batch, "RESERVED", 0)
    monkeypatch.setattr(batch, "MOST_RESERVED", 0)
    changing_batch(model, make_request, start_run, same_as_plain)


def test_rows_with_a_cache_that_cant_be_batched_run_beside_each_other(
    kind_model, make_request, start_run, same_as_plain
) -> None:
    model = kind_model("plain")
    model.batches_rows = model.batches_prefill = False
    changing_batch(model, make_request, start_run, same_as_plain)


@pytest.mark.parametrize("kind", [*(kind for kind, _ in UNBOUNDED), "not batched"])
def test_a_row_alone_and_another_that_joins_it(kind: str, kind_model, make_request, start_run, same_as_plain) -> None:
    """A lone row's last short forward brings its first token, too."""
    model = kind_model("plain" if kind == "not batched" else kind)
    assert model.splits_head is (kind not in ("recurrent", "list"))  # those name their parts otherwise
    if kind == "not batched":
        model.batches_rows = model.batches_prefill = False
    draw = random.Random(2)
    lengths = [2, 64, 65, 66, 257, 300, 560, 576, 577, 30, 34]
    requests = [
        make_request(rid, [draw.randrange(10, VOCABULARY) for _ in range(length)], 4, temperature=[0.0, 0.8][rid % 2])
        for rid, length in enumerate(lengths)
    ]
    run = start_run(model)
    for each in requests[:-2]:
        run.all([each])
    run.engine.submit(requests[-2])
    run.turn()
    run.all(requests[-1:])
    same_as_plain(model, requests, run.tokens)


def changing_batch(model: Model, make_request, start_run, same_as_plain) -> None:
    """Rows of many lengths that join, leave and are aborted get the tokens of their plain runs."""
    draw = random.Random(1)
    requests = [
        make_request(
            rid,
            [draw.randrange(10, VOCABULARY) for _ in range(length)],
            60 if rid % 3 == 0 else 9,
            temperature=[0.0, 0.8][rid % 2],
        )
        for rid, length in enumerate([90, 80, 1, 300, 40, 44, 37, 2, 257, 120, 110, 101, 5, 64, 31])
    ]
    run = start_run(model, Limits(max_num_seqs=6, max_num_batched_tokens=700, prefill_step_size=256))
    for number, each in enumerate(requests):
        run.engine.submit(each)
        if number % 3 == 2:  # three at a time: short ones of like length are prefilled together, padded
            run.turn()
            run.turn()
        if number == 8:
            run.engine.abort([5])
    run.finish()
    same_as_plain(model, [each for each in requests if each.rid != 5], run.tokens)


def test_a_padded_group_that_would_end_in_one_token(kind_model, make_request, start_run, same_as_plain) -> None:
    model = kind_model("plain", 400)
    draw = random.Random(3)
    requests = [
        make_request(r, [draw.randrange(10, VOCABULARY) for _ in range(n)], 5) for r, n in enumerate((250, 258))
    ]
    run = start_run(model)
    same_as_plain(model, requests, run.all(requests))
