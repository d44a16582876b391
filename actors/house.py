"""The house of several models: it has the HTTP workers, and loads and unloads models, each as a cast process.

Runs in the `callboard serve` process on its main thread, the only one in the system that reads signals. Which models
are loaded stands in `actors.residency`; here are the processes, the sockets and the clock. SIGTERM, SIGINT and SIGHUP
drain all models; a second one stops at once. SIGUSR1 replaces the engines of all models.
"""

import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog
import zmq

from actors.cast_child import CastChild
from actors.config import CastConfig
from actors.house_orders import HouseOrders
from actors.keeper import OTHERS_TIME, SIGNALS, SLEPT, STREAMER_TIME, HttpSpec, Keeper, Phase, told_end
from actors.link import ROLE
from actors.quotas import Quotas
from actors.residency import Load, Place, Residency, Unload
from actors.rundir import RunDirectory
from actors.supervision import Supervision
from protocol import errors
from protocol.codec import CodecError, encode, model_order_codec
from protocol.endpoints import HOUSE_SOCKET, ServerRecord, ipc_endpoint
from protocol.messages import (
    PROTOCOL_VERSION,
    ActorReport,
    Alive,
    CallFailed,
    CastUse,
    Charge,
    Drain,
    ModelAnswer,
    ModelOrder,
    ModelsState,
    Probe,
    Ready,
    StartFailed,
    Stop,
    SystemState,
    WantModel,
)
from protocol.sockets import bind_router

log = structlog.get_logger()

CAST_TIME = STREAMER_TIME + OTHERS_TIME + 1.0  # seconds a cast may take to end beyond its flush, once it was told to
START_TIMEOUT = 60.0  # seconds until an HTTP worker must be ready


@dataclass(frozen=True)
class HousePlan:
    """What a house serves. `configs` are those of the models that can be loaded, by name, without run directory and
    memory limit; `preload` are loaded at the start beside the pinned ones. Times are in seconds."""

    residency: Residency
    configs: Mapping[str, CastConfig]
    preload: tuple[str, ...] = ()
    drain_timeout: float = 30.0


@dataclass
class _Running:
    """A model's cast: its process, the last that it said of itself, and since when it has to be gone."""

    place: Place
    child: CastChild
    state: SystemState | None = None
    stop_at: float | None = None
    order: Drain | Stop | None = None
    delivered: bool = False


class House(Keeper):
    """One running house. `run` returns the exit code of `callboard serve`."""

    def __init__(
        self,
        plan: HousePlan,
        run_dir: RunDirectory,
        http: HttpSpec,
        on_ready: Callable[[Residency, Supervision], None],
        clock: Callable[[], float] = time.monotonic,
        keep_log: Callable[[bytes], None] = lambda _: None,
    ) -> None:
        """`keep_log` gets every line that the children log."""
        super().__init__(Supervision(0, http.workers, START_TIMEOUT, cast=False), run_dir.path, http, clock, keep_log)
        self._plan = plan
        self._residency = plan.residency
        self._run_dir = run_dir
        self._on_ready = on_ready
        self._casts: dict[str, _Running] = {}
        self._cast_numbers = 0
        self._orders = HouseOrders(self._residency)
        self._quotas = Quotas()
        self._shown: ModelsState | None = None
        self._failed = ""
        self._published: ServerRecord | None = None

    def run(self) -> int:
        """Serve until a signal or a failure. 0 after an orderly end, 1 with the cause on stderr otherwise."""
        cause = ""
        try:
            with self._opened(SIGNALS):
                self._models = bind_router(self._context, self._models_endpoint)
                self._listen(self._models, self._read_orders)
                for slot in self._table.slots:
                    self._spawn(slot)
                self._publish()
                cause = self._serve()
                self._stop_all(cause)
        finally:
            for cast in self._casts.values():
                cast.child.kill()
            self._run_dir.remove()
        return told_end(cause)

    @property
    def _models_endpoint(self) -> str:
        return ipc_endpoint(self._folder, HOUSE_SOCKET)

    # The loop.

    def _serve(self) -> str:
        """Watch until the system has to end. Returns the cause, empty for an orderly end."""
        last = self._clock()
        first = [self._residency.find(name) for name in self._plan.preload]
        preload = [place for place in self._residency.places.values() if place.pinned or place in first]
        for place in preload:
            self._residency.want(place, last)
        while True:
            self._poll(0.05 if self._is_hurried() else 0.2)
            now = self._clock()
            if now - last > SLEPT:
                log.warning("the house stood still", seconds=round(now - last, 1))
                self._table.excuse(now - last)
                self._residency.excuse(now - last)
                for cast in self._casts.values():
                    cast.child.excuse()
            last = now
            self._reap()
            self._watch_casts(now)
            if self._replace_engine:
                self._replace_engine = False
                for cast in self._casts.values():
                    cast.child.replace_engine()
            cause = self._act(self._table.decide(now))
            if cause is not None:
                self._failed = cause
                self._broadcast()
                return cause
            if self._phase is Phase.LOADING:
                preload = [place for place in preload if not (place.loads or place.message)]
                for place in preload:
                    self._residency.want(place, now)
                if not preload and self._table.all_ready():
                    self._phase = Phase.SERVING
                    self._broadcast()
                    self._on_ready(self._residency, self._table)
            if self._phase is not Phase.DRAINING:
                if self._signals:
                    if self._phase is Phase.LOADING:
                        return ""
                    self._begin_drain(now)
                else:
                    self._reside(now)
            elif self._drained(now):
                return ""
            if now >= self._next_probe:
                self._probe(now)
            elif self._residency_changed(now):
                self._show_models(now)

    def _is_hurried(self) -> bool:
        return any(slot.state == "dead" for slot in self._table.slots) or any(
            cast.stop_at is not None or cast.child.left for cast in self._casts.values()
        )

    def _reside(self, now: float) -> None:
        """Load and unload as residency says, and answer those whose orders are done."""
        for place in self._orders.waiting_for():
            self._residency.want(place, now)
        for action in self._residency.decide(now):
            place = self._residency.places[action.name]
            match action:
                case Load():
                    self._load(place, now)
                case Unload():
                    self._unload(place, now)
        for sender, socket, answer in self._orders.done(now):
            self._answer(socket, sender, answer)

    def _load(self, place: Place, now: float) -> None:
        name = place.model.name
        self._residency.started(place, now)
        self._cast_numbers += 1
        self._epochs += 1
        folder = self._folder / f"m{self._cast_numbers}"
        try:
            child = CastChild(
                *(self._plan.configs[name], folder, place.model.claim, self._cast_numbers, self._epochs),
                *(self._environment(ROLE), self._keep_log, now),
            )
        except OSError as error:
            log.error("model not loaded", model=name, error=str(error))
            self._residency.ended(place, f"it can't be started: {error}", now)
            return
        log.info("loading", model=name, cast=child.name, child=child.pid, claim=place.model.claim)
        self._casts[name] = _Running(place, child)

    def _unload(self, place: Place, now: float) -> None:
        cast = self._casts[place.model.name]
        seconds = self._plan.configs[place.model.name].drain_timeout
        log.info("unloading", model=place.model.name, cast=cast.child.name, streams=place.streams)
        self._tell(cast, Drain(seconds))
        cast.stop_at = now + seconds + 1.0

    def _tell(self, cast: _Running, order: Drain | Stop) -> None:
        """Give an order, or keep it for a cast that has just been started and isn't there yet."""
        cast.order = order
        cast.delivered = self._send(cast.child.identity, order)

    def _watch_casts(self, now: float) -> None:
        """See which casts have ended, and end those that hang or don't leave."""
        for name, cast in list(self._casts.items()):
            ended = cast.child.ended(now)
            if ended is not None:
                del self._casts[name]
                self._residency.ended(cast.place, ended, now)
                shutil.rmtree(cast.child.folder, ignore_errors=True)
                if cast.stop_at is None:
                    log.error("model lost", model=name, cast=cast.child.name, how=ended)
                else:
                    log.info("unloaded", model=name, cast=cast.child.name)
                self._broadcast()
            elif cast.stop_at is not None and now >= cast.stop_at:
                if isinstance(cast.order, Stop):
                    cast.child.end("it did not stop")
                    cast.stop_at = now + CAST_TIME
                else:
                    flush = self._plan.configs[name].flush_timeout
                    self._tell(cast, Stop(errors.SERVER_STOPPED, "the model was unloaded", flush))
                    cast.stop_at = now + CAST_TIME + flush
            elif why := cast.child.hangs(now):
                log.error("cast killed", model=name, cast=cast.child.name, child=cast.child.pid, why=why)
                cast.child.end(why)

    def _probe(self, now: float) -> None:
        super()._probe(now)
        for cast in self._casts.values():
            cast.child.probed(now)
            self._send(cast.child.identity, Probe(self._probes))
        self._show_models(now)
        self._publish()

    # What others are told.

    def _residency_changed(self, now: float) -> bool:
        shown = self._shown.models if self._shown else []
        places = self._residency.places.values()
        return [(m.state, m.endpoint, m.pinned) for m in shown] != [
            (place.state, place.endpoint if place.state == "ready" else "", place.pinned) for place in places
        ]

    def _show_models(self, now: float) -> None:
        """Tell the HTTP workers of everything; a word now and then also tells them that we live."""
        residency = self._residency
        self._shown = ModelsState(residency.states(now), residency.budget, residency.claimed)
        state = self._state()
        for slot in self._table.of_role("http"):
            self._order(slot, state)
            self._order(slot, self._shown)

    def _broadcast(self) -> None:
        self._show_models(self._clock())

    def _state(self) -> SystemState:
        status = "failed" if self._failed else self._phase.value
        if status == Phase.SERVING.value and not self._table.all_ready():
            status = "degraded"
        return SystemState(
            status,
            "",
            [*self._table.states(), *(cast.child.actor_state(cast.place.state) for cast in self._casts.values())],
            message=self._failed,
            http=self._table.http(),
            supervisor=self._me(),
            started=self._started,
        )

    def _publish(self) -> None:
        """Write down how clients find us, when that has changed."""
        assert self._http is not None
        first = next(iter(self._residency.places.values()))
        record = ServerRecord(
            name=self._run_dir.name,
            pid=os.getpid(),
            endpoint=first.endpoint,
            http=self._http.url,
            protocol=PROTOCOL_VERSION,
            run_dir=str(self._run_dir.path),
            model=first.model.name,
            models=self._models_endpoint,
            stop_time=self._plan.drain_timeout + max(config.flush_timeout for config in self._plan.configs.values()),
        )
        if record != self._published and self._run_dir.publish(record):
            self._published = record

    # What others tell.

    def _hear(self, report: ActorReport, sender: bytes) -> None:
        now = self._clock()
        match report:
            case WantModel():
                place = self._residency.find(report.model)
                if place is not None:
                    self._residency.want(place, now, report.keep_alive)
            case ModelOrder():
                self._take_order(report, sender, self._control, now)
            case Charge():
                self._answer(self._control, sender, self._charged(report, now))
            case SystemState() | CastUse():
                self._hear_cast(report, sender, now)
            case Ready(role="cast") | StartFailed(role="cast") | Alive(role="cast"):
                self._hear_cast(report, sender, now)
            case Ready():
                slot = self._table.ready(report, now)
                if slot is not None:
                    self._broadcast()  # what a cast says of itself is only read of a model that is loaded
                    for cast in self._casts.values():
                        if cast.state is not None:
                            self._order(slot, cast.state)
                    if self._phase is Phase.DRAINING:
                        self._order(slot, Drain(max(0.0, self._drain_until - now)))
            case StartFailed():
                self._table.failed(report.role, report.index, report.epoch, report.message)
            case Alive():
                self._table.alive(report, now)

    def _charged(self, charge: Charge, now: float) -> ModelAnswer:
        done = self._quotas.charge(charge, now)
        if isinstance(done, CallFailed):
            return ModelAnswer(charge.ref, done.code, done.message, retry_after=done.retry_after)
        return ModelAnswer(charge.ref)

    def _hear_cast(
        self, report: SystemState | CastUse | Ready | StartFailed | Alive, sender: bytes, now: float
    ) -> None:
        cast = next((cast for cast in self._casts.values() if cast.child.identity == sender), None)
        if cast is None:
            return
        cast.child.heard()
        if cast.order is not None and not cast.delivered:
            self._tell(cast, cast.order)
        match report:
            case SystemState():
                cast.state = report
                cast.child.learn(report.actors)
                ready = {actor.role: actor for actor in report.actors if actor.state == "ready"}
                cast.place.endpoint = ready["streamer"].endpoint if "streamer" in ready else ""
                cast.place.engine = ready["engine"].epoch if "engine" in ready else 0
                for slot in self._table.of_role("http"):
                    self._order(slot, report)
            case CastUse():
                self._residency.used(cast.place, report.streams, report.ended, report.memory, now)
            case Ready():
                self._residency.ready(cast.place, now)
                if cast.place.state == "ready":
                    log.info("loaded", model=cast.place.model.name, seconds=round(cast.place.takes, 2))
            case StartFailed():
                cast.child.cause = report.message

    def _read_orders(self) -> None:
        while True:
            try:
                sender, *_, frame = self._models.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._take_order(model_order_codec.decode(frame), sender, self._models, self._clock())
            except CodecError as error:
                self._answer(self._models, sender, ModelAnswer(-1, errors.INVALID_REQUEST, str(error)))

    def _take_order(self, order: ModelOrder, sender: bytes, socket: zmq.Socket[bytes], now: float) -> None:
        if self._phase is Phase.DRAINING and order.action != "list":
            answer = ModelAnswer(order.rid, errors.DRAINING, "the server is being stopped", retry_after=1.0)
            self._answer(socket, sender, answer)
            return
        self._orders.take(order, sender, socket, now)
        for place in self._orders.engines_to_replace():
            self._casts[place.model.name].child.replace_engine()
        self._reside(now)

    def _answer(self, socket: zmq.Socket[bytes], sender: bytes, answer: ModelAnswer) -> None:
        try:
            socket.send_multipart([sender, encode(answer)], zmq.NOBLOCK)
        except zmq.ZMQError:
            pass  # who asked has gone

    # The end.

    def _begin_drain(self, now: float) -> None:
        log.info("draining", at_most_seconds=self._plan.drain_timeout, models=list(self._casts))
        self._give_up_orders()
        self._drain(self._table.of_role("http"), self._plan.drain_timeout, now)
        for cast in self._casts.values():
            self._tell(cast, Drain(self._plan.drain_timeout))
            cast.stop_at = now + self._plan.drain_timeout + 1.0

    def _give_up_orders(self) -> None:
        for sender, socket, answer in self._orders.give_up():
            self._answer(socket, sender, answer)

    def _drained(self, now: float) -> bool:
        if self._signals > 1 or now > self._drain_until:
            return True
        workers = self._table.of_role("http")
        return not self._casts and all(slot.answered >= self._drain_seq and slot.streams == 0 for slot in workers)

    def _stop_all(self, cause: str) -> None:
        """End the casts, so that every stream gets its end; then the HTTP workers."""
        message = f"the server stopped: {cause}" if cause else "the server was stopped"
        self._phase = Phase.DRAINING
        self._give_up_orders()
        now = self._clock()
        for name, cast in self._casts.items():
            flush = self._plan.configs[name].flush_timeout if self._signals < 2 else 0.0
            self._tell(cast, Stop(errors.SERVER_STOPPED, message, flush))
            cast.stop_at = now + CAST_TIME + flush
            if cast.child.silent:
                cast.child.end("it was not there yet")
        while self._casts:
            self._poll(0.05)
            self._watch_casts(self._clock())
        self._stop(self._table.slots, Stop(errors.SERVER_STOPPED, message), OTHERS_TIME)
