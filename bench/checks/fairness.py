"""Check that a very long prompt neither stalls the streams that run nor holds up short requests behind it."""

import asyncio
import random
import statistics
import time

import uvloop

from bench.checks.report import Report
from bench.harness import RunningServer
from bench.load.outcome import Outcome
from bench.load.plan import FIRST_PLAIN_ID
from bench.load.summary import percentile
from protocol import AsyncClient

PAUSE = 0.2  # seconds between two short arrivals
SHORT = 64  # prompt tokens of a short arrival
TTFT_LIMIT = 1.0


class _Streams:
    """Streams that run for the whole measurement; `outcomes` holds their arrivals."""

    def __init__(self, client: AsyncClient, count: int) -> None:
        self.outcomes = [Outcome(index) for index in range(count)]
        self._client = client
        self._open = True
        self._tasks = [asyncio.create_task(self._read(outcome)) for outcome in self.outcomes]

    async def _read(self, outcome: Outcome) -> None:
        prompt = range(1000 + outcome.index, 1064 + outcome.index)
        stream = self._client.generate(ids=prompt, max_tokens=60_000, temperature=0, ignore_eos=True)
        async for _ in stream:
            outcome.token()
            if not self._open:
                stream.cancel()

    async def all_running(self) -> None:
        """Wait until each has had some tokens."""
        while any(outcome.arrivals < 8 for outcome in self.outcomes):
            if any(task.done() for task in self._tasks):
                raise RuntimeError("a stream ended before the measurement")
            await asyncio.sleep(0.01)

    def gaps_since(self, marks: list[int]) -> list[float]:
        """Inter-token latencies after each stream's mark, in seconds."""
        return [gap for o, mark in zip(self.outcomes, marks, strict=True) for gap in o.gaps[mark:]]

    def marks(self) -> list[int]:
        """Where each stream is now."""
        return [len(outcome.gaps) for outcome in self.outcomes]

    async def close(self) -> None:
        self._open = False
        await asyncio.gather(*self._tasks)


async def first_token(client: AsyncClient, ids: list[int]) -> float:
    """Seconds until the first token of a request of two tokens."""
    began = time.perf_counter()
    stream = client.generate(ids=ids, max_tokens=2, temperature=0, ignore_eos=True)
    first = 0.0
    async for _ in stream:
        first = first or time.perf_counter() - began
    return first


async def _measure(
    endpoint: str, streams: int, tokens: int, rounds: int
) -> tuple[list[float], list[float], list[float], list[float], list[float]]:
    draw = random.Random(5)

    def prompt(length: int) -> list[int]:
        return draw.choices(range(FIRST_PLAIN_ID, 10_000), k=length)

    quiet: list[float] = []
    stalled: list[float] = []
    own: list[float] = []
    short: list[float] = []
    long: list[float] = []
    async with AsyncClient(endpoint=endpoint) as client:
        running = _Streams(client, streams)
        await running.all_running()
        await first_token(client, prompt(tokens))  # the engine learns its speed
        for _ in range(rounds):
            marks = running.marks()
            for _ in range(5):
                own.append(await first_token(client, prompt(SHORT)))
                await asyncio.sleep(PAUSE)
            quiet += running.gaps_since(marks)
            marks = running.marks()
            prefill = asyncio.create_task(first_token(client, prompt(tokens)))
            await asyncio.sleep(0.05)
            while not prefill.done():
                short.append(await first_token(client, prompt(SHORT)))
                await asyncio.wait([prefill], timeout=PAUSE)
            long.append(prefill.result())
            stalled += running.gaps_since(marks)
        await running.close()
    return quiet, stalled, own, short, long


def fairness(
    report: Report,
    server: RunningServer,
    *,
    streams: int,
    tokens: int,
    target_ms: float,
    rounds: int,
    held: bool = True,
) -> None:
    """ITL of running streams and TTFT of short arrivals while a prompt of `tokens` prefills. Judged when `held`.

    A short arrival's own cost is its TTFT beside the same streams without that prefill.
    """
    quiet, stalled, own, short, long = uvloop.run(_measure(server.endpoint, streams, tokens, rounds))
    p99 = percentile(sorted(stalled), 99) * 1000
    cost = statistics.median(own)
    report.measured("seconds_of_the_long_prefill", [round(seconds, 2) for seconds in long])
    report.measured("itl_p50_ms_without", round(statistics.median(quiet) * 1000, 2))
    report.measured("itl_p99_ms_without", round(percentile(sorted(quiet), 99) * 1000, 2))
    report.measured("itl_p50_ms", round(statistics.median(stalled) * 1000, 2))
    report.measured("itl_p99_ms", round(p99, 2))
    report.measured("itl_max_ms", round(max(stalled) * 1000, 2))
    report.measured("short_arrivals", len(short))
    report.measured("short_ttft_ms_without", round(cost * 1000, 1))
    report.measured("short_ttft_ms", [round(seconds * 1000, 1) for seconds in sorted(short)[-3:]])
    report.expect(len(short) >= rounds, "short requests arrived during each prefill", len(short))
    if held:
        report.expect(p99 <= 2 * target_ms, f"ITL p99 at most 2 × {target_ms:g} ms", round(p99, 1))
        claim = f"TTFT of every short arrival at most {TTFT_LIMIT:g} s plus its own cost"
        report.expect(max(short) <= TTFT_LIMIT + cost, claim, round(max(short), 3))


async def _behind(server: RunningServer, tokens: int, deep: int) -> tuple[float, list[float], float]:
    draw = random.Random(7)

    def prompt(length: int) -> list[int]:
        return draw.choices(range(FIRST_PLAIN_ID, 10_000), k=length)

    short: list[float] = []
    async with AsyncClient(endpoint=server.endpoint) as client:
        own = statistics.median([await first_token(client, prompt(SHORT)) for _ in range(3)])
        before = server.health()["engine"]["prefilled"]
        began = time.perf_counter()
        long = asyncio.create_task(first_token(client, prompt(tokens)))
        while (await asyncio.to_thread(server.health))["engine"]["prefilled"] - before < deep and not long.done():
            await asyncio.wait([long], timeout=PAUSE)
        while not long.done():
            asked = asyncio.create_task(first_token(client, prompt(SHORT)))
            await asyncio.wait([asked, long], return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():  # the long one was sooner
                short.append(await asked)
                break
            short.append(asked.result())
            await asyncio.sleep(1.0)
        await long
    return own, short, time.perf_counter() - began


def behind_long(report: Report, server: RunningServer, *, tokens: int, deep: int, most: float) -> None:
    """TTFT of short arrivals while nothing but a prompt of `tokens` prefills, from its token `deep` on, on a model for
    which each of those costs many times what theirs cost: at most `most` seconds."""
    own, short, seconds = uvloop.run(_behind(server, tokens, deep))
    report.measured("short_alone_s", round(own, 3))
    report.measured("short_behind_s", [round(value, 2) for value in short])
    report.measured("long_s", round(seconds, 1))
    report.expect(len(short) >= 3, "several short ones were asked for beside the long one", len(short))
    report.expect(max(short, default=0.0) <= most, f"each has its first token within {most:g} s", short)
