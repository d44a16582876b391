"""LoRA adapters with random weights for the tiny models, in mlx-lm's folder format and in PEFT's.

Loads no MLX. Used by the `adapter_folders` fixture, the engine's tests and `bench/`. The matrices are so large that an
adapter changes nearly every token.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

Shapes = Mapping[str, tuple[int, int]]  # inputs and outputs of each linear layer, by its name


def linear_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """The linear layers of a llama's blocks."""
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    kv = hidden // heads * config["num_key_value_heads"]
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden, kv),
        "self_attn.v_proj": (hidden, kv),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    layers = range(config["num_hidden_layers"])
    return {f"model.layers.{layer}.{name}": shape for layer in layers for name, shape in shapes.items()}


def matrices(shapes: Shapes, rank: int, seed: int) -> dict[str, tuple[Any, Any]]:
    """A (inputs, rank) and B (rank, outputs) for each layer, float32."""
    draw = np.random.default_rng(seed)

    def normal(rows: int, columns: int) -> Any:
        return (draw.normal(0, 1, (rows, columns)) / np.sqrt(rows)).astype(np.float32)

    return {name: (normal(inputs, rank), normal(rank, outputs)) for name, (inputs, outputs) in shapes.items()}


def write_mlx_adapter(
    folder: Path, shapes: Shapes, *, rank: int = 4, seed: int = 0, scale: float = 2.0, **config: Any
) -> Path:
    """An adapter as `mlx_lm.lora` writes it; `config` is added to its config."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, (a, b) in matrices(shapes, rank, seed).items():
        tensors[f"{name}.lora_a"], tensors[f"{name}.lora_b"] = a, b
    save_file(tensors, str(folder / "adapters.safetensors"), metadata={"format": "mlx"})
    keys = sorted({name.split(".", 3)[3] if name.startswith("model.layers.") else name for name in shapes})
    settings = {
        "fine_tune_type": "lora",
        "num_layers": 64,
        "lora_parameters": {"rank": rank, "scale": scale, "dropout": 0.0, "keys": keys},
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings | config), encoding="utf-8")
    return folder


def write_peft_adapter(
    folder: Path, shapes: Shapes, *, rank: int = 4, seed: int = 0, alpha: float = 8.0, **config: Any
) -> Path:
    """The same as PEFT writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, (a, b) in matrices(shapes, rank, seed).items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = np.ascontiguousarray(a.T)
        tensors[f"base_model.model.{name}.lora_B.weight"] = np.ascontiguousarray(b.T)
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha}
    (folder / "adapter_config.json").write_text(json.dumps(settings | config), encoding="utf-8")
    return folder


def write_adapters(folder: Path, shapes: Shapes, names: Iterable[str]) -> dict[str, Path]:
    """One mlx-lm adapter for each name, of several ranks; every second one changes every second layer."""
    written = {}
    for number, name in enumerate(names):
        some = dict(sorted(shapes.items())[:: 1 + number % 2])
        written[name] = write_mlx_adapter(folder / name, some, rank=2 + 2 * number, seed=number)
    return written
