"""What the supervisor knows and decides, without processes, sockets or a clock of its own.

A table of slots, one per actor. Events change it (`started`, `ready`, `alive`, `exited` …); `decide` says what is to be
done now. An actor that ends is replaced once it has been reaped, later and later when it keeps dying young.

    starting --Ready--> ready --exit, or killed for a hang--> dead --after back-off--> starting
                          +--replaced on demand--> stopping --exit--> dead

A failure counts towards giving up when the incarnation died before it was ready; an engine's also when it died before
its first completed step with no suspect in it (a request that may have killed it). Three in a row end the system.
Before the system has served at all, an actor that says why it can't start ends it at once.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from actors.supervision_hangs import StepWatch
from protocol.messages import ActorState, Alive, EngineStats, EngineUse, ModelCard, Ready

PROBE_INTERVAL = 0.5  # seconds between probes of one actor
SILENCE_LIMIT = 10.0  # seconds an actor's loop may leave a probe unanswered; the engine has its own rule
LAST_WORDS = 0.2  # seconds between a child's exit and its judgement, for a report that is still on its way
REPLACE_FLUSH = 3.0  # seconds a replaced engine may write prefixes to the SSD, while its streams wait
REPLACE_TIME = REPLACE_FLUSH + 2.0  # seconds an actor may take to leave when it is replaced on demand
FAILURES = 3  # in a row, of one actor, until the system gives up
STEADY = 10.0  # seconds of service after which an earlier death no longer delays a restart
FIRST_DELAY = 0.25  # seconds before the second restart in a row; doubled each time
LONGEST_DELAY = 5.0


@dataclass
class Slot:
    """One actor and its incarnation. `asked` is when the oldest unanswered probe was sent, 0 when none is open.

    `error` is what it said itself of its failure; `killed` why it was killed by us; `broken` why the streamer can't
    work with it. `failures` and `young` count failures and early deaths in a row.
    """

    role: str
    index: int
    name: str
    epoch: int = 0
    pid: int = 0
    state: str = "starting"
    endpoint: str = ""
    started: float = 0.0
    ready_at: float | None = None
    asked: float = 0.0
    stopping_at: float = 0.0
    planned: bool = False
    killed: str = ""
    late: bool = False
    exited: float = 0.0
    exit_text: str = ""
    error: str = ""
    stepped: bool = False
    suspects: bool = False
    broken: str = ""
    streams: int = 0
    ended: int = 0
    answered: int = 0
    failures: int = 0
    young: int = 0
    restart_at: float | None = None
    restarts: int = 0
    crashes: int = 0
    memory: int = 0
    cpu: float = 0.0
    http: dict[str, int] = field(default_factory=dict)


class Start(NamedTuple):
    """Start a process for the slot."""

    slot: Slot


class Kill(NamedTuple):
    """End the slot's process by force."""

    slot: Slot
    why: str


class GiveUp(NamedTuple):
    """End the system."""

    why: str


Action = Start | Kill | GiveUp


class Supervision:
    """The slots of one instance and the rules about them."""

    def __init__(
        self,
        tokenizers: int,
        http_workers: int,
        start_timeout: float,
        hang_timeout: float | None = None,
        *,
        cast: bool = True,
    ) -> None:
        """Without a `cast` there are HTTP workers alone."""
        self.slots = [Slot("http", i, f"http{i}") for i in range(http_workers)]
        if cast:
            self.slots += [
                Slot("streamer", 0, "streamer"),
                *(Slot("tokenizer", i, f"tokenizer{i}") for i in range(tokenizers)),
                Slot("engine", 0, "engine"),
            ]
        self.start_timeout = start_timeout
        self.card: ModelCard | None = None
        self.engine = EngineStats()
        self.served = False
        self._steps = StepWatch(hang_timeout)
        self._http_of_the_dead: Counter[str] = Counter()

    def slot(self, role: str, index: int, epoch: int) -> Slot | None:
        """The slot a report is about; None when it comes from an earlier incarnation."""
        for slot in self.slots:
            if (slot.role, slot.index, slot.epoch) == (role, index, epoch):
                return slot
        return None

    def of_role(self, role: str) -> list[Slot]:
        """All slots of a role."""
        return [slot for slot in self.slots if slot.role == role]

    def all_ready(self) -> bool:
        """Whether every actor can serve."""
        return all(slot.state == "ready" for slot in self.slots)

    # Events.

    def started(self, slot: Slot, pid: int, epoch: int, now: float) -> None:
        """A process was started for the slot."""
        fresh = Slot(slot.role, slot.index, slot.name, epoch, pid, started=now)
        fresh.failures, fresh.young = slot.failures, slot.young
        if slot.epoch:
            fresh.restarts, fresh.crashes = slot.restarts + 1, slot.crashes + (not slot.planned)
        slot.__dict__.update(fresh.__dict__)

    def ready(self, report: Ready, now: float) -> Slot | None:
        """An actor reports that it can serve. Returns its slot."""
        slot = self.slot(report.role, report.index, report.epoch)
        if slot is not None and slot.state == "starting" and not slot.killed:
            slot.state, slot.endpoint, slot.ready_at = "ready", report.endpoint, now
            if report.card is not None:
                self.card = report.card
            if slot.role == "engine":
                self._steps.begin(now)
            self.served = self.served or self.all_ready()
        return slot

    def alive(self, report: Alive, now: float) -> None:
        """An actor's loop answered a probe."""
        slot = self.slot(report.role, report.index, report.epoch)
        if slot is None:
            return
        if report.stats is not None and slot.state == "ready":
            self._steps.answered(report.stats, slot.asked, now)
            self.engine = report.stats
        slot.asked, slot.answered = 0.0, report.seq
        slot.streams, slot.ended, slot.http = report.streams, report.ended, report.http

    def used(self, report: EngineUse) -> None:
        """The streamer says what an engine incarnation was given, or has completed."""
        slot = self.slot("engine", 0, report.epoch)
        if slot is not None:
            slot.stepped |= report.stepped
            slot.suspects = report.suspects
            slot.broken = slot.broken or report.broken

    def failed(self, role: str, index: int, epoch: int, message: str) -> None:
        """An actor says itself why it ends."""
        slot = self.slot(role, index, epoch)
        if slot is not None:
            slot.error = f"failed: {message}" if slot.ready_at is not None else f"can't start: {message}"

    def stopping(self, slot: Slot, now: float) -> None:
        """The slot's actor was asked to leave, to be replaced."""
        slot.state, slot.stopping_at, slot.planned = "stopping", now, True

    def exited(self, slot: Slot, text: str, now: float) -> None:
        """The slot's process has ended and was reaped; `text` says how."""
        slot.state, slot.exited, slot.exit_text = "dead", now, text
        self._http_of_the_dead.update(slot.http)
        slot.http = {}
        if slot.role == "engine":
            self.engine = EngineStats()

    def excuse(self, seconds: float) -> None:
        """The supervisor itself stood still for so long (a laptop slept): nothing is judged by that time."""
        self._steps.excuse(seconds)
        for slot in self.slots:
            slot.asked = 0.0
            slot.started += seconds
            slot.stopping_at += seconds
            if slot.ready_at is not None:
                slot.ready_at += seconds

    # Decisions.

    def decide(self, now: float) -> list[Action]:
        """What is to be done now. A `Kill` is told once; `Start` until `started` is called."""
        actions: list[Action] = []
        for slot in self.slots:
            if slot.state == "dead":
                if slot.restart_at is None and now - slot.exited >= LAST_WORDS:
                    cause = self._judge(slot)
                    if cause:
                        return [GiveUp(cause)]
                if slot.restart_at is not None and now >= slot.restart_at:
                    actions.append(Start(slot))
            elif slot.pid and not slot.killed:
                why = self._must_end(slot, now)
                if why:
                    slot.killed = why
                    actions.append(Kill(slot, why))
        return actions

    def _must_end(self, slot: Slot, now: float) -> str | None:
        if slot.state == "stopping":
            late = now - slot.stopping_at > REPLACE_TIME
            return f"did not leave within {REPLACE_TIME:g} s" if late else None
        if slot.state == "starting":
            slot.late = now - slot.started > self.start_timeout
            if not slot.late:
                return None
            return (
                f"was not ready after {self.start_timeout:g} s; "
                "a large model on a slow disk may need a longer --start-timeout"
            )
        if slot.role == "engine":
            return slot.broken or self._steps.hangs(slot.asked, now)
        if slot.asked and now - slot.asked > SILENCE_LIMIT:
            return f"hangs: it has not answered for {now - slot.asked:.1f} s"
        return None

    def _judge(self, slot: Slot) -> str | None:
        """Account for a death: when to start again, or why to give up."""
        if not self.served and (slot.error or slot.late):
            return self.cause(slot)
        was_ready = slot.ready_at is not None
        unproved = slot.role == "engine" and not slot.stepped
        if slot.planned:
            slot.failures = slot.young = 0
        elif not was_ready or (unproved and not slot.suspects):
            slot.failures += 1
        elif not unproved:
            slot.failures = 0
        if slot.failures >= FAILURES:
            return f"{self.cause(slot)} (failure {slot.failures} in a row)"
        if slot.ready_at is not None and slot.exited - slot.ready_at >= STEADY:
            slot.young = 0
        delay = 0.0 if not slot.young else min(LONGEST_DELAY, FIRST_DELAY * 2.0 ** (slot.young - 1))
        slot.young += not slot.planned
        slot.restart_at = slot.exited + delay
        return None

    @staticmethod
    def cause(slot: Slot) -> str:
        """How the slot's actor came to its end, for people."""
        if slot.error:
            return f"{slot.name} {slot.error}"
        if slot.killed:
            return f"{slot.name} (pid {slot.pid}) {slot.killed}"
        return f"{slot.name} (pid {slot.pid}) {slot.exit_text}"

    def states(self) -> list[ActorState]:
        """All slots as others see them: an actor that is being killed is dead for them."""
        return [
            ActorState(
                s.name,
                s.role,
                s.index,
                s.pid,
                "dead" if s.killed and not s.planned else s.state,
                s.epoch,
                s.endpoint,
                s.memory,
                s.cpu,
                s.restarts,
                s.crashes,
            )
            for s in self.slots
        ]

    def http(self) -> dict[str, int]:
        """What all HTTP workers have answered since the start, by `METHOD PATH STATUS`."""
        total = Counter(self._http_of_the_dead)
        for slot in self.of_role("http"):
            total.update(slot.http)
        return dict(total)
