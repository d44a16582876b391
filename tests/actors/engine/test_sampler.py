"""The sampler against the plain definition of its options, and that a row draws the same in any company."""

import mlx.core as mx
import numpy as np
import pytest

from actors.engine.sampler import RowOptions, Sampler, cut_top_p, noise_keys, stream_of

VOCABULARY = 24


def options(**changes: float) -> RowOptions:
    given = {"temperature": 1.0, "top_p": 1.0, "seed": 0, "choice": 0, "index": 0} | changes
    return RowOptions(**given)


def sampler(rows: list[RowOptions]) -> Sampler:
    made = Sampler()
    made.extend(rows)
    return made


def mass_before(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Softmax of `logits`, and for each token the mass of those more probable than it."""
    logits = logits.astype(np.float64)
    probabilities = np.exp(logits - logits.max())
    probabilities /= probabilities.sum()
    order = np.argsort(-probabilities, kind="stable")
    before = np.empty_like(probabilities)
    before[order] = np.cumsum(probabilities[order]) - probabilities[order]
    return probabilities, before


def plain_distribution(logits: np.ndarray, temperature: float, top_p: float) -> np.ndarray:
    """Softmax of logits / temperature, cut to the fewest most probable tokens that reach top_p."""
    probabilities, before = mass_before(logits / temperature)
    probabilities[before >= top_p] = 0
    return probabilities / probabilities.sum()


@pytest.mark.parametrize(
    ("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.8, 1.0), (1.0, 0.9), (0.8, 0.5), (2.0, 0.05)]
)
def test_draws_have_the_distribution_of_the_definition(temperature: float, top_p: float) -> None:
    logits = np.random.default_rng(3).normal(0, 1.5, VOCABULARY).astype(np.float32)
    rows = [options(temperature=temperature, top_p=top_p, seed=seed) for seed in range(500)]
    draws = sampler(rows)
    batch = mx.array(np.tile(logits, (len(rows), 1)))
    counts = np.zeros(VOCABULARY)
    steps = 60
    for _ in range(steps):
        counts += np.bincount(np.array(draws.draw(batch)), minlength=VOCABULARY)
    expected = plain_distribution(logits, temperature, top_p) * len(rows) * steps
    assert not counts[expected == 0].any()
    possible = expected > 0
    chi_square = float(((counts - expected)[possible] ** 2 / expected[possible]).sum())
    degrees = int(possible.sum()) - 1
    assert chi_square < degrees + 4 * np.sqrt(2 * degrees) + 1e-9


def test_greedy_rows_take_the_best_token_in_any_company() -> None:
    logits = mx.random.normal((6, 300), key=mx.random.key(1))
    best = np.array(mx.argmax(logits, axis=-1))
    rows = [options(temperature=0.0 if row % 2 else 1.5, top_p=0.8 if row % 3 else 1.0) for row in range(6)]
    drawn = np.array(sampler(rows).draw(logits))
    assert (drawn[1::2] == best[1::2]).all()
    assert (np.array(sampler([options(temperature=1e-6)] * 6).draw(logits)) == best).all()


def test_a_row_draws_the_same_alone_and_among_others() -> None:
    random = np.random.default_rng(5)
    rows = [
        options(
            temperature=[0.0, 0.4, 1.0, 1.7][i % 4],
            top_p=[1.0, 0.9, 0.3][i % 3],
            seed=int(i * 31 - 200),
            choice=i % 2,
        )
        for i in range(24)
    ]
    together = sampler(rows)
    alone = [sampler([row]) for row in rows]
    kept = list(range(24))
    for step in range(12):
        logits = mx.array(random.normal(0, 2, (24, 500)).astype(np.float32))
        expected = [int(alone[row].draw(logits[row : row + 1])[0]) for row in range(24)]
        drawn = np.array(together.draw(logits[mx.array(kept)])).tolist()
        assert drawn == [expected[row] for row in kept]
        if step % 4 == 3:  # rows leave
            together.filter([place for place in range(len(kept)) if place % 3])
            kept = [row for place, row in enumerate(kept) if place % 3]


def test_a_resumed_row_goes_on_with_its_sequence() -> None:
    random = np.random.default_rng(6)
    logits = [mx.array(random.normal(0, 1, (1, 400)).astype(np.float32)) for _ in range(10)]
    whole = sampler([options(seed=9)])
    tokens = [int(whole.draw(step)[0]) for step in logits]
    resumed = sampler([options(seed=9, index=4)])
    assert [int(resumed.draw(step)[0]) for step in logits[4:]] == tokens[4:]


def test_sequences_of_seeds_and_choices_differ() -> None:
    names = {stream_of(seed, choice) for seed in range(-50, 50) for choice in range(8)}
    assert len(names) == 800
    streams = np.array(sorted(names), np.uint64)
    keys = np.concatenate([np.array(noise_keys(streams, np.full(800, i, np.uint64))) for i in range(20)])
    assert len(np.unique(keys, axis=0)) == 16_000
    assert abs(np.unpackbits(keys.view(np.uint8)).mean() - 0.5) < 0.002


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63), 2**64 - 1])
def test_every_64_bit_seed_works(seed: int) -> None:
    assert 0 <= int(sampler([options(seed=seed)]).draw(mx.zeros((1, 50)))[0]) < 50


@pytest.mark.parametrize("vocabulary", [700, 10_001])
def test_top_p_keeps_the_smallest_set_that_reaches_it(vocabulary: int) -> None:
    random = np.random.default_rng(11)
    for scale in (0.01, 1.0, 4.0, 20.0):
        for top_p in (1e-9, 0.1, 0.5, 0.9, 0.99, 0.9999):
            logits = random.normal(0, scale, (4, vocabulary)).astype(np.float32)
            cut = np.array(cut_top_p(mx.array(logits), mx.full((4, 1), top_p)))
            for row in range(4):
                _, before = mass_before(logits[row])
                kept = cut[row] > -np.inf
                at_the_border = np.abs(before - top_p) < 3e-5  # where float32 may round to either side
                assert (kept == (before < top_p))[~at_the_border].all()
                assert kept[logits[row].argmax()]
                assert (cut[row][kept] == logits[row][kept]).all()


def test_top_p_keeps_all_of_equal_tokens() -> None:
    for vocabulary in (64, 5000):
        cut = np.array(cut_top_p(mx.zeros((1, vocabulary)), mx.full((1, 1), 0.5)))
        assert (cut == 0).all()


def test_half_precision_logits_are_sampled_in_full() -> None:
    logits = mx.random.normal((3, 200), key=mx.random.key(4))
    rows = [options(seed=i, top_p=0.9) for i in range(3)]
    drawn = sampler(rows).draw(logits.astype(mx.bfloat16))
    rounded = sampler(rows).draw(logits.astype(mx.bfloat16).astype(mx.float32))
    assert np.array_equal(np.array(drawn), np.array(rounded))
