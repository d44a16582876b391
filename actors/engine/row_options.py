"""`RowOptions`: the sampling options of one row, resolved, and what kind of draw they need.

Made by `actors.engine.engine`, read by `actors.engine.sampler` and its draw plan. Pure, without MLX.
"""

import enum

import msgspec

# Below this a temperature means greedy, as in vLLM: dividing by it would overflow.
MIN_TEMPERATURE = 1e-5
FEW, MANY = 64, 256  # up to so many candidates a top_k draws from these alone


class RowOptions(msgspec.Struct, frozen=True):
    """What the sampler has to know of one row; `index` is the number of its next generated token.

    A `top_k` of 0 is off. None of `stop_ids` is drawn before `min_tokens` tokens, and xtc never excludes them.
    A `constrained` row draws from the tokens that its mask allows, which observes `min_tokens`.
    `logprobs` is -1 for none, else how many of the most probable tokens are wanted beside the one drawn. Ids that
    the vocabulary doesn't have are ignored.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    logprobs: int = -1
    seed: int = 0
    choice: int = 0
    index: int = 0
    constrained: bool = False


class Kind(enum.IntEnum):
    """How a row draws."""

    GREEDY = 0
    WHOLE = 1
    FLOOR = 2  # min_p, or a top_k too large for candidates
    NUCLEUS = 3
    XTC = 4
    FEW = 5
    MANY = 6


def kind_of(options: RowOptions, vocab_size: int) -> Kind:
    """How a row with these options draws."""
    top_k = options.top_k if options.top_k < vocab_size else 0
    if options.temperature < MIN_TEMPERATURE:
        return Kind.GREEDY
    if 0 < top_k <= MANY:
        return Kind.FEW if top_k <= FEW else Kind.MANY
    if options.xtc_probability > 0:
        return Kind.XTC
    if options.top_p < 1:
        return Kind.NUCLEUS
    return Kind.FLOOR if options.min_p > 0 or top_k else Kind.WHOLE
