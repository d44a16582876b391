"""Check that text work doesn't slow down streams: inter-token latency beside four large `tokenize` calls."""

import asyncio
import multiprocessing
import random
import statistics
import string
import threading
import time
from multiprocessing.synchronize import Event

import uvloop

from bench.checks.report import Report
from bench.harness import RunningServer
from bench.load.outcome import Outcome
from bench.load.summary import percentile
from protocol import AsyncClient, Client

CALLS = 4
LIMIT = 1.5
WARM_UP = 20  # tokens of each stream that are not measured


def text_of(client: Client, tokens: int) -> str:
    """A text of at least `tokens` tokens, of words that no word cache knows."""
    random_ = random.Random(7)

    def words(count: int) -> str:
        return " ".join("".join(random_.choices(string.ascii_lowercase, k=8)) for _ in range(count))

    sample = len(client.tokenize(words(1000)))
    return words(int(tokens * 1000 / sample * 1.02))


def tokenize_for_ever(endpoint: str, text: str, tokens: int, working: Event, over: Event) -> None:
    """Keep `CALLS` tokenize calls in work until `over`; a process of its own runs this."""
    with Client(endpoint=endpoint) as client:

        def call() -> None:
            while not over.is_set():
                if len(client.tokenize(text)) < tokens:
                    raise AssertionError("the text is too short")

        threads = [threading.Thread(target=call) for _ in range(CALLS)]
        for thread in threads:
            thread.start()
        working.set()
        for thread in threads:
            thread.join()


async def gaps(endpoint: str, streams: int, seconds: float) -> list[float]:
    """Inter-token latencies of `streams` streams over about `seconds`, in seconds."""
    outcomes = [Outcome(index) for index in range(streams)]
    async with AsyncClient(endpoint=endpoint) as client:
        deadline = time.monotonic() + seconds

        async def one(outcome: Outcome) -> None:
            stream = client.generate(
                ids=range(1000 + outcome.index, 1064 + outcome.index),
                max_tokens=60_000,
                temperature=0,
                ignore_eos=True,
            )
            async for _ in stream:
                outcome.token()
                if time.monotonic() > deadline:
                    stream.cancel()

        await asyncio.gather(*(one(outcome) for outcome in outcomes))
    return [gap for outcome in outcomes for gap in outcome.gaps[WARM_UP:]]


def tokenize_itl(
    report: Report, server: RunningServer, *, streams: int, tokens: int, rounds: int, seconds: float
) -> None:
    """ITL p99 of running streams while four texts are tokenized is at most 1.5 times that without.

    Rounds with and without alternate; the ratio is the median over pairs of neighbouring rounds.
    """
    with Client(endpoint=server.endpoint) as client:
        text = text_of(client, tokens)
    spawn = multiprocessing.get_context("spawn")
    quiet: list[list[float]] = []
    loaded: list[list[float]] = []
    uvloop.run(gaps(server.endpoint, streams, min(seconds, 1.0)))
    for _ in range(rounds):
        quiet.append(uvloop.run(gaps(server.endpoint, streams, seconds)))
        working, over = spawn.Event(), spawn.Event()
        worker = spawn.Process(target=tokenize_for_ever, args=(server.endpoint, text, tokens, working, over))
        worker.start()
        try:
            if not working.wait(30):
                raise TimeoutError("the tokenize calls did not start")
            loaded.append(uvloop.run(gaps(server.endpoint, streams, seconds)))
        finally:
            over.set()
            worker.join(60)
            worker.kill()
        report.expect(worker.exitcode == 0, "all tokenize calls were answered in full", worker.exitcode)
    p99s = [[percentile(sorted(sample), 99) * 1000 for sample in side] for side in (quiet, loaded)]
    ratios = [with_ / without for without, with_ in zip(*p99s, strict=True)]
    report.measured("text_tokens_at_least", tokens)
    report.measured("text_bytes", len(text))
    report.measured("itl_p99_ms_without", [round(value, 2) for value in p99s[0]])
    report.measured("itl_p99_ms_with", [round(value, 2) for value in p99s[1]])
    report.measured("itl_p50_ms_without", [round(statistics.median(sample) * 1000, 2) for sample in quiet])
    report.measured("itl_p50_ms_with", [round(statistics.median(sample) * 1000, 2) for sample in loaded])
    report.measured("ratios", [round(ratio, 3) for ratio in ratios])
    report.measured("ratio_spread", [round(min(ratios), 3), round(max(ratios), 3)])
    ratio = statistics.median(ratios)
    report.measured("ratio", round(ratio, 3))
    report.expect(ratio <= LIMIT, f"ITL p99 with is at most {LIMIT} × without (median of rounds)", ratio)
