"""`Backend`: what an HTTP worker knows of the system that serves a model, and its connection to the streamer.

Kept by `server.backends`; asked by the endpoints. Everything runs on the event loop.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from protocol import AsyncClient
from protocol.errors import (
    DRAINING,
    LOADING,
    SERVER_LOST,
    SERVER_STOPPED,
    CallboardError,
    RequestFailed,
    ServerLost,
)
from protocol.messages import ActorState, Figures, ModelCard, ModelState, Stop, SystemState
from server.errors import ApiError

log = structlog.get_logger()

FIGURES_TIME = 3.0  # seconds the streamer may take to tell its figures
STALE_AFTER = 10.0  # seconds without a word from the supervisor until its last word counts as degraded


class Backend:
    """The state of a model's system, and one client per streamer incarnation. `held` is what a house of several models
    says of it; without one the model is always there."""

    def __init__(self, model: str, client_name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.state = SystemState(LOADING, model, [])
        self.held = ModelState(model, "unloaded")
        self.on_change: Callable[[], None] = lambda: None
        self._client_name = client_name
        self._clock = clock
        self._heard = clock()
        self._draining = False
        self._stopped: Stop | None = None
        self._client: AsyncClient | None = None
        self._client_epoch = 0
        self._was_connected = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._connecting = ""  # endpoint of the streamer that is being connected to

    @property
    def model(self) -> str:
        """The name the model is served under."""
        return self.state.card.name if self.state.card is not None else self.state.model

    @property
    def names(self) -> list[str]:
        """All that requests may call it, and its adapters."""
        return [*dict.fromkeys((self.model, *self.held.aliases, *self.adapters, *self.held.adapters))]

    def is_called(self, asked: str) -> bool:
        """Whether a request for `asked` is for this model or one of its adapters."""
        return asked == self.model or asked in self.held.aliases or self.adapter(asked) != ""

    def adapter(self, asked: str | None) -> str:
        """The adapter that a request means, "" when it means the model itself."""
        return asked if asked and (asked in self.adapters or asked in self.held.adapters) else ""

    @property
    def card(self) -> ModelCard | None:
        """What the engine says of its model; None until it is loaded."""
        return self.state.card

    @property
    def status(self) -> str:
        """loading, ok, degraded, draining or failed, as this worker's clients would find it."""
        if self.state.status in ("failed", "loading"):
            return self.state.status
        if self._draining or self._stopped is not None or self.state.status == "draining":
            return "draining"
        if self._client is None:
            return "degraded" if self._was_connected else "loading"
        if self._clock() - self._heard > STALE_AFTER:
            return "degraded"
        return self.state.status

    def client(self) -> AsyncClient:
        """The connection for a new request. Raises ApiError while none can be served."""
        if self._stopped is not None:
            raise ApiError(self._stopped.code, self._stopped.message)
        status = self.status
        if status == "failed":
            raise ApiError(SERVER_STOPPED, self.state.message or "the server has failed")
        if status == "draining":
            raise ApiError(DRAINING, "the server is shutting down and takes no new requests")
        if status == "loading":
            raise ApiError(LOADING, "the model is still loading")
        if self._client is None:
            raise ApiError(SERVER_LOST, "the connection to the model is being restored")
        return self._client

    def client_while_held(self) -> AsyncClient | None:
        """The connection for a new request to one of several models; None while it isn't loaded."""
        return self._client if self.held.state == "ready" and self.status in ("ok", "degraded") else None

    @property
    def adapters(self) -> dict[str, str]:
        """Folders of the LoRA adapters that can be asked for as models, by name."""
        return self.state.card.adapters if self.state.card is not None else {}

    async def figures(self, streams: int = 0, since: float | None = None) -> Figures | None:
        """What the streamer counts; None while it can't be asked."""
        if self._client is None:
            return None
        try:
            return await asyncio.wait_for(self._client.figures(streams, since), FIGURES_TIME)
        except (CallboardError, TimeoutError):
            return None

    def on_state(self, state: SystemState) -> None:
        """The supervisor reports the state of all actors."""
        self.state = state
        self._heard = self._clock()
        streamer = _streamer(state)
        if streamer is None or streamer.state == "dead" or streamer.epoch != self._client_epoch:
            self._drop_client(ServerLost(SERVER_LOST, "the streamer died; this stream is lost"))
        wanted = self._client is None and self._stopped is None
        if wanted and streamer is not None and streamer.state == "ready" and streamer.endpoint != self._connecting:
            self._connecting = streamer.endpoint  # an attempt at one that hung takes seconds to fail
            self.spawn(self._connect(streamer))
        self.on_change()

    def hold(self, held: ModelState) -> None:
        """The house says how the model stands. Without processes nothing is left but what is known of it."""
        self.held = held
        if held.state not in ("ready", "loading", "unloading"):
            self.state = SystemState(LOADING, held.name, [], card=self.state.card)
            self._was_connected = False
            self._drop_client(ServerLost(SERVER_LOST, "the processes of the model are gone; this stream is lost"))

    def on_drain(self) -> None:
        """Refuse new requests from now on."""
        self._draining = True

    def on_stop(self, order: Stop) -> None:
        """End every open stream with the order's error, and refuse what still comes."""
        self._stopped = order
        self._drop_client(RequestFailed(order.code, order.message))

    async def _connect(self, streamer: ActorState) -> None:
        client = AsyncClient(endpoint=streamer.endpoint, name_in_logs=self._client_name, reconnect=0.0)
        lost: list[CallboardError] = []
        client.on_lost = lost.append
        try:
            await client.open()
        except CallboardError as error:
            log.warning("no connection to the streamer", streamer_epoch=streamer.epoch, error=error.message)
            return
        finally:
            if self._connecting == streamer.endpoint:
                self._connecting = ""
        now = _streamer(self.state)
        if lost or self._stopped is not None or now is None or now.epoch != streamer.epoch or now.state == "dead":
            await client.close()
            return
        client.on_lost = self._on_lost
        self._client = client
        self._client_epoch = streamer.epoch
        self._was_connected = True
        self.on_change()
        log.info("connected to the streamer", streamer_epoch=streamer.epoch)

    def _on_lost(self, error: CallboardError) -> None:
        log.warning("the connection to the streamer is lost", error=error.message)
        self._drop_client(error)

    def _drop_client(self, error: CallboardError) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.on_lost = None
            client.fail_open_streams(error)
            self.spawn(client.close())

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Have something done beside what is being served."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _streamer(state: SystemState) -> ActorState | None:
    """The newest streamer the supervisor knows."""
    streamers = [actor for actor in state.actors if actor.role == "streamer"]
    return max(streamers, key=lambda actor: actor.epoch, default=None)
