"""Check of a flood: far more requests at once than the server takes, and one that can never fit."""

import asyncio
import statistics
import time
from collections import Counter
from pathlib import Path

import msgspec
import psutil
import uvloop

from actors.supervisor import raise_file_limit
from bench.ask import post
from bench.checks.report import Report
from bench.harness import RunningServer
from bench.load.over_http import Exchange, build_request
from bench.load.plan import Plan, prompt_ids
from bench.load.timeline import Timeline
from protocol import AsyncClient

GROWTH = 1.10  # of the mean resident size, from the first floods behind the first one to the last ones
SLACK = 16 << 20  # bytes
SWING = 1.25  # of the median peak: what no single flood may exceed
REST = 3.0  # seconds
ENDLESS = 60_000  # tokens


async def _flood(server: RunningServer, plan: Plan, held: int) -> tuple[list[Exchange], dict[str, int]]:
    loop = asyncio.get_running_loop()
    memory = Timeline(server.pids())
    holding, first_refusal = asyncio.Event(), asyncio.Event()

    async def one(index: int) -> Exchange:
        body = {"prompt": prompt_ids(plan, index), "max_tokens": plan.max_tokens, "ignore_eos": True, "seed": index}
        request = build_request(server.url, "/v1/completions", msgspec.json.encode(body | {"temperature": 0}))
        _, exchange = await loop.create_connection(lambda: Exchange(request, lambda _: None), "127.0.0.1", server.port)
        await exchange.finished
        first_refusal.set()  # as no other can end before
        return exchange

    async def hold() -> None:
        async with AsyncClient(endpoint=server.endpoint) as client:
            streams = [client.generate(ids=[700], max_tokens=ENDLESS, ignore_eos=True) for _ in range(held)]
            await asyncio.gather(*(anext(stream) for stream in streams))
            holding.set()
            await first_refusal.wait()

    async with memory.watch(), asyncio.TaskGroup() as group:
        if held:
            group.create_task(hold())
            await holding.wait()
        exchanges = await asyncio.gather(*(one(index) for index in range(plan.requests)))
    return exchanges, memory.peaks


def _judge(report: Report, exchanges: list[Exchange], plan: Plan) -> None:
    statuses = Counter(exchange.status for exchange in exchanges)
    report.measured("statuses", {str(status): count for status, count in statuses.items()})
    report.expect(statuses.keys() <= {200, 503}, "every request got 200 or 503", dict(statuses))
    report.expect(statuses[200] > 0 and statuses[503] > 0, "some were accepted and some refused", dict(statuses))
    whole = 0
    waits = []
    for exchange in exchanges:
        if exchange.status == 200:
            whole += msgspec.json.decode(exchange.body)["usage"]["completion_tokens"] == plan.max_tokens
        else:
            waits.append(exchange.headers.get("retry-after", ""))
    report.expect(whole == statuses[200], "accepted ones finish in full length", whole)
    usable = all(wait.isdecimal() and int(wait) >= 1 for wait in waits)
    report.expect(usable, "each refusal says Retry-After in seconds", Counter(waits))
    report.measured("retry_after_seconds", sorted(set(waits)))


def _at_rest(server: RunningServer, seconds: float) -> dict[str, int]:
    """The smallest resident sizes over a while: an idle engine gives its free buffers back within it."""
    processes = {name: psutil.Process(pid) for name, pid in server.pids().items()}
    sizes = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        sizes.append({name: process.memory_info().rss for name, process in processes.items()})
        time.sleep(0.1)
    return {name: min(size[name] for size in sizes) for name in processes}


def _even(sizes: list[int], slack: int) -> bool:
    """Whether bytes held in flood after flood don't grow: those of the last floods against as many behind the first.

    The first one warms up. A single peak says little, as MLX's free pool is cleared at some moment of a flood.
    """
    behind = sizes[1:]
    few = max(len(behind) // 2, 1)
    grown = statistics.mean(behind[-few:]) > GROWTH * statistics.mean(behind[:few]) + slack
    return not grown and max(behind) <= SWING * statistics.median(behind) + slack


def flood(
    report: Report,
    model: Path,
    *,
    requests: int,
    rounds: int,
    rest: float = REST,
    seats: int | None = None,
    slack: int = SLACK,
) -> None:
    """`requests` requests at once, `rounds` (at least three) times: memory after each is what it was, so are its peaks.

    It is looked at for `rest` seconds; the engine gives its free pool back after 30 s without work. A server with only
    `seats` might be done with requests as fast as they arrive, so its seats are held until one was refused. Beyond
    what is proportional, memory may grow by `slack` bytes: small floods leave MLX's free pool far from its limit, and
    the moment at which requests arrive decides how far each fills it.
    """
    raise_file_limit()
    serve = () if seats is None else ("--max-num-seqs", str(seats))
    plan = Plan(via="http", streams=requests, requests=requests, prompt_tokens=32, max_tokens=16)
    after: list[dict[str, int]] = []
    peaks: list[dict[str, int]] = []
    with RunningServer(model, *serve) as server:
        for number in range(rounds):
            exchanges, peak = uvloop.run(_flood(server, msgspec.structs.replace(plan, seed=number), seats or 0))
            _judge(report, exchanges, plan)
            server.wait_idle()
            peaks.append(peak)
            after.append(_at_rest(server, rest))
    for what, sizes in (("peak", peaks), ("after", after)):
        report.measured(f"{what}_mib", [{name: size >> 20 for name, size in each.items()} for each in sizes])
        flat = all(_even([each[name] for each in sizes], slack) for name in sizes[0])
        report.expect(flat, f"memory ({what}) of every process stays flat from the second flood on")
    too_large(report, model)


def too_large(report: Report, model: Path) -> None:
    """A prompt whose keys and values can never fit gets 400 with numbers, and the server goes on."""
    with RunningServer(model, "--memory-limit", "54MB") as server:
        answer = post(f"{server.url}/v1/completions", {"prompt": [1000] * 60_000, "max_tokens": 1})
        report.measured("too_large", answer.body)
        report.expect(answer.status == 400, "a prompt that can't fit gets 400", answer.status)
        message = str(answer.error.get("message", ""))
        report.expect(any(c.isdigit() for c in message), "the error has numbers", message)
        pids = server.pids()
        again = post(f"{server.url}/v1/completions", {"prompt": [1000] * 8, "max_tokens": 2})
        report.expect(again.status == 200 and server.pids() == pids, "the server goes on", again.body)
