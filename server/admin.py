"""The dashboard at `/admin`: its static files, and the JSON that its page asks for once a second. On the event loop.

The files hold nothing secret and are open; everything under `/admin/api/` needs a key when the server has any. What
changes something takes JSON only, which other sites' pages can't send without CORS.
"""

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from protocol.errors import INVALID_REQUEST, LOADING, CallboardError
from protocol.figures import PrefixChain, Sample
from protocol.messages import EngineStats, Figures, PrefixStats
from server.backend import FIGURES_TIME, Backend
from server.backends import Backends
from server.errors import NOT_FOUND, ApiError, from_client_error, invalid
from server.health import held_model
from server.log_tail import read_tail
from server.metrics import latest
from server.request_body import check_json

FILES = Path(__file__).parent / "dashboard"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
MAX_STREAMS = 1000
_ACTOR = ("name", "state", "pid", "epoch", "memory", "cpu", "restarts", "crashes")
_COLUMNS = Sample.__struct_fields__


def _fields(struct: msgspec.Struct) -> dict[str, Any]:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


class Admin:
    """The endpoints. `log` is the file that holds the end of the system's log, if there is one."""

    def __init__(self, backends: Backends, log: Path | None) -> None:
        self._backends = backends
        self._log = log

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route("/admin", self.page, include_in_schema=False),
            Route("/admin/api/state", self.state, include_in_schema=False),
            Route("/admin/api/prefixes", self.prefixes, include_in_schema=False),
            Route("/admin/api/streams/{rid:int}/cancel", self.cancel, methods=["POST"], include_in_schema=False),
            Route("/admin/api/engine/replace", self.replace, methods=["POST"], include_in_schema=False),
            Route("/admin/{name}", self.file, include_in_schema=False),
        ]

    async def page(self, _request: Request) -> Response:
        """The page."""
        return _file("index.html")

    async def file(self, request: Request) -> Response:
        """A file of the page. Raises ApiError when there is none of that name."""
        return _file(request.path_params["name"])

    async def state(self, request: Request) -> Response:
        """How all stands, with several models that of `model`; with samples after `since`, the first `streams`, and the
        log from byte `log` on."""
        asked = request.query_params
        backend = self._asked(request)
        try:
            since, streams, offset = (
                float(asked.get("since", 0)),
                int(asked.get("streams", 0)),
                int(asked.get("log", -1)),
            )
        except ValueError:
            raise invalid("since, streams and log are numbers") from None
        figures = await backend.figures(min(max(streams, 0), MAX_STREAMS), since)
        body = self._body(backend, figures if figures is not None else Figures(0))
        if offset >= 0 and self._log is not None:
            end, lines = read_tail(self._log, offset)
            body["log"] = {"offset": end, "lines": lines}
        return Response(msgspec.json.encode(body), headers={"cache-control": "no-store"}, media_type="application/json")

    def _asked(self, request: Request) -> Backend:
        """The model that is looked at: the first one, when the one asked for is gone."""
        asked = request.query_params.get("model", "")
        return next((each for each in self._backends.all() if each.model == asked), self._backends.first)

    def _body(self, backend: Backend, figures: Figures) -> dict[str, Any]:
        backends, system = self._backends, backend.state
        engine: EngineStats = latest(system, figures)
        prefix: PrefixStats = engine.prefix
        known = [system] if backends.house is None else [backends.system, system]
        actors = [*known[0].actors, *(actor for each in known[1:] for actor in each.actors)]
        own = [known[0].supervisor] if known[0].supervisor is not None else []
        card = backend.card
        now = time.time()
        return {
            "now": now,
            "up": now - known[0].started if known[0].started else 0,
            "status": backends.status,
            "model": backend.model,
            "context": card.context if card is not None else 0,
            "actors": [{name: getattr(actor, name) for name in _ACTOR} for actor in (*own, *actors)],
            "engine": {key: value for key, value in _fields(engine).items() if key != "prefix"},
            "prefix": _fields(prefix),
            "models": [_fields(held_model(held)) for held in backends.models.models],
            "budget": backends.models.budget,
            "claimed": backends.models.claimed,
            "phases": figures.phases,
            "requests": figures.counts.requests,
            "generated": figures.counts.generated,
            "connections": figures.connections,
            "streams": [_fields(stream) for stream in figures.streams],
            "samples": {
                "columns": _COLUMNS,
                "rows": [[getattr(sample, name) for name in _COLUMNS] for sample in figures.samples],
            },
        }

    async def prefixes(self, request: Request) -> Response:
        """The tree of prefix blocks: sizes, places and uses, nothing of their texts. Raises ApiError."""
        try:
            async with asyncio.timeout(FIGURES_TIME):
                tree = await self._asked(request).client().prefixes()
        except CallboardError as error:
            raise from_client_error(error) from None
        except TimeoutError:
            raise ApiError(LOADING, "the engine has not answered in time") from None
        columns = PrefixChain.__struct_fields__
        body = _fields(tree) | {
            "now": time.time(),
            "chains": {"columns": columns, "rows": [msgspec.structs.astuple(chain) for chain in tree.chains]},
        }
        return Response(msgspec.json.encode(body), headers={"cache-control": "no-store"}, media_type="application/json")

    async def cancel(self, request: Request) -> Response:
        """Cancel a stream. Raises ApiError when it is gone."""
        check_json(request.scope)
        rid = request.path_params["rid"]
        try:
            found = await self._asked(request).client().cancel_stream(rid)
        except CallboardError as error:
            raise from_client_error(error) from None
        if not found:
            raise ApiError(NOT_FOUND, f"stream {rid} has ended")
        return Response(b"{}", media_type="application/json")

    async def replace(self, request: Request) -> Response:
        """Have the engine replaced; no stream is lost."""
        check_json(request.scope)
        me = self._asked(request).state.supervisor
        if me is None or (self._backends.house is None and me.pid != os.getppid()):
            raise ApiError(INVALID_REQUEST, "the supervisor is not known yet")
        os.kill(me.pid, signal.SIGUSR1)
        return Response(b"{}", 202, media_type="application/json")


def _file(name: str) -> Response:
    path = FILES / name
    kind = _TYPES.get(path.suffix)
    if kind is None or path.parent != FILES or not path.is_file():
        raise ApiError(NOT_FOUND, f"there is nothing at GET /admin/{name}")
    return Response(path.read_bytes(), headers=_HEADERS, media_type=kind)
