"""Checks under load: streams against their solo runs, where the engine's time goes, what the load process can take."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from bench import null_server
from bench.checks.crowds import reached, run_plan
from bench.checks.report import Report
from bench.checks.same import MARGIN, TIES
from bench.harness import POLL, RunningServer
from bench.load import sampled
from bench.load.driver import Progress, make_load, run_load
from bench.load.over_http import HttpLoad
from bench.load.parity import Difference, compare_solo, solo_plan
from bench.load.plan import Plan
from bench.load.summary import ENGINE_PARTS, Spread, Summary, summarize
from bench.load.timeline import Timeline
from bench.mlx_child import MlxChild

OUTSIDE_MODEL = 0.05
SOON = 0.05  # seconds


def parity(report: Report, server: RunningServer, model: Path, plan: Plan) -> None:
    """Each stream of a plan with aborts and joins has the tokens of its solo run, or first differs at a tie."""
    plan = msgspec.structs.replace(plan, record=True)
    summary, compared, differences = uvloop.run(_parity(server, plan))
    name = f"temperature {plan.temperature:g}"
    report.measured(f"{name}: requests", plan.requests)
    report.measured(f"{name}: streams", plan.streams)
    report.measured(f"{name}: completed", summary.completed)
    report.measured(f"{name}: left", summary.left)
    report.measured(f"{name}: compared", compared)
    report.measured(f"{name}: tokens", summary.completion_tokens)
    report.expect(not summary.failures, f"{name}: no request failed", summary.failures)
    whole = summary.completed + sum(summary.left.values())
    report.expect(whole == plan.requests, f"{name}: every request ended as it should", whole)
    report.expect(compared == whole, f"{name}: every stream was compared with its solo run", compared)
    ties, other = _ties(model, plan, differences)
    report.measured(f"{name}: streams that differ by a tie", ties)
    report.expect(not other, f"{name}: the same tokens as alone", other)
    report.expect(len(ties) <= TIES * compared, f"{name}: ties in at most {TIES:.0%} of the streams", len(ties))


async def _parity(server: RunningServer, plan: Plan) -> tuple[Summary, int, list[Difference]]:
    async with make_load(plan, url=server.url, endpoint=server.endpoint) as load:
        outcomes = await run_load(load, Progress(plan))
    solo = solo_plan(plan)
    async with make_load(solo, url=server.url, endpoint=server.endpoint) as load:
        compared, differences = await compare_solo(load, plan, outcomes)
    return summarize(plan, outcomes), compared, differences


def _ties(model: Path, plan: Plan, differences: list[Difference]) -> tuple[list[str], list[str]]:
    ties: list[str] = []
    other: list[str] = []
    if not differences:
        return ties, other
    with MlxChild("bench.ties", str(model)) as child:
        for found in differences:
            options = {"temperature": plan.temperature, "top_p": plan.top_p, "seed": found.index}
            gap = 1.0
            if found.got is not None and found.wanted is not None:
                gap = child.ask([found.ids, found.prompt_tokens, options])
            line = f"request {found.index}, token {found.place}: {found.wanted} or {found.got}, gap {gap:.2e}"
            (ties if gap < MARGIN else other).append(line)
    return ties, other


def engine_busy(report: Report, server: RunningServer, plan: Plan, *, seconds: int, bar: float | None) -> None:
    """While all streams of a plan decode, what part of the engine's time is not the model's: by its own sums against
    the clock, and by a sampling profiler. Without `seconds` the profiler is left out. Over HTTP; the clients leave when
    enough was seen."""
    own, stacks, summary, itl = uvloop.run(_engine_busy(server, plan, seconds))
    profile = sampled.parts(stacks)
    report.measured("streams", plan.streams)
    report.measured("own_figures", own)
    report.measured("profiler", profile)
    report.measured("profiler_outside_the_model", sampled.outside(stacks))
    report.measured("tokens_per_second", summary.tokens_per_second)
    report.measured("itl_ms", msgspec.to_builtins(itl))
    report.expect(not summary.failures, "no request failed", summary.failures)
    report.expect(own["steps"] > 0, "all streams decoded while it was looked at", own)
    for name, part in (("by its own figures", own["model"]), ("by the profiler", profile.get("model", 0.0))):
        if bar is not None:
            outside = round(1 - part, 4)
            report.expect(outside <= bar, f"{name} at most {bar:.0%} outside the model", outside)


async def _engine_busy(
    server: RunningServer, plan: Plan, seconds: int
) -> tuple[dict[str, Any], list[str], Summary, Spread]:
    progress = Progress(plan)
    timeline = Timeline(server.pids(), server.url, lambda: progress.counts)
    pid = server.pids()["engine"]
    stacks: list[str] = []
    async with HttpLoad(plan, server.url) as load, timeline.watch():
        running = asyncio.create_task(run_load(load, progress))

        def all_decode() -> bool:
            now = server.load()
            return running.done() or bool(now["running"] == plan.streams and not now["prefilling"])

        await reached(all_decode, 120, "all streams decode")
        before = await fresh(server)
        if seconds:  # the profiler stops the engine for each sample, so the engine's own figures are taken without it
            stacks = await asyncio.to_thread(sampled.record, pid, seconds)
            await asyncio.sleep(0.1)
            before = await fresh(server)
        await asyncio.sleep(max(seconds, 1))
        after = await fresh(server)
        for outcome in progress.outcomes:
            if outcome.index in load.open:
                outcome.leave()
                load.open[outcome.index].abort()
        outcomes = await running
    itl = Spread.of(gap for outcome in outcomes for gap in outcome.gaps)
    return _shares(before, after, plan.streams), stacks, summarize(plan, outcomes, timeline), itl


async def fresh(server: RunningServer) -> tuple[float, dict[str, Any]]:
    """What the engine says, and when, at the moment it says something new. Raises TimeoutError.

    On a busy machine an answer may be old when it is read. So one counts whose question came soon behind one that still
    got the old answer; how soon is not insisted on for ever.
    """
    clock = asyncio.get_running_loop().time
    began = asked = clock()
    soon = SOON
    step = (await asyncio.to_thread(server.load))["step"]
    while clock() - began < 30:
        await asyncio.sleep(POLL)
        asked_before, asked = asked, clock()
        now = await asyncio.to_thread(server.load)
        if now["step"] != step:
            if clock() - asked_before <= soon:
                return clock(), now
            step = now["step"]
            soon *= 1.2
    raise TimeoutError("the engine says nothing new")


def _shares(before: tuple[float, dict[str, Any]], after: tuple[float, dict[str, Any]], streams: int) -> dict[str, Any]:
    wall = after[0] - before[0]
    spent = {name: after[1][f"seconds_in_{name}"] - before[1][f"seconds_in_{name}"] for name in ENGINE_PARTS}
    steps = after[1]["step"] - before[1]["step"] if after[1]["running"] == streams else 0
    shares: dict[str, Any] = {name: round(part / wall, 4) for name, part in spent.items()}
    shares["elsewhere"] = round(1 - sum(spent.values()) / wall, 4)
    return shares | {"steps": steps, "step_ms": round(1000 * wall / max(steps, 1), 2), "seconds": round(wall, 2)}


def harness_limit(report: Report, streams: int, tokens: int, *, least: float) -> None:
    """What the load process takes from a server without a model: `streams` at once, `least` tokens per second."""
    for via in ("http", "zmq"):
        plan = Plan(via=via, streams=streams, requests=streams, prompt_tokens=220, max_tokens=tokens)
        with null_server.running(via) as (url, endpoint, pid):
            summary = uvloop.run(_null_run(plan, url, endpoint, pid))
        report.measured(f"{via}_tokens_per_second", summary.tokens_per_second)
        report.measured(f"{via}_processor_seconds", summary.processor_seconds)
        report.measured(f"{via}_harness", msgspec.to_builtins(summary.harness))
        report.expect(summary.completed == streams, f"{via}: {streams} streams complete", summary.failures)
        claim = f"{via}: it takes at least {least:g} tokens per second"
        report.expect(summary.tokens_per_second >= least, claim, summary.tokens_per_second)


async def _null_run(plan: Plan, url: str, endpoint: str, pid: int) -> Summary:
    progress = Progress(plan)
    timeline = Timeline({"null": pid}, counts=lambda: progress.counts)
    async with make_load(plan, url=url, endpoint=endpoint) as load, timeline.watch():
        outcomes = await run_load(load, progress)
    return summarize(plan, outcomes, timeline)


def many(report: Report, server: RunningServer, streams: int) -> None:
    """So many streams at once, over HTTP and over ZeroMQ, all complete."""
    for via in ("http", "zmq"):
        plan = Plan(via=via, streams=streams, requests=streams, prompt_tokens=100, max_tokens=32)
        summary = uvloop.run(run_plan(server, plan))
        report.measured(f"{via}_tokens_per_second", summary.tokens_per_second)
        report.measured(f"{via}_ttft_ms", msgspec.to_builtins(summary.ttft_ms))
        report.measured(f"{via}_harness", msgspec.to_builtins(summary.harness))
        report.expect(summary.completed == streams, f"{via}: {streams} of {streams} complete", summary.failures)
