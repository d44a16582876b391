"""Check that text work doesn't slow down streams: inter-token latency beside four large `tokenize` calls."""

import asyncio
import multiprocessing
import os
import random
import statistics
import string
import sys
import threading
import time
from typing import Any

import uvloop

from bench.checks.report import Report
from bench.harness import RunningServer
from bench.load.outcome import Outcome
from bench.load.summary import percentile
from protocol import AsyncClient, Client

CALLS = 4
LIMIT = 1.5
WARM_UP = 20  # gaps of each stream that are not measured


def text_of(client: Client, tokens: int) -> str:
    """A text of at least `tokens` tokens, of words that no word cache knows."""
    random_ = random.Random(7)

    def words(count: int) -> str:
        return " ".join("".join(random_.choices(string.ascii_lowercase, k=8)) for _ in range(count))

    sample = len(client.tokenize(words(1000)))
    return words(int(tokens * 1000 / sample * 1.02))


class Calls:
    """Four tokenize calls in work, one followed by the next, while the block runs; made by another process."""

    def __init__(self, endpoint: str, text: str, tokens: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.endpoint = endpoint
        self.text = text
        self.tokens = tokens
        self.in_work = spawn.Event()
        self.over = spawn.Event()
        self.answered = spawn.Value("i", 0)
        self.process = spawn.Process(target=tokenize_for_ever, args=(self,))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "process"}

    def __enter__(self) -> "Calls":
        self.process.start()
        if not self.in_work.wait(30):
            raise TimeoutError("the tokenize calls did not start")
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.process.join(60)
        self.process.kill()
        self.process.join()


def tokenize_for_ever(calls: Calls) -> None:
    """Keep the calls in work until `over`; a process of its own runs this.

    It steps back behind the server and the streams' reader: what a client does with its ids is not measured.
    """
    if sys.platform == "linux":
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(10)
    with Client(endpoint=calls.endpoint) as client:

        def call() -> None:
            while True:
                if len(client.tokenize(calls.text)) < calls.tokens:
                    raise AssertionError("the text is too short")
                with calls.answered.get_lock():
                    calls.answered.value += 1
                if calls.over.is_set():
                    return

        threads = [threading.Thread(target=call) for _ in range(CALLS)]
        for thread in threads:
            thread.start()
        calls.in_work.set()
        for thread in threads:
            thread.join()


async def gaps(endpoint: str, streams: int, seconds: float) -> list[float]:
    """Inter-token latencies of `streams` streams over about `seconds`, in seconds."""
    outcomes = [Outcome(index) for index in range(streams)]
    async with AsyncClient(endpoint=endpoint) as client:
        deadline = time.monotonic() + seconds

        async def one(outcome: Outcome) -> None:
            prompt = range(1000 + outcome.index, 1064 + outcome.index)
            stream = client.generate(ids=prompt, max_tokens=60_000, temperature=0, ignore_eos=True)
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
    quiet: list[list[float]] = []
    loaded: list[list[float]] = []
    answered = 0
    failed = 0
    uvloop.run(gaps(server.endpoint, streams, min(seconds, 1.0)))
    for _ in range(rounds):
        quiet.append(uvloop.run(gaps(server.endpoint, streams, seconds)))
        with Calls(server.endpoint, text, tokens) as calls:
            loaded.append(uvloop.run(gaps(server.endpoint, streams, seconds)))
        answered += calls.answered.value
        failed += calls.process.exitcode != 0
    report.measured("text_tokens_at_least", tokens)
    report.measured("text_bytes", len(text))
    report.measured("tokenize_calls_answered", answered)
    report.expect(failed == 0 and answered >= CALLS * rounds, "all tokenize calls were answered in full", answered)
    p99s = [[percentile(sorted(sample), 99) * 1000 for sample in side] for side in (quiet, loaded)]
    p50s = [[statistics.median(sample) * 1000 for sample in side] for side in (quiet, loaded)]
    for name, (without, with_) in {"p50": p50s, "p99": p99s}.items():
        report.measured(f"itl_{name}_ms_without", [round(value, 2) for value in without])
        report.measured(f"itl_{name}_ms_with", [round(value, 2) for value in with_])
    ratios = [with_ / without for without, with_ in zip(*p99s, strict=True)]
    ratio = statistics.median(ratios)
    report.measured("ratios", [round(value, 3) for value in ratios])
    report.measured("ratio_spread", [round(min(ratios), 3), round(max(ratios), 3)])
    report.measured("ratio", round(ratio, 3))
    report.expect(ratio <= LIMIT, f"ITL p99 with is at most {LIMIT} × without (median of rounds)", ratio)
