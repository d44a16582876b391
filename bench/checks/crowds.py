"""Checks with many clients at once: all connections taken, all streams completed, the vanished ones dropped."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import uvloop
import zmq

from actors.supervisor import raise_file_limit
from bench.ask import post
from bench.checks.report import Report
from bench.harness import POLL, ROOT, RunningServer, wait_until
from bench.load.driver import Progress, make_load, run_load
from bench.load.over_http import Exchange, HttpLoad, build_request
from bench.load.plan import Plan
from bench.load.summary import Summary, summarize
from bench.load.timeline import Timeline
from protocol import Client
from protocol.codec import encode, server_codec
from protocol.messages import PROTOCOL_VERSION, Hello, Welcome
from protocol.sockets import connect_dealer

ENDLESS = 30_000  # tokens, more than a stream can get before its client leaves


async def reached(condition: Callable[[], bool], seconds: float, what: str) -> float:
    """`wait_until` for the event loop; the condition may block. Raises TimeoutError."""
    began = time.monotonic()
    while not await asyncio.to_thread(condition):
        if time.monotonic() - began > seconds:
            raise TimeoutError(f"not within {seconds:g} s: {what}")
        await asyncio.sleep(POLL)
    return time.monotonic() - began


def connections(report: Report, server: RunningServer, count: int) -> None:
    """`count` connections opened at the same time are all accepted, and a request on each is answered."""
    statuses, seconds = uvloop.run(_connections(server, count))
    report.measured("connections", count)
    report.measured("seconds_to_all_connected", round(seconds, 3))
    report.measured("answered_200", statuses.count(200))
    report.expect(len(statuses) == count, "every connection was accepted", len(statuses))
    report.expect(statuses.count(200) == count, "every request was answered with 200", statuses)


async def _connections(server: RunningServer, count: int) -> tuple[list[int], float]:
    body = json.dumps({"prompt": [1000, 1001], "max_tokens": 2, "ignore_eos": True}).encode()
    request = build_request(server.url, "/v1/completions", body)
    everyone = asyncio.Barrier(count)
    began = time.monotonic()
    connected: list[float] = []

    async def one() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        connected.append(time.monotonic() - began)
        await everyone.wait()  # all are open at once before the first one asks
        writer.write(request)
        head = await reader.readline()
        writer.close()
        return int(head.split()[1])

    async with asyncio.timeout(120):
        answers = await asyncio.gather(*(one() for _ in range(count)), return_exceptions=True)
    return [answer for answer in answers if isinstance(answer, int)], max(connected)


def raw_connections(report: Report, server: RunningServer, count: int) -> None:
    """`count` ZeroMQ sockets greet the server at the same time; every one is welcomed."""
    raise_file_limit()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    poller = zmq.Poller()
    sockets = [connect_dealer(context, server.endpoint) for _ in range(count)]
    welcomed = 0
    try:
        for socket in sockets:
            socket.send(encode(Hello(PROTOCOL_VERSION, "crowd")))
            poller.register(socket, zmq.POLLIN)
        deadline = time.monotonic() + 30
        while welcomed < count and time.monotonic() < deadline:
            for ready, _ in poller.poll(1000):
                welcomed += isinstance(server_codec.decode(ready.recv()), Welcome)
                poller.unregister(ready)
    finally:
        for socket in sockets:
            socket.close(linger=0)
        context.term()
    report.measured("zmq_connections_welcomed", welcomed)
    report.expect(welcomed == count, f"all {count} ZeroMQ connections are welcomed", welcomed)


def stress(report: Report, server: RunningServer, plan: Plan) -> None:
    """Every request of the plan completes with exactly the tokens asked for."""
    summary = uvloop.run(run_plan(server, plan))
    for name, value in msgspec.to_builtins(summary).items():
        report.measured(name, value)
    report.expect(summary.completed == plan.requests, f"{plan.requests} of {plan.requests} complete", summary.failures)
    report.expect(summary.failed == 0, "none failed", summary.failures)


async def run_plan(server: RunningServer, plan: Plan) -> Summary:
    """Run a plan against the server; its figures, and the peaks of the server's memory."""
    progress = Progress(plan)
    timeline = Timeline(server.pids(), server.url, lambda: progress.counts)
    async with make_load(plan, url=server.url, endpoint=server.endpoint) as load, timeline.watch():
        outcomes = await run_load(load, progress)
    return summarize(plan, outcomes, timeline)


def vanish_http(report: Report, server: RunningServer, streams: int, max_tokens: int, limit: float = 1.0) -> None:
    """Half of the HTTP streams are closed abruptly: within `limit` seconds the engine runs at most the others, which
    complete. Those that are closed would run on for long."""
    with Client(endpoint=server.endpoint) as watcher:
        seconds, completed = uvloop.run(_vanish_http(server, watcher, streams, max_tokens))
    _judge_vanished(report, streams, seconds, completed, limit)
    server.wait_idle()


async def _vanish_http(server: RunningServer, watcher: Client, streams: int, max_tokens: int) -> tuple[float, int]:
    half = streams // 2
    staying, leaving = (
        Progress(Plan(via="http", streams=count, requests=count, prompt_tokens=16, max_tokens=most, seed=seed))
        for seed, (count, most) in enumerate([(streams - half, max_tokens), (half, ENDLESS)])
    )

    def all_streaming() -> bool:
        outcomes = staying.outcomes + leaving.outcomes
        return len(outcomes) == streams and all(o.arrivals >= 3 for o in outcomes)

    async with HttpLoad(staying.plan, server.url) as stay, HttpLoad(leaving.plan, server.url) as leave:
        running = [asyncio.create_task(run_load(load, of)) for load, of in ((stay, staying), (leave, leaving))]
        await reached(all_streaming, 60, "every stream has had tokens")
        before = _cancelled(watcher)
        for exchange in list(leave.open.values()):
            exchange.abort()
        seconds = await reached(lambda: _dropped(server, watcher, before, streams, half), 30, "half are dropped")
        outcomes, _ = await asyncio.gather(*running)
    return seconds, sum(not outcome.error for outcome in outcomes)


def _cancelled(watcher: Client) -> int:
    """How many requests were cancelled since the streamer's start."""
    return sum(count for how, count in watcher.figures().counts.requests.items() if how.startswith("cancelled"))


def _dropped(server: RunningServer, watcher: Client, before: int, streams: int, gone: int) -> bool:
    """Whether `gone` of `streams` were cancelled after `before`, and the engine has none of them any more."""
    if _cancelled(watcher) - before < gone:
        return False
    load = server.load()
    return bool(load["running"] + load["prefilling"] + load["waiting"] <= streams - gone)


def _runs_only(server: RunningServer, count: int) -> bool:
    load = server.load()
    return bool(load["running"] == count and load["prefilling"] == load["waiting"] == 0)


def _judge_vanished(report: Report, streams: int, seconds: float, completed: int, limit: float) -> None:
    rest = streams - streams // 2
    report.measured("streams", streams)
    report.measured("seconds_until_half_runs", round(seconds, 3))
    report.measured("others_completed", completed)
    report.expect(seconds <= limit, f"within {limit:g} s the engine runs only the other half", seconds)
    report.expect(completed == rest, f"the {rest} others complete in full length", completed)


def vanish_zmq(report: Report, server: RunningServer, streams: int, max_tokens: int, limit: float = 4.0) -> None:
    """Of two client processes with half of the streams each one is killed: within `limit` seconds the engine runs at
    most the other's streams, and those complete. The killed one's would run on for long."""
    half = streams // 2
    with TemporaryDirectory() as folder, Client(endpoint=server.endpoint) as watcher:
        result = Path(folder, "survivor.json")
        victim = survivor = _client_process(server, half, ENDLESS, "--seed", "1")
        try:
            wait_until(lambda: _runs_only(server, half), 60, f"the engine runs {half}")
            survivor = _client_process(server, streams - half, max_tokens, "--json", str(result))
            wait_until(lambda: _runs_only(server, streams), 60, f"the engine runs {streams}")
            before = _cancelled(watcher)
            victim.kill()
            seconds = wait_until(lambda: _dropped(server, watcher, before, streams, half), 30, "half are dropped")
            code = survivor.wait(300)
        finally:
            for process in (survivor, victim):
                process.kill()
                process.wait()
        completed = json.loads(result.read_text())["result"]["completed"] if result.exists() else 0
    _judge_vanished(report, streams, seconds, completed, limit)
    report.expect(code == 0, "the surviving client saw no failure", code)
    server.wait_idle()


def _client_process(server: RunningServer, streams: int, max_tokens: int, *more: str) -> "subprocess.Popen[bytes]":
    script = str(ROOT / "bench" / "stress.py")
    command = [sys.executable, script, "--via", "zmq", "--endpoint", server.endpoint, "--quiet"]
    command += ["--streams", str(streams), "--prompt-tokens", "16", "--max-tokens", str(max_tokens), *more]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def vanish_unstreamed(report: Report, server: RunningServer, count: int, limit: float = 1.0) -> None:
    """Clients that wait for a whole answer and go away have their streams dropped within `limit` seconds as well."""
    seconds = uvloop.run(_vanish_unstreamed(server, count))
    report.measured("unstreamed_requests", count)
    report.measured("seconds_until_idle", round(seconds, 3))
    report.expect(seconds <= limit, f"within {limit:g} s the engine runs nothing", seconds)
    answer = post(f"{server.url}/v1/completions", {"prompt": "a", "max_tokens": 1})
    report.expect(answer.status == 200, "it serves on", answer.body)


async def _vanish_unstreamed(server: RunningServer, count: int) -> float:
    body = json.dumps({"prompt": [1000, 1001], "max_tokens": ENDLESS, "ignore_eos": True}).encode()
    request = build_request(server.url, "/v1/completions", body)
    loop = asyncio.get_running_loop()
    exchanges = []
    for _ in range(count):
        _, exchange = await loop.create_connection(lambda: Exchange(request, lambda _: None), "127.0.0.1", server.port)
        exchanges.append(exchange)
    await reached(lambda: _runs_only(server, count), 60, f"the engine runs {count}")
    for exchange in exchanges:
        exchange.abort()
    await asyncio.wait([exchange.finished for exchange in exchanges])
    return await reached(server.is_idle, 30, "the engine is idle")
