"""Request ids, and the one log line that each request leaves.

`RequestLog` is the outermost middleware of the app; endpoints add what they know to the `RequestRecord` it puts
into the scope.
"""

import re
import secrets
import time
from collections.abc import Iterable, Mapping
from typing import Any

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from protocol import AsyncStream
from server.arrival import arrival_of
from server.errors import CLIENT_CLOSED
from server.traces import Stage, Traces, Value, stages

log = structlog.get_logger()

MAX_ID = 128
_NOT_IN_IDS = re.compile(r"[^A-Za-z0-9._:-]")
_QUIET = frozenset({"/health", "/ready", "/metrics"})
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class RequestRecord:
    """What is known of one request while it runs. `arrived` is when it came (monotonic clock)."""

    def __init__(self, request_id: str, arrived: float) -> None:
        self.request_id = request_id
        self.arrived = arrived
        self.status: int | None = None
        self.stream = False
        self.streams: list[AsyncStream] = []
        self.choices = 1  # neighbours among the streams that share a prompt
        self.error_code = ""
        self.client_gone = False
        self.key = ""  # name of the API key
        self.admin = True  # whether it may load and unload models; where there are no keys, everybody may
        self.computed = 0  # tokens that were computed without a stream: embedded, ranked

    @property
    def tokens(self) -> int:
        """Prompt and answer of all streams that have ended, and what was computed without one."""
        usages = [stream.end.usage for stream in self.streams if stream.end is not None]
        prompts = sum(usage.prompt_tokens for usage in usages[:: self.choices])
        return self.computed + prompts + sum(usage.completion_tokens for usage in usages)

    def generation_fields(self) -> dict[str, Any]:
        """Times (seconds; the slowest of several prompts) and token counts, as far as the streams got."""
        ends = [stream.end for stream in self.streams if stream.end is not None]
        if not ends:
            return {"prompt_tokens": self.computed} if self.computed else {}
        timings = [end.timing for end in ends]
        reasons = [end.reason or end.code or end.outcome for end in ends]
        fields: dict[str, Any] = {
            "queue": max(timing.queue for timing in timings),
            "prefill": max(timing.prefill for timing in timings),
            "ttft": max(timing.ttft for timing in timings),
            "prompt_tokens": sum(end.usage.prompt_tokens for end in ends[:: self.choices]),
            "cached": sum(end.usage.cached_tokens for end in ends[:: self.choices]),
            "tokens": sum(end.usage.completion_tokens for end in ends),
            "reason": ",".join(dict.fromkeys(reasons)),
        }
        if len(self.streams) > 1:
            fields["prompts"] = len(self.streams)
        return fields


def record_of(scope: Scope) -> RequestRecord:
    """The record of the request in `scope`."""
    record: RequestRecord = scope["callboard.record"]
    return record


def request_id(scope: Scope) -> str:
    """The client's `x-request-id`, without what could harm a header or a log; a new one when nothing is left."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            wanted = _NOT_IN_IDS.sub("", value.decode("latin-1"))[:MAX_ID]
            if wanted:
                return str(wanted)
            break
    return secrets.token_hex(16)


class RequestLog:
    """Gives each request its id, sends it back in `x-request-id`, and logs and counts the request when it is over.

    `answered` counts by method, path and status; of paths that are none of `paths` only their kind is kept.
    """

    def __init__(
        self, app: ASGIApp, answered: dict[str, int], paths: Iterable[str] = (), traces: Traces | None = None
    ) -> None:
        self._app = app
        self._traces = traces
        self._answered = answered
        self._paths = {path for path in paths if "{" not in path}
        self._kinds = {path.partition("{")[0]: path.replace(":path", "") for path in paths if "{" in path}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = scope["callboard.record"] = RequestRecord(request_id(scope), arrival_of(scope))
        id_header = (b"x-request-id", record.request_id.encode())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message.get("headers", ()), id_header]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            self._log(scope, record, time.monotonic() - record.arrived)

    def _log(self, scope: Scope, record: RequestRecord, seconds: float) -> None:
        path = scope["path"]
        fields = record.generation_fields()
        if record.key:
            fields["key"] = record.key
        if record.error_code:
            fields["reason"] = record.error_code
        elif record.client_gone:
            fields["reason"] = "client_gone"
        status = record.status or (CLIENT_CLOSED if record.client_gone else 500)
        method = scope["method"] if scope["method"] in _METHODS else "other"
        key = f"{method} {self._kind(path)} {status}"
        self._answered[key] = self._answered.get(key, 0) + 1
        quiet = path in _QUIET or path == "/admin" or path.startswith("/admin/")
        if self._traces is not None and not quiet and (record.streams or method == "POST" or status != 200):
            self._trace(self._traces, scope, record, f"{method} {self._kind(path)}", status)
        write = log.debug if quiet else log.info
        write(
            "request",
            request_id=record.request_id,
            method=scope["method"],
            path=path[:200],
            status=status,
            stream=record.stream,
            seconds=round(seconds, 4),
            **fields,
        )

    @staticmethod
    def _trace(traces: Traces, scope: Scope, record: RequestRecord, name: str, status: int) -> None:
        over = time.monotonic()
        headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
        attributes: dict[str, Value] = {
            "http.request.method": scope["method"],
            "http.route": name.partition(" ")[2],
            "http.response.status_code": status,
            "callboard.request_id": record.request_id,
        }
        if record.computed:
            attributes["gen_ai.usage.input_tokens"] = record.computed
        streams: list[tuple[list[Stage], Mapping[str, Value]]] = []
        for choice, stream in enumerate(record.streams):
            if (end := stream.end) is not None:
                about: dict[str, Value] = {
                    "callboard.stream": choice,
                    "callboard.outcome": end.reason or end.code or end.outcome,
                    "callboard.cached_tokens": end.usage.cached_tokens,
                    "gen_ai.usage.input_tokens": end.usage.prompt_tokens,
                    "gen_ai.usage.output_tokens": end.usage.completion_tokens,
                }
                streams.append((stages(record.arrived, end, stream.first_used, over), about))
        failed = status >= 500 or bool(record.error_code)
        traces.request(name, headers, attributes, record.arrived, over, streams, failed=failed)

    def _kind(self, path: str) -> str:
        if path in self._paths:
            return path
        return next((kind for start, kind in self._kinds.items() if path.startswith(start)), "other")
