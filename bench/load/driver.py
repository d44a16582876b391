"""`run_load`: runs a plan's requests on the caller's event loop, in a closed loop or at their times of arrival."""

import asyncio
import time
from collections.abc import Iterator
from typing import Protocol, Self

from bench.load.arrivals import arrival_times
from bench.load.outcome import Outcome
from bench.load.over_http import HttpLoad
from bench.load.over_zmq import ZmqLoad
from bench.load.plan import Ask, Plan, made_up_answer, make_ask


class Load(Protocol):
    """One way to reach a server: `HttpLoad` or `ZmqLoad`."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...

    async def run(self, ask: Ask, outcome: Outcome) -> None:
        """Run one request to its end, or to where its client leaves, and write down how it went."""


class Progress:
    """What a run has done so far, for a display that reads it now and then."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.outcomes: list[Outcome] = []
        self.began = time.monotonic()
        self.completed = 0
        self.failed = 0
        self.left = 0

    @property
    def running(self) -> int:
        """Requests in flight."""
        return len(self.outcomes) - self.completed - self.failed - self.left

    @property
    def arrivals(self) -> int:
        """Arrivals of new tokens, over all requests."""
        return sum(outcome.arrivals for outcome in self.outcomes)

    @property
    def counts(self) -> tuple[int, int]:
        """Arrivals and requests in flight."""
        return self.arrivals, self.running


def make_load(plan: Plan, *, url: str = "", endpoint: str = "") -> Load:
    """The load client for the plan's way to the server."""
    return HttpLoad(plan, url) if plan.via == "http" else ZmqLoad(plan, endpoint)


async def run_load(load: Load, progress: Progress, cut: float | None = None) -> list[Outcome]:
    """Run the plan of `progress` through `load`, which is open; returns one outcome per request, in order.

    Failures are in the outcomes; only a bug in the load itself raises. What isn't over after `cut` seconds is given
    up, and what has not begun is left out; a chat ends with a request that failed or whose client left.
    """
    plan = progress.plan
    chats = [range(first, min(first + plan.turns, plan.requests)) for first in range(0, plan.requests, plan.turns)]
    times = arrival_times(plan.arrivals, len(chats), plan.seed)
    # Made before the first leaves: prompts take time that the event loop will be short of.
    ready = {chat.start: make_ask(plan, chat.start) for chat in (chats if times else chats[: plan.streams])}
    began = time.monotonic()
    try:
        async with asyncio.timeout(cut), asyncio.TaskGroup() as group:
            if times is None:
                waiting = iter(chats)
                for _ in range(min(plan.streams, len(chats))):
                    group.create_task(_work(load, progress, waiting, ready))
            else:
                for due, chat in zip(times, chats, strict=True):
                    group.create_task(_chat(load, progress, chat, ready, began + due))
    except TimeoutError:
        for outcome in progress.outcomes:
            if not outcome.ended:
                outcome.end(f"cut after {cut:g} s")
                outcome.cut = True
                progress.failed += 1
    return sorted(progress.outcomes, key=lambda outcome: outcome.index)


async def _work(load: Load, progress: Progress, chats: Iterator[range], ready: dict[int, Ask]) -> None:
    for chat in chats:
        await _chat(load, progress, chat, ready)


async def _chat(load: Load, progress: Progress, chat: range, ready: dict[int, Ask], due: float = 0.0) -> None:
    if due:
        await asyncio.sleep(due - time.monotonic())
    plan = progress.plan
    history: list[int] = []
    for index in chat:
        ask = ready.pop(index, None) or make_ask(plan, index, history)
        outcome = Outcome(index, ask.manner)
        if plan.record:
            outcome.prompt = ask.ids
        progress.outcomes.append(outcome)
        await load.run(ask, outcome)
        if due:
            outcome.late, due = max(outcome.began - due, 0.0), 0.0
        outcome.check_lengths(len(ask.ids), ask.max_tokens)
        if outcome.error:
            progress.failed += 1
        elif outcome.left:
            progress.left += 1
        else:
            progress.completed += 1
            history = [*ask.ids, *(outcome.ids or made_up_answer(plan, index))]
            continue
        return
