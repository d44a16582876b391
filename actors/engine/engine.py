"""`Engine`: scheduler, prefill and decode batch joined into turns. What the engine process is without its sockets.

Owned by `actors.engine.actor`, on the engine's one thread. Commands only change the queues; all work on the
device is launched and read in `turn`.
"""

import math
import time
from collections.abc import Callable

import mlx.core as mx
import msgspec
import numpy as np
import structlog

from actors.engine import memory
from actors.engine.batch import DecodeBatch
from actors.engine.model import Model
from actors.engine.pace import Pace
from actors.engine.prefill import Prefill, Row
from actors.engine.sampler import RowOptions
from actors.engine.scheduler import BLOCK, Limits, Scheduler
from protocol.errors import INVALID_REQUEST
from protocol.messages import EngineStats, Submit

log = structlog.get_logger()


class Outcome(msgspec.Struct):
    """What one turn brought, in the columns of `protocol.messages.Step`."""

    rids: list[int] = []
    tokens: list[int] = []
    admitted: list[int] = []
    ended: list[int] = []
    reasons: list[str] = []
    errors: list[str] = []

    def end(self, rid: int, reason: str, error: str = "") -> None:
        """Add the end of a row."""
        self.ended.append(rid)
        self.reasons.append(reason)
        self.errors.append(error)

    def __bool__(self) -> bool:
        return bool(self.rids or self.admitted or self.ended)


class Engine:
    """The rows of one streamer on one model. `rid` is the streamer's number of a row."""

    def __init__(self, model: Model, limits: Limits, clock: Callable[[], float] = time.perf_counter) -> None:
        # On a CPU forwards of one block are the fastest; elsewhere a chunk is one forward.
        forward_tokens = BLOCK if mx.default_device() == mx.cpu else limits.prefill_step_size
        self._model = model
        self._scheduler = Scheduler(limits, model.eos_token_ids)
        self._prefill = Prefill(model, forward_tokens)
        self._batch = DecodeBatch(model)
        self._queued: dict[int, Row] = {}
        self._rejected: list[tuple[int, str]] = []
        self._steps = 0
        self._pool = memory.Pool(memory.pool_limit(limits.max_num_seqs, model.vocab_size))
        self._prefilled = False
        self._pace = Pace()
        self._clock = clock
        # Prompt tokens launched since the last decode step. The device works in order: the next step that comes
        # back tells that they are done, too.
        self._since_step = 0
        self._busy_since = 0.0

    @property
    def busy(self) -> bool:
        """Whether a turn would do anything."""
        return bool(self._scheduler.busy or self._batch.in_flight or self._rejected)

    @property
    def stats(self) -> EngineStats:
        """The load now."""
        scheduler = self._scheduler
        return EngineStats(
            self._steps, scheduler.running, scheduler.prefilling, scheduler.waiting, memory=memory.in_use()
        )

    def submit(self, request: Submit) -> None:
        """Queue a request; a bad one ends with `invalid_request` in the next turn."""
        rid = request.rid
        if rid in self._scheduler:
            log.error("a row was submitted twice", rid=rid)
            return
        if fault := find_fault(request, self._model.vocab_size, self._model.context):
            self._rejected.append((rid, fault))
            return
        ids = np.frombuffer(request.ids, "<u4").astype(np.uint32)
        options = RowOptions(
            request.temperature,
            request.top_p,
            request.seed,
            request.choice,
            index=len(ids) - request.prompt_tokens,
        )
        budget = min(request.budget, self._model.context - len(ids))
        self._queued[rid] = Row(rid, ids, options)
        self._scheduler.add(rid, len(ids), budget, ignore_eos=request.ignore_eos)

    def abort(self, rids: list[int]) -> None:
        """Drop rows without an answer; those that are gone are normal. The batch lets them go in the next turn."""
        self._scheduler.abort(rids)
        for rid in rids:
            self._queued.pop(rid, None)

    def reset(self) -> None:
        """Drop every row, and what is in flight for it: the rids of the next streamer begin anew."""
        self._scheduler.abort_all()
        self._queued.clear()
        self._rejected.clear()
        self._batch.clear()
        self._since_step = 0

    def turn(self) -> Outcome:
        """Launch one turn of work, then read the step that was launched a turn ago."""
        if not (self._batch.in_flight or self._since_step):
            self._busy_since = self._clock()
        outcome = Outcome()
        for rid, fault in self._rejected:
            outcome.end(rid, INVALID_REQUEST, fault)
        self._rejected.clear()

        plan = self._scheduler.plan(self._pace.tokens(self._scheduler.running))
        outcome.admitted = plan.admit
        self._prefill.remove(plan.drop)
        self._batch.remove(plan.drop)
        for rid in plan.admit:
            self._prefill.add(self._queued.pop(rid))
        self._prefill.run(plan.chunks)
        self._since_step += plan.prefill_tokens
        self._batch.join(self._prefill.join(plan.join))

        step_before = self._batch.in_flight > 0
        if plan.decode:
            self._batch.launch(self._since_step)
            self._since_step = 0
        if step_before:
            self._collect(outcome)
        elif plan.chunks and not plan.decode:
            self._prefill.wait()
            self._learn(self._since_step)
            self._since_step = 0
        if plan.decode or plan.chunks or step_before:
            self._steps += 1
        self._prefilled = bool(plan.chunks)
        return outcome

    def tidy(self) -> None:
        """Housekeeping after a turn, once its outcome is sent."""
        self._pool.after_turn(prefilled=self._prefilled)

    @property
    def pool_used(self) -> bool:
        """Whether `rest` would free memory."""
        return self._pool.used

    def rest(self) -> None:
        """Housekeeping of an engine that has been idle for a while."""
        self._pool.clear()

    def _collect(self, outcome: Outcome) -> None:
        rids, tokens, prefill_tokens = self._batch.collect()
        self._learn(prefill_tokens)
        taken = self._scheduler.take(rids, tokens)
        outcome.rids, outcome.tokens = taken.rids, taken.tokens
        for rid, reason in zip(taken.ended, taken.reasons, strict=True):
            outcome.end(rid, reason)

    def _learn(self, prefill_tokens: int) -> None:
        now = self._clock()
        self._pace.observe(prefill_tokens, now - self._busy_since)
        self._busy_since = now


def find_fault(request: Submit, vocab_size: int, context: int) -> str:
    """What is wrong with a request, "" when nothing is. `context` counts prompt and generated tokens."""
    if len(request.ids) % 4:
        return "the ids are not a whole number of uint32"
    ids = np.frombuffer(request.ids, "<u4")
    if not len(ids):
        return "there are no ids"
    if len(ids) >= context:
        return f"{len(ids)} ids leave no room to generate in the model's context of {context} tokens"
    if (largest := int(ids.max())) >= vocab_size:
        return f"id {largest} is outside the vocabulary of {vocab_size}"
    if request.budget < 1:
        return f"the budget must be at least 1, not {request.budget}"
    if not 0 <= request.prompt_tokens <= len(ids):
        return f"{request.prompt_tokens} prompt tokens don't fit {len(ids)} ids"
    if not (math.isfinite(request.temperature) and request.temperature >= 0):
        return f"the temperature can't be {request.temperature}"
    if not 0 < request.top_p <= 1:
        return f"top_p can't be {request.top_p}"
    return ""
