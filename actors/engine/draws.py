"""Draws of the rows that sample, one function per way to do it; each row's way depends on its own options alone.

Called by `actors.engine.sampler` on the engine's one thread. All functions are lazy and their cost does not depend
on the values. Logits are float32 (rows, vocabulary), options float32 or int32 (rows, 1); tokens are uint32 (rows,).

All draw by Gumbel-max: the argmax of log-weights + Gumbel noise has the distribution of the weights (Gumbel 1954;
Maddison, Tarlow, Minka 2014). Over a whole vocabulary it is done in two steps that together are exact: first among
groups of tokens by the sums of their weights, then among the members of the one drawn.

The tokens kept, of those that the options before left, by weight:
top_k: the k heaviest; of equally heavy ones at the border, some. (Above 256: all of them.)
top_p: the fewest, heaviest first, that weigh `top_p` of all together, and those as heavy as the last of them.
min_p: those that weigh at least `min_p` times the heaviest.
xtc: with probability `xtc_probability`, of those above `xtc_threshold` of all only the lightest, and all others
(including those excepted by id).
"""

import mlx.core as mx

from actors.engine.noise import gumbel, gumbel_of_ids
from actors.engine.weights import ONE, bits_of, cut, group_sums, grouped, members_of, weights

# Halvings of the range that holds the border of top_p, and draws that are then checked against the exact border.
# When a share q of what is above the lower end of the range is outside the nucleus, all checked draws fail, and the
# last, unchecked one is outside, too, with a probability of some q^5 / 5!. After 7 halvings q is about 0.01, which
# makes it 1e-12; in bad cases (most of the weight in nearly equal tokens) 0.1, which makes it 1e-7.
HALVINGS = 7
CHECKS = 4
# Halvings that find the border to the bit: the bits of 1.0 are below 2^30.
ALL_HALVINGS = 30

# How `draw_greedy` cuts a row of logits on a CPU: into blocks of RUNS runs of LINES lines of LANES logits.
RUNS, LINES, LANES = 8, 8, 32
BLOCK = RUNS * LINES * LANES


def draw_greedy(logits: mx.array) -> mx.array:
    """The heaviest token, of equally heavy ones the first.

    On a CPU, MLX looks for a maximum faster than for its place, and fastest across lines that lie one behind the other,
    as it then takes a line's logits at once. So the heaviest block is found first, then the run in it, then the place
    in that: for 256 rows of 49,152 in 5.7 ms, `mx.argmax` takes 12.5.
    """
    rows, vocab_size = logits.shape
    blocks = vocab_size // BLOCK
    if mx.default_device() != mx.cpu or not blocks:
        return mx.argmax(logits, axis=-1)
    whole = logits[:, : blocks * BLOCK]
    of_runs = mx.max(whole.reshape(rows, blocks * RUNS, LINES, LANES), axis=2)
    of_blocks = mx.max(mx.max(of_runs.reshape(rows, blocks, RUNS, LANES), axis=2), axis=-1)
    block = mx.argmax(of_blocks, axis=-1, keepdims=True)
    of_runs = mx.take_along_axis(of_runs.reshape(rows, blocks, RUNS * LANES), block[:, :, None], axis=1)
    run = block * RUNS + mx.argmax(mx.max(of_runs.reshape(rows, RUNS, LANES), axis=-1), axis=-1, keepdims=True)
    heaviest = mx.take_along_axis(whole.reshape(rows, blocks * RUNS, LINES * LANES), run[:, :, None], axis=1)[:, 0]
    token = run[:, 0] * (LINES * LANES) + mx.argmax(heaviest, axis=-1)
    if blocks * BLOCK == vocab_size:
        return token
    rest = logits[:, blocks * BLOCK :]
    heavier = mx.max(rest, axis=-1) > mx.max(heaviest, axis=-1)
    return mx.where(heavier, blocks * BLOCK + mx.argmax(rest, axis=-1), token)


def draw_whole(logits: mx.array, inverse_temperature: mx.array, keys: mx.array) -> mx.array:
    """Draw from the whole vocabulary."""
    rows = _Rows(logits, inverse_temperature)
    token, _ = rows.pick(rows.weight, rows.noise(keys))
    return token


def draw_floor(
    logits: mx.array, inverse_temperature: mx.array, keys: mx.array, top_k: mx.array | None, min_p: mx.array
) -> mx.array:
    """Draw with min_p, and after a top_k of any size; a `top_k` of 0 in a row is off."""
    rows = _Rows(logits, inverse_temperature)
    floor = mx.maximum(_kth_floor(rows, top_k), bits_of(min_p))
    token, _ = rows.pick(cut(rows.weight, floor[:, :, None]), rows.noise(keys))
    return token


def draw_nucleus(
    logits: mx.array,
    inverse_temperature: mx.array,
    keys: mx.array,
    top_k: mx.array | None,
    top_p: mx.array,
    min_p: mx.array,
) -> mx.array:
    """Draw with top_p, before min_p and after a top_k of any size.

    Nothing is sorted. A floor somewhat below the border is found by bisection; a token drawn above it is in the
    nucleus exactly when those heavier than it weigh less than top_p, else the next one is drawn from those
    (dual-pivot rejection sampling as in FlashInfer, https://flashinfer.ai/2025/03/10/sampling.html).
    """
    rows = _Rows(logits, inverse_temperature)
    kth, target = _target(rows, top_k, top_p)
    floor = mx.maximum(_border(rows, kth, target, top_p, HALVINGS), bits_of(min_p))
    noise = rows.noise(keys, CHECKS + 1)
    size = noise.shape[-1] // (CHECKS + 1)
    token, bits = rows.pick(cut(rows.weight, floor[:, :, None]), noise[:, :size])
    for check in range(1, CHECKS + 1):
        heavier = cut(rows.weight, bits[:, None, None] + 1)
        sums = group_sums(heavier)
        inside = mx.sum(sums, axis=-1) < target[:, 0]
        other, other_bits = rows.pick(heavier, noise[:, check * size : (check + 1) * size], sums)
        token = mx.where(inside, token, other)
        bits = mx.where(inside, bits, other_bits)
    return token


def draw_xtc(
    logits: mx.array,
    inverse_temperature: mx.array,
    keys: mx.array,
    top_k: mx.array | None,
    top_p: mx.array | None,
    min_p: mx.array,
    xtc_threshold: mx.array,
    excluding: mx.array,
    excepted: tuple[mx.array, mx.array] | None,
) -> mx.array:
    """Draw with xtc after all others. `excluding`, bool (rows, 1), tells where it happens in this step.

    `excepted` are row numbers and ids of tokens that xtc leaves alone, each int32 or uint32 (n,).
    """
    rows = _Rows(logits, inverse_temperature)
    if top_p is None:
        floor = _kth_floor(rows, top_k)
    else:
        kth, target = _target(rows, top_k, top_p)
        floor = mx.where(top_p < 1, _border(rows, kth, target, top_p, ALL_HALVINGS), kth)
    floor = mx.maximum(floor, bits_of(min_p))
    kept = cut(rows.weight, floor[:, :, None])
    likely = kept > (xtc_threshold * _total(kept))[:, :, None]
    lightest = mx.min(mx.where(likely, kept, mx.inf), axis=(1, 2), keepdims=True)
    left = mx.where((kept > lightest) & excluding[:, :, None], 0.0, kept)
    if excepted is not None:
        row, token = excepted
        flat, kept = left.reshape(left.shape[0], -1), kept.reshape(left.shape[0], -1)
        flat[row, token] = kept[row, token]
        left = flat.reshape(left.shape)
    drawn, _ = rows.pick(left, rows.noise(keys))
    return drawn


def draw_candidates(
    logits: mx.array,
    most: int,
    inverse_temperature: mx.array,
    keys: mx.array,
    top_k: mx.array,
    top_p: mx.array,
    min_p: mx.array,
    xtc_threshold: mx.array,
    excluding: mx.array,
    excepted: mx.array | None,
) -> mx.array:
    """Draw with a top_k of at most `most`, and all other options, from these few tokens alone.

    `excluding` is as in `draw_xtc`; `excepted` are ids, uint32 (rows, n).
    """
    values, ids = heaviest(logits, most)
    scores = (values - values[:, :1]) * inverse_temperature
    ranks = mx.arange(values.shape[-1])[None, :]
    weight = mx.where(ranks < top_k, mx.exp(scores), 0.0)
    heavier = mx.cumsum(weight, axis=-1, inclusive=False)
    inside = heavier < top_p * mx.sum(weight, axis=-1, keepdims=True)
    floor = mx.min(mx.where(inside & (weight > 0), weight, mx.inf), axis=-1, keepdims=True)
    weight = mx.where(weight >= mx.maximum(mx.minimum(floor, 1.0), min_p), weight, 0.0)
    likely = weight > xtc_threshold * mx.sum(weight, axis=-1, keepdims=True)
    lightest = mx.min(mx.where(likely, weight, mx.inf), axis=-1, keepdims=True)
    gone = (weight > lightest) & excluding
    if excepted is not None:
        gone = gone & ~mx.any(ids[:, :, None] == excepted[:, None, :], axis=-1)
    scores = mx.where((weight > 0) & ~gone, scores, -mx.inf)
    place = mx.argmax(scores + gumbel_of_ids(keys, ids), axis=-1, keepdims=True)
    return mx.take_along_axis(ids, place, axis=-1)[:, 0]


def heaviest(logits: mx.array, most: int) -> tuple[mx.array, mx.array]:
    """The `most` largest values of each row, largest first, and their ids (uint32), both (rows, most).

    Fewer when the vocabulary is smaller. The largest of each group tell which groups can hold them, so that the
    vocabulary need not be sorted.
    """
    most = min(most, logits.shape[-1])
    blocks = grouped(logits, members_of(logits.shape[-1], most))
    rows, members, groups = blocks.shape
    values = blocks.reshape(rows, -1)
    ids = mx.arange(members * groups, dtype=mx.uint32)[None, :]
    if groups > most:
        chosen = mx.argpartition(-mx.max(blocks, axis=1), most - 1, axis=-1)[:, :most]
        ids = (mx.arange(members, dtype=mx.uint32)[None, :, None] * groups + chosen[:, None, :]).reshape(rows, -1)
        values = mx.take_along_axis(values, ids, axis=-1)
    else:
        ids = mx.broadcast_to(ids, values.shape)
    if values.shape[-1] > most:
        places = mx.argpartition(-values, most - 1, axis=-1)[:, :most]
        values, ids = mx.take_along_axis(values, places, axis=-1), mx.take_along_axis(ids, places, axis=-1)
    order = mx.argsort(-values, axis=-1)
    return mx.take_along_axis(values, order, axis=-1), mx.take_along_axis(ids, order, axis=-1)


class _Rows:
    """Weights of whole rows, (rows, members, groups), and the draw in two steps."""

    def __init__(self, logits: mx.array, inverse_temperature: mx.array) -> None:
        blocks = grouped(logits, members_of(logits.shape[-1]))
        self.weight, _ = weights(blocks, inverse_temperature[:, :, None])
        _, self._members, self._groups = blocks.shape

    def noise(self, keys: mx.array, draws: int = 1) -> mx.array:
        """Noise for so many draws, side by side."""
        return gumbel(keys, draws * (self._groups + self._members))

    def pick(self, weight: mx.array, noise: mx.array, sums: mx.array | None = None) -> tuple[mx.array, mx.array]:
        """A token drawn from `weight`, and the bits of its weight, both (rows,)."""
        if sums is None:
            sums = group_sums(weight)
        group = mx.argmax(mx.log(sums) + noise[:, : self._groups], axis=-1, keepdims=True)
        ids = mx.arange(self._members, dtype=mx.uint32)[None, :] * self._groups + group
        members = mx.take_along_axis(weight.reshape(weight.shape[0], -1), ids, axis=-1)
        member = mx.argmax(mx.log(members) + noise[:, self._groups :], axis=-1, keepdims=True)
        token = mx.take_along_axis(ids, member, axis=-1)[:, 0]
        return token, bits_of(mx.take_along_axis(members, member, axis=-1))[:, 0]


def _total(weight: mx.array) -> mx.array:
    return mx.sum(group_sums(weight), axis=-1, keepdims=True)


def _kth_floor(rows: _Rows, top_k: mx.array | None) -> mx.array:
    """Bits of the k-th heaviest weight, (rows, 1); 0 where top_k is off. Sorts the vocabulary."""
    if top_k is None:
        return mx.zeros((rows.weight.shape[0], 1), mx.int32)
    flat = bits_of(rows.weight.reshape(rows.weight.shape[0], -1))
    kth = mx.take_along_axis(mx.sort(flat, axis=-1), flat.shape[-1] - mx.maximum(top_k, 1), axis=-1)
    return mx.where(top_k > 0, kth, 0)


def _target(rows: _Rows, top_k: mx.array | None, top_p: mx.array) -> tuple[mx.array, mx.array]:
    """The floor of top_k, and the weight that the nucleus must reach, both (rows, 1)."""
    kth = _kth_floor(rows, top_k)
    left = rows.weight if top_k is None else cut(rows.weight, kth[:, :, None])
    return kth, top_p * _total(left)


def _border(rows: _Rows, kth: mx.array, target: mx.array, top_p: mx.array, halvings: int) -> mx.array:
    """Bits at or below those of the lightest token in the nucleus, (rows, 1); after ALL_HALVINGS these exactly."""
    # Tokens lighter than that have less than 1 - top_p together, so none of them stays.
    never = 0.999 * target / top_p * (1 - top_p) / (rows.weight.shape[1] * rows.weight.shape[2])
    lightest = mx.min(mx.min(rows.weight, axis=1), axis=-1, keepdims=True)
    low = mx.maximum(mx.maximum(bits_of(mx.minimum(never, 1.0)), bits_of(lightest)), kth)
    high = mx.full(low.shape, ONE + 1, mx.int32)
    for _ in range(halvings):
        middle = low + ((high - low) >> 1)
        reached = _total(cut(rows.weight, middle[:, :, None])) >= target
        low, high = mx.where(reached, middle, low), mx.where(reached, high, middle)
    return low
