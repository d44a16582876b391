"""What an adapter's folder says: mlx-lm's format and PEFT's, and why others are refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from actors.adapter_files import parse_adapter, read_adapter
from bench.made_adapters import matrices, write_mlx_adapter, write_peft_adapter

SHAPES = {"model.layers.0.self_attn.q_proj": (8, 6), "model.layers.1.mlp.up_proj": (8, 12)}


@pytest.mark.parametrize("write", [write_mlx_adapter, write_peft_adapter])
def test_both_formats_give_the_same_matrices(tmp_path: Path, write) -> None:
    found = read_adapter("fr", write(tmp_path, SHAPES, rank=4, seed=3))
    contents = found.read()
    assert contents.layers.keys() == SHAPES.keys()
    for name, (a, b) in matrices(SHAPES, 4, 3).items():
        part = contents.layers[name]
        assert np.array_equal(part.a, a.T)
        assert np.array_equal(part.b, b)
        assert part.scale == 2.0
        assert (found.layers[name].inputs, found.layers[name].outputs) == SHAPES[name]


def test_peft_scales_by_its_config(tmp_path: Path) -> None:
    write_peft_adapter(tmp_path, SHAPES, rank=4, alpha=8, use_rslora=True, alpha_pattern={"up_proj": 2})
    scales = {name: part.scale for name, part in read_adapter("x", tmp_path).layers.items()}
    assert scales == {"model.layers.0.self_attn.q_proj": 4.0, "model.layers.1.mlp.up_proj": 1.0}


def test_half_precision_is_read_as_it_is(tmp_path: Path) -> None:
    write_mlx_adapter(tmp_path, SHAPES)
    path = tmp_path / "adapters.safetensors"
    save_file({name: array.astype(np.float16) for name, array in load_file(path).items()}, str(path))
    found = read_adapter("x", tmp_path)
    assert found.dtypes == {"F16"}
    assert {part.a.dtype for part in found.read().layers.values()} == {np.dtype(np.float16)}


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fine_tune_type": "full"}, "full fine-tune.*mlx_lm.fuse"),
        ({"fine_tune_type": "dora"}, "DoRA.*mlx_lm.fuse"),
        ({"fine_tune_type": "other"}, "not lora"),
        ({"lora_parameters": {"rank": 4}}, "lora_parameters.scale"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"peft_type": "LORA", "use_dora": True}, "DoRA.*merge_and_unload"),
        ({"peft_type": "LORA", "bias": "all"}, "biases"),
        ({"peft_type": "LORA", "modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "LORA"}, "r and lora_alpha"),
        ({"peft_type": "LORA", "r": 4, "lora_alpha": 8}, "no adapter_model.safetensors"),
    ],
)
def test_what_is_no_lora_is_refused_saying_what_to_do(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    change_config(write_mlx_adapter(tmp_path, SHAPES), **changes)
    with pytest.raises(ValueError, match=said):
        read_adapter("x", tmp_path)


def with_tensors(folder: Path, **tensors: np.ndarray) -> None:
    path = write_mlx_adapter(folder, SHAPES) / "adapters.safetensors"
    kept = {name: array for name, array in (load_file(path) | tensors).items() if array.size}
    save_file(kept, str(path))


LEFT = "model.layers.0.self_attn.q_proj.lora_b"


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({LEFT: np.zeros(0)}, "but not .*lora_b"),
        ({LEFT: np.zeros((3, 6), np.float32)}, "no rank in common"),
        ({LEFT: np.zeros((4, 6), np.int32)}, "only F32, F16 and BF16"),
        ({"model.layers.0.self_attn.q_proj.m": np.zeros(6, np.float32)}, "no part of a LoRA"),
        ({"model.norm.weight": np.zeros(8, np.float32)}, "no part of a LoRA"),
        (
            {
                "a.switch_mlp.up_proj.lora_a": np.zeros((4, 4, 8), np.float32),
                "a.switch_mlp.up_proj.lora_b": np.zeros((4, 8, 4), np.float32),
            },
            "experts",
        ),
    ],
)
def test_matrices_that_make_no_lora_are_refused(tmp_path: Path, tensors, said: str) -> None:
    with_tensors(tmp_path, **tensors)
    with pytest.raises(ValueError, match=said):
        read_adapter("x", tmp_path)


def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no folder"):
        read_adapter("x", tmp_path / "none")
    with pytest.raises(ValueError, match=r"no adapter_config\.json"):
        read_adapter("x", tmp_path)
    write_mlx_adapter(tmp_path, SHAPES)
    path = tmp_path / "adapters.safetensors"
    whole = path.read_bytes()
    for data in (b"", whole[:40], whole[:-1], b"\x08\0\0\0\0\0\0\0[1, 2, 3"):
        path.write_bytes(data)
        with pytest.raises(ValueError, match="copy it again"):
            read_adapter("x", tmp_path)
    (tmp_path / "adapter_config.json").write_text("[")
    with pytest.raises(ValueError, match="can't be read"):
        read_adapter("x", tmp_path)


def test_what_has_changed_since_the_start_is_noticed(tmp_path: Path) -> None:
    found = read_adapter("x", write_mlx_adapter(tmp_path, SHAPES))
    first = found.read()
    write_mlx_adapter(tmp_path, SHAPES, seed=1)
    assert found.read().digest != first.digest, "other numbers are another adapter"
    write_mlx_adapter(tmp_path, SHAPES, rank=2)
    with pytest.raises(ValueError, match="another shape"):
        found.read()
    tensors = load_file(write_mlx_adapter(tmp_path, SHAPES) / "adapters.safetensors")
    tensors[LEFT][0, 0] = np.nan
    save_file(tensors, str(tmp_path / "adapters.safetensors"), metadata={"format": "mlx"})
    with pytest.raises(ValueError, match="NaN"):
        found.read()


def test_names_come_with_the_path_or_from_it(tmp_path: Path) -> None:
    assert parse_adapter(f"fr={tmp_path}") == ("fr", tmp_path)
    assert parse_adapter(f"{tmp_path}/") == (tmp_path.name, tmp_path)
    assert parse_adapter(f"{tmp_path}/a=b") == ("a=b", tmp_path / "a=b")
    for text in ("=x", "x="):
        with pytest.raises(ValueError, match="NAME=PATH"):
            parse_adapter(text)
