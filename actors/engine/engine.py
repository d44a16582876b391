"""`Engine`: scheduler, prefill and decode batch joined into turns. What the engine process is without its sockets.

Owned by `actors.engine.actor`, on the engine's one thread. Commands only change the queues; all work on the
device is launched and read in `turn`.
"""

import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import structlog

from actors.engine import memory
from actors.engine.batch import DecodeBatch, RowLogprobs
from actors.engine.block_cuts import PackedBlock
from actors.engine.constraints import Constraints
from actors.engine.device import Lane
from actors.engine.memory_guard import MemoryGuard
from actors.engine.model import Model
from actors.engine.pace import Pace
from actors.engine.prefill import Joining, Prefill
from actors.engine.prefix import PrefixCache, Ready
from actors.engine.request import Request
from actors.engine.row_options import RowOptions
from actors.engine.scheduler import BLOCK, Limits, Plan, Scheduler
from actors.engine.siblings import Siblings
from actors.engine.step_log import RecordedScheduler, StepRecord
from cache_store.store import PrefixStore
from protocol.errors import INTERNAL_ERROR, INVALID_REQUEST, MODEL_NOT_FOUND, PROMPT_TOO_LONG
from protocol.messages import EngineStats, PrefixStats, SamplingParams, Submit

log = structlog.get_logger()


class Outcome(msgspec.Struct):
    """What one turn brought, in the columns of `protocol.messages.Step`; `pooled` by rid."""

    rids: list[int] = []
    tokens: list[int] = []
    logprobs: dict[int, RowLogprobs] = {}
    admitted: list[int] = []
    admitted_at: float = -1.0
    ended: list[int] = []
    reasons: list[str] = []
    errors: list[str] = []
    cached: list[int] = []
    cached_tokens: list[int] = []
    pooled: dict[int, bytes] = {}

    def end(self, rid: int, reason: str, error: str = "") -> None:
        """Add the end of a row."""
        self.ended.append(rid)
        self.reasons.append(reason)
        self.errors.append(error)

    def __bool__(self) -> bool:
        return bool(self.rids or self.admitted or self.ended or self.cached or self.pooled)


class Engine:
    """The rows of one streamer on one model. `rid` is the streamer's number of a row."""

    def __init__(
        self,
        model: Model,
        limits: Limits,
        *,
        store: PrefixStore[PackedBlock] | None = None,
        stall_target: float = 0.1,
        pool_limit: int | None = None,
        on_plan: Callable[[Plan], None] | None = None,
        on_step: Callable[[StepRecord], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`store` keeps prefix blocks; without one every prompt is computed.

        `stall_target` is how many seconds a step may take because of prefill; `pool_limit` is how many bytes MLX's free
        pool may hold, by default what one engine in a process needs. `on_plan` sees each turn's plan before anything
        is done for it; `on_step` gets a record of all that the scheduler is told and decides.
        """
        # On a CPU forwards of one block are the fastest; elsewhere a chunk is one forward.
        forward_tokens = BLOCK if mx.default_device() == mx.cpu else limits.prefill_step_size
        self._model = model
        if model.adapters is not None:
            limits = msgspec.structs.replace(limits, max_loras=model.adapters.slots)
        self._limits = limits
        self._lane = Lane()
        self._pace = Pace(stall_target)
        self._requests: dict[int, Request] = {}
        self._constraints = Constraints(model.files, model.vocab_size)
        self._siblings = Siblings()
        self._prefix: PrefixCache | None = None
        if store is not None and model.block_layout is not None:
            self._prefix = PrefixCache(
                model, store, self._lane, requests=self._requests, speed=lambda: self._pace.prefill_speed
            )
        self._scheduler = (
            Scheduler(limits, self._hold) if on_step is None else RecordedScheduler(limits, on_step, self._hold)
        )
        self._prefill = Prefill(model, self._lane, forward_tokens, self._prefix)
        self._batch = DecodeBatch(model, self._lane, self._prefix, self._constraints)
        self._rejected: list[tuple[int, str, str]] = []
        self._steps = 0
        if pool_limit is None:
            pool_limit = memory.pool_limit(limits.max_num_seqs, model.vocab_size)
        self._pool = memory.Pool(pool_limit)
        self._guard = MemoryGuard(limits.cache_bytes, self._prefix.store if self._prefix else None, self._pool)
        self._prefilled = False
        self._on_plan = on_plan
        self._clock = clock
        self._step_began = 0.0
        self._resets = 0
        self._built_before = model.building
        self._turning = 0.0  # seconds spent in turns, less what `deliver` took
        self._delivering = 0.0  # of the turn so far
        self._prefilled_tokens = 0
        self._decoded_tokens = 0

    @property
    def busy(self) -> bool:
        """Whether a turn would do anything."""
        return bool(self._scheduler.busy or self._batch.in_flight or self._rejected)

    @property
    def idle(self) -> bool:
        """Whether a turn would do nothing now, and rows wait for the disk alone."""
        adapters = self._model.adapters
        disk = (self._prefix is not None and self._prefix.waits_for_disk) or (adapters is not None and adapters.loading)
        return disk and self._scheduler.idle and not (self._batch.in_flight or self._rejected)

    def _hold(self, rid: int) -> bool:
        request = self._requests[rid]
        adapters = self._model.adapters
        if adapters is not None and not adapters.ready(request.adapter):
            return True
        return self._hold_for_prefix(request)

    def _hold_for_prefix(self, request: Request) -> bool:
        if self._model.adapters is not None:
            request.digest = self._model.adapters.digest(request.adapter)
        if self._prefix is not None and self._prefix.begin(request):
            return True
        request.cached_told = True  # what it finds after it was parked, it has computed itself
        return False

    @property
    def building(self) -> bool:
        """Whether rows wait for their grammars; `turn` takes in those that are ready."""
        return self._constraints.building > 0

    def touched(self, plan: Plan) -> list[int]:
        """Rows that this turn, or a side thread meanwhile, does the first work for: one may be what ends the engine."""
        siblings = (rid for first in plan.join for rid in self._siblings.of(first))
        return [*(chunk.rid for chunk in plan.chunks), *plan.join, *siblings, *self._constraints.at_work]

    @property
    def stats(self) -> EngineStats:
        """The load now."""
        scheduler = self._scheduler
        in_model = self._lane.waited + self._model.building - self._built_before
        return EngineStats(
            self._steps,
            scheduler.running,
            scheduler.prefilling,
            scheduler.waiting + len(self._siblings) + self._constraints.building,
            memory=memory.in_use(),
            in_model=in_model,
            in_python=self._turning - in_model,
            prefilled=self._prefilled_tokens,
            decoded=self._decoded_tokens,
            parked=scheduler.parkings,
            cache=self._batch.nbytes,
            prefix=self._prefix.stats(self._guard.yielded) if self._prefix is not None else PrefixStats(),
        )

    def submit(self, request: Submit) -> None:
        """Queue a request; a bad one, or one that can never fit into memory, ends in the next turn."""
        rid = request.rid
        if rid in self._requests:
            log.error("a row was submitted twice", rid=rid)
            return
        if fault := find_fault(request, self._model.vocab_size, self._model.context):
            self._rejected.append((rid, INVALID_REQUEST, fault))
            return
        if request.adapter and (self._model.adapters is None or request.adapter not in self._model.adapters):
            self._rejected.append((rid, MODEL_NOT_FOUND, f"there is no adapter {request.adapter!r} here"))
            return
        ids = np.frombuffer(request.ids, "<u4").astype(np.uint32)
        if not self._fits(len(ids)):
            self._rejected.append((rid, PROMPT_TOO_LONG, self._too_large(len(ids))))
            return
        params = request.params or SamplingParams()
        constrained = params.grammar is not None or (
            params.thinking_budget is not None and request.thinking is not None
        )
        stop_ids = frozenset(params.stop_token_ids)
        # Behind the end of a grammar nothing but the end of the text is allowed.
        ending = stop_ids if request.ignore_eos and params.grammar is None else stop_ids | self._model.eos_token_ids
        stops = tuple(sorted(ending))
        options = row_options(request, params, stops, len(ids) - request.prompt_tokens, constrained)
        budget = self._budget(len(ids), request.budget)
        self._requests[rid] = Request(
            rid,
            ids,
            request.prompt_tokens,
            options,
            budget=budget,
            ending=ending,
            like=request.like,
            salt=request.cache_salt,
            priority=request.priority,
            turn=request.turn,
            pin=request.warm,
            adapter=request.adapter,
        )
        if constrained:
            self._constraints.build(request, stops, ids[request.prompt_tokens :].tolist())
        else:
            self._enter(rid)

    def _enter(self, rid: int) -> None:
        """Queue a row, or let it wait for another that computes the same prompt."""
        row = self._requests[rid]
        first = self._requests.get(row.like) if row.like else None
        if first is not None and row.begins_like(first):
            on_its_way = self._scheduler.computing(first.rid) or self._constraints.is_building(first.rid)
            if on_its_way and self._model.batches_rows:
                self._siblings.wait(rid, first.rid)
                return
        self._add(row)

    def _add(self, row: Request) -> None:
        self._scheduler.add(row.rid, len(row.ids), row.budget, **_queued_as(row))

    def _enter_built(self, outcome: Outcome) -> None:
        """Queue the rows whose grammars are ready."""
        if not self._constraints.building:
            return
        for rid, fault in self._constraints.finished():
            if rid not in self._requests:
                continue
            if fault:
                self._forget(rid)
                outcome.end(rid, INVALID_REQUEST, fault)
            else:
                self._enter(rid)

    def _forget(self, rid: int) -> None:
        """Drop what is known of a row that has left the scheduler. One that waited for it takes its place."""
        self._requests.pop(rid, None)
        self._constraints.drop(rid)
        self._siblings.drop(rid)
        first, *others = self._siblings.take(rid) or [0]
        if first:
            self._requests[first].like = 0
            self._enter(first)
        for other in others:
            self._requests[other].like = first
            self._enter(other)

    def _join_siblings(self, groups: list[Joining], outcome: Outcome, plan: Plan) -> list[Joining]:
        """Let choices that wait for rows of `groups` start from those rows' caches, as far as there is room."""
        joined: list[Joining] = []
        taken = plan.prefill_bytes
        outcome.admitted = outcome.admitted.copy()
        for group in groups:
            for place, leader in enumerate(group.rows):
                rows = [self._requests[rid] for rid in self._siblings.take(leader.rid)]
                now = [row for row in rows if self._add_running(row)]
                if now:
                    caches = group.row_caches(place)
                    joined.append(Joining([row.row() for row in now], [caches] * len(now), False, False))
                    self._use_adapters(row.rid for row in now)
                for row in now:
                    outcome.admitted.append(row.rid)
                    row.share_prefix(self._requests[leader.rid])
                    if row.cached:
                        outcome.cached.append(row.rid)
                        outcome.cached_tokens.append(row.cached)
                    taken += self._limits.row_bytes(len(row.ids) + BLOCK)
                for row in rows:
                    if row not in now:
                        self._add(row)
        if joined:
            self._share_memory(taken)
        return joined

    def _share_memory(self, prefill_bytes: int) -> None:
        """Make room for the rows as they are planned; spare slots of the batch may take what blocks leave."""
        blocks = self._guard.make_room(self._scheduler.planned_bytes)
        self._batch.keep_within(self._limits.cache_bytes - prefill_bytes - blocks)

    def _add_running(self, row: Request) -> bool:
        return self._scheduler.add_running(row.rid, len(row.ids), row.budget, **_queued_as(row))

    def _enter_with_adapters(self, outcome: Outcome) -> None:
        """Let rows go on whose adapters have been read."""
        adapters = self._model.adapters
        if adapters is None or not adapters.any_arrived:
            return
        self._lane.wait()
        for rids, fault in adapters.arrived():
            for rid in rids:
                if fault and rid in self._requests:
                    self._scheduler.abort([rid])
                    self._forget(rid)
                    outcome.end(rid, INTERNAL_ERROR, fault)
                elif rid in self._requests and not self._hold_for_prefix(self._requests[rid]):
                    self._scheduler.go_on(rid, 0)

    def _budget(self, length: int, wanted: int) -> int:
        """Tokens that a row may generate: not beyond the context, nor beyond all memory."""
        budget = min(wanted, self._model.context - length)
        if self._fits(length + budget):
            return budget
        low, high = 1, budget
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._fits(length + middle) else (low, middle - 1)
        return low

    def _fits(self, length: int) -> bool:
        return self._scheduler.fits(length, self._guard.pinned_bytes)

    def _too_large(self, length: int) -> str:
        needed, limit = self._limits.admission_bytes(length), self._limits.cache_bytes - self._guard.pinned_bytes
        return (
            f"the prompt of {length} tokens needs {needed / 1e6:.0f} MB for its keys and values, and all "
            f"requests together may take {limit / 1e6:.0f} MB; shorten it, or raise --memory-limit"
        )

    def abort(self, rids: Iterable[int]) -> None:
        """Drop rows without an answer; those that are gone are normal. The batch lets them go in the next turn."""
        gone = [*rids]
        self._scheduler.abort(gone)
        for rid in gone:
            self._siblings.drop(rid)
        for rid in gone:
            self._forget(rid)

    def reset(self) -> None:
        """Drop every row, and what is in flight for it: the rids of the next streamer begin anew."""
        self._scheduler.abort_all()
        self._requests.clear()
        self._constraints.clear()
        self._siblings.clear()
        self._rejected.clear()
        self._prefill.clear()
        self._batch.clear()
        if self._prefix is not None:
            self._prefix.clear()
        if self._model.adapters is not None:
            self._model.adapters.clear()
        self._resets += 1

    def turn(self, deliver: Callable[[Outcome], None]) -> None:
        """Dispatch one turn of work, and read the step that was dispatched a turn ago.

        `deliver` gets what is known as soon as it is: the old step's tokens don't wait for this turn's prompts.
        """
        turn_began = self._clock()
        resets = self._resets
        outcome = Outcome()
        for rid, code, fault in self._rejected:
            outcome.end(rid, code, fault)
        self._rejected.clear()
        self._enter_built(outcome)
        self._enter_with_adapters(outcome)

        spent = 0.0
        if self._prefix is not None:
            spent, begun = -self._prefix.restoring, self._lane.begun
            running = self._scheduler.running
            for ready in self._prefix.advance(self._pace.seconds(running) / (2 if running else 1)):
                if self._lane.begun > begun:
                    self._collect(outcome)
                self._begin_restored(ready, outcome)
                outcome = self._pass_on(outcome, deliver)
                if self._resets != resets:
                    return  # there was nobody to deliver to, and this turn's rows are gone
            spent += self._prefix.restoring
            for rid, priority in self._prefix.waited_for():
                self._scheduler.lift(rid, priority)
        running_bytes = self._batch.needed(self._scheduler.leaving) + self._guard.pinned_bytes
        waiting = self._scheduler.waiting + self._scheduler.prefilling
        plan = self._scheduler.plan(self._pace.tokens(self._scheduler.running, waiting, spent), running_bytes)
        if self._on_plan is not None:
            self._on_plan(plan)
        if plan.admit:
            outcome.admitted, outcome.admitted_at = plan.admit, time.monotonic()
        self._prefill.remove(plan.drop)
        self._batch.remove(plan.drop)
        if self._prefix is not None:
            again = set(plan.admit)
            self._prefix.release(rid for rid in plan.drop if rid not in again)
        self._share_memory(plan.prefill_bytes)
        for rid in plan.admit:
            self._prefill.add(self._requests[rid].row())
        self._swap_adapters(plan)
        step_before = self._batch.in_flight > 0
        fresh = plan.decode == len(plan.join)
        began = 0.0
        alone = plan.join[0] if fresh and plan.decode == 1 and not len(self._siblings) else None
        for forwards, _ in enumerate(self._prefill.run(plan.chunks, alone)):
            began = began or self._lane.began
            self._collect(outcome, ended=began)
            # Of rows that are only admitted nobody needs to hear before a short prompt's token.
            if forwards or outcome.rids or outcome.ended:
                outcome = self._pass_on(outcome, deliver)
            if self._resets != resets:
                return
        if self._prefix is not None:
            self._prefix.release(plan.join)
        joining = self._prefill.join(plan.join)
        if len(self._siblings):
            joining += self._join_siblings(joining, outcome, plan)
        self._batch.join(joining, expected=self._scheduler.prefilling)

        def prefilled() -> None:
            if plan.chunks:
                self._lane.wait()
                self._pace.observe_prefill(plan.prefill_cost, self._clock() - began)
            if not self._batch.in_flight:
                self._step_began = self._clock()

        if plan.decode:
            self._batch.launch(prefilled)
        else:
            prefilled()
        if not plan.decode and (self._prefix is not None or self._batch.in_flight):
            self._lane.wait()  # what is left of the last step counts as the model's time
        self._collect(outcome, keep=1 if plan.decode else 0)
        if plan.decode and (fresh or not self._scheduler.goes_on):
            # Nothing is to be built meanwhile, so these tokens need not wait for another turn; nor do first ones of
            # rows that are all there is: a CPU has them only when it is nearly through the step after.
            if outcome.rids:
                outcome = self._pass_on(outcome, deliver)
            self._lane.wait()
            self._collect(outcome, timed=not step_before)
            if self._batch.has_unwritten:
                turn_began = self._lap(turn_began)
                outcome = self._pass_on(outcome, deliver)
                if self._resets != resets:
                    return
                self._batch.write_slots()
        if self._prefix is not None:
            self._prefix.settle()
        if plan.decode or plan.chunks or step_before:
            self._steps += 1
        self._prefilled = bool(plan.chunks)
        self._prefilled_tokens += plan.prefill_tokens
        self._lap(turn_began)
        self._pass_on(outcome, deliver)
        self._delivering = 0.0

    def _swap_adapters(self, plan: Plan) -> None:
        if self._model.adapters is not None:
            again = set(plan.admit)
            self._model.adapters.release(rid for rid in plan.drop if rid not in again)
            self._use_adapters(plan.admit)

    def _use_adapters(self, rids: Iterable[int]) -> None:
        if self._model.adapters is not None:
            self._model.adapters.begin((rid, self._requests[rid].adapter) for rid in rids)

    def _pass_on(self, outcome: Outcome, deliver: Callable[[Outcome], None]) -> Outcome:
        """Deliver what there is; returns what the rest of the turn goes on with."""
        if not outcome:
            return outcome
        began = self._clock()
        deliver(outcome)
        self._delivering += self._clock() - began
        return Outcome()

    def _lap(self, began: float) -> float:
        """Count the turn's time since `began`, without what `deliver` took of it. Returns now."""
        now = self._clock()
        self._turning += now - began - self._delivering
        self._delivering = 0.0
        return now

    def _begin_restored(self, ready: list[Ready], outcome: Outcome) -> None:
        """Rows that waited for their prefixes go on behind them."""
        for rid, caches, tokens in ready:
            request = self._requests.get(rid)
            if request is None:
                continue  # aborted meanwhile
            if caches is not None:
                self._prefill.begin_with(rid, caches)
            self._scheduler.go_on(rid, tokens)
            if tokens and not request.cached_told:
                request.cached = min(tokens, request.prompt_tokens)
                outcome.cached.append(rid)
                outcome.cached_tokens.append(request.cached)
            request.cached_told = True

    def tidy(self) -> None:
        """Housekeeping after a turn, once its outcome is sent."""
        self._pool.after_turn(prefilled=self._prefilled)

    @property
    def pool_used(self) -> bool:
        """Whether `rest` would free memory."""
        return self._pool.used

    def prepare_grammars(self) -> None:
        """Make ready for the first row with a grammar; takes a quarter of a second or more."""
        self._constraints.prepare()

    def rest(self) -> None:
        """Housekeeping of an engine that has been idle for a while."""
        self._pool.rest()

    def _collect(self, outcome: Outcome, keep: int = 0, ended: float = 0.0, timed: bool = True) -> None:
        """Read the step in flight, if there are more than `keep`. `ended` is when it was done, if that was before;
        `timed`, whether the time since the last reading tells its length."""
        if self._batch.in_flight <= keep:
            return
        step = self._batch.collect()
        now = ended or self._clock()
        if step.forwarded and timed:
            self._pace.observe_step(now - self._step_began)
        self._step_began = now
        taken = self._scheduler.take(step.rids, step.tokens)
        outcome.rids, outcome.tokens, outcome.logprobs = taken.rids, taken.tokens, step.logprobs
        self._decoded_tokens += len(taken.tokens)
        for rid, token in zip(taken.rids, taken.tokens, strict=True):
            self._requests[rid].generated.append(token)
        for rid, reason in zip(taken.ended, taken.reasons, strict=True):
            outcome.end(rid, reason)
            self._forget(rid)
        for rid, fault in self._constraints.failed(taken.rids):
            outcome.end(rid, INVALID_REQUEST, f"the grammar can't be followed any further: {fault}")
            self._scheduler.abort([rid])
            self._forget(rid)


def _queued_as(row: Request) -> dict[str, Any]:
    """How the scheduler is to see a row."""
    return {"stop_ids": row.ending, "priority": row.priority, "adapter": row.adapter, "turn": row.turn}


def row_options(
    request: Submit, params: SamplingParams, stop_ids: tuple[int, ...], index: int, constrained: bool = False
) -> RowOptions:
    """The sampler's view of a request; absent options are off."""
    return RowOptions(
        temperature=request.temperature,
        top_k=max(params.top_k or 0, 0),
        top_p=request.top_p,
        min_p=params.min_p or 0.0,
        xtc_probability=params.xtc_probability or 0.0,
        xtc_threshold=0.1 if params.xtc_threshold is None else params.xtc_threshold,
        repetition_penalty=1.0 if params.repetition_penalty is None else params.repetition_penalty,
        presence_penalty=params.presence_penalty or 0.0,
        frequency_penalty=params.frequency_penalty or 0.0,
        logit_bias=params.logit_bias,
        min_tokens=params.min_tokens,
        stop_ids=stop_ids,
        logprobs=-1 if params.logprobs is None else params.logprobs,
        seed=request.seed,
        choice=request.choice,
        index=index,
        constrained=constrained,
    )


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
