"""`ApiKeys`: lets in requests that bring one of the server's keys. A middleware of the app, on the event loop.

A key comes as `Authorization: Bearer KEY`, as OpenAI's clients send it, or as `x-api-key`. `/health` and `/ready`
are open: they are for those that watch the server.
"""

import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import INVALID_API_KEY, ApiError
from server.request_log import record_of

OPEN_PATHS = frozenset({"/health", "/ready"})


def given_key(scope: Scope) -> bytes:
    """The key a request brings, empty when it brings none."""
    headers = dict(scope["headers"])
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer" and key:
        return bytes(key.strip())
    return bytes(headers.get(b"x-api-key", b""))


class ApiKeys:
    """Refuses with 401 what brings none of `keys`. Every key is compared, each in constant time."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request, or refuse it."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._knows(given_key(scope)):
            await self._app(scope, receive, send)
            return
        error = ApiError(INVALID_API_KEY, "this server needs an API key: send it as `Authorization: Bearer KEY`")
        record_of(scope).error_code = error.code
        await error.response(scope["path"])(scope, receive, send)

    def _knows(self, given: bytes) -> bool:
        found = False
        for key in self._keys:
            found |= hmac.compare_digest(key, given)
        return found
