"""What LoRA adapters cost a decode step: the engine's turns with none, one and four of them in a batch.

Each round runs every case once, in another order; medians of the rounds are compared. `bare` is a model loaded without
adapters, `base` rows without one on a model that has four, the others rows that have one each. The adapters have rank
8 and change every linear layer of every block.
`python -m bench.lora_steps --child` answers requests line by line (`bench.mlx_child`).
"""

import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from actors.adapter_files import read_adapter
from actors.engine.model import load
from bench.made_adapters import linear_shapes, write_mlx_adapter
from bench.mlx_child import answer_for_ever
from bench.models import demo_folder, tiny_model
from bench.step_overhead import CACHE_LIMIT, STEPS, Steps

NAMES = ["one", "two", "three", "four"]
CASES: dict[str, list[str]] = {
    "base": [""],
    "one adapter": NAMES[:1],
    "four adapters": NAMES,
    "four adapters and base": [*NAMES, ""],
}


def measure(name: str, rows: int, context: int, rounds: int, rank: int) -> dict[str, Any]:
    """Median milliseconds per step of each case, and the bytes of the four adapters."""
    mx.set_cache_limit(CACHE_LIMIT)
    folder = tiny_model() if name == "tiny" else demo_folder()
    shapes = linear_shapes(json.loads((folder / "config.json").read_bytes()))
    with tempfile.TemporaryDirectory() as made:
        folders = [write_mlx_adapter(Path(made) / name, shapes, rank=rank, seed=i) for i, name in enumerate(NAMES)]
        nbytes = sum((each / "adapters.safetensors").stat().st_size for each in folders)
        files = [read_adapter(name, each) for name, each in zip(NAMES, folders, strict=True)]
        model = load(folder, adapters=files)
    engines = {"bare": Steps(load(folder), rows, context, lambda row: {})}
    for number, (case, names) in enumerate(CASES.items()):
        options = _cycling(names)
        engines[case] = Steps(model, rows, context, options, first=1 + number * rows)
    seconds: dict[str, list[float]] = {case: [] for case in engines}
    for number in range(rounds + 1):
        for case in random.sample(list(engines), len(engines)):
            started = time.perf_counter()
            engines[case].run(STEPS)
            if number:
                seconds[case].append((time.perf_counter() - started) / STEPS)
    return {
        "milliseconds": {case: round(1000 * statistics.median(times), 3) for case, times in seconds.items()},
        "adapter_bytes": nbytes,
    }


def _cycling(names: list[str]) -> Callable[[int], dict[str, Any]]:
    return lambda row: {"adapter": names[row % len(names)]}


if __name__ == "__main__":
    answer_for_ever(lambda request: measure(*request))
