"""Every kind of cache that mlx-lm batches, on tiny random models: the same tokens alone and in a changing batch."""

import importlib
import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map_with_path

from actors.engine import batch
from actors.engine.model import Model
from actors.engine.scheduler import Limits
from actors.engine.solo_row import batches_rightly
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


def tiny(config: dict[str, Any], max_kv_size: int | None = None, kv_bits: int | None = None) -> Model:
    """A model with random weights; mlx-lm's own start values would make its states forget at once."""
    architecture = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
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
    return Model(network, files, max_kv_size, kv_bits, KV_GROUP)


CONFIGS["quantized"] = CONFIGS["plain"] | {"num_attention_heads": 2, "num_key_value_heads": 1}
KV_BITS = {"quantized": 8}
KV_GROUP = 32

UNBOUNDED = [(kind, None) for kind in CONFIGS]
WINDOWED = [(kind, 64) for kind in ("plain", "sliding", "gemma3", "hybrid")]  # the others have no plain caches


@pytest.mark.parametrize(("kind", "window"), UNBOUNDED + WINDOWED)
def test_a_changing_batch_gives_the_tokens_of_plain_runs(
    kind: str, window: int | None, make_request, start_run, same_as_plain
) -> None:
    model = tiny(CONFIGS[kind], window, KV_BITS.get(kind))
    assert batches_rightly(model)
    changing_batch(model, make_request, start_run, same_as_plain)


@pytest.mark.parametrize("kind", CONFIGS)
def test_groups_that_change_their_shape_in_pieces_give_the_same_tokens(
    kind: str, make_request, start_run, same_as_plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(CONFIGS[kind], None, KV_BITS.get(kind))
    model.step_bytes = 1 << 40  # one group is always better than two
    monkeypatch.setattr(batch, "SMALL_BATCH", 0)
    monkeypatch.setattr(batch, "PIECE", 1)
    monkeypatch.setattr(batch, "MOVED", 1)
    monkeypatch.setattr(batch, "RESERVED", 0)
    changing_batch(model, make_request, start_run, same_as_plain)


def test_rows_with_a_cache_that_cant_be_batched_run_beside_each_other(make_request, start_run, same_as_plain) -> None:
    model = tiny(CONFIGS["plain"])
    model.batches_rows = model.batches_prefill = False
    changing_batch(model, make_request, start_run, same_as_plain)


def changing_batch(model: Model, make_request, start_run, same_as_plain) -> None:
    """Rows of many lengths that join, leave and are aborted get the tokens of their plain runs."""
    draw = random.Random(1)
    requests = [
        make_request(
            rid,
            [draw.randrange(10, VOCABULARY) for _ in range(length)],
            60 if rid % 3 == 0 else 9,
            temperature=[0.0, 0.8][rid % 2],
        )
        for rid, length in enumerate([90, 80, 1, 300, 40, 44, 37, 2, 257, 120, 110, 101, 5, 64, 31])
    ]
    run = start_run(model, Limits(max_num_seqs=6, max_num_batched_tokens=700, prefill_step_size=256))
    for number, each in enumerate(requests):
        run.engine.submit(each)
        if number % 3 == 2:  # three at a time: short ones of like length are prefilled together, padded
            run.turn()
            run.turn()
        if number == 8:
            run.engine.abort([5])
    run.finish()
    same_as_plain(model, [each for each in requests if each.rid != 5], run.tokens)


def test_a_padded_group_that_would_end_in_one_token(make_request, start_run, same_as_plain) -> None:
    model = tiny(CONFIGS["plain"], 400)
    draw = random.Random(3)
    requests = [
        make_request(r, [draw.randrange(10, VOCABULARY) for _ in range(n)], 5) for r, n in enumerate((250, 258))
    ]
    run = start_run(model)
    same_as_plain(model, requests, run.all(requests))
