"""How cost grows: with the number of streams, 1 to 1,024, and with the length of prompts, 16 to 16k. Figures and plots.

    python bench/growth.py [--most-streams 1024] [--most-tokens 16384] [--rounds 2] [--out bench/results/growth]

On the tiny model, over ZeroMQ, with a server that may run all streams at once. For each number of streams: throughput,
step time and the model's part of it, and memory per stream; for each length: time to the first token of one prompt, and
the step time and memory of 4 streams with such prompts. Fits a sum of powers to each and writes `report.md`,
`growth.json` and plots. Takes some minutes, in which nothing else should run.
"""

import argparse
import asyncio
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import msgspec
import uvloop

mpl.use("Agg")

from matplotlib import pyplot as plt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from actors.supervisor import raise_file_limit
from bench.checks.crowds import reached
from bench.checks.loads import fresh
from bench.checks.prefixes import first_token
from bench.facts import machine_facts
from bench.growth_report import markdown
from bench.harness import ROOT, RunningServer, exit_on_sigterm
from bench.load.driver import Progress, make_load, run_load
from bench.load.fit import error, fit, value
from bench.load.plan import FIRST_PLAIN_ID, Plan
from bench.load.processor import ProcessorTime
from bench.load.summary import MIB, summarize
from bench.load.timeline import Timeline
from bench.models import tiny_model
from protocol import Client

FOLDER = ROOT / "bench" / "results" / "growth"
LONG_ROWS = 4  # streams that decode behind long prompts
VOCABULARY = 49_152
mpl.rcParams["svg.hashsalt"] = "callboard"  # the same figures give the same file

# What is fitted: the table, over which column, which other column, by which powers.
FITS = [
    ("streams", "streams", "step_ms", (0, 1)),
    ("streams", "streams", "engine_mib", (0, 1)),
    ("lengths", "prompt_tokens", "ttft_ms", (0, 1, 2)),
    ("lengths", "context", "step_ms", (0, 1)),
    ("lengths", "context", "cache_mib_per_stream", (0, 1)),
]
ACROSS = {"streams": "streams", "lengths": "context"}


def doubling(first: int, last: int, factor: int = 2) -> list[int]:
    """`first`, then `factor` times as much each time, up to `last` inclusive."""
    found = [first]
    while found[-1] * factor < last:
        found.append(found[-1] * factor)
    return [*found, last] if last > first else found


async def decoding(server: RunningServer, plan: Plan) -> dict[str, float]:
    """Run a plan whose streams all decode at the same time; figures of the whole and of the steps they share."""
    progress = Progress(plan)
    timeline = Timeline(server.pids(), server.url, lambda: progress.counts)
    cache = 0
    async with make_load(plan, url=server.url, endpoint=server.endpoint) as load, timeline.watch():
        running = asyncio.create_task(run_load(load, progress))

        def all_decode() -> bool:
            now = server.load()
            return running.done() or bool(now["running"] == plan.streams and not now["prefilling"])

        await reached(all_decode, 300, "all streams decode")
        began, before = await fresh(server)
        ended, after = began, before
        while not running.done():
            at, now = await fresh(server)
            if now["running"] < plan.streams:
                break
            ended, after, cache = at, now, now["cache_bytes"]
        outcomes = await running
    summary = summarize(plan, outcomes, timeline)
    if summary.failed:
        raise RuntimeError(f"{summary.failed} of {plan.requests} failed: {summary.failures}")
    steps = after["step"] - before["step"]
    spent = summary.processor_seconds
    in_model = after["seconds_in_model"] - before["seconds_in_model"]
    return {
        "tokens_per_second": summary.tokens_per_second,
        "decoding_tokens_per_second": round(plan.streams * steps / (ended - began), 1) if steps else 0.0,
        "step_ms": round(1000 * (ended - began) / steps, 3) if steps else 0.0,
        "model_ms": round(1000 * in_model / steps, 3) if steps else 0.0,
        "ttft_p99_ms": summary.ttft_ms.p99 or 0.0,
        "engine_mib": summary.peak_memory_mib["engine"],
        "streamer_mib": summary.peak_memory_mib["streamer"],
        "cache_mib_per_stream": round(cache / MIB / plan.streams, 4),
        "client_seconds": spent.get("client", 0.0),
        "engine_seconds": spent.get("engine", 0.0),
        "streamer_seconds": spent.get("streamer", 0.0),
        "seconds": summary.seconds,
    }


def by_streams(model: Path, counts: Sequence[int], rounds: int) -> list[dict[str, float]]:
    """Figures for each number of streams, the median of rounds; each has a server of its own, for the memory's sake."""
    rows = []
    for count in counts:
        tokens = max(64, int(5000 / (1 + 0.33 * count)))  # some seconds of steps
        with RunningServer(model, "--max-num-seqs", str(max(count, 8)), "--no-prefix-cache") as server:
            found = []
            for number in range(rounds):
                plan = Plan(
                    via="zmq", streams=count, requests=count, prompt_tokens=32, max_tokens=tokens,
                    seed=number, vocab_size=VOCABULARY,
                )  # fmt: skip
                found.append(uvloop.run(decoding(server, plan)))
        rows.append({"streams": count} | _medians(found))
        print(rows[-1], flush=True)
    return rows


def by_length(model: Path, lengths: Sequence[int], rounds: int) -> list[dict[str, float]]:
    """Figures for each length of prompt."""
    rows = []
    with RunningServer(model, "--no-prefix-cache") as server, Client(endpoint=server.endpoint) as client:
        for length in lengths:
            plain = range(FIRST_PLAIN_ID, VOCABULARY)
            prompts = [random.Random(f"growth {length} {n}").choices(plain, k=length) for n in range(rounds + 1)]
            ttft = statistics.median(first_token(client, prompt)[0] for prompt in prompts)
            tokens = max(600, 2000 - length // 4)  # enough for the last to be prefilled before the first is done
            plan = Plan(
                via="zmq", streams=LONG_ROWS, requests=LONG_ROWS, prompt_tokens=length, max_tokens=tokens,
                vocab_size=VOCABULARY,
            )  # fmt: skip
            figures = {"context": length + tokens // 2} | uvloop.run(decoding(server, plan))
            rows.append({"prompt_tokens": length, "ttft_ms": round(1000 * ttft, 3)} | figures)
            print(rows[-1], flush=True)
    return rows


def _medians(found: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(row[name] for row in found), 4) for name in found[0]}


def fits(figures: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The fits of all curves that have points enough: powers, coefficients, and the largest relative error."""
    found = {}
    for table, across, column, powers in FITS:
        points = [(row[across], row[column]) for row in figures[table] if row[column] > 0]
        if len(points) > len(powers):
            xs, ys = zip(*points, strict=True)
            terms = fit(xs, ys, powers)
            found[f"{column} by {across}"] = {
                "powers": list(powers),
                "coefficients": [float(f"{term:.4g}") for term in terms],
                "largest_error": round(error(xs, ys, powers, terms), 3),
            }
    return found


def plot(figures: dict[str, Any], folder: Path) -> None:
    """A file for each table: its curves with their fits."""
    for table, common in ACROSS.items():
        rows = figures[table]
        if not rows:  # not measured yet
            continue
        curves = [(across, column, powers) for t, across, column, powers in FITS if t == table]
        drawn, axes = plt.subplots(1, len(curves) + 1, figsize=(4 * (len(curves) + 1), 3.4))
        axes[0].plot([row[common] for row in rows], [row["decoding_tokens_per_second"] for row in rows], marker="o")
        axes[0].set(xscale="log", xlabel=common, title="tokens per second, all decoding")
        axes[0].set_ylim(bottom=0)
        for place, (across, column, powers) in zip(axes[1:], curves, strict=True):
            xs = [row[across] for row in rows]
            place.plot(xs, [row[column] for row in rows], "o")
            if (found := figures["fits"].get(f"{column} by {across}")) is not None:
                place.plot(xs, [value(x, powers, found["coefficients"]) for x in xs], linewidth=1)
            place.set(xscale="log", yscale="log", xlabel=across.replace("_", " "), title=column.replace("_", " "))
        drawn.tight_layout()
        drawn.savefig(folder / f"by-{table}.svg", metadata={"Date": None})
        plt.close(drawn)


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most-streams", type=int, default=1024)
    parser.add_argument("--most-tokens", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", choices=list(ACROSS), help="measure this alone; the other figures stay as they are")
    parser.add_argument("--out", type=Path, default=FOLDER)
    args = parser.parse_args()
    exit_on_sigterm()
    raise_file_limit()
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "growth.json"
    figures: dict[str, Any] = {table: [] for table in ACROSS}
    if args.only and path.exists():
        figures |= msgspec.json.decode(path.read_bytes())
    model = tiny_model()
    with ProcessorTime({}, children=True) as spent:
        if args.only != "lengths":
            figures["streams"] = by_streams(model, doubling(1, args.most_streams), args.rounds)
        if args.only != "streams":
            figures["lengths"] = by_length(model, doubling(16, args.most_tokens, 4), args.rounds)
    figures |= {"fits": fits(figures), "machine": machine_facts(), "others": spent.others}
    path.write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=1) + b"\n")
    (args.out / "report.md").write_text(markdown(figures))
    plot(figures, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
