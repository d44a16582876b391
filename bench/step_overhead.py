"""What a decode step costs beside the model: forward and sampler against bare floors, in one interleaved run.

    OPENBLAS_NUM_THREADS=1 LD_PRELOAD=<OpenBLAS> python bench/step_overhead.py [--rows 1 32 128 256] [--json FILE]

Each round runs every case and every floor once, in another order; medians of the rounds are compared. Rows are in
mlx-lm's batch cache with a context of `--context` tokens, so the forward is the same for all. MLX's buffer-cache
limit is raised for all alike. The BLAS must be preloaded, as the engine's is.
"""

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from actors.engine.model import Model, load
from actors.engine.sampler import RowOptions, Sampler
from bench.facts import machine_facts
from bench.models import tiny_model
from server.models.demo import demo_model

CACHE_LIMIT = 2 << 30
OPTIONS: dict[str, Callable[[int], RowOptions]] = {
    "greedy": lambda row: RowOptions(),
    "temperature": lambda row: RowOptions(temperature=0.5 + row % 64 / 64, seed=row),
    "top_k and top_p": lambda row: RowOptions(
        temperature=0.5 + row % 64 / 64, seed=row, top_k=20 + row % 44, top_p=0.8 + row % 16 / 100
    ),
    "top_p": lambda row: RowOptions(temperature=0.5 + row % 64 / 64, seed=row, top_p=0.8 + row % 16 / 100),
    "min_p": lambda row: RowOptions(temperature=0.5 + row % 64 / 64, seed=row, min_p=0.02 + row % 16 / 200),
    "one sampled in 32": lambda row: RowOptions() if row % 32 else RowOptions(temperature=0.8, seed=row),
    "one of everything in 32": lambda row: (
        RowOptions()
        if row % 32
        else RowOptions(
            temperature=0.8,
            seed=row,
            top_p=0.9,
            repetition_penalty=1.1,
            logit_bias={5: 1.0},
            logprobs=5,
            min_p=0.02,
        )
    ),
}
BAR_ROWS = 64  # smaller batches are shown without a bar: fixed costs of a step outweigh what is compared
# The floor of each case, and the ratio that must hold.
BARS = {
    "greedy": ("forward + argmax", 1.10),
    "temperature": ("forward + argmax + noise", 1.05),
    "top_k and top_p": ("forward + argmax", 1.35),
    "top_p": ("forward + softmax + cumsum", 1.5),
    "min_p": ("forward + softmax + cumsum", 1.5),
    "one sampled in 32": ("greedy", 1.15),
}
FLOORS: dict[str, Callable[[mx.array], Any]] = {
    "forward": lambda logits: logits,
    "forward + argmax": lambda logits: mx.argmax(logits, axis=-1),
    "forward + argmax + noise": lambda logits: (
        mx.argmax(logits, axis=-1),
        logits + mx.random.gumbel(logits.shape),
    ),
    "forward + softmax + cumsum": lambda logits: (mx.softmax(logits, axis=-1), mx.cumsum(logits, axis=-1)),
}


class Step:
    """One decode step of `rows` rows that can be run again and again: the cache is set back each time."""

    def __init__(self, model: Model, rows: int, context: int) -> None:
        self._model = model
        caches = model.new_caches()
        model.forward(mx.arange(context, dtype=mx.uint32)[None] % 1000, caches)
        mx.eval([cache.state for cache in caches])
        self._caches = [type(cache).merge([cache] * rows) for cache in caches]
        self._ids = mx.arange(rows, dtype=mx.uint32)[:, None] % 1000
        mx.eval(self._forward())  # the cache grows now, not in a round

    def _forward(self) -> mx.array:
        return self._model.forward(self._ids, self._caches)[:, -1, :]

    def time(self, after: Callable[[mx.array], Any]) -> float:
        """Seconds of the forward and what `after` makes of the logits."""
        started = time.perf_counter()
        mx.eval(after(self._forward()))
        seconds = time.perf_counter() - started
        for cache in self._caches:
            cache.trim(1)
        return seconds


def measure(model: Model, rows: int, context: int, rounds: int) -> dict[str, float]:
    """Median milliseconds of every floor and every case."""
    step = Step(model, rows, context)
    cases: dict[str, Callable[[mx.array], Any]] = dict(FLOORS)
    for name, options in OPTIONS.items():
        sampler = Sampler(model.vocab_size)
        for row in range(rows):
            sampler.append(options(row))
        cases[name] = sampler.draw
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for name in cases:
        step.time(cases[name])
    for _ in range(rounds):
        for name in random.sample(list(cases), len(cases)):
            seconds[name].append(step.time(cases[name]))
    return {name: round(1000 * statistics.median(times), 3) for name, times in seconds.items()}


def ratios(milliseconds: dict[str, float], rows: int) -> dict[str, dict[str, object]]:
    """Each case with a bar against its floor; `met` is None where the batch is too small to tell."""
    return {
        case: {
            "floor": floor,
            "ratio": round(milliseconds[case] / milliseconds[floor], 3),
            "bar": bar,
            "met": milliseconds[case] <= bar * milliseconds[floor] if rows >= BAR_ROWS else None,
        }
        for case, (floor, bar) in BARS.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 128, 256])
    parser.add_argument("--demo-rows", type=int, nargs="*", default=[64])
    parser.add_argument("--context", type=int, default=32, help="tokens before the step")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    mx.set_cache_limit(CACHE_LIMIT)
    results = []
    for name, folder, batches in (
        ("tiny", tiny_model, given.rows),
        ("demo", lambda: demo_model("cpu", progress=False), given.demo_rows),
    ):
        if not batches:
            continue
        model = load(folder())
        for rows in batches:
            milliseconds = measure(model, rows, given.context, given.rounds)
            bars = ratios(milliseconds, rows)
            results.append({"model": name, "rows": rows, "milliseconds": milliseconds, "bars": bars})
            print(f"\n{name}, {rows} rows")
            for case, value in milliseconds.items():
                bar = bars.get(case)
                against = f"{bar['ratio']:6} of {bar['floor']}, at most {bar['bar']}" if bar else ""
                missed = "  MISSED" if bar and bar["met"] is False else ""
                print(f"  {case:28} {value:9.2f} ms  {against}{missed}")
            gc.collect()
            mx.clear_cache()
    if given.json:
        report = {
            "machine": machine_facts(),
            "device": str(mx.default_device()),
            "cache_limit_bytes": CACHE_LIMIT,
            "context": given.context,
            "rounds": given.rounds,
            "results": results,
        }
        given.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
