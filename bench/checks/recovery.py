"""Checks of recovery: engine, tokenizers, streamer and HTTP workers die or hang under load, and what becomes of it."""

import asyncio
import json
import math
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import uvloop

from actors.streamer.recovery import POISON, REPEATS
from bench.ask import get, post
from bench.checks.crowds import reached
from bench.checks.report import Report
from bench.faults.inject import RowFault
from bench.faults.streams import Asked, Stream, compare, first_difference, running, undisturbed
from bench.harness import RunningServer
from protocol import AsyncClient, Client
from protocol.errors import CallboardError, RequestFailed

SPARE = 2.0  # seconds beyond a cold start until the first stream goes on
END_LIMIT = 4.0  # seconds until every client of a dead streamer or HTTP worker has its end
SERVE_LIMIT = 5.0  # seconds, beside the load, until the system serves again


def events(server: RunningServer) -> list[dict[str, Any]]:
    """The server's log lines that are JSON."""
    lines = []
    for line in server.log().splitlines():
        if line.startswith("{"):
            try:
                lines.append(json.loads(line))
            except ValueError:
                continue
    return lines


def clock(line: dict[str, Any]) -> float:
    """When a log line was written, in seconds since 1970."""
    return datetime.fromisoformat(line["timestamp"]).timestamp()


def cold_start(server: RunningServer) -> float:
    """Seconds from the start of the first engine to ready, beside the other processes' starts."""
    log = events(server)
    began = next(clock(line) for line in log if line["event"] == "BLAS" or line.get("actor") == "engine")
    return next(clock(line) for line in log if line["event"] == "ready" and line.get("actor") == "engine") - began


class Blow:
    """One fault: when it came, and when it was noticed (the same for a death)."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        self.at = time.monotonic()
        self.noticed = self.at
        self.open = [stream for stream in streams if stream.open]
        self.decoding = [stream for stream in self.open if stream.times]
        self.suspects = [stream for stream in self.open if not stream.times]
        self.had = {id(stream): len(stream.ids) or len(stream.times) for stream in self.open}

    def went_on(self, until: float) -> list[float]:
        """Seconds from the notice until each of the open streams went on, or ended; those that had not at `until`,
        when the next fault came, are that one's."""
        times = []
        for stream in self.open:
            later = [arrival for arrival in stream.times if arrival > self.noticed + 0.05]
            times.append(later[0] if later else stream.ended)
        return [at - self.noticed for at in times if at <= until]


def engine_faults(
    report: Report,
    server: RunningServer,
    model: Path,
    *,
    streams: int,
    tokens: int,
    times: int,
    how: int = signal.SIGKILL,
    pause: float = 1.5,
    spare: float = SPARE,
) -> None:
    """The engine is killed or stopped `times` times under `streams` streams, half of them over HTTP: all complete
    with the tokens of an undisturbed run, and go on in time: the first within a cold start and `spare` seconds. A fault
    comes up to `pause` seconds after a step."""
    requests = [Asked(index, tokens) for index in range(streams)]
    cold = cold_start(server)
    reference = uvloop.run(undisturbed(server.endpoint, requests))
    report.expect(
        all(not s.error for s in reference), "undisturbed, all complete", [s.error for s in reference if s.error]
    )
    got, blows = uvloop.run(_engine_faults(server, requests, times, how, pause))
    report.measured("streams", streams)
    report.measured("cold_start_to_ready_s", round(cold, 2))
    errors = [stream.error for stream in got if stream.error]
    report.expect(not errors, f"{streams} of {streams} complete", errors[:5])
    report.expect(all(stream.ends == 1 for stream in got), "every stream ended exactly once")
    report.expect(all(stream.tokens == tokens for stream in got), "every stream has all its tokens")
    for via, part in (("over ZeroMQ", got[::2]), ("over HTTP", got[1::2])):
        compare(report, model, via, reference, part)
    for number, blow in enumerate(blows, 1):
        until = blows[number].at if number < len(blows) else math.inf
        _judge_blow(report, server, number, blow, cold, spare, until)


def _judge_blow(
    report: Report, server: RunningServer, number: int, blow: Blow, cold: float, spare: float, until: float
) -> None:
    went_on = blow.went_on(until)
    report.measured(f"fault {number}: open streams, suspects among them", [len(blow.open), len(blow.suspects)])
    if not went_on:
        return
    prefill = uvloop.run(_prefill_time(server, blow))
    first, last = min(went_on), max(went_on)
    report.measured(f"fault {number}: streams that went on before the next fault", len(went_on))
    report.measured(f"fault {number}: seconds until the first and the last went on", [round(first, 2), round(last, 2)])
    report.measured(f"fault {number}: bare prefill of what was computed again (s)", round(prefill, 2))
    report.expect(first <= cold + spare, f"fault {number}: the first goes on within {cold:.1f} + {spare:g} s", first)
    limit = cold + spare + prefill
    report.expect(last <= limit, f"fault {number}: the last goes on within that and the bare prefill", last)


async def _prefill_time(server: RunningServer, blow: Blow) -> float:
    """Seconds that an idle server takes for the prompts of a blow: the decoding ones at once, suspects one by one."""

    async def prompt(client: AsyncClient, stream: Stream) -> None:
        ids = (stream.asked.ids * 20)[: len(stream.asked.ids) + blow.had[id(stream)]]
        await client.generate(ids=ids, max_tokens=1, ignore_eos=True).text()

    async with AsyncClient(endpoint=server.endpoint) as client:
        began = time.monotonic()
        await asyncio.gather(*(prompt(client, stream) for stream in blow.decoding))
        for stream in blow.suspects:
            await prompt(client, stream)
        return time.monotonic() - began


async def _engine_faults(
    server: RunningServer, requests: Sequence[Asked], times: int, how: int, pause: float
) -> tuple[list[Stream], list[Blow]]:
    draw = random.Random(times)
    streams = [Stream(asked) for asked in requests]
    blows = []
    async with AsyncClient(endpoint=server.endpoint) as client:
        tasks = [
            asyncio.create_task(stream.over_http(server.url) if number % 2 else stream.over_zmq(client))
            for number, stream in enumerate(streams)
        ]
        async with running(tasks):
            since = 0.0
            for _ in range(times):
                await reached(partial(_stepped, streams, since), 90, "the engine has completed a step")
                await asyncio.sleep(draw.uniform(0.0, pause))
                pid = (await asyncio.to_thread(server.pids))["engine"]
                blow = Blow(streams)
                os.kill(pid, how)
                blow.noticed = await _until_noticed(server, pid, how, blow.at)
                blows.append(blow)
                since = blow.noticed + 0.05
            await asyncio.wait_for(asyncio.gather(*tasks), 300)
    return streams, blows


def _stepped(streams: Sequence[Stream], since: float) -> bool:
    return any(stream.times and stream.times[-1] > since for stream in streams)


async def _until_noticed(server: RunningServer, pid: int, how: int, since: float) -> float:
    """When the supervisor noticed what was done to a process at `since`: a death at once."""
    if how == signal.SIGKILL:
        return since

    def noticed() -> bool:
        return any(line["event"] == "actor killed" and line["child"] == pid for line in events(server))

    await reached(noticed, 60, "the supervisor notices that it hangs")
    return time.monotonic()


def tokenizer_deaths(report: Report, server: RunningServer, *, streams: int, tokens: int, rounds: int) -> None:
    """Every tokenizer is killed while texts keep coming over HTTP and ZeroMQ: all streams complete with the same
    tokens."""
    requests = [Asked(index, tokens, words=20 + 8 * (index % 50)) for index in range(streams)]
    reference = uvloop.run(undisturbed(server.endpoint, requests))
    got = uvloop.run(_tokenizer_deaths(server, requests, rounds))
    errors = [stream.error for stream in (*reference, *got) if stream.error]
    report.measured("streams", len(got))
    report.expect(not errors, f"{len(got)} of {len(got)} complete", errors[:5])
    report.expect(all(stream.ends == 1 for stream in got), "every stream ended exactly once")
    pairs = zip(reference * rounds, got, strict=True)
    different = [mine.asked.index for wanted, mine in pairs if first_difference(wanted, mine) is not None]
    allowed = max(1, len(got) // 50)
    report.measured("streams with other tokens (ties)", len(different))
    report.expect(len(different) <= allowed, "the same tokens, ties aside", different)


async def _tokenizer_deaths(server: RunningServer, requests: Sequence[Asked], rounds: int) -> list[Stream]:
    got: list[Stream] = []
    async with AsyncClient(endpoint=server.endpoint) as client:
        for _ in range(rounds):
            names = [name for name in await asyncio.to_thread(server.pids) if name.startswith("tokenizer")]
            streams = [Stream(asked) for asked in requests]
            tasks = [
                asyncio.create_task(stream.over_http(server.url) if number % 2 else stream.over_zmq(client))
                for number, stream in enumerate(streams)
            ]
            async with running(tasks):
                for name in names:
                    await asyncio.sleep(0.02)
                    await asyncio.to_thread(server.kill, name)
                got += await asyncio.wait_for(asyncio.gather(*tasks), 120)
            await reached(lambda: server.health()["status"] == "ok", 60, "all actors are back")
    return got


def front_deaths(
    report: Report, server: RunningServer, actor: str, streams: int, how: int = signal.SIGKILL, spare: float = 0.0
) -> None:
    """The streamer, or the busiest HTTP worker (`http`), is killed or stopped under `streams` streams over HTTP and as
    many over ZeroMQ: its clients get an end in time, and the system serves again, in time from when that is noticed.
    `spare` seconds come on top of the times."""
    actor, ends, back, before, after, got, again = uvloop.run(_front_deaths(server, actor, streams, how))
    lost = [stream for stream in got if stream.ended]
    report.measured("streams", len(got))
    report.measured("streams_lost", len(lost))
    report.measured("seconds_until_the_last_lost_client_ended", round(ends, 2))
    report.measured("seconds_until_served_again", round(back, 2))
    report.expect(bool(lost), "streams were open on it")
    report.expect(ends <= END_LIMIT + spare, f"every client got its end within {END_LIMIT + spare:g} s", ends)
    wrong = [stream.error for stream in lost if stream.ends != 1 or not stream.error]
    report.expect(not wrong, "each of them one, which says that it is lost", wrong[:3])
    load = start_seconds(server, actor)
    report.measured("seconds_the_actor_took_to_start", round(load, 2))
    limit = SERVE_LIMIT + spare
    report.expect(back <= limit + load, f"the system serves again within {limit:g} s and the load", back)
    report.expect(not again, "the ZeroMQ client goes on by itself", again)
    others = {name for name in before if before[name] != after[name]}
    report.expect(others == {actor}, "nothing else was replaced", others)


def start_seconds(server: RunningServer, actor: str) -> float:
    """Seconds from the last start of an actor to its readiness."""
    log = [line for line in events(server) if line.get("actor") == actor]
    began = [clock(line) for line in log if line["event"] == "actor started"]
    ready = [clock(line) for line in log if line["event"] == "ready"]
    return max(0.0, ready[-1] - began[-1]) if began and ready else 0.0


async def _front_deaths(
    server: RunningServer, actor: str, count: int, how: int
) -> tuple[str, float, float, dict[str, int], dict[str, int], list[Stream], str]:
    before = await asyncio.to_thread(server.pids)
    streams = [Stream(Asked(index, 30_000)) for index in range(2 * count)]
    async with AsyncClient(endpoint=server.endpoint) as client:
        tasks = [
            asyncio.create_task(stream.over_http(server.url) if number % 2 else stream.over_zmq(client))
            for number, stream in enumerate(streams)
        ]
        async with running(tasks):
            await reached(lambda: all(len(stream.times) >= 2 for stream in streams), 60, "every stream has had tokens")
            if actor == "http":  # whoever wakes first takes what has come
                actor = max((name for name in before if name.startswith("http")), key=lambda name: _open(before[name]))
            os.kill(before[actor], how)
            killed = time.monotonic()
            if actor == "streamer":
                await asyncio.wait(tasks, timeout=3 * END_LIMIT)
            noticed = await _until_noticed(server, before[actor], how, killed)
            back = await _until_served(server) - noticed
            await asyncio.sleep(max(0.0, killed + END_LIMIT - time.monotonic()))
            lost = [stream for stream in streams if stream.ended]
            ends = max((stream.ended - killed for stream in lost), default=math.inf)
            if any(not stream.ended and stream.times[-1] < killed + 1.0 for stream in streams):
                ends = math.inf  # it neither goes on nor knows that it is lost
            again = ""
            try:
                await client.generate(ids=[1000], max_tokens=2).text()
            except CallboardError as error:
                again = f"{error.code}: {error.message}"
    server.wait_idle()
    await reached(lambda: server.health()["status"] == "ok", 30, "all actors are back")
    return actor, ends, back, before, await asyncio.to_thread(server.pids), streams, again


def _open(pid: int) -> int:
    """How many TCP connections a process has open."""
    return sum(
        connection.status == psutil.CONN_ESTABLISHED for connection in psutil.Process(pid).net_connections("tcp")
    )


async def _until_served(server: RunningServer) -> float:
    """When a new request over HTTP and one over ZeroMQ have been answered."""
    body = {"prompt": [1000, 1001], "max_tokens": 2, "ignore_eos": True}

    def served() -> bool:
        try:
            server.wait_ready(30)
            with Client(endpoint=server.endpoint, reconnect=0) as client:
                client.generate(ids=[1000], max_tokens=2).text()
            return post(f"{server.url}/v1/completions", body).status == 200
        except (OSError, CallboardError, TimeoutError):
            return False

    await reached(served, 60, "requests are served again")
    return time.monotonic()


POISON_IDS = [4242, 4243, 4244, 4245]


DECODED_IDS = [4342, 4343, 4344, 4345]
FATAL_TOKENS = 20  # after so many tokens of its own the second one crashes the engine


def poison_faults() -> list[RowFault]:
    """For a server whose engine crashes at `POISON_IDS`, and while it decodes what follows `DECODED_IDS`."""
    return [RowFault("crash", POISON_IDS), RowFault("crash", DECODED_IDS, "decode", FATAL_TOKENS)]


def poison(report: Report, server: RunningServer, model: Path, *, streams: int, tokens: int) -> None:
    """A request that crashes the engine fails alone after its second crash; those beside it complete."""
    deaths = _poisoned(report, server, model, [Asked(index, tokens) for index in range(streams)], POISON_IDS)
    report.expect(deaths == 2, "after its second crash", deaths)


def decoding_poison(report: Report, server: RunningServer, model: Path, *, streams: int, tokens: int) -> None:
    """The same of one that crashes it while it decodes, which has to be told from those that decode beside it."""
    requests = [Asked(streams + index, tokens) for index in range(streams)]
    deaths = _poisoned(report, server, model, requests, DECODED_IDS)
    most = 1 + REPEATS + 1 + POISON
    report.expect(deaths <= most, f"after {most} crashes at most", deaths)


def _poisoned(
    report: Report, server: RunningServer, model: Path, requests: Sequence[Asked], fatal: Sequence[int]
) -> int:
    """Deaths of the engine until the request that begins with `fatal` was given up."""
    reference = uvloop.run(undisturbed(server.endpoint, requests))
    earlier = _engine_deaths(server)
    got, error, seconds = uvloop.run(_poison(server, requests, fatal))
    deaths = _engine_deaths(server) - earlier
    what = "prompt" if fatal == POISON_IDS else "tokens"
    report.measured(f"poisonous {what}: engine_deaths", deaths)
    report.measured(f"poisonous {what}: ended_with", error)
    report.measured(f"poisonous {what}: seconds until then", round(seconds, 1))
    report.expect("crashed_engine" in error, f"poisonous {what}: the request fails, and says why", error)
    errors = [stream.error for stream in got if stream.error]
    report.expect(not errors, f"the {len(got)} streams beside it complete", errors[:5])
    compare(report, model, f"beside the poisonous {what}", reference, got)
    return deaths


def _engine_deaths(server: RunningServer) -> int:
    return sum(line["event"] == "actor died" and line["actor"] == "engine" for line in events(server))


async def _poison(
    server: RunningServer, requests: Sequence[Asked], fatal: Sequence[int]
) -> tuple[list[Stream], str, float]:
    streams = [Stream(asked) for asked in requests]
    async with AsyncClient(endpoint=server.endpoint) as client:
        tasks = [asyncio.create_task(stream.over_zmq(client)) for stream in streams]
        async with running(tasks):
            await reached(lambda: all(stream.times for stream in streams), 60, "every stream has had tokens")
            error = ""
            began = time.monotonic()
            try:
                await client.generate(ids=[*fatal, 1, 2, 3], max_tokens=3 * FATAL_TOKENS, ignore_eos=True).text()
            except RequestFailed as failure:
                error = f"{failure.code}: {failure.message}"
            seconds = time.monotonic() - began
            await asyncio.wait_for(asyncio.gather(*tasks), 120)
    return streams, error, seconds


def replaced_on_demand(
    report: Report, server: RunningServer, *, streams: int, tokens: int, ask: Callable[[], None]
) -> None:
    """`ask` has the engine replaced under load: nothing is lost."""
    requests = [Asked(index, tokens) for index in range(streams)]
    reference = uvloop.run(undisturbed(server.endpoint, requests))
    before = server.pids()["engine"]

    async def run() -> list[Stream]:
        got = [Stream(asked) for asked in requests]
        async with AsyncClient(endpoint=server.endpoint) as client:
            tasks = [asyncio.create_task(stream.over_zmq(client)) for stream in got]
            async with running(tasks):
                await reached(lambda: all(len(stream.times) > 2 for stream in got), 60, "every stream has had tokens")
                await asyncio.to_thread(ask)
                await asyncio.wait_for(asyncio.gather(*tasks), 120)
        return got

    got = uvloop.run(run())
    same = sum(r.ids == s.ids for r, s in zip(reference, got, strict=True))
    told = [clock(line) for line in events(server) if line["event"] == "replacing"][-1] - time.time() + time.monotonic()
    report.measured("streams that were open when the engine was told to leave", sum(s.ended > told for s in got))
    report.expect(not any(stream.error for stream in got), "no stream is lost", [s.error for s in got if s.error])
    report.expect(same >= streams - max(1, streams // 50), "the same tokens, ties aside", same)
    report.expect(server.pids()["engine"] != before, "the engine is another process")
    report.expect(get(f"{server.url}/health").status == 200, "the system is healthy")
