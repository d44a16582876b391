"""`PoolEngine`: texts to vectors or scores, for a cast that embeds or ranks. Has the interface of `Engine`.

Owned by `actors.engine.actor`, on the engine's one thread. A turn is one forward: of several short rows, padded on the
right, or of a chunk of one long row. Models are causal, so what lies behind a row changes nothing in it.
"""

from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import structlog

from actors.engine import memory
from actors.engine.engine import Outcome, find_fault
from actors.engine.model import Cache, Model
from protocol.errors import INVALID_REQUEST
from protocol.messages import EngineStats, Pool, Submit

log = structlog.get_logger()

SHORT = 512  # tokens; a longer row runs alone
Ids = npt.NDArray[np.uint32]


class _Row:
    __slots__ = ("caches", "done", "ids", "pool", "rid", "total")

    def __init__(self, rid: int, ids: Ids, pool: Pool) -> None:
        self.rid = rid
        self.ids = ids
        self.pool = pool
        self.caches: list[Cache] = []
        self.done = 0  # tokens computed
        self.total: Any = None  # for the mean: the sum of the hidden states so far


class PoolEngine:
    """The rows of one streamer on one model. Rows are taken first come, first served."""

    building = False

    idle = False

    def __init__(
        self,
        model: Model,
        tokens_per_turn: int,
        pool_limit: int,
        *,
        on_rows: Callable[[list[int]], None] = lambda rids: None,
    ) -> None:
        """`on_rows` sees the rows of each turn before anything is computed for them."""
        self._model = model
        self._on_rows = on_rows
        self._tokens = max(tokens_per_turn, SHORT)
        self._rows: dict[int, _Row] = {}
        self._rejected: list[tuple[int, str]] = []
        self._pool = memory.Pool(pool_limit)
        self._steps = 0
        self._computed = 0

    @property
    def busy(self) -> bool:
        """Whether a turn would do anything."""
        return bool(self._rows or self._rejected)

    @property
    def stats(self) -> EngineStats:
        """The load now."""
        return EngineStats(self._steps, prefilling=len(self._rows), memory=memory.in_use(), prefilled=self._computed)

    @property
    def pool_used(self) -> bool:
        """Whether `rest` would free memory."""
        return self._pool.used

    def submit(self, request: Submit) -> None:
        """Queue a row; a bad one ends in the next turn."""
        # A text that fills the whole context is fine here: nothing is generated behind it.
        fault = find_fault(request, self._model.vocab_size, self._model.context + 1)
        if request.pool is None:
            fault = fault or "this server generates no text"
        if fault or request.pool is None:
            self._rejected.append((request.rid, fault))
            return
        ids = np.frombuffer(request.ids, "<u4").astype(np.uint32)
        self._rows[request.rid] = _Row(request.rid, ids, request.pool)

    def abort(self, rids: Iterable[int]) -> None:
        """Drop rows without an answer."""
        for rid in rids:
            self._rows.pop(rid, None)

    def reset(self) -> None:
        """Drop every row."""
        self._rows.clear()
        self._rejected.clear()

    def turn(self, deliver: Callable[[Outcome], None]) -> None:
        """Run one forward and deliver what it brought."""
        outcome = Outcome()
        for rid, fault in self._rejected:
            outcome.end(rid, INVALID_REQUEST, fault)
        self._rejected.clear()
        if self._rows:
            first = next(iter(self._rows.values()))
            if len(first.ids) > SHORT:
                self._on_rows([first.rid])
                self._long(first, outcome)
            else:
                self._short(outcome)
            self._steps += 1
        if outcome:
            deliver(outcome)

    def tidy(self) -> None:
        """Housekeeping after a turn."""
        self._pool.after_turn(prefilled=True)

    def rest(self) -> None:
        """Housekeeping of an engine that has been idle for a while."""
        self._pool.rest()

    def _short(self, outcome: Outcome) -> None:
        """All short rows that fit one forward, those of similar length together."""
        rows: list[_Row] = []
        longest = 0
        waiting = [row for row in self._rows.values() if len(row.ids) <= SHORT]
        oldest = waiting[0]
        for row in sorted(waiting, key=lambda row: abs(len(row.ids) - len(oldest.ids))):
            longest = max(longest, len(row.ids))
            if rows and longest * (len(rows) + 1) > self._tokens:
                break
            rows.append(row)
        self._on_rows([row.rid for row in rows])
        longest = max(len(row.ids) for row in rows)
        ids = np.zeros((len(rows), longest), np.uint32)
        for place, row in enumerate(rows):
            ids[place, : len(row.ids)] = row.ids
        hidden = self._model.hidden(mx.array(ids), None)
        lengths = mx.array([len(row.ids) for row in rows])[:, None, None]
        places = mx.arange(longest)[None, :, None]
        last = mx.take_along_axis(hidden, lengths - 1, axis=1)[:, 0]
        mean = mx.sum(mx.where(places < lengths, hidden, 0), axis=1) / lengths[:, 0]
        pooled = [self._pooled(row, hidden[i, 0], last[i], mean[i]) for i, row in enumerate(rows)]
        self._end(rows, pooled, outcome)

    def _long(self, row: _Row, outcome: Outcome) -> None:
        """The next chunk of a row, and its end when that was the last one."""
        row.caches = row.caches or self._model.new_caches()
        chunk = row.ids[row.done : row.done + self._tokens]
        hidden = self._model.hidden(mx.array(chunk[None]), row.caches)
        first = hidden[0, 0]
        if row.pool.mode == "first" and row.done:
            first = row.total
        elif row.pool.mode == "first":
            row.total = first
        total = mx.sum(hidden[0].astype(mx.float32), axis=0)
        if row.pool.mode == "mean":
            row.total = total = total if row.total is None else row.total + total
        row.done += len(chunk)
        mx.eval([cache.state for cache in row.caches], total)
        if row.done == len(row.ids):
            self._end([row], [self._pooled(row, first, hidden[0, -1], total / len(row.ids))], outcome)

    def _pooled(self, row: _Row, first: mx.array, last: mx.array, mean: mx.array) -> mx.array:
        """The vector of a row, or its probabilities of the tokens that its pooling names."""
        if row.pool.among:
            logits = self._model.head(last[None, None])[0, 0].astype(mx.float32)
            return mx.softmax(logits[mx.array(row.pool.among)])
        vector = {"first": first, "last": last, "mean": mean}[row.pool.mode].astype(mx.float32)
        return vector / mx.maximum(mx.linalg.norm(vector), 1e-12) if row.pool.normalize else vector

    def _end(self, rows: list[_Row], pooled: list[mx.array], outcome: Outcome) -> None:
        mx.eval(pooled)
        for row, vector in zip(rows, pooled, strict=True):
            self._rows.pop(row.rid, None)
            self._computed += len(row.ids)
            outcome.pooled[row.rid] = np.array(vector).astype("<f4").tobytes()


def check_head(model: Model) -> None:
    """Raises ValueError when the head that `Model.head` finds is not all that turns hidden states into logits."""
    ids = mx.array([[1, 2, 3]], mx.uint32)
    wanted = model.forward(ids, model.new_caches())[:, -1].astype(mx.float32)
    found = model.head(model.hidden(ids, None)[:, -1:])[:, -1].astype(mx.float32)
    worst, size = float(mx.abs(wanted - found).max()), float(mx.abs(wanted).max())
    if not worst <= 1e-2 * size:
        raise ValueError("the logits of this architecture are more than its output layer; it can't rank texts")
