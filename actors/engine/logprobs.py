"""Log-probabilities for the rows that asked, of the model's own distribution: before bias, penalties, temperature.

Called by `actors.engine.sampler` on the engine's one thread; all lazy. vLLM's default (`raw_logprobs`) is the same.
"""

from typing import NamedTuple

import mlx.core as mx

from actors.engine.draws import heaviest
from actors.engine.weights import group_sums, grouped, members_of, weights


class LogProbs(NamedTuple):
    """Natural log-probabilities of one step, row r of each array for slot `slots[r]`.

    `chosen` is float32 (rows,), of the token drawn; `top_ids`, uint32, and `top`, float32, are (rows, n), the most
    probable first, of which the slot asked for the first `counts[r]`. The arrays are not computed yet.
    """

    slots: list[int]
    counts: list[int]
    chosen: mx.array
    top_ids: mx.array
    top: mx.array


def log_probs(logits: mx.array, tokens: mx.array, slots: list[int], counts: list[int]) -> LogProbs:
    """Log-probabilities of the rows `logits` (rows, vocabulary), which are those of `slots`; they drew `tokens`."""
    logits = logits.astype(mx.float32)
    weight, best = weights(grouped(logits, members_of(logits.shape[-1])), 1.0)
    total = best[:, :, 0] + mx.log(mx.sum(group_sums(weight), axis=-1, keepdims=True))
    chosen = (mx.take_along_axis(logits, tokens[:, None], axis=-1) - total)[:, 0]
    most = max(counts)
    if not most:
        empty = mx.zeros((len(slots), 0))
        return LogProbs(slots, counts, chosen, empty.astype(mx.uint32), empty)
    values, ids = heaviest(logits, most)
    return LogProbs(slots, counts, chosen, ids, values - total)
