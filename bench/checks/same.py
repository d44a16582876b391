"""Checks that a request gets the same tokens whatever happens around it: neighbours, joins and leaves, parking."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from actors.engine.step_log import Replay, StepRecord, rebuilt
from bench.checks.report import Report
from bench.harness import RunningServer
from bench.load.plan import FIRST_PLAIN_ID
from bench.mlx_child import MlxChild
from protocol import AsyncClient

MARGIN = 1e-4  # of the magnitude: closer than this, two scores are a tie
TIES = 0.02  # of the streams may end in a tie


class Asked:
    """One request: prompt ids, how many tokens, and the options that decide them."""

    def __init__(self, index: int, tokens: int, temperature: float) -> None:
        draw = random.Random(f"same {index}")
        self.ids = draw.choices(range(FIRST_PLAIN_ID, 10_000), k=draw.randrange(4, 300))
        self.tokens = tokens
        self.options: dict[str, Any] = {"temperature": temperature, "seed": index}


async def tokens_of(client: AsyncClient, asked: Asked) -> list[int]:
    """All token ids of one request."""
    stream = client.generate(
        ids=asked.ids, max_tokens=asked.tokens, ignore_eos=True, return_ids=True, return_text=False, **asked.options
    )
    return [token async for delta in stream for token in delta.ids]


async def together(endpoint: str, requests: Sequence[Asked], others: Sequence[Asked] = ()) -> list[list[int]]:
    """Tokens of `requests`, all at once, with `others` among them."""
    async with AsyncClient(endpoint=endpoint) as client:
        crowd = [asyncio.create_task(tokens_of(client, other)) for other in others]
        found = await asyncio.gather(*(tokens_of(client, asked) for asked in requests))
        await asyncio.gather(*crowd)
    return found


async def one_by_one(endpoint: str, requests: Sequence[Asked]) -> list[list[int]]:
    """Tokens of `requests`, each alone on the server."""
    async with AsyncClient(endpoint=endpoint) as client:
        return [await tokens_of(client, asked) for asked in requests]


async def in_motion(endpoint: str, requests: Sequence[Asked], at_once: int) -> list[list[int]]:
    """Tokens of `requests` while other rows of many lengths keep joining, ending and being cancelled."""
    draw = random.Random(3)
    over = asyncio.Event()
    async with AsyncClient(endpoint=endpoint) as client:

        async def come_and_go(number: int) -> None:
            while not over.is_set():
                number += 1000
                other = Asked(number, draw.randrange(1, 30), draw.choice([0.0, 0.9]))
                leaves = draw.random() < 0.3
                stream = client.generate(ids=other.ids, max_tokens=other.tokens, ignore_eos=True, **other.options)
                async for _ in stream:
                    if leaves:
                        stream.cancel()

        movers = [asyncio.create_task(come_and_go(number)) for number in range(at_once)]
        seats = asyncio.Semaphore(25)

        async def one(asked: Asked) -> list[int]:
            async with seats:
                await asyncio.sleep(draw.random() * 0.05)  # not all join in one turn
                return await tokens_of(client, asked)

        found = await asyncio.gather(*(one(asked) for asked in requests))
        over.set()
        await asyncio.gather(*movers)
    return found


def compare(
    report: Report,
    child: MlxChild,
    what: str,
    requests: Sequence[Asked],
    reference: Sequence[list[int]],
    found: Sequence[list[int]],
) -> None:
    """Each stream is that of the reference, or its first difference is a tie."""
    ties: list[str] = []
    other: list[str] = []
    for number, (asked, wanted, got) in enumerate(zip(requests, reference, found, strict=True)):
        if wanted == got:
            continue
        place = next((i for i, (a, b) in enumerate(zip(wanted, got, strict=False)) if a != b), -1)
        if place < 0:
            other.append(f"request {number} has {len(got)} tokens, not {len(wanted)}")
            continue
        gap = child.ask([asked.ids + wanted[:place], len(asked.ids), asked.options])
        line = f"request {number}, token {place}: {wanted[place]} or {got[place]}, gap {gap:.2e}"
        (ties if gap < MARGIN else other).append(line)
    report.measured(f"{what}: streams that differ by a tie", ties)
    report.expect(not other, f"{what}: the same tokens", other)
    report.expect(len(ties) <= TIES * len(requests), f"{what}: ties in at most {TIES:.0%} of the streams", len(ties))


def same_tokens(report: Report, server: RunningServer, model: Path, count: int, crowd: int, tokens: int = 48) -> None:
    """`count` requests at temperature 0.8 alone, in a crowd, and with rows joining and leaving."""
    requests = [Asked(index, tokens, 0.8) for index in range(count)]
    others = [Asked(index, tokens, [0.0, 1.0][index % 2]) for index in range(count, crowd)]
    alone = uvloop.run(one_by_one(server.endpoint, requests))
    report.measured("requests", count)
    report.expect(all(len(ids) == tokens for ids in alone), "every request alone gets all its tokens")
    with MlxChild("bench.ties", str(model)) as child:
        crowded = uvloop.run(together(server.endpoint, requests, others))
        compare(report, child, f"among {crowd - 1} others", requests, alone, crowded)
        moving = uvloop.run(in_motion(server.endpoint, requests, min(crowd - 25, 100)))
        compare(report, child, "with rows joining and leaving", requests, alone, moving)


def replay(log: list[dict[str, Any]]) -> str:
    """Play what `--log-steps` wrote again; "" when each plan is the same, else the first difference."""
    again = Replay(rebuilt(next(line for line in log if line["event"] == "limits")))
    for number, line in enumerate(line for line in log if line["event"] == "step"):
        record = msgspec.convert(line, StepRecord)
        if (plan := again.plan(record)) != record.plan:
            return f"step {number}: {record.plan} in the log, {plan} again"
    return ""


def low_memory(report: Report, model: Path, *, streams: int, tokens: int, limit: str = "51MB") -> None:
    """Under a memory limit that can't hold all streams to their ends they all finish through parking, with the
    tokens that they get without the limit."""
    requests = [Asked(index, tokens, [0.0, 0.8][index % 2]) for index in range(streams)]
    with RunningServer(model) as server:
        reference = uvloop.run(together(server.endpoint, requests))
    with RunningServer(model, "--memory-limit", limit, "--log-steps") as server:
        found = uvloop.run(together(server.endpoint, requests))
        log = [json.loads(line) for line in server.log().splitlines() if line.startswith("{")]
    budget = next((line["cache_mb"] for line in log if line["event"] == "memory"), None)
    steps = [line for line in log if line["event"] == "step"]
    admissions = Counter(rid for step in steps for rid in step["plan"]["admit"])
    report.measured("memory_limit", limit)
    report.measured("cache_mib", budget)
    report.measured("steps", len(steps))
    report.measured("parkings", admissions.total() - len(admissions))
    report.measured("rows_parked", sum(times > 1 for times in admissions.values()))
    report.expect(admissions.total() > len(admissions), "rows were parked and resumed", dict(admissions))
    report.expect(not (other := replay(log)), "the scheduler decides the same when it is told the same again", other)
    finished = sum(len(ids) == tokens for ids in found)
    report.expect(finished == streams, f"all {streams} streams finish in full length", finished)
    with MlxChild("bench.ties", str(model)) as child:
        compare(report, child, "under the limit", requests, reference, found)
