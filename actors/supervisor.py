"""The supervisor of a cast: starts the actors of one model, watches and replaces them, and ends them in good order.

Runs on the main thread of its process. With one model that is the `callboard serve` process, the HTTP workers are among
the actors, and it alone reads signals: SIGTERM, SIGINT and SIGHUP drain; a second one stops at once. SIGUSR1 replaces
the engine. With several models it is a process of its own (`actors.cast`), and what signals say comes over a link from
the house. What it decides stands in `actors.supervision`; the processes, the sockets and the clock in `actors.keeper`.
"""

import os
import time
from collections.abc import Callable

import structlog

from actors.allocator import malloc_environment
from actors.awake import Awake
from actors.blas import blas_environment
from actors.config import CastConfig, write_config
from actors.keeper import OTHERS_TIME, SIGNALS, SLEPT, STREAMER_TIME, HttpSpec, Keeper, Phase, told_end
from actors.link import HouseLink
from actors.rundir import RunDirectory
from actors.supervision import REPLACE_FLUSH, Slot, Supervision
from actors.trail import trail_path
from protocol import errors
from protocol.endpoints import ServerRecord
from protocol.messages import (
    PROTOCOL_VERSION,
    ActorReport,
    Alive,
    Drain,
    EngineUse,
    Ready,
    StartFailed,
    Stop,
    SystemState,
)

log = structlog.get_logger()


class Supervisor(Keeper):
    """One running cast. `run` returns the exit code of its process."""

    def __init__(
        self,
        config: CastConfig,
        run_dir: RunDirectory,
        http: HttpSpec | None,
        on_ready: Callable[[Supervision], None],
        clock: Callable[[], float] = time.monotonic,
        keep_log: Callable[[bytes], None] = lambda _: None,
        link: HouseLink | None = None,
    ) -> None:
        """`keep_log` gets every line that the children log. With a `link` there is a house, which has the HTTP workers
        and tells clients where the streamer is."""
        table = Supervision(config.tokenizers, http.workers if http else 0, config.start_timeout, config.hang_timeout)
        super().__init__(table, run_dir.path, http, clock, keep_log)
        self._config = config
        self._run_dir = run_dir
        self._link = link
        self._on_ready = on_ready
        self._flush_timeout = config.flush_timeout if config.prefix_cache and config.ssd_cache else 0.0
        self._drain_timeout = config.drain_timeout
        self._failed = ""
        self._record: ServerRecord | None = None  # to be published
        self._farewell = "the server was stopped"
        self._awake = Awake()
        self._told_seq = 0  # of the probe behind the first word that all is ready, until the streamer has answered it

    def run(self) -> int:
        """Serve until a signal or a failure. 0 after an orderly end, 1 with the cause on stderr otherwise."""
        cause = ""
        try:
            with self._opened(() if self._link else SIGNALS):
                write_config(self._config)
                if self._link is not None:
                    self._listen(self._link.socket, self._obey_house)
                for slot in self._table.slots:
                    self._spawn(slot)
                cause = self._serve()
                self._stop_all(cause)
                if self._link is not None and cause:
                    self._link.failed(cause)
        finally:
            self._awake.update(False)
            self._run_dir.remove()
        return told_end(cause)

    # Children.

    def _spawn(self, slot: Slot) -> None:
        if slot.role == "engine":  # the streamer has read the trail of the last one, if it is there
            trail_path(self._folder, slot.epoch).unlink(missing_ok=True)
        super()._spawn(slot)

    def _environment(self, role: str) -> dict[str, str]:
        environment = super()._environment(role)
        if role == "engine":
            blas = blas_environment(self._config.blas_threads)
            environment.update(blas)
            environment.update(malloc_environment())
            if blas:
                log.info("BLAS", library=blas["LD_PRELOAD"], threads=blas["OPENBLAS_NUM_THREADS"])
        return environment

    def _begin_replacing(self, slot: Slot) -> None:
        """Ask an actor to leave, so that a new one takes its place."""
        if slot.state != "ready":
            return  # it is being replaced already
        log.info("replacing", actor=slot.name, child=slot.pid, epoch=slot.epoch)
        self._order(slot, Stop(errors.SERVER_STOPPED, "replaced", min(self._flush_timeout, REPLACE_FLUSH)))
        self._table.stopping(slot, self._clock())
        self._broadcast()

    # The loop.

    def _serve(self) -> str:
        """Watch until the system has to end. Returns the cause, empty for an orderly end."""
        last = self._clock()
        while True:
            self._poll(0.05 if any(slot.state == "dead" for slot in self._table.slots) else 0.2)
            now = self._clock()
            if now - last > SLEPT:
                log.warning("the supervisor stood still", seconds=round(now - last, 1))
                self._table.excuse(now - last)
            last = now
            self._reap()
            if self._replace_engine:
                self._replace_engine = False
                for slot in self._table.of_role("engine"):
                    self._begin_replacing(slot)
            cause = self._act(self._table.decide(now))
            if cause is not None:
                self._failed = cause
                self._broadcast()
                return cause
            if self._phase is Phase.LOADING and self._table.all_ready():
                self._phase = Phase.SERVING
                self._broadcast()
                self._told_seq = self._probes + 1
                self._next_probe = now
            if self._told_seq and all(s.answered >= self._told_seq for s in self._table.of_role("streamer")):
                self._told_seq = 0  # the streamer knows of all others: what is asked now isn't refused as loading
                self._on_ready(self._table)
            if self._signals and self._phase is not Phase.DRAINING:
                if self._phase is Phase.LOADING:
                    return ""
                log.info("draining", at_most_seconds=self._drain_timeout, running=self._table.engine.running)
                self._drain(self._served_by(), self._drain_timeout, now)
            if self._phase is Phase.DRAINING and self._drained(now):
                return ""
            if now >= self._next_probe:
                self._probe(now)

    def _served_by(self) -> list[Slot]:
        """The actors that have streams of clients."""
        return [*self._table.of_role("streamer"), *self._table.of_role("http")]

    def _drained(self, now: float) -> bool:
        if self._signals > 1 or now > self._drain_until:
            return True
        return all(slot.answered >= self._drain_seq and slot.streams == 0 for slot in self._served_by())

    def _probe(self, now: float) -> None:
        super()._probe(now)
        self._publish_due()
        self._awake.update(any(slot.streams for slot in self._table.of_role("streamer")))
        self._show_outside()

    def _show_outside(self) -> None:
        """Bring `/health` up to date; a word now and then also tells the workers, or the house, that we live."""
        state = self._state()
        for slot in self._table.of_role("http"):
            self._order(slot, state)
        if self._link is not None:
            self._link.show(state, self._table, self._own.memory)

    def _state(self) -> SystemState:
        table = self._table
        status = "failed" if self._failed else self._phase.value
        if status == Phase.SERVING.value and not table.all_ready():
            status = "degraded"
        return SystemState(
            status,
            self._config.model_name,
            table.states(),
            table.engine,
            table.card,
            self._failed,
            table.http(),
            self._me(),
            self._started,
        )

    def _broadcast(self) -> None:
        state = self._state()
        # The streamer first: it must know of an engine before HTTP workers send it requests.
        for slot in sorted(self._table.slots, key=lambda slot: slot.role != "streamer"):
            self._order(slot, state)
        if self._link is not None:
            self._link.show(state, self._table, self._own.memory)

    def _hear(self, report: ActorReport, sender: bytes) -> None:
        match report:
            case Ready():
                slot = self._table.ready(report, self._clock())
                if slot is None:
                    return
                if slot.role == "streamer" and self._http is not None:
                    self._publish(report.endpoint, self._http.url)
                self._broadcast()
                if self._phase is Phase.DRAINING and slot.role in ("streamer", "http"):
                    self._order(slot, Drain(max(0.0, self._drain_until - self._clock())))
            case StartFailed():
                self._table.failed(report.role, report.index, report.epoch, report.message)
            case EngineUse():
                self._table.used(report)
            case Alive():
                before = self._table.engine
                self._table.alive(report, self._clock())
                if self._table.engine != before:
                    self._show_outside()

    def _obey_house(self) -> None:
        assert self._link is not None
        for order in self._link.orders():
            match order:
                case Drain(seconds=seconds):
                    self._drain_timeout = seconds
                    self._signals = max(self._signals, 1)
                case Stop(message=message, flush=flush):
                    self._farewell = message
                    self._drain_timeout = self._drain_until = 0.0
                    self._signals = max(self._signals, 1 if flush else 2)

    def _publish(self, endpoint: str, url: str) -> None:
        self._record = ServerRecord(
            name=self._run_dir.name,
            pid=os.getpid(),
            endpoint=endpoint,
            http=url,
            protocol=PROTOCOL_VERSION,
            run_dir=str(self._run_dir.path),
            model=self._config.model_name,
            stop_time=self._config.drain_timeout + self._flush_timeout,
        )
        self._publish_due()

    def _publish_due(self) -> None:
        if self._record is not None and self._run_dir.publish(self._record):
            self._record = None

    # The end.

    def _stop_all(self, cause: str) -> None:
        """End every actor: the streamer first, so that every stream gets its end; then all others."""
        message = f"the server stopped: {cause}" if cause else self._farewell
        flush = self._flush_timeout
        stop = Stop(errors.ENGINE_LOST if "engine" in cause else errors.SERVER_STOPPED, message, flush)
        streamers = self._table.of_role("streamer")
        self._stop(streamers, stop, STREAMER_TIME)
        self._stop([slot for slot in self._table.slots if slot not in streamers], stop, OTHERS_TIME, flush)


def raise_file_limit(wanted: int = 8192) -> str | None:
    """Raise the limit of open files to at least `wanted`; the text says what to set when that can't be done."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= wanted:
        return None
    target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    except (ValueError, OSError):
        target = soft
    if target >= wanted:
        return None
    return f"only {target} files may be open at once; for hundreds of streams set `ulimit -n {wanted}` before starting"
