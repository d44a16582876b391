"""Loading a model: what it tells, what users read when it can't be served, and what loading leaves alone."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, KVCache, RotatingKVCache

from actors.engine import model as module
from actors.engine.model import Cache, Model, ModelError, load
from actors.engine.solo_row import batches_rightly


@pytest.fixture
def copy(tiny_model: Path, tmp_path: Path) -> Path:
    """A folder with the tiny model's files that a test may damage."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    return folder


def change_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def test_a_model_tells_its_sizes(model: Model) -> None:
    assert (model.context, model.vocab_size) == (65_536, 49_152)
    assert model.eos_token_ids == {2}
    assert [type(cache) for cache in model.new_caches()] == [KVCache, KVCache]


def test_max_kv_size_makes_windows_that_keep_no_first_tokens(tiny_model: Path) -> None:
    caches = load(tiny_model, max_kv_size=100).new_caches()
    assert [(type(c), c.max_size, c.keep) for c in caches] == [(RotatingKVCache, 100, 0)] * 2


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is not a folder"):
        load(tmp_path / "nothing")


def test_missing_weights(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"holds no weights \(model\*\.safetensors\)"):
        load(copy)


def test_damaged_weights(copy: Path) -> None:
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError, match="can't be loaded as llama"):
        load(copy)


def test_weights_of_another_shape(copy: Path) -> None:
    change_config(copy, num_hidden_layers=3)
    with pytest.raises(ModelError, match="can't be loaded as llama"):
        load(copy)


def test_an_unsupported_architecture(copy: Path) -> None:
    change_config(copy, model_type="unheard_of")
    with pytest.raises(ModelError, match=r"the architecture unheard_of .*not supported"):
        load(copy)


def test_code_in_the_folder_is_not_run(copy: Path) -> None:
    change_config(copy, model_file="own.py")
    (copy / "own.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(ModelError, match="trust_remote_code"):
        load(copy)


def test_too_little_memory(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_for_weights", lambda: 1_000_000)
    with pytest.raises(ModelError, match=r"not enough memory .* take 26 MB, 1 MB are free"):
        load(tiny_model)


def network_with(*caches: object) -> SimpleNamespace:
    return SimpleNamespace(make_cache=lambda: list(caches), parameters=dict)


def test_a_kind_of_cache_that_cant_be_batched_is_served_row_by_row(model: Model) -> None:
    served = Model(network_with(KVCache(), ChunkedKVCache(64)), model.files)
    assert not served.batches_rows
    assert not served.batches_prefill
    assert served.cache_kinds == ["ChunkedKVCache", "KVCache"]


@pytest.mark.parametrize(("option", "size", "bits"), [("max_kv_size", 64, None), ("kv_bits", None, 8)])
def test_options_for_caches_that_take_none(model: Model, option: str, size: int | None, bits: int | None) -> None:
    served = Model(network_with(ArraysCache(2)), model.files, size, bits)
    with pytest.raises(ModelError, match=f"{option} doesn't apply to .*: ArraysCache"):
        module._check_options(served, size, bits)


def test_the_self_check_passes_a_good_model_and_fails_one_that_mixes_rows(model: Model) -> None:
    assert batches_rightly(model)

    class Mixing(Model):
        def forward(self, ids: mx.array, caches: list[Cache]) -> mx.array:
            logits = super().forward(ids, caches)
            return logits + 0.1 * logits.mean(axis=0, keepdims=True) if ids.shape[0] > 1 else logits

    assert not batches_rightly(Mixing(model._network, model.files))


def test_loading_leaves_the_limit_of_open_files_alone() -> None:
    script = """if True:
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (900, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        import actors.engine.model
        print(before == resource.getrlimit(resource.RLIMIT_NOFILE))
    """
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout.strip() == "True"


def test_what_depth_costs_is_told_by_the_model_where_it_says_so(model: Model) -> None:
    # Two layers of 46,080 weights with two heads of 32 numbers each: 360 tokens cost as much as all weights.
    assert model.depth_cost == pytest.approx(1 / 360)
    for args in (None, SimpleNamespace(), SimpleNamespace(num_attention_heads=[4, 8], hidden_size=64)):
        assert module._depth_cost(SimpleNamespace(args=args), 2) == 0.0
