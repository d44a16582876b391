"""The supervisor: starts the actors and HTTP workers, watches and replaces them, and ends the system in good order.

Runs in the `callboard serve` process on its main thread, the only one in the system that reads signals. SIGTERM,
SIGINT and SIGHUP drain; a second one stops at once. SIGUSR1 replaces the engine. What it decides stands in
`actors.supervision`; here are the processes, the sockets and the clock.
"""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

import structlog
import zmq

from actors.awake import Awake
from actors.blas import blas_environment
from actors.child import Child, describe_exit
from actors.config import CastConfig, write_config
from actors.footprint import Footprint, footprint
from actors.rundir import RunDirectory
from actors.supervision import (
    LONGEST_DELAY,
    PROBE_INTERVAL,
    REPLACE_FLUSH,
    Action,
    GiveUp,
    Kill,
    Slot,
    Start,
    Supervision,
)
from actors.trail import trail_path
from protocol import errors
from protocol.codec import CodecError, encode, report_codec
from protocol.endpoints import ServerRecord, ipc_endpoint
from protocol.messages import (
    PROTOCOL_VERSION,
    ActorReport,
    ActorState,
    Alive,
    Drain,
    EngineUse,
    Probe,
    Ready,
    StartFailed,
    Stop,
    SupervisorOrder,
    SystemState,
)
from protocol.sockets import bind_router

log = structlog.get_logger()

SLEPT = 10.0  # a gap of so many seconds in this loop means that the machine slept
FOOTPRINT_INTERVAL = 2.0  # seconds
STREAMER_TIME = 1.5  # seconds the streamer has to end its streams
OTHERS_TIME = 2.0  # seconds all others have to leave
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Phase(Enum):
    """Where the system is in its life."""

    LOADING = "loading"
    SERVING = "ok"
    DRAINING = "draining"


@dataclass(frozen=True)
class HttpSpec:
    """How to run the HTTP workers: the module, its options as JSON, and the listening socket they share.

    `environment` is theirs alone, for what may not stand on a command line.
    """

    module: str
    options: str
    listener: socket.socket
    workers: int
    url: str
    environment: Mapping[str, str] = field(default_factory=dict)


class Supervisor:
    """One running instance. `run` returns the exit code of `callboard serve`."""

    def __init__(
        self,
        config: CastConfig,
        run_dir: RunDirectory,
        http: HttpSpec,
        on_ready: Callable[[Supervision], None],
        clock: Callable[[], float] = time.monotonic,
        keep_log: Callable[[bytes], None] = lambda _: None,
    ) -> None:
        """`keep_log` gets every line that the children log."""
        self._config = config
        self._run_dir = run_dir
        self._http = http
        self._on_ready = on_ready
        self._clock = clock
        self._keep_log = keep_log
        self._flush_timeout = config.flush_timeout if config.prefix_cache and config.ssd_cache else 0.0
        self._table = Supervision(config.tokenizers, http.workers, config.start_timeout, config.hang_timeout)
        self._children: dict[str, Child] = {}
        self._phase = Phase.LOADING
        self._failed = ""
        self._epochs = 0
        self._probes = 0
        self._next_probe = 0.0
        self._drain_until = 0.0
        self._drain_seq = 0
        self._signals = 0
        self._replace_engine = False
        self._started = time.time()
        self._next_footprint = 0.0
        self._own = Footprint(0, 0.0)
        self._awake = Awake()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def run(self) -> int:
        """Serve until a signal or a failure. 0 after an orderly end, 1 with the cause on stderr otherwise."""
        wake_out, wake_in = socket.socketpair()
        wake_out.setblocking(False)
        wake_in.setblocking(False)
        # A hang-up that `nohup` has the process ignore stays ignored.
        heeded = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        handlers = {number: signal.signal(number, self._on_signal) for number in heeded}
        handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        handlers[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._on_replace)
        old_wakeup = signal.set_wakeup_fd(wake_in.fileno(), warn_on_full_buffer=False)
        self._poller = zmq.Poller()
        self._poller.register(wake_out.fileno(), zmq.POLLIN)
        self._wake = wake_out
        try:
            write_config(self._config)
            self._control = bind_router(self._context, ipc_endpoint(self._run_dir.path, "control"))
            self._poller.register(self._control, zmq.POLLIN)
            for slot in self._table.slots:
                self._spawn(slot)
            cause = self._serve()
            self._stop_all(cause)
        finally:
            self._awake.update(False)
            for child in self._children.values():
                child.kill()
                child.close()
            signal.set_wakeup_fd(old_wakeup)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            self._context.destroy(linger=0)
            wake_out.close()
            wake_in.close()
            self._run_dir.remove()
        if not cause:
            log.info("stopped")
        else:
            log.error("stopped", cause=cause)
            print(f"callboard: {cause}", file=sys.stderr, flush=True)
        return 1 if cause else 0

    def _on_signal(self, number: int, _frame: object) -> None:
        self._signals += 1

    def _on_replace(self, _number: int, _frame: object) -> None:
        self._replace_engine = True

    # Children.

    def _spawn(self, slot: Slot) -> None:
        last = self._children.pop(slot.name, None)
        if last is not None:
            last.close()
        self._epochs += 1
        command = [sys.executable, "-P", "-m"]
        if slot.role == "http":
            fd = self._http.listener.fileno()
            command += [self._http.module, "--socket", str(fd), "--options", self._http.options]
            fds: tuple[int, ...] = (fd,)
        else:
            command += ["actors", slot.role]
            fds = ()
        if slot.role == "engine":  # the streamer has read the trail of the last one, if it is there
            trail_path(self._run_dir.path, slot.epoch).unlink(missing_ok=True)
        command += ["--run", str(self._run_dir.path), "--index", str(slot.index), "--epoch", str(self._epochs)]
        child = Child(
            command, self._environment(slot.role), fds, actor=slot.name, epoch=self._epochs, keep=self._keep_log
        )
        self._children[slot.name] = child
        self._table.started(slot, child.pid, self._epochs, self._clock())
        if self._phase is not Phase.LOADING:
            log.info("actor started", actor=slot.name, child=child.pid, epoch=slot.epoch)

    def _environment(self, role: str) -> dict[str, str]:
        environment = dict(os.environ, TOKENIZERS_PARALLELISM="false")
        environment.pop("CALLBOARD_API_KEY", None)
        if sys.stderr.isatty():
            environment["CALLBOARD_LOG_FORMAT"] = "text"
        if role == "http":
            environment.update(self._http.environment)
        if role == "engine":
            blas = blas_environment(self._config.blas_threads)
            environment.update(blas)
            if blas:
                log.info("BLAS", library=blas["LD_PRELOAD"], threads=blas["OPENBLAS_NUM_THREADS"])
        return environment

    def _reap(self) -> None:
        for slot in self._table.slots:
            child = self._children.get(slot.name)
            if child is None or slot.state == "dead":
                continue
            code = child.exit_code()
            if code is None:
                continue
            text = describe_exit(code)
            if slot.ready_at is None and (words := child.last_words()):
                text += f": {words}"
            self._table.exited(slot, text, self._clock())
            if slot.planned:
                log.info("actor left", actor=slot.name, child=slot.pid, epoch=slot.epoch)
            else:
                log.error("actor died", actor=slot.name, child=slot.pid, epoch=slot.epoch, how=slot.killed or text)
            # A socket file outlives a killed process, and nobody binds that path again.
            (self._run_dir.path / f"{slot.name}-{slot.epoch}").unlink(missing_ok=True)
            self._broadcast()

    def _act(self, actions: list[Action]) -> str | None:
        """Do what was decided; the cause when the system has to end."""
        for action in actions:
            match action:
                case Start(slot):
                    try:
                        self._spawn(slot)
                    except OSError as error:  # no process or memory to be had just now
                        log.error("actor not started", actor=slot.name, error=str(error))
                        slot.restart_at = self._clock() + LONGEST_DELAY
                    self._broadcast()
                case Kill(slot, why):
                    log.error("actor killed", actor=slot.name, child=slot.pid, epoch=slot.epoch, why=why)
                    self._children[slot.name].end()
                    self._broadcast()
                case GiveUp(why):
                    return why
        return None

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
                self._on_ready(self._table)
            if self._signals and self._phase is not Phase.DRAINING:
                if self._phase is Phase.LOADING:
                    return ""
                self._begin_drain(now)
            if self._phase is Phase.DRAINING and self._drained(now):
                return ""
            if now >= self._next_probe:
                self._probe(now)

    def _begin_drain(self, now: float) -> None:
        self._phase = Phase.DRAINING
        self._drain_until = now + self._config.drain_timeout
        log.info("draining", at_most_seconds=self._config.drain_timeout, running=self._table.engine.running)
        order = Drain(self._config.drain_timeout)
        for slot in [*self._table.of_role("streamer"), *self._table.of_role("http")]:
            self._order(slot, order)
        self._broadcast()
        self._drain_seq = self._probes + 1
        self._next_probe = now

    def _drained(self, now: float) -> bool:
        if self._signals > 1 or now > self._drain_until:
            return True
        watched = [*self._table.of_role("streamer"), *self._table.of_role("http")]
        return all(slot.answered >= self._drain_seq and slot.streams == 0 for slot in watched)

    def _probe(self, now: float) -> None:
        self._probes += 1
        self._next_probe = now + (0.1 if self._phase is Phase.DRAINING else PROBE_INTERVAL)
        for slot in self._table.slots:
            if slot.state == "ready":
                slot.asked = slot.asked or now
                self._order(slot, Probe(self._probes))
        self._awake.update(any(slot.streams for slot in self._table.of_role("streamer")))
        if now >= self._next_footprint:
            self._next_footprint = now + FOOTPRINT_INTERVAL
            self._own = footprint(os.getpid())
            for slot in self._table.slots:
                if slot.pid:
                    slot.memory, slot.cpu = footprint(slot.pid)
        self._show_http_workers()

    def _show_http_workers(self) -> None:
        """Bring `/health` up to date; a word now and then also tells the workers that we live."""
        state = self._state()
        for slot in self._table.of_role("http"):
            self._order(slot, state)

    def _state(self) -> SystemState:
        table = self._table
        status = "failed" if self._failed else self._phase.value
        if status == Phase.SERVING.value and not table.all_ready():
            status = "degraded"
        me = ActorState("supervisor", "supervisor", 0, os.getpid(), "ready", 0, "", *self._own)
        return SystemState(
            status,
            self._config.model_name,
            table.states(),
            table.engine,
            table.card,
            self._failed,
            table.http(),
            me,
            self._started,
        )

    def _broadcast(self) -> None:
        state = self._state()
        # The streamer first: it must know of an engine before HTTP workers send it requests.
        for slot in sorted(self._table.slots, key=lambda slot: slot.role != "streamer"):
            self._order(slot, state)

    def _order(self, slot: Slot, order: SupervisorOrder) -> None:
        if slot.state != "ready" or slot.killed:
            return
        identity = f"{slot.role}-{slot.index}-{slot.epoch}".encode()
        try:
            self._control.send_multipart([identity, encode(order)], zmq.NOBLOCK)
        except zmq.ZMQError:
            pass  # gone or going; its exit is seen by itself

    def _poll(self, seconds: float) -> None:
        if not self._poller.poll(int(seconds * 1000)):
            return
        try:
            while self._wake.recv(4096):
                pass
        except BlockingIOError:
            pass
        while True:
            try:
                frames = self._control.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._hear(report_codec.decode(frames[-1]))
            except CodecError as error:
                log.error("bad report", error=str(error))

    def _hear(self, report: ActorReport) -> None:
        match report:
            case Ready():
                slot = self._table.ready(report, self._clock())
                if slot is None:
                    return
                if slot.role == "streamer":
                    self._publish(report.endpoint)
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
                    self._show_http_workers()

    def _publish(self, endpoint: str) -> None:
        self._run_dir.publish(
            ServerRecord(
                name=self._run_dir.name,
                pid=os.getpid(),
                endpoint=endpoint,
                http=self._http.url,
                protocol=PROTOCOL_VERSION,
                run_dir=str(self._run_dir.path),
                model=self._config.model_name,
            )
        )

    # The end.

    def _stop_all(self, cause: str) -> None:
        """End every actor: the streamer first, so that every stream gets its end; then all others."""
        message = f"the server stopped: {cause}" if cause else "the server was stopped"
        flush = self._flush_timeout
        stop = Stop(errors.ENGINE_LOST if "engine" in cause else errors.SERVER_STOPPED, message, flush)
        streamers = self._table.of_role("streamer")
        self._stop(streamers, stop, STREAMER_TIME)
        self._stop([slot for slot in self._table.slots if slot not in streamers], stop, OTHERS_TIME, flush)

    def _stop(self, slots: list[Slot], order: Stop, seconds: float, flush: float = 0.0) -> None:
        """Have them stop within `seconds`, the engine within `flush` more unless a second signal came."""
        for slot in slots:
            self._order(slot, order)
            if self._runs(slot) and (slot.state == "starting" or slot.killed):
                self._children[slot.name].kill()
        began = self._clock()

        def late(slot: Slot) -> bool:
            more = flush if slot.role == "engine" and self._signals < 2 else 0.0
            return self._clock() - began > seconds + more

        while any(self._runs(slot) and not late(slot) for slot in slots):
            self._poll(0.05)
        for slot in slots:
            if self._runs(slot):
                log.warning("killed, as it did not stop", actor=slot.name, pid=slot.pid)
                self._children[slot.name].kill()

    def _runs(self, slot: Slot) -> bool:
        child = self._children.get(slot.name)
        return child is not None and child.exit_code() is None


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
