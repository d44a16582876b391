"""Plots of a load run as SVG texts, to be put into a page. Draws with matplotlib, without a display."""

import io
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import matplotlib as mpl

from bench.load.manners import READS
from bench.load.outcome import Outcome
from bench.load.summary import ENGINE_PARTS, MIB, percentile
from bench.load.timeline import CLIENT, Sample

mpl.use("Agg")

from matplotlib import pyplot as plt

mpl.rcParams["svg.fonttype"] = "none"
mpl.rcParams["svg.hashsalt"] = "callboard"  # the same figures give the same text

SIZE = (6.4, 3.2)  # inches
Lines = Mapping[str, tuple[Sequence[float], Sequence[float]]]


def svg(figure: Any) -> str:
    """A figure as an `<svg>` element; the figure is closed."""
    figure.tight_layout()
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    plt.close(figure)
    return text.getvalue()[text.getvalue().index("<svg") :]


def lines(title: str, unit: str, found: Lines, across: str = "seconds") -> str:
    """Curves over one axis, from zero up."""
    figure, axes = plt.subplots(figsize=SIZE)
    for name, (x, y) in found.items():
        axes.plot(x, y, label=name, linewidth=1.2)
    axes.set(title=title, xlabel=across, ylabel=unit)
    axes.set_ylim(bottom=0)
    if len(found) > 1:
        axes.legend(fontsize=8)
    return svg(figure)


def distribution(title: str, seconds: Sequence[float]) -> str:
    """The cumulative distribution of durations, on a logarithmic axis, with the usual percentiles named."""
    figure, axes = plt.subplots(figsize=SIZE)
    ordered = sorted(value * 1000 for value in seconds)
    axes.plot(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))], linewidth=1.2)
    for percent in (50, 95, 99):
        value = percentile(ordered, percent)
        axes.axvline(value, color="grey", linewidth=0.6)
        axes.annotate(f"p{percent} {value:.3g}", (value, percent / 100), fontsize=8)
    if ordered[0] > 0:
        axes.set_xscale("log")
    axes.set(title=title, xlabel="milliseconds", ylabel="part of all")
    axes.set_ylim(0, 1.05)
    return svg(figure)


def run_plots(outcomes: Sequence[Outcome], samples: Sequence[Sample]) -> list[str]:
    """All plots of one run that it has figures for."""
    good = [outcome for outcome in outcomes if outcome.arrivals and not outcome.error and outcome.manner == READS]
    plots = []
    if good:
        plots.append(distribution("Time to first token", [outcome.ttft for outcome in good]))
    gaps = [gap for outcome in good for gap in outcome.gaps]
    if gaps:
        plots.append(distribution("Inter-token latency", gaps))
    times = [sample.at for sample in samples]
    if len(times) < 2:
        return plots
    rates = _slopes(times, [sample.arrivals for sample in samples])
    plots.append(lines("Throughput", "arrivals of tokens per second", {"arrivals": (times[1:], rates)}))
    in_flight = (times, [float(sample.open) for sample in samples])
    plots.append(lines("Rows", "rows", {"in flight": in_flight} | _rows(samples)))
    names = dict.fromkeys(name for sample in samples for name in sample.memory)
    memory = {name: _series(samples, lambda s, name=name: s.memory[name] / MIB, "memory", name) for name in names}
    plots.append(lines("Resident memory", "MiB", memory))
    spent = {name: _series(samples, lambda s, name=name: s.processor[name], "processor", name) for name in names}
    busy = {name: (x[1:], _slopes(x, y)) for name, (x, y) in spent.items() if len(x) > 1}
    plots.append(lines("Processor", f"cores ({CLIENT}: the load itself)", busy))
    parts = engine_shares(samples)
    if parts:
        plots.append(lines("The engine's time, look by look", "part", parts))
    return plots


def engine_shares(samples: Sequence[Sample]) -> dict[str, tuple[list[float], list[float]]]:
    """Parts of the engine's time between each two looks that found steps in between."""
    looks = [sample for sample in samples if "seconds_in_model" in sample.engine]
    fresh = [b for a, b in pairwise(looks) if b.engine["step"] != a.engine["step"]]
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in ENGINE_PARTS}
    for before, after in pairwise(fresh):
        spent = [after.engine[f"seconds_in_{name}"] - before.engine[f"seconds_in_{name}"] for name in ENGINE_PARTS]
        if (whole := sum(spent)) > 0 and min(spent) >= 0:
            for (x, y), part in zip(found.values(), spent, strict=True):
                x.append(after.at)
                y.append(part / whole)
    return found if found["model"][0] else {}


def _rows(samples: Sequence[Sample]) -> dict[str, tuple[list[float], list[float]]]:
    names = ("running", "prefilling", "waiting") if any(sample.engine for sample in samples) else ()
    return {name: _series(samples, lambda s, name=name: s.engine[name], "engine", name) for name in names}


def _series(samples: Sequence[Sample], value: Any, field: str, name: str) -> tuple[list[float], list[float]]:
    there = [sample for sample in samples if name in getattr(sample, field)]
    return [sample.at for sample in there], [value(sample) for sample in there]


def _slopes(times: Sequence[float], values: Sequence[float]) -> list[float]:
    return [(b - a) / max(t - s, 1e-9) for (s, t), (a, b) in zip(pairwise(times), pairwise(values), strict=True)]
