"""What a join and a leave copy, with much in the batch: bytes counted, peak memory, and the time of the step.

    OPENBLAS_NUM_THREADS=1 LD_PRELOAD=<OpenBLAS> python -m bench.joins [--rows 64] [--tokens 32000]

Counted is what MLX writes into the caches: the row itself where a buffer is the same before and after (a write in
place), all of the buffer where it is another one (a copy). Peak memory is MLX's, above what was active before; the
joining row is there already. A batch whose slots are all taken, or whose longest row has outgrown its room, must
grow, which copies everything once: that is measured apart, as `growth`.
`python -m bench.joins --child MODEL` answers `[rows, tokens]` line by line (`bench.mlx_child`).
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from actors.engine.batch import DecodeBatch
from actors.engine.device import Lane
from actors.engine.model import Model, load
from bench.made_rows import made_joining
from bench.mlx_child import CHILD, answer_for_ever
from bench.models import tiny_model


def plane_arrays(batch: DecodeBatch) -> Iterator[mx.array]:
    """All arrays that hold keys and values."""
    for group in batch._groups:
        for cache in group._caches:
            yield from cache._planes.arrays  # type: ignore[attr-defined]  # all of them are plain here


def addresses(batch: DecodeBatch) -> list[tuple[int, int]]:
    """Address and size of each buffer; nothing holds on to them afterwards."""
    mx.eval(list(plane_arrays(batch)))
    return [(address_of(array), array.nbytes) for array in plane_arrays(batch)]


def address_of(array: mx.array) -> int:
    """Where an evaluated array lies."""
    return int(np.array(array, copy=False).__array_interface__["data"][0])


class Joins:
    """A batch of `rows` rows of `tokens` tokens, with one more slot."""

    def __init__(self, model: Model, rows: int, tokens: int) -> None:
        self._model = model
        self._batch = DecodeBatch(model, Lane())
        self._tokens = tokens
        self.row_bytes = model.row_memory.bytes(tokens)
        # Made and taken in one at a time, so that they never lie in memory twice.
        for rid in range(1, rows + 1):
            self._batch.join([made_joining(model, [rid], [tokens])], expected=rows - rid)
            mx.eval(list(plane_arrays(self._batch)))
        self._next = rows + 1
        self.steps(3)

    @property
    def nbytes(self) -> int:
        """Bytes of the batch's caches."""
        return self._batch.nbytes

    def steps(self, count: int) -> float:
        """Run steps as the engine does, one ahead of what is read; seconds of the slowest, all of them finished."""
        slowest = 0.0
        for _ in range(count):
            began = time.perf_counter()
            self._batch.launch(lambda: None)
            while self._batch.in_flight > 1:
                self._batch.collect()
            slowest = max(slowest, time.perf_counter() - began)
        mx.synchronize()
        return slowest

    def measure(self, what: str) -> dict[str, Any]:
        """One join, or one leave, while a step is in flight, and the step after it."""
        joining = [] if what == "leave" else [made_joining(self._model, [self._next], [self._tokens])]
        self.steps(1)
        before = addresses(self._batch)
        mx.clear_cache()
        mx.synchronize()
        active = mx.get_active_memory()
        mx.reset_peak_memory()
        self.steps(1)
        step_peak = mx.get_peak_memory() - active
        mx.reset_peak_memory()
        began = time.perf_counter()
        if what == "leave":
            self._batch.remove([self._batch._groups[0].rids[1]])
        else:
            self._batch.join(joining)
            self._next += 1
        self.steps(1)
        seconds = time.perf_counter() - began
        peak = mx.get_peak_memory() - active
        after = addresses(self._batch)
        moved = [size for (old, _), (new, size) in zip(before, after, strict=True) if old != new]
        in_place = len(after) - len(moved)
        written = 0 if what == "leave" else self.row_bytes * in_place // len(after)
        return {
            "bytes_copied": sum(moved) + written,
            "times_the_row": round((sum(moved) + written) / self.row_bytes, 3),
            "peak_rise_bytes": peak - step_peak,
            "peak_rise_times_the_row": round((peak - step_peak) / self.row_bytes, 3),
            "milliseconds_with_its_step": round(seconds * 1000, 2),
        }


def measure(model: Model, rows: int, tokens: int) -> dict[str, Any]:
    """A leave, a join into the slot it freed, the same again, and a join that makes the batch grow."""
    joins = Joins(model, rows, tokens)
    result: dict[str, Any] = {
        "rows": rows,
        "tokens": tokens,
        "row_bytes": joins.row_bytes,
        "batch_bytes": joins.nbytes,
        "milliseconds_of_a_step": round(joins.steps(4) * 1000, 2),
    }
    for name in ("leave", "join", "leave", "join"):
        result.setdefault(name, []).append(joins.measure(name))
    result["growth"] = joins.measure("join")
    return result


def child(folder: str) -> None:
    """Answer `[rows, tokens]`."""
    model = load(folder)
    mx.set_cache_limit(512 << 20)
    answer_for_ever(lambda request: measure(model, *request))


def main() -> None:
    """Run from the command line."""
    if sys.argv[1:2] == [CHILD]:
        child(sys.argv[2])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32_000)
    args = parser.parse_args()
    mx.set_cache_limit(512 << 20)
    print(json.dumps(measure(load(tiny_model()), args.rows, args.tokens), indent=1))


if __name__ == "__main__":
    main()
