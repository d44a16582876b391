"""Checks of the step loop without a server: what a step, a join and uneven lengths cost in the engine itself."""

from pathlib import Path
from typing import Any

from bench.checks.report import Report
from bench.mlx_child import MlxChild


def step_overhead(report: Report, rows: list[int], demo_rows: list[int], *, rounds: int, held: bool = True) -> None:
    """The engine's step against floors of the same run; each ratio that has a bar is judged when `held`."""
    with MlxChild("bench.step_overhead") as child:
        for name, counts in (("tiny", rows), ("demo", demo_rows)):
            for count in counts:
                (result,) = child.ask([name, [count], 32, rounds], seconds=900)
                _judge(report, f"{name}_{count}", result, held)


def _judge(report: Report, name: str, result: dict[str, Any], held: bool) -> None:
    report.measured(f"{name}_milliseconds", result["milliseconds"])
    report.measured(f"{name}_ratios", {case: bar["ratio"] for case, bar in result["bars"].items()})
    for case, bar in result["bars"].items():
        if bar["met"] is not None and held:
            claim = f"{name} {case}: at most {bar['bar']} × {bar['floor']}"
            report.expect(bar["met"], claim, bar["ratio"])
    report.expect(bool(result["milliseconds"]), f"{name}: measured")


EVENTS = {
    "leave": "a leave",
    "join_free_slot": "a join into a free slot",
    "join_no_slot": "a join with no slot free",
    "join_longer": "a join of a row longer than the others' room",
}


def joins(report: Report, model: Path, *, rows: int, tokens: int) -> None:
    """Any join and any leave copies at most twice the row's bytes, and peak memory rises by no more."""
    with MlxChild("bench.joins", str(model)) as child:
        result = child.ask([rows, tokens], seconds=300)
    for name, value in result.items():
        report.measured(name, value)
    for name, what in EVENTS.items():
        copied = max(event["times_the_row"] for event in result[name])
        risen = max(event["peak_rise_times_the_row"] for event in result[name])
        report.expect(copied <= 2, f"{what} copies at most twice the row's bytes", copied)
        report.expect(risen <= 2, f"{what} raises peak memory by at most twice the row's bytes", risen)
    for name in ("afterwards", "growth"):
        size = result["growth"]["batch_bytes"] if name == "growth" else result["batch_bytes"]
        part = round(result[name]["bytes_copied"] / size, 3)
        report.measured(f"{name}_part_of_the_batch_in_one_turn", part)
        report.expect(part <= 0.5, f"{name}: a turn between copies at most half of the batch", part)


def mixed(report: Report, model: Path, *, long: int, rows: int, short: int, rounds: int) -> None:
    """One long row beside short ones: a step costs less than half of the naively padded batch's time and memory."""
    with MlxChild("bench.mixed_lengths", str(model)) as child:
        result = child.ask([long, rows, short, rounds])
    times, sizes = result["milliseconds"], result["cache_bytes"]
    report.measured("milliseconds", times)
    report.measured("cache_bytes", sizes)
    for case in ("long_last", "long_first"):
        report.measured(f"{case}_time_to_padded", round(times[case] / times["padded"], 3))
        report.measured(f"{case}_memory_to_padded", round(sizes[case] / sizes["padded"], 3))
        report.measured(f"{case}_time_to_short_alone", round(times[case] / times["short_alone"], 3))
        report.expect(times[case] < 0.5 * times["padded"], f"{case}: a step takes less than half of padded", times)
        report.expect(sizes[case] < 0.5 * sizes["padded"], f"{case}: caches take less than half of padded", sizes)
