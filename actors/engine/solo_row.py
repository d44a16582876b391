"""`SoloRow`: one row that decodes alone, on mlx-lm's own caches; and the check that tells whether it must.

Used by `actors.engine.batch` for models with a kind of cache that we can't batch, or that fail the check. Such rows run
beside each other, one forward each.
"""

from collections.abc import Iterable

import mlx.core as mx
import numpy as np

from actors.engine.constraints import Wanted
from actors.engine.cutter import Cutter
from actors.engine.model import Cache, Model
from actors.engine.prefill import Joining
from actors.engine.row_group import FREE
from actors.engine.row_memory import GROW
from actors.engine.sampler import Drawn, Sampler
from actors.engine.scheduler import BLOCK
from actors.engine.slots import Positions

CHECK_LENGTHS = (3, 11)
CHECK_STEPS = 2
TOLERANCE = {mx.float32: 1e-3}  # of the largest logit; other types are coarser
COARSE = 0.1


class SoloRow:
    """Looks like a `RowGroup` with one row."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._caches: list[Cache] = []
        self._sampler = Sampler(model.vocab_size)
        self._rid = FREE
        self._length = 0  # tokens in the caches
        self._inputs = mx.zeros((0,), mx.uint32)
        self._logits: mx.array | None = None  # of the first step, when they came with the prompt

    def __len__(self) -> int:
        return int(self._rid != FREE)

    @property
    def nbytes(self) -> int:
        """Bytes of the caches."""
        return sum(cache.nbytes for cache in self._caches)

    def needed(self, leaving: frozenset[int]) -> int:
        """Bytes of the caches, unless the row is `leaving`."""
        return 0 if self._rid in leaving else self.nbytes

    def join(self, joining: Joining, place: int) -> None:
        """Take in one row of `joining`."""
        row = joining.rows[place]
        self._caches = joining.row_caches(place)
        self._sampler.append(row.options, row.prompt, row.generated)
        self._inputs = mx.array(row.ids[-1:])
        self._rid = row.rid
        self._length = len(row.ids) - 1
        self._logits = joining.logits

    def remove(self, rids: Iterable[int]) -> None:
        """Let the row go if it is among these."""
        if self._rid in rids:
            self._rid = FREE
            self._caches = []

    def slots(self) -> list[int]:
        """The row's rid."""
        return [self._rid]

    @property
    def has_logits(self) -> bool:
        """Whether the next step needs no forward."""
        return self._logits is not None

    @property
    def constrained(self) -> int:
        """How many rows need a mask."""
        return len(self._sampler.constrained)

    def wanted(self) -> list[Wanted]:
        """The row, when its next token needs a mask; see `RowGroup.wanted`."""
        if self._rid == FREE:
            return []
        return [Wanted(self._rid, index, int(np.array(self._inputs)[0])) for _, index in self._sampler.constrained]

    def step(self) -> Drawn:
        """Build one decode step; returns what was drawn, not yet computed."""
        return self.draw(self.forward())

    def forward(self) -> mx.array:
        """Build the logits of one decode step, (1, vocabulary); `draw` must follow."""
        self._length += 1
        if self._logits is not None:
            logits, self._logits = self._logits, None
            return logits
        return self._model.forward(self._inputs[:, None], self._caches, [self._rid])[:, -1, :]

    def draw(self, logits: mx.array, allowed: mx.array | None = None) -> Drawn:
        """Build the draw of the step whose logits these are."""
        drawn = self._sampler.draw(logits, allowed)
        self._inputs = drawn.tokens
        return drawn

    def cut(self, cutter: Cutter) -> list[mx.array]:
        """Take the block that the forward just built completes, if it does."""
        if self._rid == FREE or self._length % BLOCK:
            return []
        return cutter.of_solo(self._rid, self._caches, self._length)


def batches_rightly(model: Model) -> bool:
    """Whether two rows of unequal length in slots get the logits that each gets alone.

    Run once at load: a model's code may use its caches in ways that only hold for one row.
    """
    slots = model.new_slots()
    for slot in slots:
        slot.reshape(len(CHECK_LENGTHS), GROW)
    alone: list[list[Cache]] = []
    for row, length in enumerate(CHECK_LENGTHS):
        caches = model.new_caches()
        mx.eval(model.forward(_ids(length)[None], caches))
        for slot, cache in zip(slots, caches, strict=True):
            slot.load(row, cache)
        alone.append(caches)
    lengths = np.array(CHECK_LENGTHS, np.int64)
    for step in range(CHECK_STEPS):
        inputs = mx.array([[7 + step], [5 + step]], mx.uint32)
        at = Positions(lengths + step)
        for slot in slots:
            slot.step(at)
        together = model.forward(inputs, list[Cache](slots))[:, -1]
        apart = mx.concatenate(
            [model.forward(inputs[row : row + 1], caches)[:, -1] for row, caches in enumerate(alone)]
        )
        worst = mx.abs(together.astype(mx.float32) - apart.astype(mx.float32)).max()
        size = mx.abs(apart.astype(mx.float32)).max()
        if not float(worst) <= TOLERANCE.get(apart.dtype, COARSE) * float(size):
            return False
    return True


def _ids(length: int) -> mx.array:
    return mx.array(np.arange(3, 3 + length, dtype=np.uint32))
