"""`Summary`: the figures of a load run, as a table and as JSON. Pure."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from rich.table import Table

from bench.load.outcome import Outcome
from bench.load.plan import Plan

MIB = 1 << 20


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


class Summary(msgspec.Struct, frozen=True):
    """The figures of one run. `tokens_per_second` counts completion tokens from first start to last end."""

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


def summarize(plan: Plan, outcomes: Sequence[Outcome], peaks: Mapping[str, int]) -> Summary:
    """Make the summary of a run; latencies are those of the requests that completed."""
    good = [outcome for outcome in outcomes if not outcome.error]
    failures = Counter(outcome.error for outcome in outcomes if outcome.error)
    seconds = max(o.ended for o in outcomes) - min(o.began for o in outcomes) if outcomes else 0.0
    tokens = sum(outcome.completion_tokens for outcome in good)
    return Summary(
        plan=plan,
        completed=len(good),
        failed=len(outcomes) - len(good),
        failures=dict(failures.most_common()),
        seconds=round(seconds, 3),
        completion_tokens=tokens,
        tokens_per_second=round(tokens / seconds, 1) if seconds else 0.0,
        ttft_ms=Spread.of(outcome.ttft for outcome in good if outcome.arrivals),
        itl_ms=Spread.of(gap for outcome in good for gap in outcome.gaps),
        peak_memory_mib={name: round(size / MIB, 1) for name, size in peaks.items()},
    )


def table(summary: Summary) -> Table:
    """The summary for people."""
    plan = summary.plan
    title = (
        f"{plan.requests} requests, {plan.streams} at once over {plan.via}: "
        f"{plan.prompt_tokens} prompt tokens ({plan.shared_prefix} shared), {plan.max_tokens} generated"
    )
    grid = Table(title=title, show_header=False, title_justify="left")
    grid.add_row("completed", str(summary.completed))
    grid.add_row("failed", str(summary.failed))
    for reason, count in summary.failures.items():
        grid.add_row("", f"{count} × {reason}")
    grid.add_row("seconds", f"{summary.seconds:.2f}")
    grid.add_row("tokens per second", f"{summary.tokens_per_second:.1f}")
    for label, spread in (("TTFT", summary.ttft_ms), ("ITL", summary.itl_ms)):
        if spread.p50 is not None:
            grid.add_row(
                f"{label} p50 / p95 / p99",
                f"{spread.p50:.1f} / {spread.p95:.1f} / {spread.p99:.1f} ms",
            )
    for name, size in summary.peak_memory_mib.items():
        grid.add_row(f"peak memory {name}", f"{size:.0f} MiB")
    return grid
