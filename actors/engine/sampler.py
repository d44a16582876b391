"""`Sampler`: the next token of every row of a batch in one graph, each row by its own options.

Used by the decode batch on the engine's one thread. Nothing here waits for the device.

Greedy rows are an argmax. The others draw by Gumbel-max: the argmax of logits / temperature + noise has the
distribution of the softmax (Gumbel 1954; Maddison, Tarlow, Minka 2014), and unlike inverting a cumulative sum
it does not flip with the rounding of distant logits. A row's noise depends on (seed, choice, i) alone, i being
the number of the token in the generated sequence, so a row draws the same whatever else is in the batch and
after a resume. It always covers the whole vocabulary, for MLX's noise of another length is another noise.
"""

import mlx.core as mx
import msgspec
import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float32]

# Below this a temperature means greedy, as in vLLM: dividing by it would overflow.
MIN_TEMPERATURE = 1e-5

SORTED_WHOLE = 2048  # values; fewer are sorted at once

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class RowOptions(msgspec.Struct, frozen=True):
    """What the sampler has to know of one row; `index` is the number of its next generated token."""

    temperature: float
    top_p: float
    seed: int
    choice: int
    index: int


class Sampler:
    """Options of the rows of one batch, in columns, and the draw. Rows keep the order of the batch."""

    def __init__(self) -> None:
        self._temperature: Floats = np.empty(0, np.float32)
        self._top_p: Floats = np.empty(0, np.float32)
        self._stream: Words = np.empty(0, np.uint64)
        self._index: Words = np.empty(0, np.uint64)
        self._sampled = _Sampled(self._temperature, self._top_p)

    def extend(self, rows: list[RowOptions]) -> None:
        """Append rows."""
        temperature = np.array([row.temperature for row in rows], np.float32)
        top_p = np.array([row.top_p for row in rows], np.float32)
        stream = np.array([stream_of(row.seed, row.choice) for row in rows], np.uint64)
        index = np.array([row.index for row in rows], np.uint64)
        self._set(
            np.concatenate([self._temperature, temperature]),
            np.concatenate([self._top_p, top_p]),
            np.concatenate([self._stream, stream]),
            np.concatenate([self._index, index]),
        )

    def filter(self, keep: list[int]) -> None:
        """Keep the rows at these places, in this order."""
        self._set(self._temperature[keep], self._top_p[keep], self._stream[keep], self._index[keep])

    def draw(self, logits: mx.array) -> mx.array:
        """Next token of each row, uint32 (rows,), from `logits` (rows, vocabulary); counts the rows on."""
        sampled = self._sampled
        if not sampled.places.size:
            tokens = mx.argmax(logits, axis=-1)
        else:
            keys = noise_keys(self._stream[sampled.places], self._index[sampled.places])
            if sampled.places.size == len(self._index):
                tokens = sampled.draw(logits, keys)
            else:
                # Cheaper than gathering the greedy rows: they are many, or the others dominate anyway.
                tokens = mx.argmax(logits, axis=-1)
                tokens[sampled.places_mx] = sampled.draw(logits[sampled.places_mx], keys)
        self._index = self._index + np.uint64(1)
        return tokens

    def _set(self, temperature: Floats, top_p: Floats, stream: Words, index: Words) -> None:
        self._temperature, self._top_p, self._stream, self._index = temperature, top_p, stream, index
        self._sampled = _Sampled(temperature, top_p)


class _Sampled:
    """The rows that draw: their places in the batch and their options as arrays on the device."""

    def __init__(self, temperature: Floats, top_p: Floats) -> None:
        self.places = np.flatnonzero(temperature >= MIN_TEMPERATURE)
        if not self.places.size:
            return
        self.places_mx = mx.array(self.places.astype(np.uint32))
        self._temperature = mx.array(temperature[self.places])[:, None]
        top_p = top_p[self.places]
        self._cut = np.flatnonzero(top_p < 1)
        if self._cut.size:
            self._cut_mx = mx.array(self._cut.astype(np.uint32))
            self._top_p = mx.array(top_p[self._cut])[:, None]

    def draw(self, logits: mx.array, keys: mx.array) -> mx.array:
        logits = logits.astype(mx.float32) / self._temperature
        if self._cut.size == len(self.places):
            logits = cut_top_p(logits, self._top_p)
        elif self._cut.size:
            logits[self._cut_mx] = cut_top_p(logits[self._cut_mx], self._top_p)
        return mx.argmax(logits + gumbel(keys, logits.shape[-1]), axis=-1)


def gumbel(keys: mx.array, size: int) -> mx.array:
    """Gumbel noise (rows, size), each row from its own key of `keys`, uint32 (rows, 2)."""
    return mx.vmap(lambda key: mx.random.gumbel((size,), key=key))(keys)


def cut_top_p(logits: mx.array, top_p: mx.array) -> mx.array:
    """Set all but the most probable tokens to -inf: the fewest whose probabilities reach `top_p` together.

    `logits` is float32 (rows, vocabulary), `top_p` (rows, 1). At least one token stays; tokens exactly as
    probable as the last one that stays do, too. Sums over a vocabulary are exact to about 2e-5.
    """
    probabilities = mx.softmax(logits, axis=-1)
    # Tokens below (1 - top_p) / vocabulary have less than 1 - top_p together, so none of them stays; as zeros they
    # are ordered faster. So are integers than floats, whose order they have.
    floor = (1 - top_p) / logits.shape[-1]
    candidates, before = _around_border((probabilities * (probabilities >= floor)).view(mx.int32), top_p)
    ranked = mx.sort(candidates, axis=-1).view(mx.float32)
    mass = mx.cumsum(ranked, axis=-1)
    before = before + (mass[:, -1:] - mass)
    least = mx.min(mx.where(before < top_p, ranked, mx.inf), axis=-1, keepdims=True)
    return mx.where(probabilities >= least, logits, -mx.inf)


def _around_border(values: mx.array, top_p: mx.array) -> tuple[mx.array, mx.array]:
    """The part of each row that the border of `top_p` falls into, and the mass (rows, 1) of what is above it.

    `values` are probabilities viewed as int32. On a CPU halving takes a fraction of the time of a sort; on GPUs
    a partition is a whole sort, and the rows come back as they are.
    """
    before = mx.zeros_like(top_p)
    while values.shape[-1] > SORTED_WHOLE and mx.default_device() == mx.cpu:
        half = values.shape[-1] // 2
        parts = mx.partition(values, half, axis=-1)
        low, high = parts[:, :half], parts[:, half:]
        if high.shape[-1] > half:
            low = mx.pad(low, [(0, 0), (1, 0)])
        mass = mx.sum(high.view(mx.float32), axis=-1, keepdims=True)
        in_high = before + mass >= top_p
        values = mx.where(in_high, high, low)
        before = mx.where(in_high, before, before + mass)
    return values, before


def stream_of(seed: int, choice: int) -> int:
    """64 bits that name the random sequence of one choice of one seed (any signed or unsigned 64-bit seed)."""
    words = np.array([seed & 0xFFFF_FFFF_FFFF_FFFF, choice & 0xFFFF_FFFF_FFFF_FFFF], np.uint64)
    return int(_mix(_mix(words[:1]) + words[1:] * _GOLDEN)[0])


def noise_keys(streams: Words, indices: Words) -> mx.array:
    """MLX random keys, uint32 (rows, 2), for token number `indices[r]` of the sequence `streams[r]`."""
    words = _mix(streams + (indices + np.uint64(1)) * _GOLDEN)
    halves = np.stack([words >> np.uint64(32), words & np.uint64(0xFFFFFFFF)], axis=-1)
    return mx.array(halves.astype(np.uint32))


def _mix(words: Words) -> Words:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014): every output bit depends on every input bit."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
