"""`CrossOrigin`: refuses what a page of another site has a browser send. A middleware of the app, on the event loop.

Without CORS such a page can't read an answer, but a "simple" POST (a form's, or `text/plain`) goes out without asking
first, and would have done its work by then. The rules are those of Go's `net/http.CrossOriginProtection` (1.25): what
`Sec-Fetch-Site` says; of a browser that doesn't send it, whether `Origin` is this server's own host. Programs send
neither, and are not concerned. As with Ollama, pages served by this machine and desktop apps are let in.
"""

from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import ORIGIN_NOT_ALLOWED, ApiError
from server.request_log import record_of

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
OWN_SITES = frozenset({b"same-origin", b"none"})
APP_SCHEMES = frozenset({"app", "file", "tauri", "vscode-webview", "vscode-file"})  # no website can have these
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


class CrossOrigin:
    """Refuses (403) requests that change or cost something and come from pages that are not in `allowed`."""

    def __init__(self, app: ASGIApp, allowed: Sequence[str] = ()) -> None:
        self._app = app
        self._allowed = frozenset(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request, or refuse it."""
        if scope["type"] != "http" or self._lets_in(scope):
            await self._app(scope, receive, send)
            return
        origin = dict(scope["headers"]).get(b"origin", b"").decode("latin-1")
        error = ApiError(
            ORIGIN_NOT_ALLOWED,
            f"pages of {origin or 'another site'} may not call this server; to let them, start it with "
            f"--allow-origins {origin or 'ORIGIN'}",
        )
        record_of(scope).error_code = error.code
        await error.response(scope["path"])(scope, receive, send)

    def _lets_in(self, scope: Scope) -> bool:
        if scope["method"] in SAFE_METHODS or "*" in self._allowed:
            return True
        headers = dict(scope["headers"])
        origin = headers.get(b"origin", b"").decode("latin-1")
        if origin and (origin in self._allowed or _is_local(origin)):
            return True
        site = headers.get(b"sec-fetch-site")
        if site is not None:
            return site in OWN_SITES
        return not origin or _host(origin) == headers.get(b"host", b"").decode("latin-1").lower()


def _is_local(origin: str) -> bool:
    """Whether it is a page of this machine, or a desktop app."""
    try:
        parts = urlsplit(origin)
        return parts.scheme in APP_SCHEMES or parts.hostname in LOOPBACK
    except ValueError:
        return False


def _host(origin: str) -> str:
    """Host and port of an origin, "" of one that has none, such as `null`."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""
