"""The report of a comparison: Markdown, and plots as SVG files. Pure but for writing the plots."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt

from bench.comparison import METRICS, OURS, Run, Value, Workload, best_peer, labels, losses, median, of, ratio

mpl.rcParams["svg.hashsalt"] = "callboard"  # the same figures give the same file

_PROMPTS_WAIT = "prompts wait for one another within `--decode-stall-target-ms`, so that running streams go on"
_HOPS = "noise, or the hops between processes that a request and each of its tokens take"
WHY = {
    "memory": "five processes, each with a Python of its own, and the engine keeps a pool of freed buffers as large as "
    "a full batch's logits, so that steps don't fault their pages anew",
    "throughput": "a burst's prompts are computed some at a time between steps; the peer computes all of them first",
    "TTFT p50": _PROMPTS_WAIT,
    "TTFT p99": _PROMPTS_WAIT,
    "ITL p50": "more rows decode at the same time, so a step takes longer than that of a server which lets rows wait",
    "ITL p99": "prompts that arrive are prefilled between steps, up to `--decode-stall-target-ms` at a time, or for a "
    "second and more where a step alone takes longer than that",
}
WHY_ALONE = dict.fromkeys(WHY, _HOPS) | {"memory": WHY["memory"]}  # of a single stream, in a single run
PLOTS = {"throughput": "tokens per second", "TTFT p99": "milliseconds", "ITL p99": "milliseconds", "memory": "MiB"}


def markdown(
    runs: Sequence[Run], workloads: Sequence[Workload], bare: Mapping[str, float], facts: Mapping[str, object]
) -> str:
    """The whole report. `bare` maps workloads to the bare limit's tokens per second."""
    there = [workload for workload in workloads if any(run.workload == workload.name for run in runs)]
    parts = [
        "# Callboard beside other MLX servers\n",
        "Made by `make compare` (`bench/compare.py`): the same model, prompts, load process and BLAS for all; ours "
        "runs before each run of a peer, and ratios (ours to theirs) are of such pairs: median (smallest–largest). "
        "A model without an end of sequence makes all generate the same number of tokens. Latencies are left out where "
        "a server completed less than 90 % of its requests.\n",
        *(_section(runs, workload, bare.get(workload.name)) for workload in there),
        _where_we_lose(runs, there),
        "## Measured on\n",
        "\n".join(f"- {name}: {value}" for name, value in facts.items()) + "\n",
        "\n".join(f"![{name}]({plot_name(name)})" for name in PLOTS) + "\n",
    ]
    return "\n".join(parts)


def _section(runs: Sequence[Run], workload: Workload, bare: float | None) -> str:
    plan = workload.plan
    lines = [f"## {workload.title}\n"]
    asked = [f"{workload.model} model", f"{plan.requests} requests", f"{plan.streams} at once"]
    asked.append(f"prompts of {plan.prompt_lengths or plan.prompt_tokens} tokens")
    if plan.shared_prefix:
        asked.append(f"the first {plan.shared_prefix} shared")
    asked.append(f"{plan.output_lengths or plan.max_tokens} generated")
    if plan.aborts:
        asked.append(f"{plan.aborts:.0%} of the clients abort")
    lines.append(", ".join(asked) + ".\n")
    lines.append(
        "| server | tokens/s | ours to it | TTFT p50 / p99 | ours to it (p99) | ITL p50 / p99 | failed | MiB | |"
    )
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for label in labels(runs, workload.name):
        lines.append(_row(runs, workload.name, label))
    best = best_peer(runs, workload.name)
    if best and (against := ratio(runs, workload.name, best, METRICS["throughput"])):
        lines.append(f"\nThe best peer as shipped is {best}: ours is {against} × as fast.")
    ours = median(of(runs, workload.name, OURS), METRICS["throughput"])
    if bare and ours:
        lines.append(
            f"\nThe bare limit (forward and argmax in lockstep) is {bare:.0f}: ours is {ours / bare:.2f} of it."
        )
    return "\n".join(lines) + "\n"


def _row(runs: Sequence[Run], workload: str, label: str) -> str:
    mine = of(runs, workload, label)

    def shown(name: str, digits: int = 0) -> str:
        value = median(mine, METRICS[name])
        return "–" if value is None else f"{value:,.{digits}f}"

    def against(name: str) -> str:
        found = ratio(runs, workload, label, METRICS[name]) if label != OURS else None
        return str(found) if found else ""

    notes = dict.fromkeys(run.note for run in mine if run.note)
    notes |= dict.fromkeys(f"{count} × {reason}" for run in mine for reason, count in list(run.failures.items())[:2])
    if any(run.requests and run.answers_after is None for run in mine):
        notes["did not answer afterwards"] = None
    failed = f"{sum(run.failed for run in mine)} of {sum(run.requests for run in mine)}"
    cells = [label, shown("throughput", 1), against("throughput"), f"{shown('TTFT p50')} / {shown('TTFT p99')} ms"]
    cells += [against("TTFT p99"), f"{shown('ITL p50', 1)} / {shown('ITL p99', 1)} ms", failed, shown("memory")]
    return "| " + " | ".join([*cells, "; ".join(notes).replace("|", "/")]) + " |"


def _where_we_lose(runs: Sequence[Run], workloads: Sequence[Workload]) -> str:
    lines = ["## Where Callboard loses\n"]
    found = losses(runs, workloads)
    alone = {workload.name for workload in workloads if workload.plan.streams == 1}
    for loss in found:
        why = (WHY_ALONE if loss.workload in alone else WHY)[loss.metric]
        lines.append(f"- {loss.workload}, {loss.metric}: {loss.ratio} of {loss.label}'s. Likely: {why}.")
    if not found:
        lines.append("Nowhere in these figures.")
    return "\n".join(lines) + "\n"


def plot_name(metric: str) -> str:
    """The file of a plot."""
    return f"{metric.lower().replace(' ', '-')}.svg"


def plot(runs: Sequence[Run], workloads: Sequence[Workload], folder: Path) -> None:
    """One SVG file per figure: bars by workload and server."""
    for metric, unit in PLOTS.items():
        _bars(runs, [w.name for w in workloads], METRICS[metric], f"{metric}, {unit}", folder / plot_name(metric))


def _bars(runs: Sequence[Run], workloads: Sequence[str], value: Value, unit: str, path: Path) -> None:
    servers = sorted(dict.fromkeys(run.label for run in runs), key=lambda label: label != OURS)
    width = 0.85 / max(len(servers), 1)
    figure, axes = plt.subplots(figsize=(1.3 * len(workloads) + 3, 4))
    for place, label in enumerate(servers):
        heights = [median(of(runs, workload, label), value) or 0.0 for workload in workloads]
        axes.bar([n + place * width for n in range(len(workloads))], heights, width, label=label)
    axes.set_xticks([n + 0.42 for n in range(len(workloads))], workloads, rotation=20, ha="right")
    axes.set_yscale("symlog")
    axes.set_ylabel(unit)
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
