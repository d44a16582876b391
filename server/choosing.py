"""`Chooser`: finds the model that a request is for, and waits with its client until that serves. On the event loop."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.types import Receive

from protocol import AsyncClient
from protocol.errors import DRAINING, LOADING, SERVER_LOST, SERVER_STOPPED, CallboardError
from server.backend import Backend
from server.backends import Backends
from server.errors import KEY_NOT_ALLOWED, ApiError
from server.request_body import ClientGone
from server.request_log import RequestRecord

TRIES = 4  # a request may meet a model that is being unloaded so often, before it fails
PAUSE = 1.0  # seconds until one that was refused asks the same connection again
_LEAVING = (DRAINING, LOADING, SERVER_LOST, SERVER_STOPPED)


class Chooser:
    """For one request: call it with the name that the request has."""

    def __init__(self, backends: Backends, record: RequestRecord, receive: Receive) -> None:
        self._backends = backends
        self._record = record
        self._receive = receive
        self._keep_alive: float | None = None
        self._backend: Backend | None = None
        self._client: AsyncClient | None = None
        self._tries = 0

    async def __call__(self, asked: str | None, keep_alive: float | None = None) -> Backend:
        """The model, which can be asked now. Raises ApiError, ClientGone.

        `keep_alive` is told when the request is over (`close`): how long the model may stay without streams. That of
        a key that may not load and unload models is ignored.
        """
        backend = self._backends.find(asked)
        self._backend, self._keep_alive = backend, keep_alive if self._record.admin else None
        self._tries += 1
        if self._client is not None:  # the refusal comes before the word that the model leaves
            await _unless_gone(self._receive, self._backends.left_behind(backend, self._client, PAUSE))
        client = self._backends.at_once(backend)
        if client is None:
            client = await _unless_gone(self._receive, self._backends.wait(backend))
        self._client = client
        return backend

    def unload(self, asked: str) -> None:
        """Have a model leave as soon as nothing runs. Raises ApiError when the request's key is not for that."""
        if not self._record.admin:
            raise ApiError(KEY_NOT_ALLOWED, f"the API key {self._record.key!r} may not unload models")
        self._backends.keep(self._backends.find(asked), 0)

    def used(self, tokens: int) -> None:
        """So many tokens were computed for the request, beside those of its streams."""
        self._record.computed += tokens

    def may_try_again(self, error: ApiError | CallboardError) -> bool:
        """Whether a request that failed has only met a model on its way out, so that nothing of it had begun."""
        begun = any(stream.prompt_tokens is not None for stream in self._record.streams)
        return self._backends.house is not None and error.code in _LEAVING and not begun and self._tries < TRIES

    def close(self) -> None:
        """The request is over."""
        if self._backend is not None and self._keep_alive is not None:
            self._backends.keep(self._backend, self._keep_alive)


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, Any]) -> Any:
    """What `work` gives. Raises ClientGone as soon as the client leaves."""

    async def listen() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, listener = asyncio.ensure_future(work), asyncio.ensure_future(listen())
    try:
        await asyncio.wait((working, listener), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        listener.cancel()
        working.cancel()
