"""What a step of the engine costs beside the model: its turns against bare floors, in one interleaved run.

    OPENBLAS_NUM_THREADS=1 LD_PRELOAD=<OpenBLAS> python -m bench.step_overhead [--rows 1 32 128 256] [--json FILE]

Each round runs every case and every floor once, in another order; medians of the rounds are compared. Where its arrays
come to lie in memory makes a case up to a tenth faster or slower for as long as it lives, so all are made anew BUILDS
times. A case is an engine whose rows all decode: scheduler, slots, forward, sampler, reading the tokens and
housekeeping. A floor is the forward on mlx-lm's plain caches and what it names. All have as long a context,
`--context` tokens and those since.
MLX's buffer-cache limit is raised for all alike. The BLAS must be preloaded, as the engine's is.
`python -m bench.step_overhead --child` answers requests line by line (`bench.mlx_child`).
"""

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from actors.engine.engine import Engine
from actors.engine.model import Model, load, plain_cache
from actors.engine.scheduler import Limits
from bench.facts import machine_facts
from bench.mlx_child import CHILD, answer_for_ever
from bench.models import demo_folder, tiny_model
from protocol.ids import pack_ids
from protocol.messages import SamplingParams, Submit

CACHE_LIMIT = 2 << 30
BUILDS = 3  # times that every case and floor is made anew
STEPS = 4  # in a row, so that an engine's steps overlap as they do when it serves
Options = Callable[[int], dict[str, Any]]


def _spread(row: int) -> float:
    return 0.5 + row % 64 / 64


def _everything(row: int) -> dict[str, Any]:
    if row % 32:
        return {}
    params = SamplingParams(repetition_penalty=1.1, logit_bias={5: 1.0}, logprobs=5, min_p=0.02)
    return {"temperature": 0.8, "top_p": 0.9, "params": params}


OPTIONS: dict[str, Options] = {
    "greedy": lambda row: {},
    "temperature": lambda row: {"temperature": _spread(row)},
    "top_k and top_p": lambda row: {
        "temperature": _spread(row),
        "top_p": 0.8 + row % 16 / 100,
        "params": SamplingParams(top_k=20 + row % 44),
    },
    "top_p": lambda row: {"temperature": _spread(row), "top_p": 0.8 + row % 16 / 100},
    "min_p": lambda row: {"temperature": _spread(row), "params": SamplingParams(min_p=0.02 + row % 16 / 200)},
    "one sampled in 32": lambda row: {} if row % 32 else {"temperature": 0.8},
    "one of everything in 32": _everything,
}
DEMO_CASES = ["greedy", "temperature", "top_k and top_p", "top_p", "one sampled in 32"]
BAR_ROWS = {"tiny": 256, "demo": 64}  # smaller batches are shown without a verdict
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


class Floor:
    """Bare forwards of `rows` rows on mlx-lm's plain caches, all equally long: nothing is masked or padded."""

    def __init__(self, model: Model, rows: int, context: int) -> None:
        self._model = model
        row = model.new_caches()
        model.forward(mx.arange(context, dtype=mx.uint32)[None] % 1000, row)
        mx.eval([cache.state for cache in row])
        self._caches = [
            plain_cache(*(mx.repeat(a[:, :, :context], rows, axis=0) for a in (cache.keys, cache.values)))
            for cache in row
        ]
        self._ids = mx.arange(rows, dtype=mx.uint32)[:, None] % 1000
        self.run(lambda logits: logits, 1)  # the cache grows now, not in a round

    def run(self, after: Callable[[mx.array], Any], steps: int) -> None:
        """So many steps: the forward and what `after` makes of the logits. Leaves no token behind."""
        for _ in range(steps):
            mx.eval(after(self._model.forward(self._ids, self._caches)[:, -1, :]))
            for cache in self._caches:
                cache.trim(1)

    def advance(self, steps: int) -> None:
        """Make the rows longer by so many tokens."""
        for _ in range(steps):
            mx.eval(self._model.forward(self._ids, self._caches))


class Steps:
    """An engine whose rows all decode, with its scheduler, its batch and what it would send."""

    def __init__(self, model: Model, rows: int, context: int, options: Options, first: int = 1) -> None:
        """`first` is the number of the first row: engines that share a model with adapters need rows of their own."""
        limits = Limits(max_num_seqs=rows, max_num_batched_tokens=1 << 20)
        self._engine = Engine(model, limits, pool_limit=CACHE_LIMIT)  # which all cases share
        for row in range(rows):
            ids = pack_ids((row + i) % 1000 for i in range(context))
            given: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0, "seed": row} | options(row)
            self._engine.submit(
                Submit(
                    epoch=1,
                    streamer=1,
                    rid=row + first,
                    ids=ids,
                    budget=1 << 20,
                    prompt_tokens=context,
                    ignore_eos=True,
                    **given,
                )
            )
        while self._engine.stats.running < rows:
            self._turn()
        self.run(2)

    def _turn(self) -> None:
        self._engine.turn(lambda outcome: None)
        self._engine.tidy()

    def run(self, turns: int) -> None:
        """So many turns; each builds its step while the one before is in work, as in the engine process."""
        for _ in range(turns):
            self._turn()
        mx.synchronize()


def measure(model: Model, rows: int, context: int, rounds: int, names: list[str]) -> dict[str, float]:
    """Median milliseconds per step of every floor and of the cases with these names."""
    seconds: dict[str, list[float]] = {name: [] for name in [*FLOORS, *names]}
    for build in range(min(BUILDS, rounds)):
        floor = Floor(model, rows, context)
        cases: dict[str, Callable[[int], None]] = {name: partial(floor.run, after) for name, after in FLOORS.items()}
        for name in names:
            cases[name] = Steps(model, rows, context, OPTIONS[name]).run
        warm = build == 0  # the first round isn't counted
        for number in range(-(-rounds // BUILDS) + warm):
            for name in random.sample(list(cases), len(cases)):
                mx.synchronize()
                started = time.perf_counter()
                cases[name](STEPS)
                if number or not warm:
                    seconds[name].append((time.perf_counter() - started) / STEPS)
            floor.advance(STEPS)
        del floor, cases
        gc.collect()
        mx.clear_cache()
    return {name: round(1000 * statistics.median(times), 3) for name, times in seconds.items()}


def ratios(milliseconds: dict[str, float], judged: bool) -> dict[str, dict[str, object]]:
    """Each case with a bar against its floor; `met` is None unless `judged`."""
    return {
        case: {
            "floor": floor,
            "ratio": round(milliseconds[case] / milliseconds[floor], 3),
            "bar": bar,
            "met": milliseconds[case] <= bar * milliseconds[floor] if judged else None,
        }
        for case, (floor, bar) in BARS.items()
        if case in milliseconds
    }


def measure_all(name: str, rows: list[int], context: int, rounds: int) -> list[dict[str, Any]]:
    """Results on one of the two models, an entry for each number of rows."""
    mx.set_cache_limit(CACHE_LIMIT)
    model = load(tiny_model() if name == "tiny" else demo_folder())
    results = []
    for count in rows:
        milliseconds = measure(model, count, context, rounds, list(OPTIONS) if name == "tiny" else DEMO_CASES)
        bars = ratios(milliseconds, count >= BAR_ROWS[name])
        results.append({"model": name, "rows": count, "milliseconds": milliseconds, "bars": bars})
        gc.collect()
        mx.clear_cache()
    return results


def child() -> None:
    """Answer `[name, rows, context, rounds]` with `measure_all`."""
    answer_for_ever(lambda request: measure_all(*request))


def main() -> None:
    """Run from the command line."""
    if sys.argv[1:2] == [CHILD]:
        child()
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 32, 128, 256])
    parser.add_argument("--demo-rows", type=int, nargs="*", default=[64])
    parser.add_argument("--context", type=int, default=32, help="tokens before the step")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    results = []
    for name, rows in (("tiny", given.rows), ("demo", given.demo_rows)):
        for result in measure_all(name, rows, given.context, given.rounds) if rows else []:
            results.append(result)
            show(result)
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


def show(result: dict[str, Any]) -> None:
    """Print one result."""
    print(f"\n{result['model']}, {result['rows']} rows")
    for case, value in result["milliseconds"].items():
        bar = result["bars"].get(case)
        against = f"{bar['ratio']:6} of {bar['floor']}, at most {bar['bar']}" if bar else ""
        missed = "  MISSED" if bar and bar["met"] is False else ""
        print(f"  {case:28} {value:9.2f} ms  {against}{missed}")


if __name__ == "__main__":
    main()
