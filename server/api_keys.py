"""`ApiKeys`: lets in requests that bring one of the server's keys, within that key's limits. A middleware of the app,
on the event loop.

A key comes as `Authorization: Bearer KEY`, as OpenAI's clients send it, or as `x-api-key`. `/health` and `/ready`
are open: they are for those that watch the server; and so are the dashboard's files, whose page asks for the key.
Limits are counted for all HTTP workers together, by the streamer; with several models by the house, for all of them.
"""

import contextlib
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from server.backends import Backends
from server.errors import INVALID_API_KEY, KEY_NOT_ALLOWED, ApiError
from server.key_file import ApiKey, digest_of
from server.request_log import record_of

OPEN_PATHS = frozenset({"/health", "/ready"})


def given_key(scope: Scope) -> bytes:
    """The key a request brings, empty when it brings none."""
    headers = dict(scope["headers"])
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer" and key:
        return bytes(key.strip())
    return bytes(headers.get(b"x-api-key", b""))


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path == "/admin" or (path.startswith("/admin/") and not path.startswith("/admin/api/"))


def _is_for_admins(path: str) -> bool:
    return path == "/metrics" or path.startswith(("/admin/api/", "/models/"))


class ApiKeys:
    """Refuses what brings none of `keys` (401), what the key is not for (403), and what is beyond its limits (429)."""

    def __init__(self, app: ASGIApp, keys: Sequence[ApiKey], backends: Backends) -> None:
        self._app = app
        self._keys = keys
        self._backends = backends

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request, or refuse it."""
        if scope["type"] != "http" or _is_open(scope["path"]):
            await self._app(scope, receive, send)
            return
        record = record_of(scope)
        try:
            key = self._key(scope)
            record.key, record.admin = key.name, key.admin
            is_charged = bool(key.quotas) and scope["method"] == "POST"
            if is_charged:
                await self._backends.charge(key.name, key.quotas, requests=1)
        except ApiError as error:
            record.error_code = error.code
            await error.response(scope["path"])(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            if is_charged and record.tokens:
                self._backends.first.spawn(self._charge_tokens(key, record.tokens))

    async def _charge_tokens(self, key: ApiKey, count: int) -> None:
        with contextlib.suppress(ApiError):
            await self._backends.charge(key.name, key.quotas, tokens=count)

    def _key(self, scope: Scope) -> ApiKey:
        given = digest_of(given_key(scope))
        found = None
        for key in self._keys:  # all of them, each in constant time
            if hmac.compare_digest(key.digest, given):
                found = key
        if found is None:
            text = "this server needs an API key: send it as `Authorization: Bearer KEY`"
            raise ApiError(INVALID_API_KEY, text)
        if _is_for_admins(scope["path"]) and not found.admin:
            raise ApiError(KEY_NOT_ALLOWED, f"the API key {found.name!r} is not for this; it needs `admin = true`")
        return found
