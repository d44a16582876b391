"""The sampler against the plain definition of its options, and that a row draws the same in any company."""

from collections.abc import Iterable

import mlx.core as mx
import numpy as np
import pytest
from msgspec.structs import replace

from actors.engine.row_options import FEW, MANY, Kind, kind_of
from actors.engine.sampler import RowOptions, Sampler

VOCABULARY = 24
DRAWS = 30_000


def sampler(rows: Iterable[RowOptions], vocabulary: int, **ids: np.ndarray) -> Sampler:
    made = Sampler(vocabulary)
    for row in rows:
        made.append(row, **ids)
    return made


def plain_logits(logits: np.ndarray, options: RowOptions, prompt: np.ndarray, generated: np.ndarray) -> np.ndarray:
    """Masks, bias and penalties as they are defined, for the next token after `generated`."""
    logits = logits.astype(np.float64)
    if options.index < options.min_tokens:
        logits[list(options.stop_ids)] = -np.inf
    for token, bias in options.logit_bias.items():
        logits[token] += bias
    for token in {*prompt.tolist(), *generated.tolist()}:
        repetition = options.repetition_penalty
        logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
    for token in generated.tolist():
        logits[token] -= options.frequency_penalty
    for token in set(generated.tolist()):
        logits[token] -= options.presence_penalty
    return logits


def softmax(logits: np.ndarray) -> np.ndarray:
    weight = np.exp(logits - logits.max())
    return weight / weight.sum()


def plain_distribution(logits: np.ndarray, options: RowOptions) -> np.ndarray:
    """Probabilities of the tokens, option by option; no two logits are equal."""
    probabilities = softmax(logits.astype(np.float64) / options.temperature)
    order = np.argsort(-probabilities)
    if options.top_k:
        probabilities[order[options.top_k :]] = 0
        probabilities /= probabilities.sum()
    if options.top_p < 1:
        before = np.cumsum(probabilities[order]) - probabilities[order]
        probabilities[order[before >= options.top_p]] = 0
        probabilities /= probabilities.sum()
    probabilities[probabilities < options.min_p * probabilities.max()] = 0
    probabilities /= probabilities.sum()
    likely = [token for token in order if probabilities[token] > options.xtc_threshold]
    left = probabilities.copy()
    left[[token for token in likely[:-1] if token not in options.stop_ids]] = 0
    share = options.xtc_probability
    return (1 - share) * probabilities + share * left / left.sum()


def counted(options: RowOptions, logits: np.ndarray, rows: int = 500) -> np.ndarray:
    """How often each token is drawn in DRAWS draws, each of another seed or index."""
    draws = sampler((replace(options, seed=seed) for seed in range(rows)), len(logits))
    batch = mx.array(np.tile(logits.astype(np.float32), (rows, 1)))
    tokens = [np.array(draws.draw(batch).tokens) for _ in range(DRAWS // rows)]
    return np.bincount(np.concatenate(tokens), minlength=len(logits))


def assert_distributed(counts: np.ndarray, probabilities: np.ndarray) -> None:
    expected = probabilities * counts.sum()
    assert not counts[expected == 0].any(), "a token that must not be drawn was"
    possible = expected > 0
    chi_square = float(((counts - expected)[possible] ** 2 / expected[possible]).sum())
    degrees = int(possible.sum()) - 1
    assert chi_square < degrees + 4 * np.sqrt(2 * degrees) + 1e-9


CASES = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.8},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_p": 0.9},
    {"temperature": 0.8, "top_p": 0.5},
    {"temperature": 2.0, "top_p": 0.05},
    {"top_p": 0.9, "min_p": 0.15},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 24},
    {"top_k": 12, "temperature": 1.7, "top_p": 0.8},
    {"top_k": 12, "min_p": 0.1, "top_p": 0.95},
    {"xtc_probability": 0.5, "xtc_threshold": 0.1},
    {"xtc_probability": 1.0, "xtc_threshold": 0.05, "top_p": 0.8, "min_p": 0.1},
    {"xtc_probability": 0.7, "xtc_threshold": 0.1, "top_k": 10, "top_p": 0.95},
    {"xtc_probability": 1.0, "xtc_threshold": 0.02, "stop_ids": (3, 21)},
    {"xtc_probability": 1.0, "xtc_threshold": 0.02, "stop_ids": (3, 21), "top_k": 20},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_draws_have_the_distribution_of_the_definition(case: dict[str, object]) -> None:
    logits = np.random.default_rng(3).normal(0, 1.5, VOCABULARY).astype(np.float32)
    options = RowOptions(**{"temperature": 1.0, **case})
    assert_distributed(counted(options, logits), plain_distribution(logits, options))


@pytest.mark.parametrize("case", [{}, {"top_p": 0.6}, {"min_p": 0.3}, {"top_k": 40}, {"top_k": 300}], ids=str)
def test_draws_from_a_larger_vocabulary(case: dict[str, object]) -> None:
    logits = np.random.default_rng(4).normal(0, 1.0, 1201).astype(np.float32)  # a prime: no even groups
    options = RowOptions(**{"temperature": 1.0, **case})
    counts = counted(options, logits)
    probabilities = plain_distribution(logits, options)
    assert not counts[probabilities == 0].any()
    # Chi-square wants some five expected draws per cell.
    cells = np.argsort(probabilities)  # ids, the least probable first
    pooled = [
        (counts[part].sum(), probabilities[part].sum()) for part in np.array_split(cells[probabilities[cells] > 0], 30)
    ]
    assert_distributed(np.array([c for c, _ in pooled]), np.array([p for _, p in pooled]))


def test_every_kind_has_a_case() -> None:
    kinds = {kind_of(RowOptions(**{"temperature": 1.0, **case}), VOCABULARY) for case in CASES}
    assert kinds == {Kind.WHOLE, Kind.FLOOR, Kind.NUCLEUS, Kind.XTC, Kind.FEW}
    assert kind_of(RowOptions(temperature=1.0, top_k=FEW + 1), 1000) is Kind.MANY
    assert kind_of(RowOptions(temperature=1.0, top_k=MANY + 1), 1000) is Kind.FLOOR
    assert kind_of(RowOptions(temperature=1e-6, top_k=5), 1000) is Kind.GREEDY


def mixed_rows(count: int) -> list[RowOptions]:
    return [
        RowOptions(
            temperature=[0.0, 0.4, 1.0, 1.7][i % 4],
            top_k=[0, 0, 20, 100, 300][i % 5],
            top_p=[1.0, 0.9, 0.3][i % 3],
            min_p=[0.0, 0.05][i % 2],
            xtc_probability=0.5 if i % 7 == 0 else 0.0,
            xtc_threshold=0.02,
            repetition_penalty=1.2 if i % 6 == 0 else 1.0,
            presence_penalty=0.5 if i % 11 == 0 else 0.0,
            frequency_penalty=-0.3 if i % 13 == 0 else 0.0,
            logit_bias={3: 2.0, 400: -100.0, 9999: 1.0} if i % 8 == 1 else {},
            min_tokens=5 if i % 9 == 2 else 0,
            stop_ids=(1, 2),
            logprobs=3 if i % 10 == 4 else -1,
            seed=i * 31 - 200,
            choice=i % 2,
        )
        for i in range(count)
    ]


def test_a_row_draws_the_same_alone_and_among_others() -> None:
    random = np.random.default_rng(5)
    rows = mixed_rows(60)
    prompts = [random.integers(0, 500, 30).astype(np.uint32) for _ in rows]
    together = Sampler(500)
    alone = []
    for row, prompt in zip(rows, prompts, strict=True):
        together.append(row, prompt)
        alone.append(sampler([row], 500, prompt_ids=prompt))
    slots = list(range(60))  # the row in each slot, -1 where there is none
    for step in range(12):
        logits = mx.array(random.normal(0, 2, (60, 500)).astype(np.float32))
        expected = [int(alone[row].draw(logits[row : row + 1]).tokens[0]) for row in range(60)]
        drawn = np.array(together.draw(logits[mx.array(np.maximum(slots, 0))]).tokens).tolist()
        assert [token for row, token in zip(slots, drawn, strict=True) if row >= 0] == [
            expected[row] for row in slots if row >= 0
        ]
        if step % 3 == 2:  # rows leave; then the last ones move into the first free slots
            for slot in [slot for slot, row in enumerate(slots) if row >= 0 and (row + step) % 5 == 0]:
                together.clear(slot)
                slots[slot] = -1
            for _ in range(4):
                while slots[-1] < 0:
                    slots.pop()
                together.cut(len(slots))
                if -1 in slots:
                    target = slots.index(-1)
                    together.move(len(slots) - 1, target)
                    slots[target], slots[-1] = slots[-1], -1
        if step == 6:
            other = Sampler(500)
            for slot, row in enumerate(slots):
                if row >= 0:
                    other.adopt(together, slot)
            together, slots = other, [row for row in slots if row >= 0]
    assert len(slots) == 20


def test_a_slot_is_taken_anew() -> None:
    logits = mx.random.normal((2, 300), key=mx.random.key(1))
    draws = sampler([RowOptions(temperature=1.0, top_p=0.5, presence_penalty=2.0), RowOptions()], 300)
    draws.draw(logits)
    draws.set(0, RowOptions(temperature=1.0, seed=5))
    fresh = sampler([RowOptions(temperature=1.0, seed=5)], 300)
    assert int(draws.draw(logits).tokens[0]) == int(fresh.draw(logits[:1]).tokens[0])


def test_free_slots_are_ignored() -> None:
    draws = sampler([RowOptions(temperature=1.0)] * 3, 100)
    for slot in (0, 1, 2):
        draws.clear(slot)
    drawn = draws.draw(mx.zeros((3, 100)))
    assert drawn.tokens.shape == (3,)
    assert drawn.logprobs is None
    draws.cut(0)
    assert len(draws) == 0


def test_greedy_rows_take_the_best_token_in_any_company() -> None:
    logits = mx.random.normal((6, 300), key=mx.random.key(1))
    best = np.array(mx.argmax(logits, axis=-1))
    rows = [
        RowOptions(temperature=0.0 if row % 2 else 1.5, top_p=0.8 if row % 3 else 1.0, top_k=10) for row in range(6)
    ]
    drawn = np.array(sampler(rows, 300).draw(logits).tokens)
    assert (drawn[1::2] == best[1::2]).all()
    assert (np.array(sampler([RowOptions(temperature=1e-6)] * 6, 300).draw(logits).tokens) == best).all()


def test_a_resumed_row_goes_on_with_its_sequence() -> None:
    random = np.random.default_rng(6)
    prompt = random.integers(0, 400, 20).astype(np.uint32)
    for row in mixed_rows(30):
        logits = [mx.array(random.normal(0, 1, (1, 400)).astype(np.float32)) for _ in range(10)]
        whole = sampler([row], 400, prompt_ids=prompt)
        tokens = [int(whole.draw(step).tokens[0]) for step in logits]
        resumed = sampler(
            [replace(row, index=4)],
            400,
            prompt_ids=prompt,
            generated_ids=np.array(tokens[:4], np.uint32),
        )
        assert [int(resumed.draw(step).tokens[0]) for step in logits[4:]] == tokens[4:]


@pytest.mark.parametrize(
    "case",
    [
        {"repetition_penalty": 1.7},
        {"frequency_penalty": 0.8},
        {"presence_penalty": 1.5},
        {"repetition_penalty": 0.8, "frequency_penalty": -0.5, "presence_penalty": 0.7},
        {"logit_bias": {3: 4.0, 7: -100.0}},
        {"min_tokens": 10, "stop_ids": (0, 2, 4, 11)},
        {"logit_bias": {5: 50.0}, "min_tokens": 6, "stop_ids": (5,), "repetition_penalty": 1.3},
    ],
    ids=str,
)
def test_masks_bias_and_penalties_are_those_of_the_definition(case: dict[str, object]) -> None:
    """Greedy, so that each step tells which logit was the best; all steps are built before any token is read."""
    random = np.random.default_rng(8)
    prompt = random.integers(0, 12, 9).astype(np.uint32)
    options = RowOptions(**case)
    rows = [RowOptions(), options, RowOptions(temperature=1.0, frequency_penalty=0.5)]
    draws = sampler(rows, 12, prompt_ids=prompt)
    steps = [random.normal(0, 1, (3, 12)).astype(np.float32) for _ in range(14)]
    drawn = [draws.draw(mx.array(logits)).tokens for logits in steps]
    mx.eval(drawn)
    generated = np.zeros(0, np.uint32)
    changed = 0
    for index, (logits, tokens) in enumerate(zip(steps, drawn, strict=True)):
        current = RowOptions(**case, index=index)
        expected = int(plain_logits(logits[1], current, prompt, generated).argmax())
        assert int(tokens[1]) == expected
        assert int(tokens[0]) == int(logits[0].argmax())
        changed += expected != int(logits[1].argmax())
        generated = np.append(generated, np.uint32(expected))
    assert changed > 1


def test_log_probabilities_are_those_of_the_model() -> None:
    random = np.random.default_rng(9)
    logits = random.normal(0, 3, (5, 900)).astype(np.float32)
    rows = [
        RowOptions(logprobs=5),
        RowOptions(temperature=0.5),
        RowOptions(temperature=1.3, top_k=7, logprobs=0),
        RowOptions(logit_bias={4: 100.0}, repetition_penalty=1.5, logprobs=20),
        RowOptions(),
    ]
    drawn = sampler(rows, 900).draw(mx.array(logits))
    asked = drawn.logprobs
    assert asked is not None
    assert asked.slots == [0, 2, 3]
    assert asked.counts == [5, 0, 20]
    tokens = np.array(drawn.tokens)
    assert tokens[3] == 4
    for place, slot in enumerate(asked.slots):
        plain = np.log(softmax(logits[slot].astype(np.float64)))
        assert float(asked.chosen[place]) == pytest.approx(plain[tokens[slot]], abs=1e-4)
        order = np.argsort(-plain)[: asked.counts[place]]
        assert np.array(asked.top_ids)[place, : len(order)].tolist() == order.tolist()
        assert np.array(asked.top)[place, : len(order)] == pytest.approx(plain[order], abs=1e-4)


def test_only_the_chosen_log_probability_may_be_asked_for() -> None:
    asked = sampler([RowOptions(logprobs=0)], 50).draw(mx.zeros((1, 50))).logprobs
    assert asked is not None
    assert asked.top.shape == (1, 0)
    assert float(asked.chosen[0]) == pytest.approx(-np.log(50), abs=1e-5)


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63), 2**64 - 1])
def test_every_64_bit_seed_works(seed: int) -> None:
    drawn = sampler([RowOptions(temperature=1.0, seed=seed)], 50).draw(mx.zeros((1, 50)))
    assert 0 <= int(drawn.tokens[0]) < 50


def test_half_precision_logits_are_sampled_in_full() -> None:
    logits = mx.random.normal((30, 200), key=mx.random.key(4)).astype(mx.bfloat16)
    drawn = sampler(mixed_rows(30), 200).draw(logits)
    rounded = sampler(mixed_rows(30), 200).draw(logits.astype(mx.float32))
    assert np.array_equal(np.array(drawn.tokens), np.array(rounded.tokens))
