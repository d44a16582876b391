"""The Starlette application of an HTTP worker: routes, CORS, request ids and error handlers put together."""

from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.routing import Route

from server.admin import Admin
from server.api_keys import ApiKeys
from server.backends import Backends
from server.calls import JsonCall, cancel_request, detokenize, tokenize
from server.chat import parse_chat
from server.completions import parse_completion
from server.cross_origin import CrossOrigin
from server.endpoints import GenerateEndpoint
from server.errors import ApiError, on_api_error, on_http_exception, on_unexpected
from server.health import HealthEndpoints
from server.messages import count_tokens, parse_message
from server.metrics import MetricsEndpoint
from server.model_orders import ACTIONS, ModelOrders
from server.ollama import OllamaApi
from server.openapi import describe
from server.options import HttpOptions
from server.pooled import embeddings, rerank
from server.request_log import RequestLog
from server.responses import ResponseEndpoints, parse_response
from server.traces import Traces


def make_app(
    backends: Backends, options: HttpOptions, log: Path | None = None, traces: Traces | None = None
) -> Starlette:
    """The app, serving what `backends` connect to. `log` holds the end of the system's log."""
    routes = _routes(backends, options, log)
    # CORS stands inside the log, so that a preflight is logged too, and outside all that may fail.
    middleware = [Middleware(RequestLog, backends.answered, [route.path for route in routes], traces)]
    if options.trusted_hosts:
        middleware.append(Middleware(TrustedHostMiddleware, allowed_hosts=options.trusted_hosts, www_redirect=False))
    if options.allow_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=options.allow_origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "retry-after"],
            )
        )
    middleware.append(Middleware(CrossOrigin, allowed=options.allow_origins))
    if options.api_keys:
        middleware.append(Middleware(ApiKeys, keys=options.api_keys, backends=backends))
    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={ApiError: on_api_error, HTTPException: on_http_exception, Exception: on_unexpected},
    )
    app.router.redirect_slashes = False
    return app


def _routes(backends: Backends, options: HttpOptions, log: Path | None) -> list[Route]:
    health = HealthEndpoints(backends)
    ollama = OllamaApi(backends)
    kept = ResponseEndpoints(backends)
    return [
        *(
            Route(path, GenerateEndpoint(backends, options, parse), methods=["POST"])
            for path, parse in (
                ("/v1/chat/completions", parse_chat),
                ("/v1/completions", parse_completion),
                ("/v1/responses", parse_response),
                ("/v1/messages", parse_message),
            )
        ),
        *(
            Route(path, JsonCall(backends, options, work), methods=["POST"])
            for path, work in (
                ("/v1/messages/count_tokens", count_tokens),
                ("/tokenize", tokenize),
                ("/detokenize", detokenize),
                ("/v1/embeddings", embeddings),
                ("/v1/rerank", rerank),
            )
        ),
        Route("/v1/responses/{id}", kept.get, methods=["GET"]),
        Route("/v1/responses/{id}", kept.delete, methods=["DELETE"]),
        Route("/v1/requests/{id}/cancel", cancel_request(backends), methods=["POST"]),
        Route("/openapi.json", describe),
        Route("/v1/models", health.models),
        Route("/v1/models/{name:path}", health.model),
        *(Route(f"/models/{action}", ModelOrders(backends, action), methods=["POST"]) for action in ACTIONS),
        Route("/metrics", MetricsEndpoint(backends).get, include_in_schema=False),
        *Admin(backends, log).routes(),
        *(
            Route(f"/api/{name}", endpoint, methods=["POST"], include_in_schema=False)
            for name, endpoint in (
                ("chat", GenerateEndpoint(backends, options, ollama.parse_chat)),
                ("generate", GenerateEndpoint(backends, options, ollama.parse_generate)),
                ("embed", JsonCall(backends, options, ollama.embed)),
                ("embeddings", JsonCall(backends, options, ollama.embed)),
                ("show", JsonCall(backends, options, ollama.show)),
            )
        ),
        Route("/", ollama.root, include_in_schema=False),
        Route("/api/version", ollama.version, include_in_schema=False),
        Route("/api/tags", ollama.tags, include_in_schema=False),
        Route("/api/ps", ollama.ps, include_in_schema=False),
        Route("/api/{name}", ollama.instead, methods=["POST", "DELETE"], include_in_schema=False),
        Route("/ready", health.ready),
        Route("/health", health.health),
    ]
