"""The check of the supervisor's sudden death: everything else ends soon, and every client gets an end."""

import asyncio
import json
import math
import time
from collections import Counter

import uvloop

from bench.checks.crowds import reached
from bench.checks.report import Report
from bench.harness import RunningServer
from bench.load.driver import Progress, run_load
from bench.load.outcome import Outcome
from bench.load.over_http import Exchange, HttpLoad, build_request
from bench.load.over_zmq import ZmqLoad
from bench.load.plan import Plan

LIMIT = 5.0  # seconds within which everything has to be over
ENDLESS = 30_000  # tokens, more than a stream can get before the kill


def kill_supervisor(report: Report, server: RunningServer, streams: int, limit: float = LIMIT) -> None:
    """SIGKILL the supervisor while streams run over HTTP and ZeroMQ: within `limit` seconds no process of the server is
    left, and every client got an end."""
    server.pids()
    killed, outcomes, plain_ended, gone = uvloop.run(_kill(server, streams, limit))
    slowest = max(outcome.ended - killed for outcome in outcomes)
    report.measured("streams", len(outcomes))
    report.measured("seconds_until_last_client_ended", round(slowest, 2))
    for reason, count in Counter(outcome.error for outcome in outcomes).items():
        report.measured(f"ended_with_{reason or 'no error'}", count)
    report.expect(all(outcome.error for outcome in outcomes), "every stream ended with an error")
    report.expect(slowest <= limit, f"every client got its end within {limit:g} s", slowest)
    report.expect(plain_ended <= limit, "a request without streaming ended too", plain_ended)
    report.measured("seconds_until_no_process_left", round(gone, 2))
    left = [process.name() for process in server.leftover()]
    report.expect(gone <= limit and not left, f"within {limit:g} s no process is left", left)


async def _kill(server: RunningServer, streams: int, limit: float) -> tuple[float, list[Outcome], float, float]:
    plans = [
        Plan(via=via, streams=streams, requests=streams, prompt_tokens=16, max_tokens=ENDLESS, seed=seed)
        for seed, via in enumerate(("http", "zmq"))
    ]
    over_http, over_zmq = (Progress(plan) for plan in plans)

    def all_streaming() -> bool:
        outcomes = over_http.outcomes + over_zmq.outcomes
        return len(outcomes) == 2 * streams and all(outcome.arrivals >= 2 for outcome in outcomes)

    async with HttpLoad(plans[0], server.url) as http, ZmqLoad(plans[1], server.endpoint) as zmq:
        plain = asyncio.create_task(_unstreamed(server))
        loads = [asyncio.create_task(run_load(http, over_http)), asyncio.create_task(run_load(zmq, over_zmq))]
        await reached(all_streaming, 60, "every stream has had tokens")
        await asyncio.to_thread(server.kill, "supervisor")
        killed = time.monotonic()
        gone = asyncio.create_task(_until_gone(server, 2 * limit))
        await asyncio.wait([*loads, plain], timeout=2 * limit)
        for outcome in over_http.outcomes + over_zmq.outcomes:
            if not outcome.ended:
                outcome.end()
        plain_ended = plain.result() - killed if plain.done() else math.inf
        for task in (*loads, plain):
            task.cancel()
        await asyncio.wait([*loads, plain])
        return killed, over_http.outcomes + over_zmq.outcomes, plain_ended, await gone


async def _until_gone(server: RunningServer, seconds: float) -> float:
    """Seconds until no process of the server is left; infinite when some stay."""
    try:
        return await reached(lambda: not server.leftover(), seconds, "no process is left")
    except TimeoutError:
        return math.inf


async def _unstreamed(server: RunningServer) -> float:
    """When a request without streaming got its end: an answer, or its connection closed."""
    body = json.dumps({"prompt": [1000, 1001], "max_tokens": ENDLESS, "ignore_eos": True}).encode()
    request = build_request(server.url, "/v1/completions", body)
    loop = asyncio.get_running_loop()
    _, exchange = await loop.create_connection(lambda: Exchange(request, lambda _: None), "127.0.0.1", server.port)
    await asyncio.wait([exchange.finished])
    return time.monotonic()
