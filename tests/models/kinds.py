"""Tiny models with random weights for every kind of cache: what the engine's tests run where kinds matter.

Loads MLX, unlike its neighbour `tiny.py`. Used by the fixture `kind_model`.
"""

import importlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map_with_path

from actors.engine.model import Model, RotatingKVCache, try_out
from actors.model_files import ModelFiles

VOCABULARY = 512
COMMON = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": VOCABULARY, "max_position_embeddings": 8192}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": COMMON
    | HEADS
    | {"model_type": "llama", "num_hidden_layers": 2, "rms_norm_eps": 1e-5, "tie_word_embeddings": False},
    "sliding": COMMON
    | HEADS
    | {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "rms_norm_eps": 1e-5,
        "sliding_window": 96,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "tie_word_embeddings": False,
    },
    "gemma3": COMMON
    | HEADS
    | {
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "head_dim": 16,
        "sliding_window": 96,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 16,
    },
    "recurrent": COMMON
    | {
        "model_type": "mamba2",
        "num_heads": 4,
        "head_dim": 32,
        "state_size": 16,
        "num_hidden_layers": 3,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": False,
        "time_step_limit": [0.0, 1e9],
        "time_step_rank": "auto",
    },
    "list": COMMON
    | HEADS
    | {
        "model_type": "falcon_h1",
        "num_hidden_layers": 2,
        "head_dim": 16,
        "mamba_d_head": 16,
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_expand": 1,
        "rope_theta": 1e6,
    },
    "chunked": {
        "model_type": "llama4",
        "text_config": COMMON
        | HEADS
        | {
            "attention_bias": False,
            "attention_chunk_size": 320,
            "head_dim": 16,
            "interleave_moe_layer_step": 100,
            "intermediate_size_mlp": 128,
            "model_type": "llama4_text",
            "num_experts_per_tok": 1,
            "num_hidden_layers": 4,
            "num_local_experts": 1,
            "rms_norm_eps": 1e-5,
            "rope_scaling": None,
            "rope_theta": 1e6,
            "use_qk_norm": True,
        },
    },
    "hybrid": COMMON
    | HEADS
    | {
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "head_dim": 16,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 64,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.5,
        "norm_topk_prob": True,
        "full_attention_interval": 2,
    },
}


class KeptModel(Model):
    """Windows that keep the first tokens of a row, as mlx-lm makes them for `max_kv_size`."""

    def new_caches(self) -> list[Any]:
        return [RotatingKVCache(max_size=self._max_kv_size, keep=KEPT) for _ in super().new_caches()]


def kind_model(kind: str, window: int | None = None) -> Model:
    """A model of one of `CONFIGS`; mlx-lm's own start values would make its states forget at once.

    With `window` its plain caches become windows of that size.
    """
    config = CONFIGS[kind]
    architecture = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(0)  # qwen3_next draws its decays; another model in every run would meet its ties some day
    network = architecture.Model(architecture.ModelArgs.from_dict(config))
    draw = np.random.default_rng(0)

    def weight(path: str, array: mx.array) -> mx.array:
        if path.endswith("dt_bias"):
            return mx.full(array.shape, -5.0)
        if array.ndim < 2:
            return array
        return mx.array((draw.normal(0, 1.5, array.shape) / np.sqrt(array.shape[-1])).astype(np.float32))

    network.update(tree_map_with_path(weight, network.parameters()))
    network.eval()
    files = ModelFiles(
        path=Path("tiny"),
        model_type=config["model_type"],
        context=8192,
        vocab_size=VOCABULARY,
        eos_token_ids=(2,),
        chat_template=None,
        special_tokens={},
    )
    model = (KeptModel if kind == "kept" else Model)(network, files, window, KV_BITS.get(kind), KV_GROUP)
    try_out(model)
    return model


CONFIGS["kept"] = CONFIGS["plain"]
CONFIGS["quantized"] = CONFIGS["plain"] | {"num_attention_heads": 2, "num_key_value_heads": 1}
KV_BITS = {"quantized": 8}
KV_GROUP = 32
KEPT = 4
