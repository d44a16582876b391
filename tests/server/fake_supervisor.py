"""`FakeSupervisor`: the supervisor's end of the control channel, for one worker. A test tool."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fake_router import FakeRouter

from protocol.codec import report_codec
from protocol.endpoints import ipc_endpoint
from protocol.messages import (
    ActorState,
    Alive,
    Charge,
    EngineStats,
    ModelAnswer,
    ModelCard,
    PrefixStats,
    Probe,
    Ready,
    SystemState,
)

CARD = ModelCard("tiny", context=4096, vocab_size=49152, created=1_700_000_000)


class FakeSupervisor(FakeRouter):
    """Keeps every report; sends orders to the worker `http-INDEX-EPOCH`. `on_charge` answers as a house does."""

    def __init__(self, run_dir: Path, worker: str = "http-0-7") -> None:
        self.reports: list[Any] = []
        self._worker = worker.encode()
        self._seq = 0
        self.on_charge: Callable[[Charge], ModelAnswer] = lambda charge: ModelAnswer(charge.ref)
        super().__init__(ipc_endpoint(run_dir, "control"))

    def on_frame(self, identity: bytes, frame: bytes) -> None:
        """Keep a report."""
        assert identity == self._worker
        report = report_codec.decode(frame)
        self.reports.append(report)
        if isinstance(report, Charge):
            self.order(self.on_charge(report))

    def order(self, order: Any) -> None:
        """Send an order to the worker."""
        self.send(self._worker, order)

    def wait_ready(self) -> Ready:
        """Wait until the worker listens."""
        ready: Ready = self.wait_for(lambda: next((r for r in self.reports if isinstance(r, Ready)), None))
        return ready

    def probe(self) -> Alive:
        """Ask the worker whether it lives; with its answer, what was ordered before has been obeyed."""
        self._seq += 1
        seq = self._seq
        self.order(Probe(seq))
        alive: Alive = self.wait_for(
            lambda: next((r for r in self.reports if isinstance(r, Alive) and r.seq == seq), None)
        )
        return alive


def system_state(
    status: str, endpoint: str = "", epoch: int = 3, streamer_state: str = "ready", message: str = ""
) -> SystemState:
    """A state of the system with a streamer and an engine."""
    return SystemState(
        status,
        "tiny",
        [
            ActorState("streamer", "streamer", 0, 4242, streamer_state, epoch, endpoint),
            ActorState("engine", "engine", 0, 4243, "ready", 4),
        ],
        EngineStats(
            step=12,
            running=2,
            prefilling=1,
            waiting=5,
            in_model=1.5,
            decoded=99,
            cache=4096,
            prefix=PrefixStats(30, 10, 60),
        ),
        None if status == "loading" else CARD,
        message,
    )
