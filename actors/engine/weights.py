"""Unnormalized probabilities of whole rows of logits, in strided groups, and cuts of them by a floor.

Called by `actors.engine.draws` and `actors.engine.logprobs` on the engine's one thread. All functions are lazy.

A row of a vocabulary is seen as (members, groups): token id = member × groups + group. Reducing over the members
runs along contiguous memory, which is several times faster on a CPU than reducing over neighbours. Weights are
never negative, so the bits of two of them, read as int32, compare as they do: floors and searches are in bits.
"""

import functools
import math
from collections.abc import Callable

import mlx.core as mx

ONE = 0x3F800000  # the bits of 1.0, the weight of a row's best token
_MINUS_INFINITY = 0xFF800000 - (1 << 32)  # its bits, as int32

_LOG2_E = 1 / math.log(2)
# Adding it rounds a small float32 to an integer, which is then found in the lowest bits of the sum.
_ROUNDER = 1.5 * 2**23
# 2^f - 1 over f for f in [-1/2, 1/2], fitted by least squares of the relative error, which is at most 1.1e-7.
_POWER = (
    0.0013218672481562563,
    0.009671697938397505,
    0.055508929524513306,
    0.24022238002741148,
    0.6931468559416908,
    1.0,
)

Function = Callable[..., mx.array]


@functools.cache
def members_of(vocabulary: int, groups_per_member: float = 1.0) -> int:
    """Members per group: a divisor of `vocabulary` near sqrt(vocabulary / groups_per_member) where there is one."""
    best = math.sqrt(vocabulary / groups_per_member)
    low, high = max(1, math.ceil(best / 3)), math.floor(best * 3)
    divisors = [size for size in range(low, high + 1) if vocabulary % size == 0]
    return min(divisors, key=lambda size: abs(math.log(size / best)), default=max(1, round(best)))


def grouped(rows: mx.array, members: int) -> mx.array:
    """`rows` (rows, vocabulary) as (rows, members, groups), padded with -inf where the division leaves a rest."""
    groups = -(-rows.shape[-1] // members)
    missing = members * groups - rows.shape[-1]
    if missing:
        rows = mx.pad(rows, [(0, 0), (0, missing)], constant_values=-math.inf)
    return rows.reshape(rows.shape[0], members, groups)


def weights(logits: mx.array, inverse_temperature: mx.array | float) -> tuple[mx.array, mx.array]:
    """exp((logits - best) / temperature) of `logits` (rows, members, groups), and best, (rows, 1, 1).

    `inverse_temperature` is (rows, 1, 1) or a number. The best token of a row weighs exactly 1, a logit of -inf
    exactly 0. Relative error below 1e-6 for weights above 1e-3, as of `exp` of a float32 difference.
    """
    best = mx.max(mx.max(logits, axis=1, keepdims=True), axis=2, keepdims=True)
    return _power()(logits, best, mx.array(inverse_temperature * _LOG2_E, mx.float32)), best


def cut(weight: mx.array, floor: mx.array) -> mx.array:
    """`weight` with 0 for those whose bits are below `floor`, int32, broadcast over it."""
    bits = weight.view(mx.int32)
    return _masked()(bits, (floor - 1) - bits)


def bits_of(weight: mx.array) -> mx.array:
    """The bits of float32 weights, as int32."""
    return weight.view(mx.int32)


def group_sums(weight: mx.array) -> mx.array:
    """Sums of (rows, members, groups) over the members: (rows, groups)."""
    return mx.sum(weight, axis=1)


def allowed_only(logits: mx.array, allowed: mx.array) -> mx.array:
    """`logits`, float32, with -inf where `allowed`, bool of the same shape, is false."""
    return _forbidding()(logits.view(mx.int32), allowed)


def prepare() -> None:
    """Compile what is compiled. Waits for the device; unless called, the first row that samples waits for it."""
    _power()
    _masked()
    _forbidding()


def _power_by_bits(logits: mx.array, best: mx.array, scale: mx.array) -> mx.array:
    """2^((logits - best) × scale), never above 1; MLX's own `exp` takes eight times as long on an x86 CPU."""
    exponent = mx.maximum((logits - best) * scale, -127.0)
    shifted = exponent + _ROUNDER
    rest = exponent - (shifted - _ROUNDER)
    power = rest * _POWER[0] + _POWER[1]
    for coefficient in _POWER[2:]:
        power = power * rest + coefficient
    return (power.view(mx.int32) + (shifted.view(mx.int32) << 23)).view(mx.float32)


def _power_by_exp(logits: mx.array, best: mx.array, scale: mx.array) -> mx.array:
    return mx.exp((logits - best) * (scale * math.log(2)))


@functools.cache
def _power() -> Function:
    # GPUs have a fast exp, and their compilers may simplify away the rounding that the other way relies on.
    if mx.default_device().type != mx.DeviceType.cpu:
        return _power_by_exp
    return fused(_power_by_bits, mx.ones((1, 2, 2)), mx.ones((1, 1, 1)), mx.ones((1, 1, 1)))


@functools.cache
def _masked() -> Function:
    zeros = mx.zeros((1, 2, 2), mx.int32)
    return fused(_mask_by_sign, zeros, zeros)


def _mask_by_sign(bits: mx.array, below: mx.array) -> mx.array:
    """Bits where `below` is negative, else 0: the sign, smeared over all bits, is the mask. Selects are slower."""
    return (bits & (below >> 31)).view(mx.float32)


@functools.cache
def _forbidding() -> Function:
    return fused(_forbid, mx.zeros((1, 2), mx.int32), mx.zeros((1, 2), mx.bool_))


def _forbid(bits: mx.array, allowed: mx.array) -> mx.array:
    """-inf has all bits of the exponent and the sign: where they are forced on and the others off."""
    kept = -allowed.astype(mx.int32)
    return ((bits & kept) | (~kept & _MINUS_INFINITY)).view(mx.float32)


def fused(function: Function, *sample: mx.array) -> Function:
    """The function in one kernel, if that works: for a CPU MLX needs the system's C++ compiler.

    Compiling takes a second when MLX has not kept the kernel from another time.
    """
    compiled: Function = mx.compile(function)
    try:
        mx.eval(compiled(*sample))
    except RuntimeError:
        return function
    return compiled
