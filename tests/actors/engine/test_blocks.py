"""Blocks of every kind of cache: what is put together again equals the row computed cold, bit for bit."""

import functools
import random
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from actors.engine.block_cuts import CantCut, cut_padded, cut_row, cut_slot, snap_row, snap_slot
from actors.engine.block_layout import BlockLayout, block_layout
from actors.engine.block_restore import Restore, needed
from actors.engine.model import Model
from actors.engine.scheduler import BLOCK
from actors.engine.slots import Positions

KINDS = [
    ("plain", None),
    ("plain", 300),
    ("sliding", None),
    ("gemma3", None),
    ("recurrent", None),
    ("list", None),
    ("hybrid", None),
    ("hybrid", 64),
    ("quantized", None),
    ("kept", 100),
    ("kept", 258),
    ("kept", 600),
    ("chunked", None),
]


def ids(length: int) -> mx.array:
    draw = random.Random(length)
    return mx.array([[draw.randrange(10, 512) for _ in range(length)]], mx.uint32)


class Cold:
    """A row computed on the 256-token grid, with its blocks and snapshots."""

    def __init__(self, model: Model, prompt: mx.array) -> None:
        assert model.block_layout is not None
        self.layout = model.block_layout
        self.caches = model.new_caches()
        self.blocks, self.snapshots = [], []
        self.logits: list[np.ndarray] = []
        for start in range(0, prompt.shape[1], BLOCK):
            logits = model.forward(prompt[:, start : start + BLOCK], self.caches)
            mx.eval(logits, [cache.state for cache in self.caches])
            self.logits.append(np.array(logits))
            if start + BLOCK <= prompt.shape[1]:
                self.blocks.append(cut_row(self.layout, self.caches, start + BLOCK))
                self.snapshots.append(snap_row(self.layout, self.caches))
                mx.eval(self.blocks[-1].arrays, self.snapshots[-1].arrays)


@pytest.fixture(scope="module")
def cold_row(kind_model) -> Callable[[str, int | None], tuple[Model, mx.array, Cold]]:
    """A model of a kind, a prompt of five blocks and a bit, and its cold run."""

    def make(kind: str, window: int | None) -> tuple[Model, mx.array, Cold]:
        model = kind_model(kind, window)
        prompt = ids(5 * BLOCK + 37)
        return model, prompt, Cold(model, prompt)

    return functools.cache(make)


def states(caches: list[Any]) -> list[np.ndarray]:
    """What the caches hold, without room behind it."""
    found = []
    for _, cache in tree_flatten([c.caches if hasattr(c, "caches") else [c] for c in caches]):
        if hasattr(cache, "cache"):
            found += [np.array(state) for state in cache.cache]
            continue
        keys, values = cache.keys_and_values()
        arrays = [*keys, *values] if isinstance(keys, tuple | list) else [keys, values]
        found += [np.array(array) for array in arrays]
        found.append(np.array(cache.offset))
    return found


def same(ours: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.shape == other.shape
        assert mine.tobytes() == other.tobytes()


@pytest.mark.parametrize(("kind", "window"), KINDS)
@pytest.mark.parametrize(("blocks", "ssd"), [(1, "all"), (3, "none"), (3, "all"), (3, "last"), (3, "first")])
def test_restored_equals_cold(kind: str, window: int | None, blocks: int, ssd: str, cold_row) -> None:
    model, prompt, cold = cold_row(kind, window)
    layout = cold.layout
    on_ssd = {"none": [], "all": list(range(blocks)), "last": [blocks - 1], "first": [0]}[ssd]
    first = needed(layout, blocks)
    given = [None if i in on_ssd or i < first else cold.blocks[i] for i in range(blocks)]
    snapshot = cold.snapshots[blocks - 1] if layout.has_snapshots and ssd != "all" else None
    restore = Restore(layout, model.new_caches(), given, snapshot, room=prompt.shape[1])
    while not restore.done:
        mx.eval(restore.build(1, views=bool(on_ssd)))
    for block in on_ssd:
        if block >= first:
            scatter(cold.blocks[block], restore.targets(block))
    if ssd == "all" and layout.has_snapshots:
        scatter(cold.snapshots[blocks - 1], restore.snapshot_targets())
    caches = restore.finish(restore.end)
    for start in range(blocks * BLOCK, prompt.shape[1], BLOCK):
        logits = model.forward(prompt[:, start : start + BLOCK], caches)
        assert np.array(logits).tobytes() == cold.logits[start // BLOCK].tobytes()
    same(states(caches), states(cold.caches))


def scatter(block: Any, targets: list[memoryview]) -> None:
    data = b"".join(bytes(tensor.data) for tensor in block.tensors())
    assert len(data) == block.nbytes
    at = 0
    for target in targets:
        target[:] = data[at : at + len(target)]
        at += len(target)
    assert at == len(data)


def test_a_full_hit_of_plain_caches_is_trimmed_by_one_token(kind_model) -> None:
    for kind in ("plain", "quantized"):
        model = kind_model(kind)
        prompt = ids(2 * BLOCK)
        cold = Cold(model, prompt)
        assert cold.layout.trims
        restore = Restore(cold.layout, model.new_caches(), cold.blocks, None, room=2 * BLOCK)
        mx.eval(restore.build(1 << 40))
        caches = restore.finish(2 * BLOCK - 1)
        model.forward(prompt[:, -1:], caches)
        ours, theirs = states(caches), states(cold.caches)
        for mine, other in zip(ours, theirs, strict=True):
            assert mine.shape == other.shape
            np.testing.assert_allclose(mine, other, rtol=1e-3, atol=1e-3 if kind == "plain" else 20)


@pytest.mark.parametrize(("kind", "window"), KINDS[:-1])
def test_a_slot_gives_the_block_of_the_row_that_joined(kind: str, window: int | None, kind_model) -> None:
    """At a border the slot holds what the row's own caches do, and decoding up to a border gives nearly the same."""
    model = kind_model(kind, window)
    prompt = ids(3 * BLOCK)
    cold = Cold(model, prompt)
    layout = cold.layout
    # With kept tokens mlx-lm's own prefill and decode steps look at different windows.
    for joined in (3 * BLOCK,) if kind == "kept" else (3 * BLOCK, 3 * BLOCK - 3):
        caches = model.new_caches()
        for start in range(0, joined, BLOCK):
            mx.eval(model.forward(prompt[:, start : min(start + BLOCK, joined)], caches))
        slots = model.new_slots()
        for slot, cache in zip(slots, caches, strict=True):
            slot.reshape(2, 4 * BLOCK)
            slot.load(1, cache)
        for length in range(joined, 3 * BLOCK):
            at = Positions(np.array([0, length], np.int64))
            for slot in slots:
                slot.step(at)
            token = prompt[:, length : length + 1]
            mx.eval(model.forward(mx.concatenate([token, token]), list(slots)))
        for cut, expected in (
            (cut_slot(layout, slots, 1, 3 * BLOCK), cut_row(layout, cold.caches, 3 * BLOCK)),
            (snap_slot(layout, slots, 1), snap_row(layout, cold.caches)),
        ):
            mx.eval(cut.arrays, expected.arrays)
            for ours, theirs, dtype in zip(cut.arrays, expected.arrays, cut._pack.dtypes, strict=True):
                mine, other = (np.array(array.view(dtype)) for array in (ours, theirs))
                if dtype == mx.float32:
                    np.testing.assert_allclose(mine, other, rtol=2e-2, atol=2e-3)
                else:
                    assert np.mean(mine == other) > 0.9


def test_a_row_of_a_padded_group_gives_its_own_blocks(kind_model) -> None:
    model = kind_model("plain")
    prompts = [ids(300)[0], ids(256)[0]]
    padded = mx.stack([mx.pad(p, (0, 300 - p.shape[0])) for p in prompts])
    caches = model.new_caches()
    mx.eval(model.forward(padded, caches))
    for place, prompt in enumerate(prompts):
        alone = Cold(model, prompt[None])
        cut = cut_padded(alone.layout, caches, place, BLOCK)
        np.testing.assert_allclose(
            np.array(cut.arrays[0].view(mx.float32)),
            np.array(alone.blocks[0].arrays[0].view(mx.float32)),
            rtol=1e-3,
            atol=1e-4,
        )


def test_a_block_holds_on_to_no_cache(kind_model) -> None:
    model = kind_model("recurrent")
    cold = Cold(model, ids(BLOCK))
    before = mx.get_active_memory()
    cold.caches.clear()
    freed = before - mx.get_active_memory()
    assert freed >= cold.snapshots[0].nbytes


def test_what_cant_be_cut_is_told(kind_model) -> None:
    model = kind_model("sliding")
    cold = Cold(model, ids(3 * BLOCK))
    with pytest.raises(CantCut):
        cut_row(cold.layout, cold.caches, 4 * BLOCK)
    with pytest.raises(CantCut):
        cut_row(cold.layout, cold.caches, BLOCK)

    class Other:
        keys = None

    assert block_layout([Other()]) is None
    assert block_layout([]) is None


def test_a_layout_is_named_by_all_that_matters(kind_model) -> None:
    layouts: list[BlockLayout] = [kind_model(kind, window).block_layout for kind, window in KINDS if kind != "gemma3"]
    names = [layout.description for layout in layouts]
    assert len(set(names)) == len(names)
    assert names[0] == "v1;2*plain:2x16f32,2x16f32"
