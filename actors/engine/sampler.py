"""`Sampler`: the next token of every slot of a row group in one graph, each row by its own options.

Used by `actors.engine.row_group` on the engine's one thread. Nothing here waits for the device, and nothing that a
step needs comes from the tokens of the one before by way of the host.

Options apply in this order: min_tokens (stop ids masked) and logit_bias, repetition, frequency and presence
penalties, the mask of a grammar, temperature, top_k, top_p, min_p, xtc, the draw. That is the order of vLLM's `Sampler`
(vllm/v1/sample/sampler.py), except that it has no xtc and cuts by min_p ahead of top_k: here top_p counts what
min_p cuts, too. xtc comes after top_p and min_p as in mlx_lm.sample_utils. A temperature of 0 takes the best token
after the penalties.

What a row draws as token number i is a function of its logits, its options and (seed, choice, i). Rows are sorted
by what their options need (`Kind`), and each kind costs only the rows that have it. The kind of a row is decided by
its own options, never by who else is in the batch.
"""

from typing import NamedTuple

import mlx.core as mx
import numpy as np

from actors.engine.draw_plan import DrawPlan
from actors.engine.logprobs import LogProbs, log_probs
from actors.engine.noise import stream_of
from actors.engine.penalties import Ids, Penalties, penalized
from actors.engine.row_options import RowOptions

__all__ = ["Drawn", "RowOptions", "Sampler"]

_NO_IDS: Ids = np.zeros(0, np.uint32)


class Drawn(NamedTuple):
    """One step, not computed yet: the token of each slot, uint32 (slots,), and log-probabilities if any slot asked.

    The token of a free slot means nothing, but is one of the vocabulary.
    """

    tokens: mx.array
    logprobs: LogProbs | None


class Sampler:
    """Options of the rows in the slots of one group. A new slot is appended; a cleared one is free until set."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._options: list[RowOptions | None] = []
        self._stream = np.zeros(0, np.uint64)
        self._index = np.zeros(0, np.int64)
        self._masked_until = np.zeros(0, np.int64)  # the index at which the stop ids of a row may be drawn
        self._penalties = Penalties(vocab_size)
        self._plan: DrawPlan | None = None

    def __len__(self) -> int:
        return len(self._options)

    @property
    def nbytes(self) -> int:
        """Bytes that rows keep on the device for their penalties."""
        return self._penalties.nbytes

    def append(self, options: RowOptions, prompt_ids: Ids = _NO_IDS, generated_ids: Ids = _NO_IDS) -> None:
        """Put a row into a new slot at the end."""
        self._grow()
        self.set(len(self._options) - 1, options, prompt_ids, generated_ids)

    def set(self, slot: int, options: RowOptions, prompt_ids: Ids = _NO_IDS, generated_ids: Ids = _NO_IDS) -> None:
        """Put a row into a slot. The ids, which penalties look at, are those so far."""
        self._penalties.drop(slot)
        if penalized(options):
            self._penalties.add(slot, options, prompt_ids, generated_ids)
        self._place(slot, options, stream_of(options.seed, options.choice), options.index)

    def clear(self, slot: int) -> None:
        """Free a slot."""
        self._penalties.drop(slot)
        self._options[slot] = None
        self._masked_until[slot] = 0
        self._plan = None

    def move(self, source: int, target: int) -> None:
        """Move a row into another slot, and free its own."""
        options = self._options[source]
        assert options is not None
        self._penalties.drop(target)
        self._penalties.move(source, target)
        self._place(target, options, int(self._stream[source]), int(self._index[source]))
        self.clear(source)

    def adopt(self, other: "Sampler", source: int) -> None:
        """Put the row in slot `source` of another sampler into a new slot at the end. The other keeps it, too."""
        options = other._options[source]
        assert options is not None
        self._grow()
        slot = len(self._options) - 1
        if penalized(options):
            self._penalties.put(slot, other._penalties.take(source))
        self._place(slot, options, int(other._stream[source]), int(other._index[source]))

    def cut(self, rows: int) -> None:
        """Keep the first `rows` slots."""
        for slot in range(rows, len(self._options)):
            self._penalties.drop(slot)
        del self._options[rows:]
        self._stream, self._index = self._stream[:rows].copy(), self._index[:rows].copy()
        self._masked_until = self._masked_until[:rows].copy()
        self._plan = None

    @property
    def constrained(self) -> list[tuple[int, int]]:
        """Slots whose rows need a mask, and the number of the token that each draws next."""
        return [
            (slot, int(self._index[slot]))
            for slot, row in enumerate(self._options)
            if row is not None and row.constrained
        ]

    def draw(self, logits: mx.array, allowed: mx.array | None = None) -> Drawn:
        """The next token of each slot from `logits` (slots, vocabulary); counts the rows on.

        `allowed`, bool (rows, vocabulary), holds the masks of the slots in `constrained`, in that order.
        """
        masked = self._index < self._masked_until
        if self._plan is None or not np.array_equal(self._plan.masked, masked):
            self._plan = DrawPlan(self._options, masked, self._penalties, self._vocab_size)
        tokens = self._plan.draw(logits, self._stream, self._index.astype(np.uint64), allowed)
        self._index += 1
        logprobs = None
        if self._plan.asked:
            rows = self._plan.asked_mx
            logprobs = log_probs(logits[rows], tokens[rows], self._plan.asked, self._plan.asked_counts)
        return Drawn(tokens, logprobs)

    def _grow(self) -> None:
        self._options.append(None)
        self._stream = np.append(self._stream, np.uint64(0))
        self._index = np.append(self._index, 0)
        self._masked_until = np.append(self._masked_until, 0)

    def _place(self, slot: int, options: RowOptions, stream: int, index: int) -> None:
        self._options[slot] = options
        self._stream[slot] = stream
        self._index[slot] = index
        self._masked_until[slot] = options.min_tokens if options.stop_ids else 0
        self._plan = None
