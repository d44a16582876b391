"""Traces of requests: the stages' times, what a collector gets, and what is said when the extra is missing."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue

import pytest
from fake_streamer import FakeStream
from http_worker import HttpWorker, chat

from protocol.messages import End, Timing, Trace, Usage
from server.traces import Stage, missing, stages, wanted

TRACE_ID, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_each_stage_begins_where_the_one_before_ends():
    timing = Timing(tokenize=0.5, queue=0.25, prefill=1.0, ttft=1.75, total=3.0)
    end = End(1, "finished", "stop", timing=timing, trace=Trace(received=10.0, encoded=10.5, ended=13.0))
    assert stages(9.5, end, 12.0, 14.0) == [
        Stage("http", 9.5, 10.0),
        Stage("tokenize", 10.0, 10.5),
        Stage("queue", 10.5, 10.75),
        Stage("prefill", 10.75, 11.75),
        Stage("decode", 11.75, 13.0),
        Stage("stream", 12.0, 14.0),
    ]


def test_what_a_stream_did_not_come_by_is_left_out():
    end = End(1, "cancelled", timing=Timing(tokenize=0.5), trace=Trace(received=10.0, encoded=10.5, ended=11.0))
    assert [stage.name for stage in stages(9.5, end, -1.0, 14.0)] == ["http", "tokenize"]
    assert stages(9.5, End(1, "failed"), -1.0, 14.0) == []


def test_it_is_wanted_by_our_flag_or_opentelemetrys_variables():
    assert not wanted("", {})
    assert wanted("http://127.0.0.1:4318", {})
    assert wanted("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"})
    assert not wanted("http://127.0.0.1:4318", {"OTEL_SDK_DISABLED": "true"})


def test_without_the_extra_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    assert "callboard[otel]" in missing()


@pytest.fixture
def collector() -> Iterator[tuple[str, "Queue[bytes]"]]:
    """A collector's address, and the bodies that come to it."""
    bodies: Queue[bytes] = Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            bodies.put(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", bodies
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_collector_gets_a_span_for_each_stage(
    collector: tuple[str, "Queue[bytes]"], start_worker: Callable[..., HttpWorker], monkeypatch: pytest.MonkeyPatch
):
    if missing():
        pytest.skip(missing())
    messages = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    url, bodies = collector
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    worker = start_worker(traces=True, otlp_endpoint=url)

    def answer(stream: FakeStream) -> None:
        now = time.monotonic()
        stream.accept()
        stream.text("Hello")
        timing = Timing(tokenize=0.0, queue=0.0, prefill=0.0, ttft=0.0, total=0.0)
        stream.end(End(stream.ref, "finished", "stop", usage=Usage(5, 3, 2), timing=timing, trace=Trace(*([now] * 10))))

    worker.streamer.on_generate = answer
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT}-01"}
    worker.client.post("/v1/chat/completions", json=chat(stream=True), headers=headers).raise_for_status()
    assert worker.streamer.stream().request.trace
    spans: list[object] = []
    while len(spans) < 7:
        request = messages.ExportTraceServiceRequest.FromString(bodies.get(timeout=20))
        for resource in request.resource_spans:
            names = {each.key: each.value.string_value for each in resource.resource.attributes}
            assert names["service.name"] == "callboard"
            spans += [span for scope in resource.scope_spans for span in scope.spans]
    by_name = {span.name: span for span in spans}
    assert by_name.keys() == {
        "POST /v1/chat/completions",
        *("http", "tokenize", "queue", "prefill", "decode", "stream"),
    }
    whole = by_name.pop("POST /v1/chat/completions")
    assert (whole.trace_id.hex(), whole.parent_span_id.hex()) == (TRACE_ID, PARENT)
    for span in by_name.values():
        assert (span.trace_id, span.parent_span_id) == (whole.trace_id, whole.span_id)
        assert whole.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= whole.end_time_unix_nano
    assert abs(whole.end_time_unix_nano / 1e9 - time.time()) < 60

    worker.client.post("/v1/embeddings", json={"input": "one two"}).raise_for_status()
    request = messages.ExportTraceServiceRequest.FromString(bodies.get(timeout=20))
    (span,) = request.resource_spans[0].scope_spans[0].spans
    counts = {each.key: each.value.int_value for each in span.attributes}
    assert (span.name, counts["gen_ai.usage.input_tokens"]) == ("POST /v1/embeddings", 2)
