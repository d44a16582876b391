"""One HTTP request at a time, blocking: what checks and tests ask a server with. No proxy is ever used."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

# The last events of the APIs that don't end with [DONE].
_LAST = ("message_stop", "response.completed", "response.incomplete", "response.failed")
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


class Answer(msgspec.Struct, frozen=True):
    """A response. `body` is decoded JSON, or the text when it isn't JSON; header names are in lower case."""

    status: int
    body: Any
    headers: dict[str, str]

    @property
    def error(self) -> dict[str, Any]:
        """The OpenAI error object. Raises AssertionError when there is none."""
        assert isinstance(self.body, dict), self.body
        error = self.body.get("error")
        assert isinstance(error, dict), self.body
        return error


def request(
    method: str,
    url: str,
    body: Any = None,
    *,
    headers: Mapping[str, str] | None = None,
    timeout: float = 60.0,
) -> Answer:
    """Send one request, a body as JSON unless it is bytes. Raises OSError when nobody answers."""
    try:
        with _open(_prepare(method, url, body, headers), timeout=timeout) as response:
            return _answer(response.status, response.read(), response.headers)
    except urllib.error.HTTPError as error:
        with error:
            return _answer(error.code, error.read(), error.headers)


def get(url: str, **options: Any) -> Answer:
    """`request` with GET."""
    return request("GET", url, **options)


def post(url: str, body: Any, **options: Any) -> Answer:
    """`request` with POST."""
    return request("POST", url, body, **options)


def events(url: str, body: Mapping[str, Any], *, timeout: float = 60.0) -> Iterator[dict[str, Any]]:
    """POST with `stream` on; yields each decoded event as it arrives.

    Raises ConnectionError when the stream ends without its last event (`[DONE]` for most APIs), and HTTPError for a
    status above 399.
    """
    with _open(_prepare("POST", url, {**body, "stream": True}, None), timeout=timeout) as response:
        for line in response:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            event = json.loads(data)
            yield event
            if event.get("type") in _LAST:
                return
    raise ConnectionError("the stream ended without [DONE]")


def chat(question: str, **options: Any) -> dict[str, Any]:
    """The body of a chat completion at temperature 0."""
    return {"messages": [{"role": "user", "content": question}], "temperature": 0, **options}


def streamed_text(stream: Iterator[dict[str, Any]]) -> str:
    """All text of the first choice of a streamed chat or completion. Raises AssertionError on an error event."""
    pieces = []
    for event in stream:
        assert "error" not in event, event
        for choice in event["choices"]:
            pieces.append(choice["text"] if "text" in choice else choice["delta"].get("content") or "")
    return "".join(pieces)


def _prepare(method: str, url: str, body: Any, headers: Mapping[str, str] | None) -> urllib.request.Request:
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    content = {"content-type": "application/json"} if data is not None else {}
    return urllib.request.Request(url, data, {**content, **(headers or {})}, method=method)


def _answer(status: int, body: bytes, headers: Any) -> Answer:
    decoded: Any
    try:
        decoded = json.loads(body or b"null")
    except ValueError:
        decoded = body.decode(errors="replace")
    return Answer(status, decoded, {name.lower(): value for name, value in headers.items()})
