"""`Backends`: the models that an HTTP worker can reach, by every name a request may use.

A server of one model has one `Backend`, and a request either gets it at once or is refused. With several, the house
(`actors/house.py`) loads and unloads them: a request for one that isn't loaded has the house told, and waits. Fed by
the worker with the orders on its control channel; asked by the endpoints. Everything runs on the event loop.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from protocol import AsyncClient
from protocol.errors import DRAINING, LOADING, MODEL_NOT_FOUND, QUEUE_FULL, SERVER_STOPPED, CallboardError
from protocol.messages import ModelAnswer, ModelsState, Quota, Stop, SystemState
from server.backend import STALE_AFTER, Backend
from server.errors import ApiError, from_client_error
from server.house_link import HouseLink

MAX_WAITING = 4096  # requests that may wait for one model to be loaded, per HTTP worker


class Backends:
    """A `Backend` for each model. `house` is None for a server of one model."""

    def __init__(
        self,
        models: Sequence[str],
        client_name: str,
        house: HouseLink | None = None,
        load_wait: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A request that names none of `models` gets the first. It waits up to `load_wait` seconds for its model."""
        self.house = house
        self.in_work = 0
        self.answered: dict[str, int] = {}  # HTTP requests, by `METHOD PATH STATUS`
        self.models = ModelsState([])
        self._client_name = client_name
        self._load_wait = load_wait
        self._clock = clock
        self._own = SystemState(LOADING, "", [])  # what the house says of itself and of the HTTP workers
        self._heard = clock()
        self._draining = False
        self._stopped: Stop | None = None
        self._waiting: dict[str, int] = {}
        self._changed = asyncio.Event()
        self._by_name: dict[str, Backend] = {}
        for name in models:
            self._make(name)
        self.first = self._by_name[models[0]]

    def _make(self, name: str) -> Backend:
        backend = Backend(name, self._client_name, self._clock)
        backend.on_change = self._on_change
        self._by_name[name] = backend
        return backend

    def all(self) -> list[Backend]:
        """Every model's, the first one's first."""
        return list(self._by_name.values())

    # How it stands.

    @property
    def system(self) -> SystemState:
        """What is known of the process that owns the HTTP workers."""
        return self.first.state if self.house is None else self._own

    @property
    def status(self) -> str:
        """loading, ok, degraded, draining or failed. With several models: whether requests are taken at all."""
        if self.house is None:
            return self.first.status
        if self._own.status in ("failed", "loading"):
            return self._own.status
        if self._draining or self._stopped is not None:
            return "draining"
        return "degraded" if self._clock() - self._heard > STALE_AFTER else self._own.status

    def check(self) -> None:
        """Raises ApiError while no request can be served, whatever model it is for."""
        if self.house is None:
            self.first.client()
            return
        if self._stopped is not None:
            raise ApiError(self._stopped.code, self._stopped.message)
        if self._own.status == "failed":
            raise ApiError(SERVER_STOPPED, self._own.message or "the server has failed")
        if self.status == "draining":
            raise ApiError(DRAINING, "the server is shutting down and takes no new requests")

    # Choosing.

    def find(self, asked: str | None) -> Backend:
        """The model that a request means. Raises ApiError when there is none of that name."""
        if not asked:
            return self.first
        for backend in self._by_name.values():
            if backend.is_called(asked):
                return backend
        if self.house is not None and not self.models.models:
            raise ApiError(LOADING, "the server is still starting")
        names = ", ".join(repr(name) for backend in self._by_name.values() for name in backend.names)
        text = f"the model {asked!r} does not exist here; this server has {names}"
        raise ApiError(MODEL_NOT_FOUND, text, param="model")

    def at_once(self, backend: Backend) -> AsyncClient | None:
        """The connection for a new request; None when its model has to be waited for. Raises ApiError."""
        if self.house is None:
            return backend.client()
        self.check()
        return backend.client_while_held()

    async def wait(self, backend: Backend) -> AsyncClient:
        """Have the house load a model, and wait for it. Raises ApiError when it fails, or takes too long."""
        assert self.house is not None
        name, until = backend.model, self._clock() + self._load_wait
        if self._waiting.get(name, 0) >= MAX_WAITING:
            raise ApiError(QUEUE_FULL, f"too many requests wait for the model {name!r}")
        self._waiting[name] = self._waiting.get(name, 0) + 1
        self.house.want(name, self._waiting)
        was_tried = False
        try:
            while True:
                self.check()
                if (client := backend.client_while_held()) is not None:
                    return client
                held = backend.held
                if held.state == "failed" and (was_tried or held.retry_after > 0):
                    text = f"the model {name!r} could not be loaded: {held.message}"
                    raise ApiError(SERVER_STOPPED, text, retry_after=held.retry_after)
                was_tried = was_tried or held.state != "failed"
                left = until - self._clock()
                if left <= 0:
                    raise ApiError(LOADING, f"the model {name!r} is {_how_far(backend)}", retry_after=held.retry_after)
                await self._next_change(left)
        finally:
            self._waiting[name] -= 1
            if not self._waiting[name]:
                del self._waiting[name]

    async def left_behind(self, backend: Backend, client: AsyncClient, seconds: float) -> None:
        """Wait until a model has another connection than `client`, or none; at most so long."""
        until = self._clock() + seconds
        while backend.client_while_held() is client and (left := until - self._clock()) > 0:
            await self._next_change(left)

    async def _next_change(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            pass

    def keep(self, backend: Backend, keep_alive: float) -> None:
        """Tell the house how long a loaded model may stay without streams, from now on; see `WantModel`."""
        if self.house is not None and backend.held.state == "ready":
            self.house.keep(backend.model, keep_alive)

    async def order(self, action: str, model: str, keep_alive: float | None = None) -> ModelAnswer:
        """Have the house load, unload, pin or unpin a model. Raises ApiError when it doesn't."""
        backend = self.find(model)
        if self.house is None:
            return ModelAnswer(0)
        self.check()
        return await self.house.order(action, backend.model, keep_alive)

    async def charge(self, name: str, quotas: list[Quota], *, requests: int = 0, tokens: int = 0) -> None:
        """Account for requests or tokens of an API key. Raises ApiError when a request goes beyond a quota."""
        if self.house is not None:
            await self.house.charge(name, quotas, requests, tokens)
            return
        try:
            await self.first.client().charge(name, quotas, requests=requests, tokens=tokens)
        except CallboardError as error:
            raise from_client_error(error) from None

    def clients(self) -> list[AsyncClient]:
        """The connections to all that is loaded. Raises ApiError while no request can be served."""
        self.check()
        return [self.first.client()] if self.house is None else self.other_clients(None)

    def other_clients(self, but: Backend | None) -> list[AsyncClient]:
        """The connections to what is loaded, that of one model left out."""
        if self.house is None:
            return []
        others = [backend.client_while_held() for backend in self._by_name.values() if backend is not but]
        return [client for client in others if client is not None]

    @contextmanager
    def working(self) -> Iterator[None]:
        """Counts a request as in work."""
        self.in_work += 1
        try:
            yield
        finally:
            self.in_work -= 1

    # What the worker hears.

    def on_state(self, state: SystemState) -> None:
        """A supervisor reports the state of its actors."""
        if self.house is None:
            self.first.on_state(state)
        elif state.model:
            backend = self._by_name.get(state.model)
            if backend is not None and backend.held.state in ("loading", "ready", "unloading"):
                backend.on_state(state)
        else:
            self._own = state
            self._heard = self._clock()
            self._on_change()

    def on_models(self, models: ModelsState) -> None:
        """The house says which models there are, and how they stand."""
        self.models = models
        for held in models.models:
            backend = self._by_name.get(held.name) or self._make(held.name)
            backend.hold(held)
        named = {held.name: self._by_name[held.name] for held in models.models}
        if named:
            self._by_name = named
            self.first = named[models.models[0].name]
        self._on_change()

    def on_answer(self, answer: ModelAnswer) -> None:
        """The house answers an order."""
        if self.house is not None:
            self.house.on_answer(answer)

    def on_drain(self) -> None:
        """Refuse new requests from now on."""
        self._draining = True
        for backend in self._by_name.values():
            backend.on_drain()
        self._on_change()

    def on_stop(self, order: Stop) -> None:
        """End every open stream with the order's error, and refuse what still comes."""
        self._stopped = order
        for backend in self._by_name.values():
            backend.on_stop(order)
        self._on_change()

    def _on_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _how_far(backend: Backend) -> str:
    held = backend.held
    if held.state == "loading":
        return f"still loading ({held.progress:.0%})" if held.progress else "still loading"
    return {"waiting": "waiting for memory", "unloading": "being unloaded"}.get(held.state, "not loaded yet")
