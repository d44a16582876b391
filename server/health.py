"""`GET /health`, `GET /ready` and `GET /v1/models`: what the worker knows of the system, without asking anyone."""

import msgspec
from msgspec import UNSET
from msgspec.structs import astuple
from starlette.requests import Request
from starlette.responses import Response

from protocol.errors import LOADING, MODEL_NOT_FOUND
from protocol.messages import EngineStats, ModelCard, ModelState, PrefixStats
from server.backend import Backend
from server.backends import Backends
from server.errors import ApiError
from server.messages_models import VERSION_HEADER, model_info, model_list
from server.schemas import (
    HealthActor,
    HealthBody,
    HealthEngine,
    HealthPrefixCache,
    ModelBody,
    ModelListBody,
    ReadyBody,
)
from server.schemas_models import HeldModel

_NO_CACHE = {"cache-control": "no-store"}


class HealthEndpoints:
    """The endpoints that only read what `Backends` knows."""

    def __init__(self, backends: Backends) -> None:
        self._backends = backends

    async def health(self, _request: Request) -> Response:
        """The state of the system: 200 when it is ok or degraded, else 503."""
        backends = self._backends
        system, status = backends.system, backends.status
        actors, engine, models = [("", actor) for actor in system.actors], system.engine, None
        if backends.house is not None:
            loaded = backends.all()
            actors += [(f"{each.model}/", actor) for each in loaded for actor in each.state.actors]
            engine = _sum([each.state.engine for each in loaded])
            models = [held_model(each) for each in backends.models.models]
        body = HealthBody(
            status=status,
            model=backends.first.model,
            actors=[HealthActor(start + actor.name, actor.pid, actor.state, actor.epoch) for start, actor in actors],
            engine=_engine(engine),
            prefix_cache=_prefix_cache(engine.prefix),
            message=system.message if status == "failed" else UNSET,
            models=UNSET if models is None else models,
        )
        return _json(body, 200 if status in ("ok", "degraded") else 503)

    async def ready(self, _request: Request) -> Response:
        """200 once requests can be served, else the error they would get."""
        self._backends.check()
        status = self._backends.status
        if status not in ("ok", "degraded"):
            raise ApiError(LOADING, "the server is still starting")
        return _json(ReadyBody(status))

    async def models(self, request: Request) -> Response:
        """The models that can be asked for. Raises ApiError while none is loaded."""
        models = self._models()
        if VERSION_HEADER in request.headers:
            return _json(model_list(models))
        return _json(ModelListBody(models))

    async def model(self, request: Request) -> Response:
        """One model by name. Raises ApiError when there is none of that name."""
        models = {model.id: model for model in self._models()}
        name = request.path_params["name"]
        if name not in models:
            text = f"the model {name!r} does not exist here; this server has {', '.join(map(repr, models))}"
            raise ApiError(MODEL_NOT_FOUND, text, param="model")
        return _json(model_info(models[name]) if VERSION_HEADER in request.headers else models[name])

    def _models(self) -> list[ModelBody]:
        if self._backends.house is not None:
            return [body for backend in self._backends.all() for body in _held_bodies(backend)]
        card = self._backends.first.card
        if card is None:
            raise ApiError(LOADING, "the model is still loading")
        return [_body(each) for each in card.all()]


def _body(card: ModelCard) -> ModelBody:
    return ModelBody(card.name, card.created, card.context, card.root or card.name, card.parent or None)


def _held_bodies(backend: Backend) -> list[ModelBody]:
    """One of several models, and its adapters, which come and go with it."""
    held = backend.held
    card = backend.card or ModelCard(held.name, task=held.task, adapters={name: name for name in held.adapters})
    bodies = [_body(each) for each in card.all()]
    for body in bodies:
        body.state, body.progress, body.pinned, body.size = held.state, held.progress, held.pinned, held.size
    bodies[0].aliases = held.aliases
    return bodies


def held_model(held: ModelState) -> HeldModel:
    """How one of several models stands, for people who ask over HTTP."""
    return HeldModel(**{name: getattr(held, name) for name in HeldModel.__struct_fields__})


def _sum(engines: list[EngineStats]) -> EngineStats:
    """The load of several engines together."""
    prefix = PrefixStats(*(sum(values) for values in zip(*(astuple(each.prefix) for each in engines), strict=True)))
    names = [name for name in EngineStats.__struct_fields__ if name != "prefix"]
    return EngineStats(**{name: sum(getattr(each, name) for each in engines) for name in names}, prefix=prefix)


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
        prefix.acquired,
    )


def _json(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, _NO_CACHE, media_type="application/json")
