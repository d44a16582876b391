"""What a comparison of servers found: figures of runs, ratios of those that belong together, and what they say. Pure.

A run of ours and one of a peer belong together when they carry the same number: they ran one after the other with the
same prompts. `bench/compare.py` makes the runs, `bench/compare_report.py` words and draws them.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence

import msgspec

from bench.load.plan import Plan
from bench.load.summary import Spread, Summary

OURS = "callboard"
ENOUGH = 0.9  # of its requests a server must have completed for its latencies to be compared


class Workload(msgspec.Struct, frozen=True):
    """One load. `model` is tiny or demo; `rounds` how often each pair runs; with `best` peers run with their best
    settings, too."""

    name: str
    title: str
    model: str
    plan: Plan
    rounds: int = 1
    best: bool = False


class Run(msgspec.Struct, frozen=True):
    """One server under one workload. `note` says what went wrong beside single requests; `memory_mib` is the peak of
    all its processes; `answers_after` how many seconds a request took afterwards, None when it got no answer."""

    workload: str
    server: str
    best: bool
    pair: int
    tokens_per_second: float = 0.0
    ttft_ms: Spread = Spread(None, None, None, None)
    itl_ms: Spread = Spread(None, None, None, None)
    requests: int = 0
    completed: int = 0
    failed: int = 0
    failures: dict[str, int] = {}
    left: dict[str, int] = {}
    seconds: float = 0.0
    memory_mib: float = 0.0
    client_busy: float = 0.0
    answers_after: float | None = None
    note: str = ""

    @property
    def label(self) -> str:
        """The server's name, with its settings."""
        return f"{self.server}, best settings" if self.best else self.server

    @property
    def served(self) -> bool:
        """Whether enough of it succeeded for its latencies to mean something."""
        return self.requests > 0 and self.completed + sum(self.left.values()) >= ENOUGH * self.requests


def run_of(workload: str, server: str, best: bool, pair: int, summary: Summary, answers_after: float | None) -> Run:
    """The figures of a summary."""
    cut = any(reason.startswith("cut after") for reason in summary.failures)
    return Run(
        workload,
        server,
        best,
        pair,
        summary.tokens_per_second,
        summary.ttft_ms,
        summary.itl_ms,
        summary.plan.requests,
        summary.completed,
        summary.plan.requests - summary.completed - sum(summary.left.values()),
        summary.failures,
        summary.left,
        summary.seconds,
        round(sum(summary.peak_memory_mib.values()), 1),
        summary.harness.busy if summary.harness else 0.0,
        answers_after,
        "cut" if cut else "",
    )


class Ratio(msgspec.Struct, frozen=True):
    """Ours to a peer's over pairs of runs: smallest, median, largest."""

    least: float
    median: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Ratio | None":
        """The spread of ratios; None of nothing."""
        found = sorted(values)
        return cls(*(round(v, 3) for v in (found[0], statistics.median(found), found[-1]))) if found else None

    def __str__(self) -> str:
        if self.least == self.most:
            return f"{self.median:.2f}"
        return f"{self.median:.2f} ({self.least:.2f}–{self.most:.2f})"


Value = Callable[[Run], float | None]
METRICS: dict[str, Value] = {
    "throughput": lambda run: run.tokens_per_second,
    "TTFT p50": lambda run: run.ttft_ms.p50 if run.served else None,
    "TTFT p99": lambda run: run.ttft_ms.p99 if run.served else None,
    "ITL p50": lambda run: run.itl_ms.p50 if run.served else None,
    "ITL p99": lambda run: run.itl_ms.p99 if run.served else None,
    "memory": lambda run: run.memory_mib,
}


def labels(runs: Sequence[Run], workload: str) -> list[str]:
    """The servers that ran a workload, ours first."""
    found = dict.fromkeys(run.label for run in runs if run.workload == workload)
    return sorted(found, key=lambda label: label != OURS)


def of(runs: Sequence[Run], workload: str, label: str) -> list[Run]:
    """The runs of one server under one workload."""
    return [run for run in runs if run.workload == workload and run.label == label]


def median(runs: Iterable[Run], value: Value) -> float | None:
    """The median of a figure over runs that have it."""
    found = [figure for run in runs if (figure := value(run)) is not None]
    return statistics.median(found) if found else None


def ratio(runs: Sequence[Run], workload: str, label: str, value: Value) -> Ratio | None:
    """Ours to a peer's, over the pairs of runs where both have the figure."""
    mine = {run.pair: run for run in of(runs, workload, OURS)}
    pairs = [(value(mine[run.pair]), value(run)) for run in of(runs, workload, label) if run.pair in mine]
    return Ratio.of(ours / theirs for ours, theirs in pairs if ours is not None and theirs)


def best_peer(runs: Sequence[Run], workload: str, *, best_settings: bool = False) -> str:
    """The peer with the most tokens per second, as shipped or among all; "" when none ran."""
    found = {
        label: median(of(runs, workload, label), METRICS["throughput"]) or 0.0
        for label in labels(runs, workload)
        if label != OURS and (best_settings or label == label.partition(",")[0])
    }
    return max(found, key=lambda label: found[label]) if found else ""


class Loss(msgspec.Struct, frozen=True):
    """Where a peer is better than ours: by what figure, and how often, ours to theirs."""

    workload: str
    label: str
    metric: str
    ratio: Ratio


def losses(runs: Sequence[Run], workloads: Sequence[Workload], slack: float = 0.02) -> list[Loss]:
    """Every figure in which some peer is better by more than `slack`, the worst peer for us of each."""
    found = []
    for workload in workloads:
        for metric, value in METRICS.items():
            higher_wins = metric == "throughput"
            ratios = {
                label: it
                for label in labels(runs, workload.name)
                if label != OURS and (it := ratio(runs, workload.name, label, value)) is not None
            }
            if not ratios:
                continue
            worst = (min if higher_wins else max)(ratios, key=lambda label: ratios[label].median)
            if (ratios[worst].median < 1 - slack) if higher_wins else (ratios[worst].median > 1 + slack):
                found.append(Loss(workload.name, worst, metric, ratios[worst]))
    return found
