"""`FakeHouse`: what a house of several models tells one HTTP worker, and what it hears of it. A test tool."""

from collections.abc import Callable
from typing import Any

import msgspec
from fake_streamer import FakeStreamer
from fake_supervisor import CARD
from http_worker import HttpWorker

from protocol.messages import (
    ActorState,
    ModelAnswer,
    ModelOrder,
    ModelsState,
    ModelState,
    SystemState,
    WantModel,
)

STEP = 1 << 20


class FakeHouse:
    """A worker with models `tiny` (alias `gpt`) and `other` (adapter `fr`), each with a streamer of its own."""

    def __init__(self, **options: Any) -> None:
        self.worker = HttpWorker(serving=False, models=["tiny", "other"], **options)
        self.client = self.worker.client
        self.streamers: dict[str, FakeStreamer] = {}
        self.models = {
            "tiny": ModelState("tiny", "unloaded", ["gpt"], claim=3 * STEP, size=STEP),
            "other": ModelState("other", "unloaded", adapters=["fr"], claim=2 * STEP, size=STEP),
        }
        self._epoch = 10
        self._own = [ActorState("http0", "http", 0, self.worker.process.pid, "ready", 7)]
        self.say_own("ok")
        self.say()

    def say_own(self, status: str) -> None:
        """How the house itself stands."""
        me = ActorState("supervisor", "supervisor", 0, 1, "ready", 0)
        self.worker.tell(SystemState(status, "", self._own, supervisor=me, started=1.7e9))

    def say(self) -> None:
        """Tell the worker of all models; it knows on return."""
        self.worker.tell(ModelsState([*self.models.values()], 10 * STEP, 5 * STEP))

    def set(self, model: str, state: str, **fields: Any) -> None:
        """A model changes its state."""
        self.models[model] = msgspec.structs.replace(self.models[model], state=state, **fields)
        self.say()

    def load(self, model: str) -> FakeStreamer:
        """A model becomes ready, with a new streamer that the worker is connected to."""
        self._epoch += 1
        streamer = self.streamers[model] = self.worker.new_streamer(self._epoch)
        actors = [
            ActorState("streamer", "streamer", 0, 4242, "ready", self._epoch, streamer.endpoint),
            ActorState("engine", "engine", 0, 4243, "ready", self._epoch),
        ]
        card = msgspec.structs.replace(CARD, name=model, adapters={"fr": "/fr"} if model == "other" else {})
        self.set(model, "loading")
        self.worker.tell(SystemState("ok", model, actors, card=card))
        self.set(model, "ready", loads=self.models[model].loads + 1, endpoint=streamer.endpoint, memory=7)
        self.worker.wait_log(event="connected to the streamer", streamer_epoch=self._epoch)
        return streamer

    def unload(self, model: str) -> None:
        """A model goes."""
        self.set(model, "unloading")
        self.set(model, "unloaded", endpoint="", memory=0)
        self.streamers.pop(model).close()

    def heard(self, kind: type, since: int = 0) -> list[Any]:
        """What the worker has reported of one kind, from report number `since` on."""
        return [report for report in self.worker.supervisor.reports[since:] if isinstance(report, kind)]

    def count(self) -> int:
        """How many reports have come."""
        return len(self.worker.supervisor.reports)

    def wait_wanted(self, model: str, since: int = 0) -> WantModel:
        """Wait until the worker wants a model."""

        def wanted() -> WantModel | None:
            return next((want for want in self.heard(WantModel, since) if want.model == model), None)

        found: WantModel = self.worker.supervisor.wait_for(wanted)
        return found

    def answer_orders(self, make: Callable[[ModelOrder], ModelAnswer], since: int) -> ModelOrder:
        """Wait for an order, and answer it."""
        order: ModelOrder = self.worker.supervisor.wait_for(lambda: next(iter(self.heard(ModelOrder, since)), None))
        self.worker.supervisor.order(make(order))
        return order

    def close(self) -> None:
        """End the worker."""
        self.worker.close()
