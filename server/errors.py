"""What clients are told when something goes wrong: the one place that maps error codes to HTTP.

Used by every endpoint of an HTTP worker. The shape is OpenAI's:
`{"error": {"message", "type", "param", "code"}}`.
"""

import math

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from protocol import errors as codes
from protocol.errors import CallboardError
from server.schemas_messages import MessagesError, MessagesErrorDetail

NOT_FOUND = "not_found"
METHOD_NOT_ALLOWED = "method_not_allowed"
BODY_TOO_LARGE = "body_too_large"
BODY_TIMEOUT = "body_timeout"
BODY_ENCODED = "body_encoded"
UNSUPPORTED = "unsupported_parameter"
INVALID_API_KEY = "invalid_api_key"
KEY_NOT_ALLOWED = "key_not_allowed"
ORIGIN_NOT_ALLOWED = "origin_not_allowed"

MAX_MESSAGE = 2000  # characters; a message may quote what the client sent
MAX_PARAM = 200

CLIENT_CLOSED = 499  # never sent; stands in the log for a client that left before its answer


class Shown(msgspec.Struct, frozen=True):
    """How one code appears over HTTP: status, OpenAI error type, code, and the default Retry-After in seconds."""

    status: int
    kind: str
    code: str
    retry_after: float = 0.0


_BAD = "invalid_request_error"
_SERVER = "server_error"

_SHOWN = {
    codes.INVALID_REQUEST: Shown(400, _BAD, codes.INVALID_REQUEST),
    codes.PROMPT_TOO_LONG: Shown(400, _BAD, "context_length_exceeded"),
    UNSUPPORTED: Shown(400, _BAD, UNSUPPORTED),
    INVALID_API_KEY: Shown(401, "authentication_error", INVALID_API_KEY),
    KEY_NOT_ALLOWED: Shown(403, "permission_error", KEY_NOT_ALLOWED),
    ORIGIN_NOT_ALLOWED: Shown(403, "permission_error", ORIGIN_NOT_ALLOWED),
    codes.RATE_LIMITED: Shown(429, "rate_limit_error", codes.RATE_LIMITED, 1.0),
    codes.MODEL_NOT_FOUND: Shown(404, _BAD, codes.MODEL_NOT_FOUND),
    NOT_FOUND: Shown(404, _BAD, NOT_FOUND),
    METHOD_NOT_ALLOWED: Shown(405, _BAD, METHOD_NOT_ALLOWED),
    BODY_TIMEOUT: Shown(408, _BAD, BODY_TIMEOUT),
    BODY_ENCODED: Shown(415, _BAD, BODY_ENCODED),
    BODY_TOO_LARGE: Shown(413, _BAD, BODY_TOO_LARGE),
    codes.INTERNAL_ERROR: Shown(500, _SERVER, codes.INTERNAL_ERROR),
    codes.CRASHED_ENGINE: Shown(500, _SERVER, codes.CRASHED_ENGINE),
    codes.PROTOCOL_MISMATCH: Shown(500, _SERVER, codes.PROTOCOL_MISMATCH),
    codes.LOADING: Shown(503, _SERVER, codes.LOADING, 2.0),
    codes.QUEUE_FULL: Shown(503, _SERVER, codes.QUEUE_FULL, 1.0),
    codes.OUT_OF_MEMORY: Shown(503, _SERVER, codes.OUT_OF_MEMORY, 5.0),
    codes.DRAINING: Shown(503, _SERVER, codes.DRAINING, 5.0),
    codes.SERVER_STOPPED: Shown(503, _SERVER, codes.SERVER_STOPPED, 5.0),
    codes.SERVER_LOST: Shown(503, _SERVER, codes.SERVER_LOST, 2.0),
    codes.ENGINE_LOST: Shown(503, _SERVER, codes.ENGINE_LOST, 2.0),
    codes.TOKENIZER_LOST: Shown(503, _SERVER, codes.TOKENIZER_LOST, 2.0),
    codes.SLOW_CONSUMER: Shown(503, _SERVER, codes.SLOW_CONSUMER, 1.0),
    codes.CANCELLED: Shown(503, _SERVER, codes.CANCELLED, 1.0),
    codes.TIMEOUT: Shown(504, _SERVER, codes.TIMEOUT),
}
_ANTHROPIC = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_UNKNOWN = Shown(500, _SERVER, codes.INTERNAL_ERROR)


class ErrorDetail(msgspec.Struct):
    """What stands under `error`."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """Body of every error response, and data of an SSE error event."""

    error: ErrorDetail


class ApiError(Exception):
    """A request that ends with an error. `code` is one of `protocol.errors` or of this module."""

    def __init__(self, code: str, message: str, *, param: str | None = None, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.code = code
        self.message = message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + "…"
        self.param = None if param is None else param[:MAX_PARAM]
        self.shown = _SHOWN.get(code, _UNKNOWN)
        self.retry_after = retry_after or self.shown.retry_after

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self.shown.status

    def body(self) -> bytes:
        """The error as JSON."""
        shown = self.shown
        return msgspec.json.encode(ErrorBody(ErrorDetail(self.message, shown.kind, self.param, shown.code)))

    def anthropic_body(self, request_id: str | None = None) -> bytes:
        """The error as JSON in Anthropic's shape."""
        kind = _ANTHROPIC.get(self.status, "api_error")
        return msgspec.json.encode(MessagesError(MessagesErrorDetail(kind, self.message), request_id=request_id))

    def response(self, path: str = "") -> Response:
        """The error as a whole response to a request for `path`."""
        headers = {}
        if self.status in (429, 503) and self.retry_after > 0:
            headers["retry-after"] = str(math.ceil(self.retry_after))
        if path.startswith("/v1/messages"):
            body = self.anthropic_body()
        elif path.startswith("/api/"):
            body = msgspec.json.encode({"error": self.message})  # as Ollama has it
        else:
            body = self.body()
        return Response(body, self.status, headers, media_type="application/json")


def invalid(message: str, param: str | None = None) -> ApiError:
    """A request that is wrong in itself; `param` names the field."""
    return ApiError(codes.INVALID_REQUEST, message, param=param)


def from_client_error(error: CallboardError) -> ApiError:
    """What an exception of the Python client means over HTTP."""
    message = error.message or f"the request failed: {error.code}"
    return ApiError(error.code, message, param=error.param or None, retry_after=error.retry_after)


async def on_api_error(request: Request, error: Exception) -> Response:
    """Starlette's handler for `ApiError`."""
    assert isinstance(error, ApiError)
    return error.response(request.url.path)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's handler for what its router raises: 404 and 405."""
    assert isinstance(error, HTTPException)
    place = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        answer = ApiError(NOT_FOUND, f"there is nothing at {place}")
    elif error.status_code == 405:
        answer = ApiError(METHOD_NOT_ALLOWED, f"{place} is not allowed")
    else:
        answer = ApiError(codes.INTERNAL_ERROR, error.detail)
    response = answer.response(request.url.path)
    response.headers.update(error.headers or {})
    return response


async def on_unexpected(request: Request, _error: Exception) -> Response:
    """Starlette's handler for everything else. The details go to the log, never to the client."""
    return internal_error().response(request.url.path)


def internal_error() -> ApiError:
    """The error for a fault of ours."""
    return ApiError(codes.INTERNAL_ERROR, "the server failed to handle this request; its log has the details")
