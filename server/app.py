"""The Starlette application of an HTTP worker: routes, CORS, request ids and error handlers put together."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from server.api_keys import ApiKeys
from server.backend import Backend
from server.chat import parse_chat
from server.completions import parse_completion
from server.endpoints import GenerateEndpoint
from server.errors import ApiError, on_api_error, on_http_exception, on_unexpected
from server.health import HealthEndpoints
from server.options import HttpOptions
from server.request_log import RequestLog


def make_app(backend: Backend, options: HttpOptions) -> Starlette:
    """The app, serving what `backend` connects to."""
    health = HealthEndpoints(backend)
    chat = GenerateEndpoint(backend, options, parse_chat)
    completions = GenerateEndpoint(backend, options, parse_completion)
    # CORS stands inside the log, so that a preflight is logged too, and outside all that may fail.
    middleware = [Middleware(RequestLog)]
    if options.allow_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=options.allow_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "retry-after"],
            )
        )
    if options.api_keys:
        middleware.append(Middleware(ApiKeys, keys=options.api_keys))
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/models", health.models),
            Route("/v1/models/{name:path}", health.model),
            Route("/ready", health.ready),
            Route("/health", health.health),
        ],
        middleware=middleware,
        exception_handlers={ApiError: on_api_error, HTTPException: on_http_exception, Exception: on_unexpected},
    )
    app.router.redirect_slashes = False
    return app
