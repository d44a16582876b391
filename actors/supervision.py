"""What the supervisor knows and decides, without processes, sockets or a clock of its own.

A table of slots, one per actor; events change it, and `failure` says when the system has to end and why. In this
version the death of any actor ends the system (fail-stop).
"""

from dataclasses import dataclass

from protocol.messages import ActorState, Alive, EngineStats, ModelCard, Ready

PROBE_INTERVAL = 0.5  # seconds between probes of one actor
SILENCE_LIMIT = 60.0  # seconds an actor's loop may leave a probe unanswered
LAST_WORDS = 0.2  # seconds between a child's exit and its judgement, for a report that is still on its way


@dataclass
class Slot:
    """One actor. `asked` is when the oldest unanswered probe was sent, 0 when none is open."""

    role: str
    index: int
    name: str
    epoch: int = 0
    pid: int = 0
    state: str = "starting"
    endpoint: str = ""
    started: float = 0.0
    asked: float = 0.0
    exited: float = 0.0
    exit_text: str = ""
    error: str = ""
    streams: int = 0
    answered: int = 0


class Supervision:
    """The slots of one instance and the rules about them."""

    def __init__(self, tokenizers: int, http_workers: int, start_timeout: float) -> None:
        self.slots = [
            *(Slot("http", i, f"http{i}") for i in range(http_workers)),
            Slot("streamer", 0, "streamer"),
            *(Slot("tokenizer", i, f"tokenizer{i}") for i in range(tokenizers)),
            Slot("engine", 0, "engine"),
        ]
        self.start_timeout = start_timeout
        self.card: ModelCard | None = None
        self.engine = EngineStats()

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

    def started(self, slot: Slot, pid: int, epoch: int, now: float) -> None:
        """A process was started for the slot."""
        slot.pid, slot.epoch, slot.state, slot.started = pid, epoch, "starting", now

    def ready(self, report: Ready) -> Slot | None:
        """An actor reports that it can serve. Returns its slot."""
        slot = self.slot(report.role, report.index, report.epoch)
        if slot is not None and slot.state == "starting":
            slot.state, slot.endpoint = "ready", report.endpoint
            if report.card is not None:
                self.card = report.card
        return slot

    def alive(self, report: Alive) -> None:
        """An actor's loop answered a probe."""
        slot = self.slot(report.role, report.index, report.epoch)
        if slot is not None:
            slot.asked, slot.streams, slot.answered = 0.0, report.streams, report.seq
            if report.stats is not None:
                self.engine = report.stats

    def exited(self, slot: Slot, text: str, now: float) -> None:
        """The slot's process has ended; `text` says how."""
        slot.state, slot.exited, slot.exit_text = "dead", now, text

    def excuse(self, seconds: float) -> None:
        """The supervisor itself stood still for so long (a laptop slept): no probe or start is judged by that time."""
        for slot in self.slots:
            slot.asked = 0.0
            slot.started += seconds

    def failure(self, now: float) -> str | None:
        """Why the system must end now; None while it may go on."""
        for slot in self.slots:
            if slot.error:
                return f"{slot.name} {slot.error}"
            if slot.state == "dead" and now - slot.exited >= LAST_WORDS:
                return f"{slot.name} (pid {slot.pid}) {slot.exit_text}"
            if slot.state == "starting" and slot.pid and now - slot.started > self.start_timeout:
                return (
                    f"{slot.name} was not ready after {self.start_timeout:g} s; "
                    "a large model on a slow disk may need a longer --start-timeout"
                )
            if slot.asked and now - slot.asked > SILENCE_LIMIT:
                return f"{slot.name} (pid {slot.pid}) hangs: it has not answered for {SILENCE_LIMIT:g} s"
        return None

    def states(self) -> list[ActorState]:
        """All slots as others see them."""
        return [ActorState(s.name, s.role, s.index, s.pid, s.state, s.epoch, s.endpoint) for s in self.slots]
