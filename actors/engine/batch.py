"""`DecodeBatch`: the running rows and their decode steps, double-buffered.

Used by `actors.engine.engine` on the engine's one thread. `launch` puts the next step on the device without
waiting for the one before; `collect` waits for the oldest and reads all of its tokens at once. Batched caches are
mlx-lm's: a row that joins or leaves copies the batch.
"""

from collections import deque
from collections.abc import Iterable

import mlx.core as mx
import numpy as np

from actors.engine.model import Cache, Model, start_eval
from actors.engine.prefill import Joining
from actors.engine.sampler import Sampler


class DecodeBatch:
    """Rows in the order of the batch, their caches, and the steps in flight."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._sampler = Sampler()
        self._rids: list[int] = []
        self._caches: list[Cache] = []
        self._inputs: mx.array | None = None  # (rows,), each row's last token; may still be in computation
        self._in_flight: deque[tuple[list[int], mx.array, int]] = deque()

    def __len__(self) -> int:
        return len(self._rids)

    @property
    def in_flight(self) -> int:
        """Steps that were launched and not collected."""
        return len(self._in_flight)

    def join(self, groups: list[Joining]) -> None:
        """Take in rows that are ready to decode."""
        for group in groups:
            last = mx.array(np.array([row.ids[-1] for row in group.rows], np.uint32))
            if self._inputs is None:
                self._caches, self._inputs = group.caches, last
            else:
                for mine, theirs in zip(self._caches, group.caches, strict=True):
                    mine.extend(theirs)
                self._inputs = mx.concatenate([self._inputs, last])
            self._rids.extend(row.rid for row in group.rows)
            self._sampler.extend([row.options for row in group.rows])
        for cache in self._caches:
            cache.finalize()  # rows with one id bring empty caches; recurrent ones mark them as padded

    def remove(self, rids: Iterable[int]) -> None:
        """Let these rows go; those that are not in the batch are normal. Steps in flight keep them."""
        gone = set(rids)
        keep = [place for place, rid in enumerate(self._rids) if rid not in gone]
        if len(keep) == len(self._rids):
            return
        self._rids = [self._rids[place] for place in keep]
        self._sampler.filter(keep)
        if not keep:
            self._caches, self._inputs = [], None
            return
        places = mx.array(keep)
        for cache in self._caches:
            cache.filter(places)
        assert self._inputs is not None
        self._inputs = self._inputs[places]

    def launch(self, prefill_tokens: int) -> None:
        """Start one decode step of all rows.

        `prefill_tokens` is how many prompt tokens were launched before it; `collect` tells it back.
        """
        if self._inputs is None:
            return
        logits = self._model.forward(self._inputs[:, None], self._caches)
        self._inputs = self._sampler.draw(logits[:, -1, :])
        start_eval(self._inputs)
        self._in_flight.append((self._rids.copy(), self._inputs, prefill_tokens))

    def collect(self) -> tuple[list[int], list[int], int]:
        """Wait for the oldest step in flight: its rids, the token of each, and the prompt tokens done before it."""
        rids, tokens, prefill_tokens = self._in_flight.popleft()
        mx.eval(tokens)
        return rids, np.array(tokens).tolist(), prefill_tokens

    def clear(self) -> None:
        """Let all rows go, and the steps in flight with them."""
        self.remove(self._rids)
        self._in_flight.clear()
