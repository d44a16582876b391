"""Checks of a system under load and faults for a while: nothing is lost, nothing leaks, memory stays flat."""

import random
import time
from pathlib import Path
from statistics import median

import uvloop

from bench.checks.report import Report
from bench.faults.inject import Faults
from bench.faults.soak import FAULTS, SHORT, Soak
from bench.faults.streams import Asked, compare, undisturbed
from bench.harness import RunningServer

FLAT = 1.05  # largest growth of a process that lived through it
ROUND = 6  # faults of a round of the long run
DISTINCT = 96  # different requests


def soak(
    report: Report,
    server: RunningServer,
    switches: Faults,
    model: Path,
    *,
    streams: int,
    tokens: int,
    every: float,
    seconds: float | None = None,
    distinct: int = DISTINCT,
) -> None:
    """Faults every `every` seconds under `streams` streams: for `seconds`, or one short round of each kind of fault."""
    requests = [_asked(index, tokens) for index in range(distinct)]
    reference = uvloop.run(undisturbed(server.endpoint, requests))
    run = Soak(server, switches, reference, streams, every)
    began = time.monotonic()
    if seconds is None:
        uvloop.run(run.run([SHORT]))
    else:
        draw = random.Random(0)
        while time.monotonic() - began < seconds:
            uvloop.run(run.run([[draw.choice(FAULTS) for _ in range(ROUND)]]))
    report.measured("seconds", round(time.monotonic() - began, 1))
    report.measured("streams_at_once", streams)
    report.measured("faults", dict(run.faults.most_common()))
    report.measured("streams_finished", run.finished)
    report.measured("streams_lost_to_streamer_or_http_faults", run.lost)
    report.expect(run.finished > streams, "streams finished", run.finished)
    report.expect(
        not run.wrong, "every stream ended once and none was lost to another fault; nothing leaked", run.wrong[:8]
    )
    compare(report, model, "all", reference, run.different, of=run.finished)
    if seconds is not None:
        _judge_memory(report, run, began)


def _asked(index: int, tokens: int) -> Asked:
    """A third from texts, and some of the others long enough for prefix blocks."""
    return Asked(index, tokens, words=0 if index % 3 else 30 + index, ids=300 + 6 * index if index % 4 == 1 else 0)


def _judge_memory(report: Report, run: Soak, began: float) -> None:
    whole = time.monotonic() - began

    def quarter(samples: list[tuple[float, int]], number: int) -> list[int]:
        low, high = began + whole * number / 4, began + whole * (number + 1) / 4
        return [size for at, size in samples if low <= at < high]

    by_name: dict[str, list[tuple[float, int]]] = {}
    for (name, _), samples in run.memory.samples.items():
        by_name.setdefault(name, []).extend(samples)
        second, last = quarter(samples, 1), quarter(samples, 3)
        if not (second and last):
            continue
        growth = median(last) / median(second)
        report.measured(f"{name}: lived through the second to the last quarter, memory × ", round(growth, 3))
        report.expect(growth <= FLAT, f"{name}: memory is flat within {FLAT - 1:.0%}", growth)
    for name, samples in by_name.items():
        second, last = quarter(samples, 1), quarter(samples, 3)
        if second and last:
            peaks = [round(max(part) / (1 << 20), 1) for part in (second, last)]
            report.measured(f"{name}: peak of the second and the last quarter (MiB)", peaks)
            report.expect(peaks[1] <= FLAT * peaks[0], f"{name}: the peak is no higher in the last quarter", peaks)
