"""`ApiKeys`: lets in requests that bring one of the server's keys, within that key's limits. A middleware of the app,
on the event loop.

A key comes as `Authorization: Bearer KEY`, as OpenAI's clients send it, or as `x-api-key`. `/health` and `/ready`
are open: they are for those that watch the server; and so are the dashboard's files, whose page asks for the key.
Limits are counted by the model's streamer: with several models each has a count of its own.
"""

import contextlib
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from protocol import AsyncClient
from protocol.errors import CallboardError
from server.backends import Backends
from server.errors import INVALID_API_KEY, KEY_NOT_ALLOWED, ApiError, from_client_error
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


class _Charge:
    """What one request costs its key. `client` is that of the model that counts it, once it is known."""

    def __init__(self, key: ApiKey) -> None:
        self._key = key
        self._client: AsyncClient | None = None

    async def request(self, client: AsyncClient) -> None:
        """Count the request. Raises ApiError when it is one too many."""
        self._client = client
        try:
            await client.charge(self._key.name, self._key.quotas, requests=1)
        except CallboardError as error:
            raise from_client_error(error) from None

    async def tokens(self, count: int) -> None:
        """Count its tokens."""
        if self._client is not None:
            with contextlib.suppress(CallboardError):
                await self._client.charge(self._key.name, self._key.quotas, tokens=count)


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
            record.key = key.name
            charge = _Charge(key) if key.quotas and scope["method"] == "POST" else None
            if charge is not None and self._backends.house is None:
                await charge.request(self._backends.first.client())
            elif charge is not None:
                record.charge = charge.request
        except ApiError as error:
            record.error_code = error.code
            await error.response(scope["path"])(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            if charge is not None and record.tokens:
                self._backends.first.spawn(charge.tokens(record.tokens))

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
