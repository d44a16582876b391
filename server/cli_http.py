"""What commands ask a running server over HTTP: its health. No proxy is used, and a certificate of the server's own is
not checked: the address comes from the server's record on this machine."""

import json
import ssl
import urllib.error
import urllib.request
from typing import Any


def health(url: str, timeout: float = 10.0) -> dict[str, Any]:
    """The body of `/health`, whatever its status. Raises OSError when nobody answers, ValueError when it is no JSON."""
    context = ssl._create_unverified_context() if url.startswith("https:") else None
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if context is not None:
        handlers.append(urllib.request.HTTPSHandler(context=context))
    try:
        with urllib.request.build_opener(*handlers).open(f"{url}/health", timeout=timeout) as answer:
            body = json.load(answer)
    except urllib.error.HTTPError as error:  # not healthy, but it speaks
        with error:
            body = json.load(error)
    return body if isinstance(body, dict) else {}
