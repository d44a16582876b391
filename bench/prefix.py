"""What the prefix cache brings: time to first token, sharing, a chat, restore bandwidth; figures and plots.

    python bench/prefix.py [--out bench/results] [--quick]

Cold, from memory, and from the SSD after a restart for prefixes of 1k and 4k tokens of the demo model and 16k of the
tiny one; 32 users with one prefix of 2k tokens, shared and not; a chat of ten turns; the SSD against plain reading.
Writes `prefix.json` and `prefix-*.png`. Takes some minutes; nothing else should run meanwhile. `--quick`: the tiny
model only.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import msgspec

mpl.use("Agg")  # files only: no display is needed

from matplotlib import pyplot as plt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.checks import prefixes
from bench.checks.report import Report
from bench.facts import machine_facts
from bench.harness import ROOT, RunningServer, exit_on_sigterm
from bench.models import DEMO, demo_folder, tiny_model


def measure(quick: bool) -> dict[str, Any]:
    """Run everything; figures by name."""
    report = Report(lambda line: print(line, flush=True))
    tiny = tiny_model()
    sizes: list[tuple[str, str | Path, int]] = [("tiny", tiny, 16_384)]
    if not quick:
        sizes = [("demo", DEMO, 1024), ("demo", DEMO, 4096), *sizes]
    seconds = {
        f"{name}, {tokens} tokens": prefixes.ttft(report, model, tokens, bars=None) for name, model, tokens in sizes
    }
    with RunningServer(tiny) as server:
        sharing = prefixes.shared(report, server, users=32, tokens=2048)
        apart = prefixes.users_at_once(server, users=32, tokens=2048, salted=True)
        turns = prefixes.chat(report, server, turns=10, tokens=600)
    with RunningServer(tiny, "--no-prefix-cache") as server:
        cold_turns = prefixes.chat(Report(), server, turns=10, tokens=600)
    model, tokens = (tiny, 16_384) if quick else (demo_folder(), 4096)
    speeds = prefixes.restore(report, model, tokens=tokens, rounds=5, bar=None)
    return {
        "ttft": seconds,
        "sharing": sharing,
        "without_sharing": apart,
        "chat": turns,
        "chat_without": cold_turns,
        "restore": speeds,
        "machine": machine_facts(),
    }


def plot(figures: dict[str, Any], out: Path) -> None:
    """One PNG per figure."""
    names = list(figures["ttft"])
    figure, axes = plt.subplots(figsize=(7, 4))
    for place, way in enumerate(("cold", "memory", "ssd")):
        bars = axes.bar(
            [n + 0.27 * (place - 1) for n in range(len(names))],
            [figures["ttft"][name][way] for name in names],
            0.25,
            label={"cold": "cold", "memory": "from memory", "ssd": "from the SSD, restarted"}[way],
        )
        axes.bar_label(bars, fmt="%.3g", fontsize=8)
    axes.set_xticks(range(len(names)), names)
    axes.set_yscale("log")
    axes.set_ylabel("seconds to the first token")
    axes.legend()
    _save(figure, out / "prefix-ttft.png")

    figure, axes = plt.subplots(figsize=(7, 4))
    for label, rows in (("without prefix cache", figures["chat_without"]), ("with", figures["chat"])):
        axes.plot([row["prompt"] for row in rows], [1000 * row["ttft"] for row in rows], marker="o", label=label)
    axes.set_xlabel("tokens of the prompt, turn by turn")
    axes.set_ylabel("milliseconds to the first token")
    axes.set_ylim(bottom=0)
    axes.legend()
    _save(figure, out / "prefix-turns.png")

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4))
    ways = {"each their own": figures["without_sharing"], "shared": figures["sharing"]}
    bars = left.bar(list(ways), [way["pool_bytes"] / 1e6 for way in ways.values()])
    left.bar_label(bars, fmt="%.1f")
    left.set_ylabel("MB of blocks of 32 users with one prefix")
    speeds = figures["restore"]["megabytes_per_second"]
    right.boxplot(list(speeds.values()), tick_labels=[name.replace("_", " ") for name in speeds])
    right.set_ylim(bottom=0)
    right.tick_params("x", labelrotation=15)
    right.set_ylabel("MB/s, page cache dropped")
    _save(figure, out / "prefix-memory-and-disk.png")


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results", help="folder for JSON and plots")
    parser.add_argument("--quick", action="store_true", help="the tiny model only")
    args = parser.parse_args()
    exit_on_sigterm()
    args.out.mkdir(parents=True, exist_ok=True)
    figures = measure(args.quick)
    (args.out / "prefix.json").write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=2) + b"\n")
    plot(figures, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
