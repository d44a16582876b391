"""Rows with made-up keys and values, of a real model's shapes: what joins a batch without the time of a prefill."""

from typing import Any

import mlx.core as mx
import numpy as np

from actors.engine.model import Model, plain_cache
from actors.engine.prefill import Joining, Row
from actors.engine.sampler import RowOptions


def made_joining(model: Model, rids: list[int], lengths: list[int]) -> Joining:
    """Rows of so many tokens each, computed and ready to join. Only for models with plain caches."""
    samples = model.new_caches()
    model.forward(mx.zeros((1, 2), mx.uint32), samples)
    rows = [
        Row(rid, np.arange(length + 1, dtype=np.uint32) % 1000, length + 1, RowOptions())
        for rid, length in zip(rids, lengths, strict=True)
    ]
    return Joining(rows, [_caches(samples, length) for length in lengths], batched=False, right_padded=False)


def _caches(samples: list[Any], length: int) -> list[Any]:
    caches = []
    for sample in samples:
        shapes = [(1, part.shape[1], length, part.shape[3]) for part in (sample.keys, sample.values)]
        caches.append(plain_cache(*(mx.random.normal(shape) for shape in shapes)))
    mx.eval([(cache.keys, cache.values) for cache in caches])
    return caches
