"""`run_load`: runs a plan's requests, at most `streams` at once, on the caller's event loop."""

import asyncio
import time
from collections.abc import Iterator
from typing import Protocol, Self

from bench.load.outcome import Outcome
from bench.load.over_http import HttpLoad
from bench.load.over_zmq import ZmqLoad
from bench.load.plan import Plan


class Load(Protocol):
    """One way to reach a server: `HttpLoad` or `ZmqLoad`."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...

    async def run(self, index: int, outcome: Outcome) -> None:
        """Run request `index` to its end and write down how it went."""


class Progress:
    """What a run has done so far, for a display that reads it now and then."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.outcomes: list[Outcome] = []
        self.began = time.monotonic()
        self.completed = 0
        self.failed = 0

    @property
    def running(self) -> int:
        """Requests in flight."""
        return len(self.outcomes) - self.completed - self.failed

    @property
    def arrivals(self) -> int:
        """Arrivals of new tokens, over all requests."""
        return sum(outcome.arrivals for outcome in self.outcomes)


def make_load(plan: Plan, *, url: str = "", endpoint: str = "") -> Load:
    """The load client for the plan's way to the server."""
    return HttpLoad(plan, url) if plan.via == "http" else ZmqLoad(plan, endpoint)


async def run_load(load: Load, progress: Progress) -> list[Outcome]:
    """Run the plan of `progress` through `load`, which is open; returns one outcome per request, in order.

    Failures are in the outcomes; only a bug in the load itself raises.
    """
    plan = progress.plan
    indices = iter(range(plan.requests))
    async with asyncio.TaskGroup() as group:
        for _ in range(min(plan.streams, plan.requests)):
            group.create_task(_work(load, progress, indices))
    return sorted(progress.outcomes, key=lambda outcome: outcome.index)


async def _work(load: Load, progress: Progress, indices: Iterator[int]) -> None:
    plan = progress.plan
    for index in indices:
        outcome = Outcome(index)
        progress.outcomes.append(outcome)
        await load.run(index, outcome)
        outcome.check_lengths(plan.prompt_tokens, plan.max_tokens)
        if outcome.error:
            progress.failed += 1
        else:
            progress.completed += 1
