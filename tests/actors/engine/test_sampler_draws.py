"""Weights, cuts and candidates: which tokens each option keeps, ties at the borders included."""

import math

import mlx.core as mx
import numpy as np
import pytest

from actors.engine import weights as weights_module
from actors.engine.draws import BLOCK, draw_candidates, draw_floor, draw_greedy, draw_nucleus, draw_xtc, heaviest
from actors.engine.noise import coins, gumbel_of_ids, noise_keys, stream_of
from actors.engine.weights import bits_of, cut, grouped, members_of, weights

ROWS = 4000


def keys(rows: int) -> mx.array:
    return noise_keys(np.arange(rows, dtype=np.uint64) * np.uint64(7919), np.zeros(rows, np.uint64))


@pytest.mark.parametrize("vocab_size", [1000, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 1000, 49_152])
@pytest.mark.parametrize("values", ["many", "few", "one", "none"])
def test_greedy_is_the_first_of_the_heaviest(vocab_size: int, values: str):
    random = np.random.default_rng(vocab_size)
    logits = random.normal(size=(5, vocab_size)).astype(np.float32)
    if values == "few":
        logits = np.round(logits)
    if values in ("one", "none"):
        logits = np.full_like(logits, -np.inf)
    if values == "one":
        logits[:, [vocab_size // 2, vocab_size - 1]] = -3.0
    token = draw_greedy(mx.array(logits))
    assert token.dtype == mx.uint32
    assert np.array(token).tolist() == logits.argmax(axis=-1).tolist()


def drawn_set(how: str, logits: list[float], **options: float) -> set[int]:
    """Tokens that come up among many draws: the set that is kept, when all that is kept is likely enough."""
    rows = mx.array(np.tile(np.array(logits, np.float32), (ROWS, 1)))
    given = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "xtc_threshold": 2.0} | options
    column = {name: mx.full((ROWS, 1), value) for name, value in given.items()}
    top_k = mx.full((ROWS, 1), int(given["top_k"]), mx.int32)
    scale = mx.ones((ROWS, 1))
    excluding = mx.full((ROWS, 1), True)
    match how:
        case "candidates":
            rest = (column["top_p"], column["min_p"], column["xtc_threshold"], excluding)
            tokens = draw_candidates(rows, 64, scale, keys(ROWS), top_k, *rest, None)
        case "floor":
            tokens = draw_floor(rows, scale, keys(ROWS), top_k, column["min_p"])
        case "nucleus":
            tokens = draw_nucleus(rows, scale, keys(ROWS), top_k, column["top_p"], column["min_p"])
        case "xtc":
            rest = (column["min_p"], column["xtc_threshold"], excluding)
            tokens = draw_xtc(rows, scale, keys(ROWS), top_k, column["top_p"], *rest, None)
    return set(np.array(tokens).tolist())


# Probabilities 4/16, 4/16, 2/16, 2/16, 2/16, 1/16, 1/16: exact in binary, so borders are hit exactly.
SIXTEENTHS = [math.log(4), math.log(4), math.log(2), math.log(2), math.log(2), 0.0, 0.0]


@pytest.mark.parametrize("how", ["nucleus", "candidates", "xtc"])
@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.2, 2), (0.3, 2), (0.49, 2), (0.51, 5), (0.8, 5), (0.86, 5), (0.9, 7), (0.99, 7)]
)
def test_top_p_keeps_what_is_as_heavy_as_the_last(how: str, top_p: float, kept: int) -> None:
    assert drawn_set(how, SIXTEENTHS, top_p=top_p, top_k=7) == set(range(kept))


@pytest.mark.parametrize("how", ["floor", "candidates", "xtc"])
@pytest.mark.parametrize(("min_p", "kept"), [(0.24, 7), (0.26, 5), (0.49, 5), (0.51, 2), (1.0, 2)])
def test_min_p_is_relative_to_the_heaviest(how: str, min_p: float, kept: int) -> None:
    assert drawn_set(how, SIXTEENTHS, min_p=min_p, top_k=7) == set(range(kept))


def test_top_k_with_ties_at_the_border() -> None:
    for k in range(1, 8):
        few = drawn_set("candidates", SIXTEENTHS, top_k=k)
        assert len(few) == k
        values = sorted((SIXTEENTHS[token] for token in few), reverse=True)
        assert values == SIXTEENTHS[:k]
        many = drawn_set("floor", SIXTEENTHS, top_k=k)
        assert many == {token for token, value in enumerate(SIXTEENTHS) if value >= SIXTEENTHS[k - 1]}


def test_top_p_counts_what_top_k_left() -> None:
    # Of 4, 4, 2 sixteenths the first two are 0.8; of all they are 0.5.
    assert drawn_set("candidates", SIXTEENTHS, top_k=3, top_p=0.79) == {0, 1}
    assert drawn_set("nucleus", SIXTEENTHS[:3] + [0.0] * 6, top_k=3, top_p=0.79) == {0, 1}
    assert drawn_set("nucleus", [*SIXTEENTHS[:3], 0.0, 0.0, 0.0], top_p=0.75) == {0, 1, 2}


@pytest.mark.parametrize("how", ["xtc", "candidates"])
def test_xtc_leaves_the_lightest_of_the_likely_ones(how: str) -> None:
    assert drawn_set(how, SIXTEENTHS, xtc_threshold=0.2, top_k=7) == {0, 1, 2, 3, 4, 5, 6}  # both are the lightest
    assert drawn_set(how, SIXTEENTHS, xtc_threshold=0.1, top_k=7) == {2, 3, 4, 5, 6}
    assert drawn_set(how, SIXTEENTHS, xtc_threshold=0.5, top_k=7) == {0, 1, 2, 3, 4, 5, 6}


@pytest.mark.parametrize("scale", [0.01, 1.0, 4.0, 20.0])
@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.9, 0.99, 0.9999])
def test_nothing_outside_the_nucleus_is_drawn(scale: float, top_p: float) -> None:
    logits = np.random.default_rng(11).normal(0, scale, 700).astype(np.float32)
    probabilities = np.exp(logits.astype(np.float64) - logits.max())
    probabilities /= probabilities.sum()
    order = np.argsort(-probabilities)
    before = np.empty(700)
    before[order] = np.cumsum(probabilities[order]) - probabilities[order]
    for how in ("nucleus", "xtc"):
        drawn = np.array(sorted(drawn_set(how, logits.tolist(), top_p=top_p)))
        assert (before[drawn] < top_p + 1e-5).all()
        assert logits.argmax() in drawn or probabilities.max() * ROWS < 20


@pytest.mark.parametrize("vocabulary", [7, 300, 1201, 4096])
@pytest.mark.parametrize("most", [1, 20, 64])
def test_the_heaviest_are_found_in_order(vocabulary: int, most: int) -> None:
    logits = np.random.default_rng(2).normal(0, 1, (6, vocabulary)).astype(np.float32)
    values, ids = heaviest(mx.array(logits), most)
    order = np.argsort(-logits, axis=-1)[:, :most]
    assert np.array_equal(np.array(ids), order)
    assert np.array_equal(np.array(values), np.take_along_axis(logits, order, axis=-1))


def test_the_heaviest_among_equals_are_different_tokens() -> None:
    values, ids = heaviest(mx.array(np.random.default_rng(3).integers(0, 3, (8, 2000)).astype(np.float32)), 64)
    assert (np.array(values) == 2).all()
    assert all(len(set(row)) == 64 for row in np.array(ids).tolist())


@pytest.mark.parametrize("path", ["_power_by_bits", "_power_by_exp", None])
def test_weights_are_the_exponential_function(path: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if path is not None:
        monkeypatch.setattr(weights_module, "_power", lambda: getattr(weights_module, path))
    logits = np.random.default_rng(4).normal(0, 8, (5, 1201)).astype(np.float32)
    logits[:, 3] = -np.inf
    temperature = np.array([0.1, 0.5, 1.0, 2.0, 1e-5], np.float32)[:, None]
    weight, best = weights(grouped(mx.array(logits), members_of(1201)), mx.array(1 / temperature)[:, :, None])
    found = np.array(weight).reshape(5, -1)
    assert not found[:, 1201:].any()
    with np.errstate(under="ignore"):
        exact = np.exp((logits.astype(np.float64) - logits.max(axis=1, keepdims=True)) / temperature)
    assert np.allclose(found[:, :1201], exact, rtol=2e-5, atol=1e-37)
    assert (found[:, 3] == 0).all()
    assert (found.max(axis=1) == 1).all()
    assert np.array_equal(np.array(best)[:, 0, 0], logits.max(axis=1))


def test_a_cut_keeps_what_reaches_the_floor() -> None:
    weight = mx.array([0.0, 1e-30, 0.25, 0.5, 1.0])
    assert cut(weight, bits_of(mx.array(0.25))).tolist() == [0.0, 0.0, 0.25, 0.5, 1.0]
    assert cut(weight, bits_of(mx.array(0.25)) + 1).tolist() == [0.0, 0.0, 0.0, 0.5, 1.0]
    assert cut(weight, mx.array(0)).tolist() == weight.tolist()


@pytest.mark.parametrize("vocabulary", [1, 2, 24, 1201, 32_000, 49_152, 128_256, 151_936, 262_144])
def test_groups_are_about_the_square_root(vocabulary: int) -> None:
    members = members_of(vocabulary)
    groups = -(-vocabulary // members)
    assert members + groups <= 4 * math.sqrt(vocabulary)


def test_sequences_of_seeds_and_choices_differ() -> None:
    names = {stream_of(seed, choice) for seed in range(-50, 50) for choice in range(8)}
    assert len(names) == 800
    streams = np.array(sorted(names), np.uint64)
    made = np.concatenate([np.array(noise_keys(streams, np.full(800, i, np.uint64))) for i in range(20)])
    assert len(np.unique(made, axis=0)) == 16_000
    assert abs(np.unpackbits(made.view(np.uint8)).mean() - 0.5) < 0.002


def test_coins_are_even_and_their_own() -> None:
    streams = np.array([stream_of(seed, 0) for seed in range(4000)], np.uint64)
    flips = np.array(coins(streams, np.full(4000, 3, np.uint64)))[:, 0]
    assert flips.min() >= 0
    assert flips.max() < 1
    assert abs(flips.mean() - 0.5) < 0.02
    assert abs(np.histogram(flips, 10, (0, 1))[0] - 400).max() < 80


def test_noise_of_an_id_is_the_same_wherever_it_stands() -> None:
    ids = mx.array([[5, 9, 40_000], [7, 5, 9]], mx.uint32)
    same = mx.broadcast_to(keys(3)[1:2], (2, 2))
    noise = np.array(gumbel_of_ids(same, ids))
    assert noise[0, 0] == noise[1, 1]
    assert noise[0, 1] == noise[1, 2]
    many = np.array(gumbel_of_ids(keys(40), mx.broadcast_to(mx.arange(500, dtype=mx.uint32)[None], (40, 500))))
    assert abs(many.mean() - 0.5772) < 0.03
    assert abs(many.std() - math.pi / math.sqrt(6)) < 0.03
