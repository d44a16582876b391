"""`Penalties`: what the rows with penalties have seen, on the device, and the penalties on their logits.

Used by `actors.engine.sampler` on the engine's one thread. Tokens drawn are counted on the device, so the next step
can be built before they are read. A row costs 5 bytes per entry of the vocabulary.
"""

import functools
from typing import NamedTuple, Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from actors.engine.weights import Function, fused

Ids = npt.NDArray[np.uint32]


class PenaltyOptions(Protocol):
    """The options read here."""

    @property
    def repetition_penalty(self) -> float: ...
    @property
    def presence_penalty(self) -> float: ...
    @property
    def frequency_penalty(self) -> float: ...


class Context(NamedTuple):
    """One row: how often each id was generated, int32 (1, vocabulary); ids in its prompt, bool; its options."""

    counts: mx.array
    prompt: mx.array
    options: PenaltyOptions


def penalized(options: PenaltyOptions) -> bool:
    """Whether a row with these options has a penalty."""
    return bool(options.repetition_penalty != 1 or options.presence_penalty != 0 or options.frequency_penalty != 0)


class Penalties:
    """Rows of contexts, each under the number of its slot, in the order of `slots`."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._table: list[int] = []  # slot of each row of the arrays
        self._joining: dict[int, Context] = {}  # rows that are not in the arrays yet
        self._options: dict[int, PenaltyOptions] = {}
        self._counts = mx.zeros((0, vocab_size), mx.int32)
        self._prompt = mx.zeros((0, vocab_size), mx.bool_)
        self._columns: tuple[mx.array, mx.array, mx.array] | None = None

    @property
    def slots(self) -> list[int]:
        """Slots that have a penalty, in the order in which `apply` and `count` expect their rows."""
        self._settle()
        return self._table

    @property
    def nbytes(self) -> int:
        """Bytes of the contexts."""
        return (len(self._table) + len(self._joining)) * self._vocab_size * 5

    def add(self, slot: int, options: PenaltyOptions, prompt_ids: Ids, generated_ids: Ids) -> None:
        """Take in a row."""
        counts = np.bincount(generated_ids, minlength=self._vocab_size)[: self._vocab_size]
        prompt = np.bincount(prompt_ids, minlength=self._vocab_size)[: self._vocab_size] > 0
        self.put(slot, Context(mx.array(counts[None].astype(np.int32)), mx.array(prompt[None]), options))

    def put(self, slot: int, context: Context) -> None:
        """Take in a row with the context it has."""
        self._joining[slot] = context
        self._options[slot] = context.options

    def take(self, slot: int) -> Context:
        """The context of a row, which may still be in computation."""
        if slot in self._joining:
            return self._joining[slot]
        row = self._table.index(slot)
        return Context(self._counts[row : row + 1], self._prompt[row : row + 1], self._options[slot])

    def drop(self, slot: int) -> None:
        """Forget a row; one without a penalty is normal."""
        if self._options.pop(slot, None) is None:
            return
        if self._joining.pop(slot, None) is None:
            self._table[self._table.index(slot)] = -1

    def move(self, source: int, target: int) -> None:
        """Renumber a row; one without a penalty is normal."""
        if source not in self._options:
            return
        self._options[target] = self._options.pop(source)
        if source in self._joining:
            self._joining[target] = self._joining.pop(source)
        else:
            self._table[self._table.index(source)] = target

    def apply(self, logits: mx.array) -> mx.array:
        """`logits`, float32, of the rows of `slots`, with their penalties, defined as in vLLM.

        Repetition divides positive logits of ids in the prompt or generated, and multiplies negative ones; then
        frequency is subtracted for each time an id was generated, and presence once.
        """
        if self._columns is None:
            options = [self._options[slot] for slot in self._table]
            self._columns = (
                _column([row.repetition_penalty for row in options]),
                _column([row.frequency_penalty for row in options]),
                _column([row.presence_penalty for row in options]),
            )
        return _penalizing()(logits, self._prompt, self._counts, *self._columns)

    def count(self, tokens: mx.array) -> None:
        """Count the tokens drawn by the rows of `slots`, uint32 (rows,)."""
        self._counts = self._counts.at[mx.arange(len(self._table)), tokens].add(1)

    def _settle(self) -> None:
        """Bring rows that joined into the arrays and let go of those that left, in one copy."""
        if not self._joining and -1 not in self._table:
            return
        kept = [row for row, slot in enumerate(self._table) if slot >= 0]
        if len(kept) < len(self._table):
            rows = mx.array(kept, mx.uint32)
            self._counts, self._prompt = self._counts[rows], self._prompt[rows]
        joining = list(self._joining.values())
        self._counts = mx.concatenate([self._counts, *(context.counts for context in joining)])
        self._prompt = mx.concatenate([self._prompt, *(context.prompt for context in joining)])
        self._table = [self._table[row] for row in kept] + list(self._joining)
        self._joining = {}
        self._columns = None


def prepare() -> None:
    """Compile what is compiled. Waits for the device; unless called, the first row with a penalty waits for it."""
    _penalizing()


@functools.cache
def _penalizing() -> Function:
    floats, column = mx.zeros((1, 2)), mx.ones((1, 1))
    return fused(_penalize, floats, floats.astype(mx.bool_), floats.astype(mx.int32), column, column, column)


def _penalize(
    logits: mx.array,
    prompt: mx.array,
    counts: mx.array,
    repetition: mx.array,
    frequency: mx.array,
    presence: mx.array,
) -> mx.array:
    """By masks of bits, all ones or none, for selects take ten times as long on a CPU."""
    generated = -counts >> 31
    seen = generated | -prompt.astype(mx.int32)
    bits = logits.view(mx.int32)
    negative = bits >> 31
    divided, multiplied = (logits / repetition).view(mx.int32), (logits * repetition).view(mx.int32)
    repeated = (divided & ~negative) | (multiplied & negative)
    rows = ((repeated & seen) | (bits & ~seen)).view(mx.float32)
    rows = rows - frequency * counts.astype(mx.float32)
    return rows - (presence.view(mx.int32) & generated).view(mx.float32)


def _column(values: list[float]) -> mx.array:
    return mx.array(np.array(values, np.float32))[:, None]
