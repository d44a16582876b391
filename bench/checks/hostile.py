"""Checks of hostile clients: malformed requests and messages, and clients that vanish, while streams run."""

import asyncio
import contextlib
import json
import math
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import uvloop
import zmq

from bench.checks.crowds import reached
from bench.checks.report import Report
from bench.faults.garbage import http_requests, zmq_frames
from bench.faults.streams import Asked, Stream, compare, running, undisturbed
from bench.harness import RunningServer
from bench.load.over_http import build_request
from protocol import AsyncClient, Client
from protocol.codec import CodecError, encode, server_codec
from protocol.ids import pack_ids
from protocol.messages import (
    PROTOCOL_VERSION,
    CallFailed,
    Deltas,
    Generate,
    Hello,
    Ping,
    Pong,
    Refused,
    SamplingParams,
)
from protocol.sockets import connect_dealer

AT_ONCE = 24  # connections of the hostile client
PATIENCE = 10.0  # seconds for one answer
PROMPT = list(range(1000, 1300))  # of clients that vanish: all but the first find its block in memory
LAST = 1_000_000_007  # the number of the ping behind all frames


def malformed(report: Report, server: RunningServer, model: Path, *, count: int, streams: int, tokens: int) -> None:
    """`count` malformed HTTP requests and as many ZeroMQ messages, while `streams` streams run."""
    requests = [Asked(index, tokens) for index in range(streams)]
    pids = server.pids()
    reference = uvloop.run(undisturbed(server.endpoint, requests))
    before = _malformed_so_far(server)
    statuses, replies, got = uvloop.run(_malformed(server, requests, count))
    counted = _malformed_so_far(server) - before
    report.measured("http_answers", dict(statuses.most_common()))
    report.measured("zeromq_answers", dict(replies.most_common()))
    report.measured("zeromq_messages_counted_as_malformed", counted)
    report.measured("streams_beside_them", len(got))
    bad = {
        answer: n for answer, n in statuses.items() if answer not in ("closed", "200") and not answer.startswith("4")
    }
    report.expect(sum(statuses.values()) == count, "every HTTP request was answered or its connection closed")
    report.expect(not bad, "HTTP: a 4xx, closed, or answered properly", bad)
    # All that no message can be made of is counted; a client that has introduced itself is also told.
    told = replies["CallFailed invalid_request"]
    report.expect(counted >= told > 0, "ZeroMQ: what is unreadable is dropped and counted, or answered", counted)
    errors = [stream.error for stream in got if stream.error]
    report.expect(len(got) >= streams and not errors, "no stream was disturbed", errors[:5])
    compare(report, model, "beside them", reference, got)
    server.wait_idle(30)
    report.expect(server.pids() == pids, "no process was restarted")


def _malformed_so_far(server: RunningServer) -> int:
    with Client(endpoint=server.endpoint) as client:
        return client.figures().counts.malformed


async def _malformed(
    server: RunningServer, requests: Sequence[Asked], count: int
) -> tuple["Counter[str]", "Counter[str]", list[Stream]]:
    over = asyncio.Event()
    got: list[Stream] = []

    async def keep_streaming(client: AsyncClient, number: int, asked: Asked) -> None:
        while True:
            stream = Stream(asked)
            got.append(await (stream.over_http(server.url) if number % 2 else stream.over_zmq(client)))
            if over.is_set():
                return

    async with AsyncClient(endpoint=server.endpoint) as client:
        tasks = [asyncio.create_task(keep_streaming(client, *numbered)) for numbered in enumerate(requests)]
        async with running(tasks):
            statuses, replies = await asyncio.gather(
                _send_requests(server, count), asyncio.to_thread(_send_frames, server.endpoint, count)
            )
            over.set()
            await asyncio.gather(*tasks)
    return statuses, replies, got


async def _send_requests(server: RunningServer, count: int) -> "Counter[str]":
    answers: Counter[str] = Counter()
    requests = http_requests(server.url, count)

    async def work(requests: Iterator[bytes]) -> None:
        for request in requests:
            answers[await _answer(server, request)] += 1

    await asyncio.gather(*(work(requests) for _ in range(AT_ONCE)))
    return answers


async def _answer(server: RunningServer, request: bytes) -> str:
    """The status of the answer, or how it stayed out."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        writer.write(request)
        with contextlib.suppress(OSError):
            writer.write_eof()  # what is cut short is over, then
        try:
            line = await asyncio.wait_for(reader.readline(), PATIENCE)
        except TimeoutError:
            return "no answer"
        except OSError:
            return "closed"
        return line.split()[1].decode() if line.startswith(b"HTTP/1.1 ") else "closed"
    finally:
        writer.transport.abort()


def _send_frames(endpoint: str, count: int) -> "Counter[str]":
    """Send all frames over a few sockets; returns how they were answered."""
    answers: Counter[str] = Counter()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sockets = [connect_dealer(context, endpoint) for _ in range(4)]
    try:
        for number, frames in enumerate(zmq_frames(count)):
            socket = sockets[number % 4]
            if number < 3:  # the fourth one never introduces itself
                socket.send(encode(Hello(PROTOCOL_VERSION, f"hostile {number}")))
            socket.send_multipart(frames)
            if number % 50 == 0:
                time.sleep(0.01)
                _read(sockets, answers)
        for socket in sockets[:3]:
            socket.send(encode(Ping(LAST)))
        until = time.monotonic() + PATIENCE
        while answers["last"] < 3 and time.monotonic() < until:
            time.sleep(0.02)
            _read(sockets, answers)
        if answers.pop("last") < 3:
            raise TimeoutError("the server does not answer a ping behind all that")
    finally:
        context.destroy(linger=0)
    return answers


def _read(sockets: "Sequence[zmq.Socket[bytes]]", answers: "Counter[str]") -> None:
    for socket in sockets:
        while True:
            try:
                frame = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                message = server_codec.decode(frame)
            except CodecError:
                answers["unreadable"] += 1
                continue
            if isinstance(message, CallFailed):
                answers[f"CallFailed {message.code}"] += 1
            elif isinstance(message, Deltas):
                for end in message.ends:
                    answers[f"End {end.outcome} {end.code}".rstrip()] += 1
            elif isinstance(message, Refused):
                answers["Refused"] += 1
            elif isinstance(message, Pong) and message.seq == LAST:
                answers["last"] += 1
            else:
                answers[type(message).__name__] += 1


def vanishing(report: Report, server: RunningServer, clients: int) -> None:
    """`clients` clients connect and vanish at random points; rows, blocks in use and file descriptors return to where
    they were."""
    server.wait_idle()
    pids = server.pids()
    uvloop.run(_vanish(server, 20))  # so that what is made once is there
    _settle(server, 10)
    before = descriptors(pids)
    uvloop.run(_vanish(server, clients))
    seconds = _settle(server, 10)
    report.measured("clients", clients)
    report.measured("seconds_until_idle", round(seconds, 2))
    report.expect(seconds < math.inf, "no row is left", server.load())
    acquired = _acquired_blocks(server)
    report.expect(acquired == 0, "no block is held any more", acquired)
    after = before
    for _ in range(100):
        after = descriptors(pids)
        if all(after[name] <= before[name] for name in before):
            break
        time.sleep(0.1)
    report.measured("file_descriptors_before", before)
    report.measured("file_descriptors_after", after)
    grown = {name: [before[name], after[name]] for name in before if after[name] > before[name]}
    report.expect(not grown, "file descriptors are back at their start value", grown)
    report.expect(server.pids() == pids, "no process was restarted")


def _acquired_blocks(server: RunningServer) -> int:
    """Blocks that rows hold, once the engine has told what is so now."""
    acquired = 0
    for _ in range(100):
        acquired = int(server.health()["prefix_cache"]["acquired_blocks"])
        if not acquired:
            break
        time.sleep(0.1)
    return acquired


def _settle(server: RunningServer, seconds: float) -> float:
    began = time.monotonic()
    try:
        server.wait_idle(seconds)
    except TimeoutError:
        return math.inf
    return time.monotonic() - began


def descriptors(pids: dict[str, int]) -> dict[str, int]:
    """Open file descriptors of each process."""
    return {name: psutil.Process(pid).num_fds() for name, pid in pids.items()}


async def _vanish(server: RunningServer, count: int) -> None:
    seats = asyncio.Semaphore(60)
    draw = random.Random(count)
    body = json.dumps({"prompt": PROMPT, "max_tokens": 3000, "ignore_eos": True, "stream": True}).encode()
    request = build_request(server.url, "/v1/completions", body)
    parts = urlsplit(server.url)

    async def over_http() -> None:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            cut = draw.choice([draw.randrange(len(request)), len(request)])
            writer.write(request[:cut])
            if cut == len(request):
                for _ in range(draw.randrange(8)):
                    if not await asyncio.wait_for(reader.readline(), 30):
                        break
            else:
                await asyncio.sleep(draw.random() * 0.05)
        finally:
            writer.transport.abort()

    def over_zmq() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            socket = connect_dealer(context, server.endpoint)
            socket.rcvtimeo = 30_000
            for step in range(draw.randrange(5)):
                if step == 0:
                    socket.send(encode(Hello(PROTOCOL_VERSION, "vanishing")))
                elif step == 1:
                    socket.send(
                        encode(Generate(1, SamplingParams(max_tokens=3000, ignore_eos=True), ids=pack_ids(PROMPT)))
                    )
                else:
                    socket.recv()
        finally:
            context.destroy(linger=0)

    async def one(number: int) -> None:
        async with seats:
            if number % 3:
                await over_http()
            else:
                await asyncio.to_thread(over_zmq)

    await asyncio.gather(*(one(number) for number in range(count)))
    with contextlib.suppress(TimeoutError):
        await reached(server.is_idle, 10, "the engine is idle")
