"""The report on how cost grows: tables, fits, and the first limit at each end, named from the figures. Pure."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

FLAT = 1.25  # a doubling of streams that brings less than so many times the throughput brings little
MOST = 0.9  # of a step in the model: then the model is the limit
SUPERSCRIPTS = {0: "", 1: "·x", 2: "·x²"}
COLUMNS = {
    "streams": {
        "streams": "streams",
        "decoding_tokens_per_second": "tokens/s, all decoding",
        "step_ms": "step, ms",
        "model_ms": "of it the model, ms",
        "ttft_p99_ms": "TTFT p99, ms",
        "engine_mib": "engine, MiB",
        "cache_mib_per_stream": "cache per stream, MiB",
    },
    "lengths": {
        "prompt_tokens": "prompt, tokens",
        "ttft_ms": "TTFT alone, ms",
        "context": "context while decoding",
        "step_ms": "step of 4, ms",
        "model_ms": "of it the model, ms",
        "cache_mib_per_stream": "cache per stream, MiB",
    },
}
Row = Mapping[str, float]


def markdown(figures: Mapping[str, Any]) -> str:
    """The whole report of what `growth.py` measured."""
    machine = figures["machine"]
    lines = [
        "# How cost grows\n",
        "Made by `bench/growth.py` on the tiny model, over ZeroMQ; fits have the smallest relative error and no "
        "negative terms.\n",
        f"Machine: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {machine['system']}; cores "
        f"that others used meanwhile: {figures.get('others', 'not known')}.\n",
    ]
    for table, title in (("streams", "With the number of streams"), ("lengths", "With the length of prompts")):
        rows = figures[table]
        if rows:
            lines += [f"## {title}\n", *_table(rows, COLUMNS[table]), f"\n![{title}](by-{table}.svg)\n"]
    lines += ["## Fits\n", *(_fit(name, found) for name, found in figures["fits"].items()), ""]
    lines += ["## The first limits\n", *(f"- {limit}" for limit in limits(figures)), ""]
    return "\n".join(lines)


def _table(rows: Sequence[Row], columns: Mapping[str, str]) -> list[str]:
    there = {name: title for name, title in columns.items() if name in rows[0]}
    body = ["| " + " | ".join(f"{row[name]:,.4g}".rstrip() for name in there) + " |" for row in rows]
    return ["| " + " | ".join(there.values()) + " |", "|" + "---|" * len(there), *body]


def _fit(name: str, found: Mapping[str, Any]) -> str:
    terms = zip(found["coefficients"], found["powers"], strict=True)
    text = " + ".join(f"{term:.4g}{SUPERSCRIPTS[power]}" for term, power in terms if term)
    return f"- {name.replace('_', ' ')}: {text} (at most {found['largest_error']:.0%} off at the points)"


def limits(figures: Mapping[str, Any]) -> list[str]:
    """What is met first at each end, as far as there are figures."""
    found = []
    streams, lengths, fits = figures["streams"], figures["lengths"], figures["fits"]
    if streams:
        found += [_one_stream(streams[0]), _many_streams(streams)]
        if (fit := fits.get("engine_mib by streams")) and (slope := fit["coefficients"][1]):
            room = figures["machine"]["memory_gib"] * 1024 / slope
            found.append(f"Memory: {slope:.2f} MiB of the engine's process per stream; all memory here is {room:,.0f}.")
    if lengths and (fit := fits.get("ttft_ms by prompt_tokens")):
        fixed, linear, square = fit["coefficients"]
        found.append(f"Short prompts: {fixed:.1f} ms of the time to the first token don't depend on the prompt.")
        if square and linear:
            found.append(
                f"Long prompts: from {linear / square:,.0f} tokens on the square of the length rules (attention)."
            )
        else:
            found.append("Long prompts: up to the longest here, time grows with the length alone, not with its square.")
    return found


def _part(row: Row) -> float:
    return row["model_ms"] / row["step_ms"] if row.get("model_ms") and row["step_ms"] else 0.0


def _rules(row: Row) -> str:
    part = _part(row)
    if not part:
        return "what rules it was not measured"
    return f"{part:.0%} of it in the model" + (
        ", so the model is the limit" if part >= MOST else ", the rest around it"
    )


def _one_stream(row: Row) -> str:
    return f"One stream: a step takes {row['step_ms']:.2f} ms, {_rules(row)}."


def _many_streams(rows: Sequence[Row]) -> str:
    for before, row in pairwise(rows):
        gain = row["decoding_tokens_per_second"] / before["decoding_tokens_per_second"]
        if row["streams"] == 2 * before["streams"] and gain < FLAT:
            span = f"from {before['streams']:.0f} to {row['streams']:.0f}"
            step = f"a step of {row['streams']:.0f} takes {row['step_ms']:.0f} ms"
            return f"Many streams: {span} throughput grows by {gain:.2f} only; {step}, {_rules(row)}."
    return f"Many streams: up to {rows[-1]['streams']:.0f} each doubling brought at least {FLAT} × the throughput."
