"""The bare limit: prompts prefilled and decoded in lockstep with forward + argmax and nothing else.

    OPENBLAS_NUM_THREADS=1 LD_PRELOAD=<OpenBLAS> python -m bench.bare_limit MODEL [--streams 256] [--rounds 3]

All prompts are equally long and all streams generate equally much, so there is no padding, no scheduling, no
sampling and no text: what is left is what the model itself takes. MLX's buffer-cache limit is the engine's.
`python -m bench.bare_limit --child MODEL` answers plans line by line (`bench.mlx_child`).
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from actors.engine import memory
from actors.engine.model import Model, load, plain_cache
from bench.load.plan import Plan, prompt_ids
from bench.mlx_child import CHILD, answer_for_ever

PREFILL_ROWS = 32  # with this chunk the fastest of those tried on a CPU
PREFILL_CHUNK = 64


def run(model: Model, plan: Plan) -> dict[str, float]:
    """Run a plan once; seconds of prefill and of decode. Only for models with plain caches."""
    began = time.perf_counter()
    rows = mx.array([prompt_ids(plan, index) for index in range(plan.streams)], mx.uint32)
    groups = [
        _prefill(model, rows[start : start + PREFILL_ROWS], plan.max_tokens)
        for start in range(0, plan.streams, PREFILL_ROWS)
    ]
    caches = [
        plain_cache(mx.concatenate([cache.keys for cache in layer]), mx.concatenate([cache.values for cache in layer]))
        for layer in zip(*groups, strict=True)
    ]
    for cache, cut in zip(caches, groups[0], strict=True):
        cache.offset = cut.offset
    last = rows[:, -1:]
    mx.eval([(cache.keys, cache.values) for cache in caches])
    del groups
    prefilled = time.perf_counter()
    for _ in range(plan.max_tokens):
        last = mx.argmax(model.forward(last, caches)[:, -1:], axis=-1)
        mx.eval(last)
        last.tolist()
    ended = time.perf_counter()
    return {"seconds": ended - began, "prefill_seconds": prefilled - began, "decode_seconds": ended - prefilled}


def _prefill(model: Model, ids: mx.array, more: int) -> list[Any]:
    """Caches of these rows, all but the last token, with room for `more`."""
    caches = model.new_caches()
    for start in range(0, ids.shape[1] - 1, PREFILL_CHUNK):
        model.forward(ids[:, start : min(start + PREFILL_CHUNK, ids.shape[1] - 1)], caches)
        mx.eval([cache.state for cache in caches])
    for cache in caches:
        room = cache.offset + more - cache.keys.shape[2]
        if room > 0:
            shape = (*cache.keys.shape[:2], room, cache.keys.shape[3])
            cache.keys = mx.concatenate([cache.keys, mx.zeros(shape, cache.keys.dtype)], axis=2)
            cache.values = mx.concatenate([cache.values, mx.zeros(shape, cache.values.dtype)], axis=2)
    return caches


def child(folder: str) -> None:
    """Answer plans with what they took."""
    model = load(folder)

    def answer(request: dict[str, Any]) -> dict[str, float]:
        plan = msgspec.convert(request, Plan)
        mx.set_cache_limit(memory.pool_limit(plan.streams, model.vocab_size))
        return run(model, plan)

    answer_for_ever(answer)


def main() -> None:
    """Run from the command line."""
    if sys.argv[1:2] == [CHILD]:
        child(sys.argv[2])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=220)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    model = load(args.model)
    mx.set_cache_limit(memory.pool_limit(args.streams, model.vocab_size))
    for number in range(args.rounds):
        plan = Plan(
            via="", streams=args.streams, requests=args.streams, prompt_tokens=args.prompt_tokens,
            max_tokens=args.max_tokens, seed=number, vocab_size=model.vocab_size,
        )  # fmt: skip
        took = run(model, plan)
        tokens = plan.streams * plan.max_tokens
        print(f"{tokens / took['seconds']:.0f} tokens/s, {took}")


if __name__ == "__main__":
    main()
