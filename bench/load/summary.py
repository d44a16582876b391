"""`Summary`: the figures of a load run, as a table and as JSON. Pure."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from rich.table import Table

from bench.load.manners import READS, SLOW
from bench.load.outcome import Outcome
from bench.load.plan import Plan
from bench.load.timeline import CLIENT, Timeline

MIB = 1 << 20
ENGINE_PARTS = ("model", "python", "sockets")


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The value that `percent` % of the sorted values don't exceed (nearest rank); nan of nothing."""
    if not ordered:
        return math.nan
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


class Spread(msgspec.Struct, frozen=True):
    """Percentiles of a set of durations in milliseconds; None when there were none."""

    p50: float | None
    p95: float | None
    p99: float | None
    max: float | None

    @classmethod
    def of(cls, seconds: Iterable[float]) -> "Spread":
        """Percentiles of durations given in seconds."""
        ordered = sorted(seconds)
        if not ordered:
            return cls(None, None, None, None)
        p50, p95, p99, top = (round(percentile(ordered, p) * 1000, 3) for p in (50, 95, 99, 100))
        return cls(p50, p95, p99, top)


class Harness(msgspec.Struct, frozen=True):
    """How the load process itself fared: its share of one core, how late its event loop was, and how much later than
    planned a request left. One that is late, or near a whole core, was the bottleneck."""

    busy: float
    late_ms: Spread
    request_late_ms: float


class Summary(msgspec.Struct, frozen=True):
    """The figures of one run. `tokens_per_second` counts completion tokens from first start to last end.

    `left` counts, by manner, requests whose clients left as planned: they neither completed nor failed.
    `processor_seconds` go by process; `engine` says where the engine's time went, in parts of 1, and `engine_steps`
    how many steps it took.
    """

    plan: Plan
    completed: int
    failed: int
    failures: dict[str, int]
    seconds: float
    completion_tokens: int
    tokens_per_second: float
    ttft_ms: Spread
    itl_ms: Spread
    peak_memory_mib: dict[str, float]
    left: dict[str, int] = {}
    slow: int = 0
    processor_seconds: dict[str, float] = {}
    engine: dict[str, float] = {}
    engine_steps: int = 0
    harness: Harness | None = None
    parity: dict[str, Any] = {}


def summarize(plan: Plan, outcomes: Sequence[Outcome], timeline: Timeline | None = None) -> Summary:
    """Make the summary of a run; latencies are those of the requests that completed, read at full speed."""
    good = [outcome for outcome in outcomes if not outcome.error and not outcome.left]
    eager = [outcome for outcome in good if outcome.manner == READS and outcome.arrivals]
    failures = Counter(outcome.error for outcome in outcomes if outcome.error)
    seconds = max(o.ended for o in outcomes) - min(o.began for o in outcomes) if outcomes else 0.0
    tokens = sum(outcome.tokens for outcome in outcomes)
    parts, steps = engine_parts(timeline) if timeline else ({}, 0)
    spent = processor_seconds(timeline) if timeline else {}
    return Summary(
        plan=plan,
        completed=len(good),
        failed=sum(failures.values()),
        failures=dict(failures.most_common()),
        seconds=round(seconds, 3),
        completion_tokens=tokens,
        tokens_per_second=round(tokens / seconds, 1) if seconds else 0.0,
        ttft_ms=Spread.of(outcome.ttft for outcome in eager),
        itl_ms=Spread.of(gap for outcome in eager for gap in outcome.gaps),
        peak_memory_mib={name: round(size / MIB, 1) for name, size in timeline.peaks.items()} if timeline else {},
        left=dict(Counter(outcome.manner for outcome in outcomes if outcome.left)),
        slow=sum(outcome.manner == SLOW for outcome in good),
        processor_seconds=spent,
        engine=parts,
        engine_steps=steps,
        harness=_harness(timeline, outcomes, spent) if timeline else None,
    )


def processor_seconds(timeline: Timeline) -> dict[str, float]:
    """Processor time of each process between the first and the last sample that has it."""
    spent: dict[str, float] = {}
    first: dict[str, float] = {}
    for sample in timeline.samples:
        for name, seconds in sample.processor.items():
            spent[name] = round(seconds - first.setdefault(name, seconds), 2)
    return spent


def engine_parts(timeline: Timeline) -> tuple[dict[str, float], int]:
    """Where the time of the engine's turns went while it was looked at: parts of 1, and its steps.

    Empty when the engine took no step, or was replaced meanwhile.
    """
    looks = [sample.engine for sample in timeline.samples if "seconds_in_model" in sample.engine]
    if not looks or looks[-1]["step"] <= looks[0]["step"]:
        return {}, 0
    spent = {name: looks[-1][f"seconds_in_{name}"] - looks[0][f"seconds_in_{name}"] for name in ENGINE_PARTS}
    whole = sum(spent.values())
    return {name: round(part / whole, 4) for name, part in spent.items()}, looks[-1]["step"] - looks[0]["step"]


def _harness(timeline: Timeline, outcomes: Sequence[Outcome], spent: dict[str, float]) -> Harness:
    wall = timeline.samples[-1].at - timeline.samples[0].at if timeline.samples else 0.0
    return Harness(
        busy=round(spent.get(CLIENT, 0.0) / wall, 3) if wall else 0.0,
        late_ms=Spread.of(sample.late for sample in timeline.samples[1:]),
        request_late_ms=round(max((outcome.late for outcome in outcomes), default=0.0) * 1000, 3),
    )


def table(summary: Summary) -> Table:
    """The summary for people."""
    plan = summary.plan
    prompts = plan.prompt_lengths or f"{plan.prompt_tokens}"
    crowd = f"{plan.streams} at once" if plan.closed else plan.arrivals
    title = (
        f"{plan.requests} requests, {crowd} over {plan.via}: {prompts} prompt tokens "
        f"({plan.shared_prefix} shared), {plan.output_lengths or plan.max_tokens} generated"
    )
    grid = Table(title=title, show_header=False, title_justify="left")
    for name, value in rows(summary):
        grid.add_row(name, value)
    return grid


def rows(summary: Summary) -> list[tuple[str, str]]:
    """The figures as names and texts."""
    found = [("completed", str(summary.completed)), ("failed", str(summary.failed))]
    found += [("", f"{count} × {reason}") for reason, count in summary.failures.items()]
    found += [(f"left ({manner})", str(count)) for manner, count in summary.left.items()]
    if summary.slow:
        found.append(("slow readers", str(summary.slow)))
    found.append(("seconds", f"{summary.seconds:.2f}"))
    found.append(("tokens per second", f"{summary.tokens_per_second:.1f}"))
    for label, spread in (("TTFT", summary.ttft_ms), ("ITL", summary.itl_ms)):
        if spread.p50 is not None:
            found.append((f"{label} p50 / p95 / p99", f"{spread.p50:.1f} / {spread.p95:.1f} / {spread.p99:.1f} ms"))
    if summary.engine:
        parts = ", ".join(f"{name} {part:.1%}" for name, part in summary.engine.items())
        found.append(("engine's time", f"{parts} ({summary.engine_steps} steps)"))
    found += [(f"peak memory {name}", f"{size:.0f} MiB") for name, size in summary.peak_memory_mib.items()]
    if summary.harness is not None:
        late = summary.harness.late_ms.p99 or 0.0
        found.append(("this process", f"{summary.harness.busy:.0%} of a core, at most {late:.0f} ms late (p99)"))
    if summary.parity:
        found += [(f"parity: {name}", str(value)) for name, value in summary.parity.items()]
    return found
