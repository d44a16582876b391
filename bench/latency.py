"""Where the time of one small request goes: python bench/latency.py [--requests N] [--busy-poll MS] [--json FILE]

A server with the tiny model, idle but for one request at a time: 16 ids in, one id out. Asked in turn by a raw ZeroMQ
socket, by `protocol.Client`, and over HTTP; the parts come from the marks that traced requests carry (`Trace`).
"""

import argparse
import http.client
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import zmq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.facts import machine_facts
from bench.harness import RunningServer, exit_on_sigterm
from bench.models import tiny_model
from protocol import Client
from protocol.codec import encode, server_codec
from protocol.ids import pack_ids
from protocol.messages import PROTOCOL_VERSION, Deltas, Generate, Hello, Ping, SamplingParams, Trace, Welcome
from protocol.sockets import connect_dealer

IDS = list(range(1000, 1016))
REST = 0.003  # seconds between two requests
WARM = 30  # requests before anything is counted
PARTS = (
    "client to streamer",
    "streamer (in)",
    "tokenizer",
    "streamer to engine",
    "engine: model",
    "engine: Python",
    "engine: sockets",
    "engine: waiting",
    "engine to streamer",
    "streamer (out)",
    "streamer to client",
)


class Sample(msgspec.Struct, frozen=True):
    """One request: seconds from asking to the answer, and its parts in the order of PARTS (none over HTTP)."""

    total: float
    parts: list[float] = []

    @property
    def in_engine(self) -> float:
        """Seconds from the engine's taking it in to its sending the token: its turns, model and all else."""
        return sum(self.parts[4:8])

    @property
    def in_model(self) -> float:
        """Seconds of these in the model: building its graph, feeding the device and waiting for it."""
        return self.parts[4]


def split(began: float, trace: Trace, ended: float) -> Sample:
    """The parts of a request that was asked at `began` and answered at `ended`, by the monotonic clock."""
    text = trace.tokenized - trace.tokenizing if trace.tokenizing >= 0 else 0.0
    engine = trace.stepped - trace.queued
    parts = [
        trace.received - began,
        trace.submitted - trace.received - text,
        text,
        trace.queued - trace.submitted,
        trace.in_model,
        trace.in_python,
        trace.in_sockets,
        engine - trace.in_model - trace.in_python - trace.in_sockets,
        trace.arrived - trace.stepped,
        trace.ended - trace.arrived,
        ended - trace.ended,
    ]
    return Sample(ended - began, parts)


class RawClient:
    """A DEALER socket used as docs/protocol.md says, on the caller's thread: the shortest way there is."""

    def __init__(self, endpoint: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = connect_dealer(self._context, endpoint)
        self._socket.rcvtimeo = 30_000
        self._socket.send(encode(Hello(PROTOCOL_VERSION, "latency")))
        assert isinstance(server_codec.decode(self._socket.recv()), Welcome)
        self._ref = 0

    def ask(self) -> Sample:
        """One request. Raises zmq.Again when the answer takes too long."""
        self._ref += 1
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        began = time.monotonic()
        request = Generate(self._ref, params, ids=pack_ids(IDS), return_text=False, return_ids=True, trace=True)
        self._socket.send(encode(request))
        while True:
            message = server_codec.decode(self._socket.recv())
            if isinstance(message, Deltas) and message.ends:
                ended = time.monotonic()
                break
        self._socket.send(encode(Ping(self._ref)))
        trace = message.ends[0].trace
        assert trace is not None
        return split(began, trace, ended)

    def close(self) -> None:
        """Disconnect."""
        self._socket.close(linger=0)
        self._context.term()


def ask_client(client: Client) -> Sample:
    """One request by the Python client."""
    began = time.monotonic()
    stream = client.generate(
        ids=IDS, temperature=0, max_tokens=1, ignore_eos=True, return_text=False, return_ids=True, trace=True
    )
    for _ in stream:
        pass
    ended = time.monotonic()
    assert stream.end is not None
    assert stream.end.trace is not None
    return split(began, stream.end.trace, ended)


def ask_http(connection: http.client.HTTPConnection) -> Sample:
    """One request over an HTTP connection that is kept open."""
    body = json.dumps({"prompt": IDS, "max_tokens": 1, "temperature": 0, "ignore_eos": True})
    began = time.monotonic()
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    response = connection.getresponse()
    response.read()
    ended = time.monotonic()
    assert response.status == 200, response.status
    return Sample(ended - began)


def measure(server: RunningServer, requests: int) -> dict[str, list[Sample]]:
    """So many requests each way, one at a time and in turn."""
    raw = RawClient(server.endpoint)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        with Client(endpoint=server.endpoint) as client:
            ways: dict[str, Callable[[], Sample]] = {
                "raw": raw.ask,
                "client": lambda: ask_client(client),
                "http": lambda: ask_http(connection),
            }
            samples: dict[str, list[Sample]] = {way: [] for way in ways}
            for number in range(requests + WARM):
                for way, ask in ways.items():
                    time.sleep(REST)
                    sample = ask()
                    if number >= WARM:
                        samples[way].append(sample)
    finally:
        raw.close()
        connection.close()
    return samples


def p50_ms(seconds: Iterable[float]) -> float:
    """Median in milliseconds."""
    return round(statistics.median(seconds) * 1000, 3)


def table(samples: dict[str, list[Sample]]) -> list[tuple[str, float, float]]:
    """Median of each part, in milliseconds: by the raw socket and by the client."""
    ways = samples["raw"], samples["client"]
    return [
        (part, *(p50_ms(sample.parts[i] for sample in way) for way in ways))  # type: ignore[misc]  # two of them
        for i, part in enumerate(PARTS)
    ]


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=300, help="requests each way (300)")
    parser.add_argument("--busy-poll", type=float, default=0.0, metavar="MS", help="as of `callboard serve`")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    args = parser.parse_args()
    exit_on_sigterm()
    with RunningServer(tiny_model(), "--busy-poll", str(args.busy_poll)) as server:
        samples = measure(server, args.requests)
    rows = table(samples)
    print(f"{'p50, ms':<22}{'raw':>9}{'client':>9}{'http':>9}")
    for part, raw, client in rows:
        print(f"{part:<22}{raw:>9.3f}{client:>9.3f}")
    totals = {way: p50_ms(sample.total for sample in each) for way, each in samples.items()}
    print(f"{'round trip':<22}" + "".join(f"{total:>9.3f}" for total in totals.values()))
    if args.json:
        result = {"requests": args.requests, "p50_ms": totals, "parts_p50_ms": rows, "machine": machine_facts()}
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
