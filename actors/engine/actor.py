"""`EngineActor`: the engine process. Commands of the streamer in, one message per step out.

Binds a ROUTER that only the streamer connects to. Everything runs on the process's one thread, in the loop of
`Actor.run`: commands and the control channel are served between turns, and with nothing to do the loop blocks.
"""

import gc
import math
import time
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

import msgspec
import structlog
import zmq

from actors import grammars
from actors.adapter_files import read_adapter
from actors.base import Actor, StartError
from actors.engine import memory, penalties, weights
from actors.engine.block_cuts import PackedBlock
from actors.engine.engine import Engine, Outcome
from actors.engine.kv_events import KvEvents
from actors.engine.model import Model, ModelError, load
from actors.engine.pool_engine import PoolEngine, check_head
from actors.engine.prefix_store import StoreOpening
from actors.engine.row_memory import row_bytes
from actors.engine.scheduler import Limits
from actors.engine.solo_row import batches_rightly
from actors.engine.step_log import StepRecord, described
from actors.engine.traces import Traces
from actors.trail import Trail
from cache_store.store import PrefixStore
from protocol.codec import CodecError, command_codec, encode
from protocol.errors import INTERNAL_ERROR
from protocol.figures import PrefixTree
from protocol.ids import pack_ids
from protocol.messages import (
    Abort,
    Attach,
    EngineCommand,
    EngineStats,
    ModelCard,
    Step,
    Stop,
    Submit,
    TellPrefixes,
)
from protocol.sockets import bind_router

log = structlog.get_logger()

RETRY_MS = 100  # how soon an idle engine tries again to report rows whose step could not be sent
BUILDING_MS = 5  # how soon an otherwise idle engine looks again for rows whose grammar is ready
DISK_MS = 1  # how often rows that wait for the SSD alone are looked after
STORE_MS = 50  # the same of blocks on their way to the SSD
FLUSH_LOG_S = 2.0
SHOWN_BLOCKS, SHOWN_CHAINS = 1000, 200  # of prefixes, to those who look on
SSD_START_S = 3.0  # how long a start waits for the SSD cache to be open; what takes longer is done beside serving


def log_step(record: StepRecord) -> None:
    """Print what the scheduler decided for a turn, and what it was told (`--log-steps`)."""
    log.info("step", **msgspec.to_builtins(record))


def flush(store: PrefixStore[PackedBlock], seconds: float) -> None:
    """Write what the SSD lacks, and tell how it goes."""
    began = told = time.monotonic()

    def progress(left: int) -> None:
        nonlocal told
        if time.monotonic() - told >= FLUSH_LOG_S:
            told = time.monotonic()
            log.info("writing prefixes to the SSD", left_mb=left >> 20)

    if store.flush(seconds, progress):
        log.info("prefixes are on the SSD", seconds=round(time.monotonic() - began, 2))
    else:
        log.warning("prefixes were left unwritten", at_most_seconds=seconds)


class EngineActor(Actor):
    """Serves one streamer incarnation at a time: the newest that attached."""

    def start(self) -> tuple[str, ModelCard | None]:
        config = self.config
        self._events: KvEvents | None = None
        self._opening = StoreOpening(config, prefixes=config.task == "generate")
        try:
            model = load(
                config.model_path,
                config.max_kv_size,
                config.trust_remote_code,
                config.kv_bits,
                config.kv_group_size,
                [read_adapter(name, Path(folder)) for name, folder in config.adapters.items()],
                config.max_loras,
            )
        except (ModelError, ValueError) as error:
            raise StartError(str(error)) from error
        memory.set_limits(config.max_num_seqs, model.vocab_size)
        free = memory.cache_budget(config.memory_limit, config.max_num_seqs, model.vocab_size)
        if model.block_layout is not None:
            self._opening.set_memory(free)
        budget = free - self._opening.queue_bytes
        limits = Limits(
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.prefill_step_size,
            cache_bytes=budget,
            row_bytes=lru_cache(maxsize=4096)(partial(row_bytes, model.row_memory)),
            depth_cost=model.depth_cost,
        )
        if budget < limits.admission_bytes(1):
            raise StartError(
                f"with its memory limit the engine has {budget >> 20} MB left for keys and values once "
                f"{config.model_name} is loaded; raise --memory-limit, or take a smaller model"
            )
        weights.prepare()
        penalties.prepare()
        if model.batches_rows and not batches_rightly(model):
            log.warning("a row in a batch doesn't get the logits it gets alone", model_type=model.files.model_type)
            model.batches_rows = False
        if not model.batches_rows:
            log.warning("rows run one at a time: their caches can't be batched", caches=model.cache_kinds)
        elif not model.batches_prefill:
            log.info("prompts are prefilled one row at a time", caches=model.cache_kinds)
        if model.adapters is not None:
            log.info("adapters", names=list(config.adapters), resident=model.adapters.resident)
        log.info("memory", cache_mb=budget >> 20, row_kb_per_token=round(model.row_memory.per_token / 1024, 2))
        self._trail = Trail(self.me.run_dir, self.me.epoch)
        self._store: PrefixStore[PackedBlock] | None = None
        self._flush_seconds = 0.0
        self._prepare: Callable[[], None] | None = None
        if config.task != "generate":
            try:
                self._engine: Engine | PoolEngine = self._pool_engine(model)
            except (ValueError, AttributeError) as error:
                raise StartError(f"{config.model_name} can't {config.task} texts: {error}") from error
            return self._started(model)
        if config.log_steps:
            log.info("limits", **described(limits, model.row_memory))
        stall_target = config.decode_stall_target_ms / 1000 if config.decode_fairness else math.inf
        self._events = self._open_events()
        self._store = self._opening.open(model.block_layout, model.cache_kinds, self._events)
        engine = self._engine = Engine(
            model,
            limits,
            store=self._store,
            stall_target=stall_target,
            on_plan=lambda plan: self._trail.turn(engine.touched(plan)),
            on_step=log_step if config.log_steps else None,
        )
        self._opening.wait(SSD_START_S)
        self._prepare = engine.prepare_grammars
        return self._started(model)

    def _pool_engine(self, model: Model) -> PoolEngine:
        config = self.config
        if config.task == "rank":
            check_head(model)
        limit = memory.pool_limit(config.max_num_seqs, model.vocab_size)
        tokens = min(config.max_num_batched_tokens, config.prefill_step_size)
        return PoolEngine(model, tokens, limit, on_rows=self._trail.turn)

    def _started(self, model: Model) -> tuple[str, ModelCard | None]:
        config = self.config
        self._streamer = 0
        self._peer = b""
        self._lost: set[int] = set()
        self._traces = Traces()
        self._idle_since = time.monotonic()
        self.faults = 0
        self._in_sockets = 0.0  # seconds
        # What the imports made lives as long as the process; a full collection would stall a step to look at it.
        gc.collect()
        gc.freeze()
        endpoint = self.me.endpoint()
        self._socket = bind_router(self.context, endpoint)
        self.add_socket(self._socket, self._receive)
        template = model.files.chat_template is not None
        card = ModelCard(
            config.model_name,
            model.context,
            model.vocab_size,
            has_chat_template=template,
            created=int((model.files.path / "config.json").stat().st_mtime),
            task=config.task,
            adapters=config.adapters,
        )
        return endpoint, card

    def on_stop(self, order: Stop) -> None:
        self._flush_seconds = order.flush

    def _open_events(self) -> KvEvents | None:
        where = self.config.kv_events
        if not where:
            return None
        host, _, port = where.rpartition(":")
        try:
            replay = f"tcp://{host}:{int(port) + 1}"
            events = KvEvents(self.context, f"tcp://{where}", replay, self.config.adapters)
        except zmq.ZMQError as error:
            raise StartError(f"can't publish KV events on {where} and the port after it: {error}") from error
        self.add_socket(events.replay, events.answer)
        return events

    def close(self) -> None:
        self.remove_socket(self._socket)
        if self._events is not None:
            self.poller.unregister(self._events.replay)
            self._events.close()
        if self._store is not None:
            if self._flush_seconds:
                flush(self._store, self._flush_seconds)
            self._store.close()

    def stats(self) -> EngineStats:
        return msgspec.structs.replace(self._engine.stats, in_sockets=self._in_sockets)

    def wait_ms(self) -> float | None:
        if self._engine.busy:
            return DISK_MS if self._engine.idle else 0
        waits: list[float] = []
        if self._engine.building:
            waits.append(BUILDING_MS)
        if self._lost:
            waits.append(RETRY_MS)
        if self._store is not None and (self._store.busy or self._opening.pending):
            waits.append(STORE_MS)
        if self._engine.pool_used:
            waits.append(max(0.0, (self._idle_since + memory.IDLE_REST_S - time.monotonic()) * 1000))
        return min(waits, default=None)

    def turn(self) -> None:
        self._opening.poll()
        if self._store is not None:
            self._store.set_at_work(self._engine.busy)
        if self._engine.busy or self._engine.building:
            overdue = bool(self._lost)
            self._engine.turn(self._send)
            if overdue and self._lost:
                self._send(Outcome())
            self._engine.tidy()
            self._tell_events()
            self._idle_since = time.monotonic()
            return
        if self._store is not None:
            self._store.poll()
        self._tell_events()
        if self._lost:
            self._send(Outcome())
        idle = time.monotonic() - self._idle_since
        if self._engine.pool_used and idle >= memory.IDLE_REST_S:
            self._engine.rest()
        if self._prepare is not None and idle >= grammars.IDLE_S:  # the supervisor's probes bring turns
            self._prepare()
            self._prepare = None

    def _tell_events(self) -> None:
        if self._events is not None:
            self._events.publish()

    def _receive(self) -> None:
        began = time.perf_counter()
        self._receive_all()
        self._in_sockets += time.perf_counter() - began

    def _receive_all(self) -> None:
        # All that has arrived, in its order: an abort behind its own submit then finds the row, and one for a row
        # in the batch takes effect before anything more is launched for it.
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._obey_command(frames[0], command_codec.decode(frames[-1]))
            except CodecError as error:
                self.faults += 1
                log.error("bad command", error=str(error), faults=self.faults)
                if frames[0] == self._peer:  # strangers' frames are nobody's loss
                    self._send_step(Outcome(), unread=True)

    def _obey_command(self, peer: bytes, command: EngineCommand) -> None:
        if command.epoch != self.me.epoch or command.streamer < self._streamer:
            return
        if command.streamer > self._streamer:  # by whatever it says first: an Attach may have been lost
            self._engine.reset()
            self._lost.clear()
            self._traces.clear()
            self._streamer, self._peer = command.streamer, peer
            log.info("streamer attached", streamer=command.streamer)
        match command:
            case Attach():
                self._peer = peer
            case Submit(rid=rid):
                self._trail.took(rid)
                if command.trace:
                    self._traces.begin(rid, time.monotonic(), self.stats())
                self._engine.submit(command)
            case Abort(rids=rids):
                self._traces.drop(rids)
                self._engine.abort(rids)
            case TellPrefixes():
                tree = PrefixTree() if self._store is None else self._store.tree(SHOWN_BLOCKS, SHOWN_CHAINS)
                self._send_step(Outcome(), prefixes=tree)

    def _send(self, outcome: Outcome) -> None:
        began = time.perf_counter()
        self._send_step(outcome)
        self._in_sockets += time.perf_counter() - began

    def _send_step(self, outcome: Outcome, *, unread: bool = False, prefixes: PrefixTree | None = None) -> None:
        for rid in self._lost:
            outcome.end(rid, INTERNAL_ERROR, "the engine could not send this row's tokens")
        if not (outcome or unread or prefixes):
            return
        stats = self.stats()
        asked = [(rid, outcome.logprobs[rid]) for rid in outcome.rids if rid in outcome.logprobs]
        step = Step(
            self.me.epoch,
            self._streamer,
            outcome.rids,
            pack_ids(outcome.tokens),
            outcome.admitted,
            outcome.ended,
            outcome.reasons,
            outcome.errors,
            stats,
            logprob_rids=[rid for rid, _ in asked],
            logprobs=[row.chosen for _, row in asked],
            top_ids=[row.top_ids for _, row in asked],
            top_logprobs=[row.top for _, row in asked],
            cached_rids=outcome.cached,
            cached_tokens=outcome.cached_tokens,
            pooled_rids=list(outcome.pooled),
            pooled=list(outcome.pooled.values()),
            unread=unread,
            traces=self._traces.take(outcome.rids, time.monotonic(), stats),
            prefixes=prefixes,
            admitted_at=outcome.admitted_at,
        )
        try:
            self._socket.send_multipart([self._peer, encode(step)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self.faults += 1
            if error.errno == zmq.EHOSTUNREACH:  # nobody is left to tell
                log.warning("the streamer is gone", faults=self.faults)
                self._engine.reset()
                self._lost.clear()
                return
            log.error("step not sent", error=str(error), faults=self.faults)
            # These rows now miss a token or their end, so they can only fail.
            self._lost.update(outcome.rids, outcome.ended, outcome.pooled)
            self._engine.abort([*self._lost])
        else:
            self._lost.clear()
