"""Checks of a machine that misbehaves: a disk that is full or slow, also while an engine leaves; a clock that jumps."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import uvloop

from actors.supervision import REPLACE_TIME
from bench.checks.crowds import reached
from bench.checks.recovery import clock, events
from bench.checks.report import Report
from bench.faults.inject import ROUTES, Faults
from bench.faults.streams import Asked, Stream, compare, running, undisturbed
from bench.harness import ROOT, RunningServer, clean_environment
from protocol import AsyncClient

LONG_WRITE = 0.7  # seconds for a block, on the slow disk: far more are waiting than a flush has time for
HOUR = 3600.0


def disks(report: Report, server: RunningServer, faults: Faults, model: Path, *, streams: int, tokens: int) -> None:
    """The disk is full, then slow: streams complete, an engine that is killed or replaced meanwhile goes on with the
    same tokens, and afterwards nothing in the directory is wrong."""

    def kill() -> None:
        server.kill("engine")

    def replace() -> None:
        os.kill(server.pids()["supervisor"], signal.SIGUSR1)

    number = 0
    for name, state, blow in (
        ("full", {"full": True}, kill),
        ("slow", {"slow": LONG_WRITE}, kill),
        ("slow, and the engine is replaced", {"slow": LONG_WRITE}, replace),
    ):
        requests = [Asked(7000 + number + index, tokens, ids=700) for index in range(streams)]
        number += streams
        faults.disk(**state)
        got, seconds = uvloop.run(_under(server, requests, blow))
        faults.disk()
        errors = [stream.error for stream in got if stream.error]
        report.expect(not errors, f"{name}: all streams complete", errors[:3])
        report.measured(f"{name}: seconds until all went on", round(seconds, 2))
        compare(report, model, name, uvloop.run(undisturbed(server.endpoint, requests)), got)
    cut = [line for line in events(server) if line["event"] == "prefixes were left unwritten"]
    report.expect(len(cut) == 1, "the replaced engine was cut off in its flush", len(cut))
    went = [clock(line) for line in events(server) if line["event"] in ("replacing", "actor left")]
    left = went[1] - went[0]
    report.measured("seconds a replaced engine took to leave", round(left, 2))
    report.expect(left < REPLACE_TIME, "it left in time", left)
    folder = server.home / "prefix"
    command = [sys.executable, "-m", "server.cli", "cache", "verify", "--ssd-cache-dir", str(folder)]
    verified = subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True)
    report.expect(verified.returncode == 0, "`callboard cache verify` finds nothing wrong", verified.stdout[-500:])


async def _under(server: RunningServer, requests: list[Asked], blow: Callable[[], None]) -> tuple[list[Stream], float]:
    """The streams, and how long after the blow the last of them went on."""
    streams = [Stream(asked) for asked in requests]
    async with AsyncClient(endpoint=server.endpoint) as client:
        tasks = [asyncio.create_task(stream.over_zmq(client)) for stream in streams]
        async with running(tasks):
            await reached(lambda: all(stream.times for stream in streams), 60, "every stream has had tokens")
            epoch = _epoch(server)
            await asyncio.to_thread(blow)
            began = time.monotonic()
            await reached(lambda: _epoch(server) > epoch, 30, "there is another engine")
            found = time.monotonic()
            await reached(partial(_go_on, streams, found), 60, "all go on")
            seconds = time.monotonic() - began
            await asyncio.wait_for(asyncio.gather(*tasks), 120)
    return streams, seconds


def _epoch(server: RunningServer) -> int:
    return max(
        (a["epoch"] for a in server.health()["actors"] if a["name"] == "engine" and a["state"] == "ready"), default=0
    )


def clock_jump(report: Report, server: RunningServer, faults: Faults, *, streams: int, tokens: int) -> None:
    """All clocks jump by an hour under streams, twice: nobody is killed, no stream is lost."""
    requests = [Asked(index, tokens) for index in range(streams)]
    reference = uvloop.run(undisturbed(server.endpoint, requests))
    pids = server.pids()
    got = uvloop.run(_clock_jump(server, requests, faults))
    errors = [stream.error for stream in got if stream.error]
    report.expect(not errors, "no stream is lost to a clock", errors[:5])
    same = sum(r.tokens == s.tokens for r, s in zip(reference, got, strict=True))
    report.expect(same == streams, "every stream has all its tokens", same)
    report.expect(server.pids() == pids, "no process was replaced")
    report.expect(server.health()["status"] == "ok", "the system is healthy")


def _go_on(streams: list[Stream], since: float) -> bool:
    return all(stream.ended or stream.times[-1] > since for stream in streams)


async def _clock_jump(server: RunningServer, requests: list[Asked], faults: Faults) -> list[Stream]:
    streams = [Stream(asked) for asked in requests]
    async with AsyncClient(endpoint=server.endpoint) as client:
        tasks = [
            asyncio.create_task(stream.over_http(server.url) if number % 2 else stream.over_zmq(client))
            for number, stream in enumerate(streams)
        ]
        async with running(tasks):
            for _ in range(2):
                began = time.monotonic()
                await reached(lambda: all(s.ended or s.times for s in streams), 60, "every stream has had tokens")
                faults.clock_jump(HOUR)
                await asyncio.sleep(1.0)
                await reached(partial(_go_on, streams, began + 1.0), 30, "they go on")
            await asyncio.wait_for(asyncio.gather(*tasks), 120)
    return streams


def cut_frames(
    report: Report,
    server: RunningServer,
    faults: Faults,
    model: Path,
    *,
    streams: int,
    tokens: int,
    routes: Sequence[str] = ROUTES,
) -> None:
    """A frame between two actors is cut in half, on each way in turn, under streams from texts and ids: each ends once,
    with the same tokens, and only an engine whose link is broken is replaced."""
    requests = [Asked(index, tokens, words=30 + index if index % 2 else 0) for index in range(streams)]
    reference = uvloop.run(undisturbed(server.endpoint, requests))
    for route in routes:
        before = server.pids()
        got = uvloop.run(_cut_frames(server, requests, faults, route))
        errors = [stream.error for stream in got if stream.error]
        report.expect(not errors, f"{route}: all streams complete", errors[:3])
        report.expect(all(stream.ends == 1 for stream in got), f"{route}: each ended once")
        compare(report, model, route, reference, got)
        server.wait_ready(30)
        replaced = {name for name, pid in server.pids().items() if before[name] != pid}
        wanted = {"engine"} if "engine" in route else set()
        report.expect(replaced == wanted, f"{route}: replaced is only {wanted or 'nobody'}", replaced)


async def _cut_frames(server: RunningServer, requests: list[Asked], faults: Faults, route: str) -> list[Stream]:
    """Streams one after the other until the frame was cut, and those that ran then."""
    got: list[Stream] = []

    async def keep_streaming(client: AsyncClient, asked: Asked) -> None:
        while True:
            cut = faults.was_cut()
            got.append(await Stream(asked).over_zmq(client))
            if cut:
                return

    async with AsyncClient(endpoint=server.endpoint) as client:
        faults.cut(route)
        tasks = [asyncio.create_task(keep_streaming(client, asked)) for asked in requests]
        async with running(tasks):
            await asyncio.wait_for(asyncio.gather(*tasks), 90)
    return got
