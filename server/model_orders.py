"""`POST /models/load`, `unload`, `pin` and `unpin`: which of several models are in memory.

Paths and bodies are those of llama.cpp's router.
"""

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from protocol.errors import INVALID_REQUEST
from server.backends import Backends
from server.errors import ApiError
from server.health import held_model
from server.request_body import ClientGone, check_json, decode_request, read_body
from server.request_log import record_of
from server.schemas_models import ModelOrderBody, ModelOrderRequest
from server.sse import encode_json

ACTIONS = ("load", "unload", "pin", "unpin")
MAX_BODY = 64 << 10
BODY_TIME = 60.0  # seconds


class ModelOrders:
    """An ASGI endpoint for one of the `ACTIONS`. It answers when it is done; a client that leaves doesn't undo it."""

    def __init__(self, backends: Backends, action: str) -> None:
        self._backends = backends
        self._action = action

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Raises ApiError."""
        check_json(scope)
        with self._backends.working():
            try:
                body = await read_body(scope, receive, MAX_BODY, BODY_TIME)
            except ClientGone:
                record_of(scope).client_gone = True
                return
            asked = decode_request(body, ModelOrderRequest, {})
            backend = self._backends.find(asked.model)
            if self._backends.house is None:
                text = f"this server serves {backend.model!r} alone; `callboard serve A B` serves several models"
                raise ApiError(INVALID_REQUEST, text, param="model")
            answer = await self._backends.order(self._action, backend.model, asked.keep_alive)
            shown = next((held for held in answer.models if held.name == backend.model), backend.held)
            made = encode_json(ModelOrderBody(held_model(shown)))
            await Response(made, media_type="application/json")(scope, receive, send)
