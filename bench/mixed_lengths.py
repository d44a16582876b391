"""One long row beside many short ones: time and memory of a step, grouped as the engine does and padded naively.

    OPENBLAS_NUM_THREADS=1 LD_PRELOAD=<OpenBLAS> python -m bench.mixed_lengths [--long 16000] [--rows 63] [--short 300]

`long_last` and `long_first` are `DecodeBatch`, the long row joining after the others or before them; `padded` is
mlx-lm's batch cache with every row padded to the longest, forward and argmax; `short_alone` is the engine without
the long row. All take turns; medians are compared.
`python -m bench.mixed_lengths --child MODEL` answers `[long, rows, short, rounds]` line by line (`bench.mlx_child`).
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from actors.engine.batch import DecodeBatch
from actors.engine.device import Lane
from actors.engine.model import Model, load
from bench.made_rows import made_joining
from bench.mlx_child import CHILD, answer_for_ever
from bench.models import tiny_model

STEPS = 4


def engine_steps(model: Model, lengths: list[int]) -> tuple[DecodeBatch, Callable[[], None]]:
    """The engine's batch of such rows, and what runs STEPS of its steps."""
    batch = DecodeBatch(model, Lane())
    for rid, length in enumerate(lengths, 1):
        batch.join([made_joining(model, [rid], [length])], expected=len(lengths) - rid)

    def run() -> None:
        for _ in range(STEPS):
            batch.launch(lambda: None)
            while batch.in_flight > 1:
                batch.collect()
        mx.synchronize()

    return batch, run


def padded_steps(model: Model, lengths: list[int]) -> tuple[list[Any], Callable[[], None]]:
    """mlx-lm's caches of such rows in one batch, and what runs STEPS steps on them."""
    rows = made_joining(model, list(range(1, len(lengths) + 1)), lengths).caches
    caches = [type(layer[0]).merge(list(layer)) for layer in zip(*rows, strict=True)]
    last = [mx.zeros((len(lengths), 1), mx.uint32)]

    def run() -> None:
        for _ in range(STEPS):
            last[0] = mx.argmax(model.forward(last[0], caches)[:, -1:], axis=-1)
            mx.eval(last[0])

    return caches, run


def measure(model: Model, long: int, rows: int, short: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of a step and bytes of the caches, for each of the cases."""
    many = [short] * rows
    last, run_last = engine_steps(model, [*many, long])
    first, run_first = engine_steps(model, [long, *many])
    alone, run_alone = engine_steps(model, many)
    padded, run_padded = padded_steps(model, [*many, long])
    cases = {"long_last": run_last, "long_first": run_first, "padded": run_padded, "short_alone": run_alone}
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, run in cases.items():
            began = time.perf_counter()
            run()
            if number:
                seconds[name].append((time.perf_counter() - began) / STEPS)
    return {
        "milliseconds": {name: round(statistics.median(found) * 1000, 2) for name, found in seconds.items()},
        "cache_bytes": {
            "long_last": last.nbytes,
            "long_first": first.nbytes,
            "padded": sum(cache.keys.nbytes + cache.values.nbytes for cache in padded),
            "short_alone": alone.nbytes,
        },
    }


def child(folder: str) -> None:
    """Answer `[long, rows, short, rounds]`."""
    model = load(folder)
    mx.set_cache_limit(1 << 30)
    answer_for_ever(lambda request: measure(model, *request))


def main() -> None:
    """Run from the command line."""
    if sys.argv[1:2] == [CHILD]:
        child(sys.argv[2])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", type=int, default=16_000)
    parser.add_argument("--rows", type=int, default=63)
    parser.add_argument("--short", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    mx.set_cache_limit(1 << 30)
    print(json.dumps(measure(load(tiny_model()), args.long, args.rows, args.short, args.rounds), indent=1))


if __name__ == "__main__":
    main()
