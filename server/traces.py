"""`Traces`: OpenTelemetry spans of requests, one per stage, sent by OTLP over HTTP. Made in an HTTP worker when a
request is over, from the times that its messages carried: nothing of it runs in the other processes.

The packages are those of the extra `otel`, imported here alone. The exporter's own thread sends; the event loop never
waits for it.
"""

import threading
import time
from collections.abc import Mapping
from importlib.util import find_spec

from msgspec import Struct

from protocol.messages import End

PACKAGES = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")
VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
CLOSE_SECONDS = 0.5  # that the last spans may take at a stop

Value = str | int | float | bool


class Stage(Struct, frozen=True):
    """One part of a request's time, in seconds of the monotonic clock."""

    name: str
    begin: float
    end: float


def stages(arrived: float, end: End, written: float, over: float) -> list[Stage]:
    """The stages of a stream, as far as it came: http (read, checked, handed to the streamer), tokenize, queue,
    prefill, decode, and stream (from its first text `written` to the request's being `over`; -1 for none)."""
    trace, timing = end.trace, end.timing
    if trace is None or trace.received < 0:
        return []
    admitted = trace.encoded + timing.queue if trace.encoded >= 0 and timing.queue >= 0 else -1.0
    first = admitted + timing.prefill if admitted >= 0 and timing.prefill >= 0 else -1.0
    moments = (
        ("http", arrived, trace.received),
        ("tokenize", trace.received, trace.encoded),
        ("queue", trace.encoded, admitted),
        ("prefill", admitted, first),
        ("decode", first, trace.ended),
        ("stream", written, over),
    )
    return [Stage(name, begin, max(begin, until)) for name, begin, until in moments if begin >= 0 and until >= 0]


def missing() -> str:
    """What is to be done when the extra isn't installed; empty when it is."""
    try:
        found = all(find_spec(name) is not None for name in PACKAGES)
    except ImportError:
        found = False
    return "" if found else "traces need the extra `otel`: pip install 'callboard[otel]'"


def wanted(endpoint: str, environment: Mapping[str, str]) -> bool:
    """Whether requests are to be traced, by `--otlp-endpoint` or by OpenTelemetry's own variables."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    return bool(endpoint or any(environment.get(name) for name in VARIABLES))


class Traces:
    """Sends spans to `endpoint`, a collector's address, or to where OpenTelemetry's variables say when it is "".
    `instance` tells this process from others. Raises ImportError without the extra."""

    def __init__(self, endpoint: str, instance: str, environment: Mapping[str, str]) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation import set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        about: dict[str, Value] = {"service.instance.id": instance}
        named = "OTEL_SERVICE_NAME" in environment or "service.name=" in environment.get("OTEL_RESOURCE_ATTRIBUTES", "")
        if not named:
            about["service.name"] = "callboard"
        url = endpoint.rstrip("/")
        if url and not url.endswith("/v1/traces"):
            url += "/v1/traces"
        self._provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url or None)))
        self._tracer = self._provider.get_tracer("callboard")
        self._propagator = TraceContextTextMapPropagator()
        self._server, self._in_context = SpanKind.SERVER, set_span_in_context
        self._failed = Status(StatusCode.ERROR)
        self._offset = time.time_ns() - time.monotonic_ns()

    def _at(self, moment: float) -> int:
        return self._offset + int(moment * 1e9)

    def request(
        self,
        name: str,
        headers: Mapping[str, str],
        attributes: Mapping[str, Value],
        begin: float,
        end: float,
        streams: list[tuple[list[Stage], Mapping[str, Value]]],
        *,
        failed: bool,
    ) -> None:
        """A request is over: its span, below that of `traceparent` in `headers` if there is one, and its stages'."""
        context = self._propagator.extract(headers)
        whole = self._tracer.start_span(
            name, context, kind=self._server, attributes=dict(attributes), start_time=self._at(begin)
        )
        if whole.is_recording():
            below = self._in_context(whole)
            for parts, about in streams:
                for part in parts:
                    span = self._tracer.start_span(
                        part.name, below, attributes=dict(about), start_time=self._at(part.begin)
                    )
                    span.end(self._at(part.end))
            if failed:
                whole.set_status(self._failed)
        whole.end(self._at(end))

    def close(self) -> None:
        """Send what is left, within a moment."""
        ending = threading.Thread(target=self._provider.shutdown, name="traces-end", daemon=True)
        ending.start()
        ending.join(CLOSE_SECONDS)
