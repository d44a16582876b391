"""`GET /health`, `GET /ready` and `GET /v1/models`: what the worker knows of the system, without asking anyone."""

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from protocol.errors import LOADING, MODEL_NOT_FOUND
from protocol.messages import EngineStats, PrefixStats
from server.backend import Backend
from server.errors import ApiError
from server.schemas import (
    HealthActor,
    HealthBody,
    HealthEngine,
    HealthPrefixCache,
    ModelBody,
    ModelListBody,
    ReadyBody,
)

_NO_CACHE = {"cache-control": "no-store"}


class HealthEndpoints:
    """The endpoints that only read the `Backend`."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def health(self, _request: Request) -> Response:
        """The state of the system: 200 when it is ok or degraded, else 503."""
        state = self._backend.state
        status = self._backend.status
        engine = state.engine
        body = HealthBody(
            status=status,
            model=self._backend.model,
            actors=[HealthActor(actor.name, actor.pid, actor.state, actor.epoch) for actor in state.actors],
            engine=_engine(engine),
            prefix_cache=_prefix_cache(engine.prefix),
            message=state.message if status == "failed" else UNSET,
        )
        return _json(body, 200 if status in ("ok", "degraded") else 503)

    async def ready(self, _request: Request) -> Response:
        """200 once requests can be served, else the error they would get."""
        self._backend.client()
        return _json(ReadyBody(self._backend.status))

    async def models(self, _request: Request) -> Response:
        """The models that can be asked for. Raises ApiError while none is loaded."""
        return _json(ModelListBody(self._models()))

    async def model(self, request: Request) -> Response:
        """One model by name. Raises ApiError when there is none of that name."""
        models = {model.id: model for model in self._models()}
        name = request.path_params["name"]
        if name not in models:
            text = f"the model {name!r} does not exist here; this server has {', '.join(map(repr, models))}"
            raise ApiError(MODEL_NOT_FOUND, text, param="model")
        return _json(models[name])

    def _models(self) -> list[ModelBody]:
        card = self._backend.card
        if card is None:
            raise ApiError(LOADING, "the model is still loading")
        return [
            ModelBody(each.name, each.created, each.context, each.root or each.name, each.parent or None)
            for each in card.all()
        ]


def _engine(engine: EngineStats) -> HealthEngine:
    return HealthEngine(
        engine.step,
        engine.running,
        engine.prefilling,
        engine.waiting,
        round(engine.in_model, 4),
        round(engine.in_python, 4),
        round(engine.in_sockets, 4),
        engine.prefilled,
        engine.decoded,
        engine.parked,
        engine.memory,
        engine.cache,
    )


def _prefix_cache(prefix: PrefixStats) -> HealthPrefixCache:
    hit = prefix.memory_tokens + prefix.ssd_tokens
    return HealthPrefixCache(
        round(hit / max(hit + prefix.computed_tokens, 1), 4),
        prefix.memory_tokens,
        prefix.ssd_tokens,
        prefix.computed_tokens,
        prefix.memory_blocks,
        prefix.memory_bytes,
        prefix.memory_limit,
        prefix.ssd_bytes,
        prefix.ssd_limit,
        prefix.queued_bytes,
        prefix.faults,
        prefix.yielded,
    )


def _json(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, _NO_CACHE, media_type="application/json")
