"""What a join and a leave copy, with much in the batch: bytes counted, peak memory, and the time of the step.

    OPENBLAS_NUM_THREADS=1 LD_PRELOAD=<OpenBLAS> python -m bench.joins [--rows 64] [--tokens 32000]

Counted is what MLX writes into the caches: the row itself where a buffer is the same before and after (a write in
place), all of the buffer where it is a new one. Peak memory is MLX's, above what was active before; the joining row is
there already. Joins are measured into a free slot, with no slot free, and of the first row that is longer than the
others' room. What the batch then does between steps to have fewer groups, and to have room for more tokens, is
measured turn by turn (`afterwards`, `growth`): no join or leave waits for it.
`python -m bench.joins --child MODEL` answers `[rows, tokens]` line by line (`bench.mlx_child`).
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from actors.engine.batch import AHEAD, DecodeBatch
from actors.engine.device import Lane
from actors.engine.model import Model, load
from actors.engine.row_group import RowGroup
from actors.engine.row_memory import GROW
from bench.made_rows import made_joining
from bench.mlx_child import CHILD, answer_for_ever
from bench.models import tiny_model


def plane_arrays(groups: list[RowGroup]) -> Iterator[mx.array]:
    """All arrays that hold keys and values."""
    for group in groups:
        for cache in group._caches:
            yield from cache.every_array()


def addresses(groups: list[RowGroup]) -> dict[int, int]:
    """Size of each buffer by its address; nothing holds on to them afterwards."""
    mx.eval(list(plane_arrays(groups)))
    return {address_of(array): array.nbytes for array in plane_arrays(groups)}


def address_of(array: mx.array) -> int:
    """Where an evaluated array lies."""
    return int(np.array(array, copy=False).__array_interface__["data"][0])


class Joins:
    """A batch of `rows` rows of `tokens` tokens in one group, with no free slot."""

    def __init__(self, model: Model, rows: int, tokens: int) -> None:
        self._model = model
        self._batch = DecodeBatch(model, Lane())
        self._tokens = tokens
        self.row_bytes = model.row_memory.bytes(tokens)
        self._batch.join([made_joining(model, list(range(1, rows + 1)), [tokens] * rows)])
        self._next = rows + 1
        self._step_peak = 0
        self.steps(3)

    @property
    def groups(self) -> int:
        """How many forwards a step takes."""
        return len(self._batch._groups)

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

    def leave(self) -> dict[str, Any]:
        """One row leaves while a step is in flight."""
        return self._event(lambda: self._batch.remove([self._batch._groups[0].rids[1]]))

    def join(self, more_tokens: int = 0) -> dict[str, Any]:
        """One row joins while a step is in flight; it may be longer than the others."""
        tokens = self._tokens + more_tokens
        joining = [made_joining(self._model, [self._next], [tokens])]
        row = self._next
        self._next += 1

        def carry_out() -> None:
            self._batch.join(joining)

        return self._event(carry_out, row, self._model.row_memory.bytes(tokens))

    def _peak_of(self, carry_out: Callable[[], object]) -> tuple[int, float]:
        """Bytes beyond those held before, and seconds."""
        mx.eval(list(plane_arrays(self._batch._groups)))
        mx.clear_cache()
        mx.synchronize()
        active = mx.get_active_memory()
        mx.reset_peak_memory()
        began = time.perf_counter()
        carry_out()
        return mx.get_peak_memory() - active, time.perf_counter() - began

    def turns(self, count: int) -> dict[str, Any]:
        """The worst of so many steps in which nobody joins or leaves."""
        events = [self._event(lambda: None, settle=False) for _ in range(count)]
        worst = max(events, key=lambda event: int(event["bytes_copied"]))
        return worst | {"turns": count, "groups": self.groups, "turns_that_copy": sum(map(_copies, events))}

    def _event(
        self, carry_out: Callable[[], None], row: int = 0, row_bytes: int = 0, *, settle: bool = True
    ) -> dict[str, Any]:
        """What happens, and the step after it. Peak memory is compared with that of a step before, if they `settle`."""
        step_peak = self._peak_of(lambda: self.steps(1))[0] if settle else self._step_peak
        self._step_peak = step_peak
        before = addresses(self._batch._groups)

        def both() -> None:
            carry_out()
            self.steps(1)

        peak, seconds = self._peak_of(both)
        made = sum(size for at, size in addresses(self._batch._groups).items() if at not in before)
        its = addresses([group for group in self._batch._groups if row in group])
        in_place = sum(at in before for at in its)
        copied = made + row_bytes * in_place // max(1, len(its))
        return {
            "bytes_copied": copied,
            "times_the_row": round(copied / (row_bytes or self.row_bytes), 3),
            "peak_rise_bytes": peak - step_peak,
            "peak_rise_times_the_row": round((peak - step_peak) / (row_bytes or self.row_bytes), 3),
            "milliseconds_with_its_step": round(seconds * 1000, 2),
        }


def _copies(event: dict[str, Any]) -> bool:
    return bool(event["bytes_copied"])


def measure(model: Model, rows: int, tokens: int) -> dict[str, Any]:
    """Leaves, joins into free slots, joins without one, a longer row's join; and what is done between steps."""
    joins = Joins(model, rows, tokens)
    result: dict[str, Any] = {
        "rows": rows,
        "tokens": tokens,
        "row_bytes": joins.row_bytes,
        "batch_bytes": joins.nbytes,
        "milliseconds_of_a_step": round(joins.steps(4) * 1000, 2),
        "leave": [],
        "join_free_slot": [],
        "join_no_slot": [],
        "join_longer": [],
    }
    for _ in range(2):
        result["leave"].append(joins.leave())
        result["join_free_slot"].append(joins.join())
    for _ in range(3):
        result["join_no_slot"].append(joins.join())
    result["afterwards"] = joins.turns(3)
    for _ in range(2):
        result["join_longer"].append(joins.join(more_tokens=tokens // 4))
    del joins
    # Rows that soon need more room.
    joins = Joins(model, max(10, rows // 4), -(-tokens // GROW) * GROW - AHEAD - 8)
    joins.leave()  # tells what a step takes
    result["growth"] = {"batch_bytes": joins.nbytes} | joins.turns(6)
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
