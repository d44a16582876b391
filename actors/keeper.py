"""`Keeper`: what the supervisor of a cast and the house of several models have in common: child processes in a table of
slots, the control ROUTER they report to, and a loop that signals and exits of children wake.

Runs on the main thread of its process. What it decides about actors stands in `actors.supervision`.
"""

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import structlog
import zmq

from actors.child import Child, describe_exit
from actors.footprint import Footprint, footprint
from actors.priority import give_way
from actors.supervision import LONGEST_DELAY, PROBE_INTERVAL, Action, GiveUp, Kill, Slot, Start, Supervision
from protocol.codec import CodecError, encode, report_codec
from protocol.endpoints import ipc_endpoint
from protocol.messages import ActorReport, ActorState, Drain, Probe, Stop, SupervisorOrder, SystemState
from protocol.sockets import bind_router

log = structlog.get_logger()

Socket = zmq.Socket[bytes]

SLEPT = 10.0  # a gap of so many seconds in this loop means that the machine slept
FOOTPRINT_INTERVAL = 2.0  # seconds
DRAINING_INTERVAL = 0.1  # seconds between probes while draining
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


class Keeper:
    """The processes in `table`, with sockets in `folder`. Subclasses have the loop, and say what a report means."""

    def __init__(
        self,
        table: Supervision,
        folder: Path,
        http: HttpSpec | None,
        clock: Callable[[], float] = time.monotonic,
        keep_log: Callable[[bytes], None] = lambda _: None,
    ) -> None:
        """`keep_log` gets every line that the children log."""
        self._table = table
        self._folder = folder
        self._http = http
        self._clock = clock
        self._keep_log = keep_log
        self._children: dict[str, Child] = {}
        self._phase = Phase.LOADING
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
        self._handlers: dict[Socket, Callable[[], None]] = {}
        self._context: zmq.Context[Socket] = zmq.Context()

    # What subclasses have.

    def _command(self, slot: Slot) -> list[str]:
        """The arguments of Python that run the actor of a slot; not of HTTP workers."""
        return ["actors", slot.role]

    def _state(self) -> SystemState:
        """The system as others see it."""
        raise NotImplementedError

    def _broadcast(self) -> None:
        """Something has changed: tell those who have to know."""
        raise NotImplementedError

    def _hear(self, report: ActorReport, sender: bytes) -> None:
        """A child reports something; `sender` is its identity on the control channel."""
        raise NotImplementedError

    # Beginning and end.

    @contextlib.contextmanager
    def _opened(self, signals: tuple[signal.Signals, ...]) -> Iterator[None]:
        """Sockets and signal handlers. At the end every child is ended by force that still runs."""
        wake_out, wake_in = socket.socketpair()
        wake_out.setblocking(False)
        wake_in.setblocking(False)
        # A hang-up that `nohup` has the process ignore stays ignored.
        heeded = [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]
        handlers = {number: signal.signal(number, self._on_signal) for number in heeded}
        handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        handlers[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._on_replace)
        old_wakeup = signal.set_wakeup_fd(wake_in.fileno(), warn_on_full_buffer=False)
        self._poller = zmq.Poller()
        self._poller.register(wake_out.fileno(), zmq.POLLIN)
        self._wake = wake_out
        try:
            self._control = bind_router(self._context, ipc_endpoint(self._folder, "control"))
            self._listen(self._control, self._read_reports)
            yield
        finally:
            for child in self._children.values():
                child.kill()
                child.close()
            signal.set_wakeup_fd(old_wakeup)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            self._context.destroy(linger=0)
            wake_out.close()
            wake_in.close()

    def _listen(self, socket: Socket, handler: Callable[[], None]) -> None:
        """Call `handler` whenever `socket` is readable; it has to read until there is nothing left."""
        self._poller.register(socket, zmq.POLLIN)
        self._handlers[socket] = handler

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
        fds: tuple[int, ...] = ()
        if slot.role == "http":
            assert self._http is not None
            fds = (self._http.listener.fileno(),)
            command += [self._http.module, "--socket", str(fds[0]), "--options", self._http.options]
        else:
            command += self._command(slot)
        command += ["--run", str(self._folder), "--index", str(slot.index), "--epoch", str(self._epochs)]
        child = Child(
            command, self._environment(slot.role), fds, actor=slot.name, epoch=self._epochs, keep=self._keep_log
        )
        give_way(slot.role, child.pid)
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
            assert self._http is not None
            environment.update(self._http.environment)
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
            (self._folder / f"{slot.name}-{slot.epoch}").unlink(missing_ok=True)
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

    # The loop.

    def _probe(self, now: float) -> None:
        """Ask every actor whether it lives, and see what all of them take of the machine."""
        self._probes += 1
        self._next_probe = now + (DRAINING_INTERVAL if self._phase is Phase.DRAINING else PROBE_INTERVAL)
        for slot in self._table.slots:
            if slot.state == "ready":
                slot.asked = slot.asked or now
                self._order(slot, Probe(self._probes))
        if now >= self._next_footprint:
            self._next_footprint = now + FOOTPRINT_INTERVAL
            self._own = footprint(os.getpid())
            for slot in self._table.slots:
                if slot.pid:
                    slot.memory, slot.cpu = footprint(slot.pid)

    def _drain(self, slots: list[Slot], seconds: float, now: float) -> None:
        """Have these actors refuse new work and finish what runs, within so many seconds."""
        self._phase = Phase.DRAINING
        self._drain_until = now + seconds
        for slot in slots:
            self._order(slot, Drain(seconds))
        self._broadcast()
        self._drain_seq = self._probes + 1
        self._next_probe = now

    def _me(self) -> ActorState:
        return ActorState("supervisor", "supervisor", 0, os.getpid(), "ready", 0, "", *self._own)

    def _order(self, slot: Slot, order: SupervisorOrder) -> None:
        if slot.state != "ready" or slot.killed:
            return
        self._send(f"{slot.role}-{slot.index}-{slot.epoch}".encode(), order)

    def _send(self, identity: bytes, order: SupervisorOrder) -> bool:
        """Send an order; False to one that is not there. That it has gone is seen by its exit."""
        try:
            self._control.send_multipart([identity, encode(order)], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def _poll(self, seconds: float) -> None:
        """Wait until something comes, for so long at most, and read all of it."""
        ready = self._poller.poll(int(seconds * 1000))
        if not ready:
            return
        try:
            while self._wake.recv(4096):
                pass
        except BlockingIOError:
            pass
        for handler in self._handlers.values():
            handler()

    def _read_reports(self) -> None:
        while True:
            try:
                sender, *_, frame = self._control.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._hear(report_codec.decode(frame), sender)
            except CodecError as error:
                log.error("bad report", error=str(error))

    # The end.

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


def told_end(cause: str) -> int:
    """Say in the log, and to the user, that all has ended and why; returns the exit code. No cause is a good end."""
    if not cause:
        log.info("stopped")
        return 0
    log.error("stopped", cause=cause)
    print(f"callboard: {cause}", file=sys.stderr, flush=True)
    return 1
