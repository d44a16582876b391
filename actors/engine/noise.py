"""Noise of the sampler: pure functions of (seed, choice, i), i being the number of the token in its sequence.

Called by `actors.engine.sampler` on the engine's one thread. Keys are made on the host, one per row and step, and
turned into noise on the device. MLX's noise of another length is another noise, so whoever draws fixes the shape
by the row's own options; noise per token id depends on nothing but the key and the id.
"""

import mlx.core as mx
import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_COIN = np.uint64(0xD1B54A32D192ED03)
_WORD = 0xFFFF_FFFF_FFFF_FFFF


def stream_of(seed: int, choice: int) -> int:
    """64 bits that name the random sequence of one choice of one seed (any signed or unsigned 64-bit seed)."""
    return _mix_one(_mix_one(seed) + choice * int(_GOLDEN))


def noise_keys(streams: Words, indices: Words) -> mx.array:
    """MLX random keys, uint32 (rows, 2), for token number `indices[r]` of the sequence `streams[r]`."""
    words = _mix(streams + (indices + np.uint64(1)) * _GOLDEN)
    halves = np.stack([words >> np.uint64(32), words & np.uint64(0xFFFFFFFF)], axis=-1)
    return mx.array(halves.astype(np.uint32))


def coins(streams: Words, indices: Words) -> mx.array:
    """One number from [0, 1) for each row, float32 (rows, 1), independent of the row's other noise."""
    words = _mix(_mix(streams + (indices + np.uint64(1)) * _GOLDEN) ^ _COIN)
    return mx.array((words >> np.uint64(40)).astype(np.float32)[:, None] * np.float32(2**-24))


def gumbel(keys: mx.array, size: int) -> mx.array:
    """Gumbel noise (rows, size), each row from its own key of `keys`, uint32 (rows, 2)."""
    return mx.vmap(lambda key: mx.random.gumbel((size,), key=key))(keys)


def gumbel_of_ids(keys: mx.array, ids: mx.array) -> mx.array:
    """Gumbel noise (rows, n) for the tokens `ids`, uint32 (rows, n): the same for an id wherever it stands."""
    own = mx.stack([mx.broadcast_to(keys[:, :1], ids.shape), keys[:, 1:] ^ ids], axis=-1).reshape(-1, 2)
    return mx.vmap(lambda key: mx.random.gumbel((), key=key))(own).reshape(ids.shape)


def _mix(words: Words) -> Words:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014): every output bit depends on every input bit."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _mix_one(word: int) -> int:
    """The same of one word, in the place of which any integer may stand that is equal to it modulo 2^64."""
    word &= _WORD
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
    return word ^ word >> 31
