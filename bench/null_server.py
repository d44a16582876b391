"""A server without a model, to measure what a load client can take: it sends every open stream a token per step.

    python -m bench.null_server http|zmq [--step-ms 0]

Prints where it listens as one line of JSON and serves until stdin ends. One process, one thread, no checks: it knows
just enough of HTTP and of our protocol for `bench/load`. With `--step-ms 0` a step follows the one before at once.
"""

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import msgspec
import uvloop
import zmq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.harness import ROOT
from protocol.codec import client_codec, encode
from protocol.messages import (
    PROTOCOL_VERSION,
    Accepted,
    Cancel,
    Credit,
    Deltas,
    End,
    Generate,
    Hello,
    ListModels,
    ModelCard,
    Models,
    Ping,
    Pong,
    Usage,
    Welcome,
)
from protocol.sockets import bind_router

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
CARD = ModelCard("null", 65_536, 49_152)
WINDOW = 64  # deltas of a stream that may be unacknowledged
HIGH_WATER = 1 << 16  # bytes unread by a client before its streams rest


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


TOKEN = _chunk(b'data: {"id":"cmpl-0","choices":[{"index":0,"text":" word","finish_reason":null}],"usage":null}\n\n')
LAST = _chunk(b'data: {"id":"cmpl-0","choices":[{"index":0,"text":" word","finish_reason":"length"}],"usage":null}\n\n')


class Body(msgspec.Struct):
    """What it reads of a request."""

    prompt: list[int] | str
    max_tokens: int

    @property
    def prompt_tokens(self) -> int:
        """Words count as tokens."""
        return len(self.prompt.split() if isinstance(self.prompt, str) else self.prompt)


class HttpStream(asyncio.Protocol):
    """One connection, one request, one stream; in `open` while it has tokens to come."""

    def __init__(self, open_streams: "set[HttpStream]", work: asyncio.Event) -> None:
        self._open = open_streams
        self._work = work
        self._data = b""
        self._body: Body | None = None
        self._sent = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, found, body = self._data.partition(b"\r\n\r\n")
        if not found or self._body is not None:
            return
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        if len(body) >= length:
            self._body = msgspec.json.decode(body, type=Body)
            self.transport.write(HEAD)
            self._open.add(self)
            self._work.set()

    def connection_lost(self, _: Exception | None) -> None:
        self._open.discard(self)

    def step(self) -> None:
        """Send a token, and behind the last one the end."""
        assert self._body is not None
        if self.transport.get_write_buffer_size() > HIGH_WATER:
            return
        self._sent += 1
        if self._sent < self._body.max_tokens:
            self.transport.write(TOKEN)
            return
        usage = {"prompt_tokens": self._body.prompt_tokens, "completion_tokens": self._sent}
        tail = b'data: {"choices":[],"usage":' + json.dumps(usage).encode() + b"}\n\ndata: [DONE]\n\n"
        self.transport.write(LAST + _chunk(tail) + b"0\r\n\r\n")
        self.transport.close()
        self._open.discard(self)


async def serve_http(step_seconds: float) -> None:
    """Serve until stdin ends."""
    streams: set[HttpStream] = set()
    work = asyncio.Event()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: HttpStream(streams, work), "127.0.0.1", 0, backlog=2048)
    loop.add_reader(sys.stdin.fileno(), lambda: os._exit(0))
    print(json.dumps({"url": f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "endpoint": ""}), flush=True)
    while True:
        await work.wait()
        for stream in list(streams):
            stream.step()
        if not streams:
            work.clear()
        await asyncio.sleep(step_seconds)


class ZmqStream(msgspec.Struct):
    """One stream: tokens to come, and deltas that the client has not acknowledged."""

    prompt_tokens: int
    max_tokens: int
    left: int
    unread: int = 0


def serve_zmq(step_seconds: float) -> None:
    """Serve until stdin ends."""
    with tempfile.TemporaryDirectory(prefix="cb-", dir="/tmp") as folder:
        endpoint = f"ipc://{folder}/null"
        socket = bind_router(zmq.Context(), endpoint)
        print(json.dumps({"url": "", "endpoint": endpoint}), flush=True)
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(sys.stdin.fileno(), zmq.POLLIN)
        peers: dict[bytes, dict[int, ZmqStream]] = {}
        stepped = False
        while True:
            ready = dict(poller.poll(int(step_seconds * 1000) if stepped else None))
            if sys.stdin.fileno() in ready:
                return
            while socket in ready and socket.poll(0):
                peer, frame = socket.recv_multipart()[:2]
                with contextlib.suppress(zmq.ZMQError):  # it has gone again
                    _obey(socket, peer, frame, peers.setdefault(peer, {}))
            stepped = False
            for peer, streams in list(peers.items()):
                try:
                    stepped = _step(socket, peer, streams) or stepped
                except zmq.ZMQError:
                    del peers[peer]  # vanished


def _obey(socket: "zmq.Socket[bytes]", peer: bytes, frame: bytes, streams: dict[int, ZmqStream]) -> None:
    match client_codec.decode(frame):
        case Hello():
            socket.send_multipart([peer, encode(Welcome(PROTOCOL_VERSION, 1, WINDOW, [CARD]))])
        case Ping(seq=seq):
            socket.send_multipart([peer, encode(Pong(seq, 1))])
        case ListModels(ref=ref):
            socket.send_multipart([peer, encode(Models(ref, [CARD]))])
        case Generate(ref=ref, params=params, ids=ids):
            tokens = params.max_tokens or 1
            streams[ref] = ZmqStream(len(ids or b"") // 4, tokens, tokens)
            socket.send_multipart([peer, encode(Accepted(ref, ref, streams[ref].prompt_tokens))])
        case Credit(refs=refs, counts=counts):
            for ref, count in zip(refs, counts, strict=True):
                if ref in streams:
                    streams[ref].unread -= count
        case Cancel(ref=ref) if ref in streams:
            stream = streams.pop(ref)
            usage = Usage(stream.prompt_tokens, stream.max_tokens - stream.left)
            socket.send_multipart([peer, encode(Deltas([], [], [], [], [End(ref, "cancelled", usage=usage)]))])


def _step(socket: "zmq.Socket[bytes]", peer: bytes, streams: dict[int, ZmqStream]) -> bool:
    """Send a token of every stream whose client keeps up; whether there was one."""
    ends = []
    refs = [ref for ref, stream in streams.items() if stream.unread < WINDOW]
    for ref in refs:
        stream = streams[ref]
        stream.left -= 1
        stream.unread += 1
        if not stream.left:
            ends.append(End(ref, "finished", "length", usage=Usage(stream.prompt_tokens, stream.max_tokens)))
            del streams[ref]
    if refs:
        count = len(refs)
        message = Deltas(refs, [" word"] * count, [b""] * count, [1] * count, ends)
        socket.send_multipart([peer, encode(message)])
    return bool(refs)


@contextlib.contextmanager
def running(via: str, step_ms: float = 0.0) -> Iterator[tuple[str, str, int]]:
    """A null server in a process of its own; yields its URL, its endpoint and its pid."""
    command = [sys.executable, "-m", "bench.null_server", via, "--step-ms", str(step_ms)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        try:
            place = json.loads(process.stdout.readline())
            yield place["url"], place["endpoint"], process.pid
        finally:
            process.kill()


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("via", choices=("http", "zmq"))
    parser.add_argument("--step-ms", type=float, default=0.0)
    args = parser.parse_args()
    if args.via == "http":
        uvloop.run(serve_http(args.step_ms / 1000))
    else:
        serve_zmq(args.step_ms / 1000)


if __name__ == "__main__":
    main()
