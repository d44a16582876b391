"""The tiny test model: a llama with random weights and the demo model's tokenizer and chat template.

It answers noise, fast: for scheduling, load and robustness. Used by the `tiny_model` fixture and by the
scripts in `bench/`; run by hand it prints its folder, or makes the model in the folder it is given:

    python tests/models/tiny.py [FOLDER]

Loads no MLX. Made once, then kept in Callboard's cache folder.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from server.models.cache import built_once
from server.models.demo import demo_model

VERSION = 1  # grows when anything below changes what is made
SEED = 0
MARKS = {"<reponame>": "<think>", "<file_sep>": "</think>"}
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,  # of 32: keys and values can be quantized
    "num_key_value_heads": 1,
    "max_position_embeddings": 65_536,
    "rope_theta": 10_000.0,
    "rms_norm_eps": 1e-5,
    "vocab_size": 49_152,
    "tie_word_embeddings": False,  # a random model with a tied head only repeats its last token
    "attention_bias": False,
    "mlp_bias": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


def tiny_model() -> Path:
    """Folder of the tiny model, made when the cache doesn't hold it yet."""
    return built_once(f"tiny-llama-{VERSION}", make, waiting=lambda: None)


def thinker_model() -> Path:
    """Folder of the tiny model with marks of reasoning: its answers begin inside of it, unless that is switched off."""
    return built_once(f"tiny-thinker-{VERSION}", make_thinker, waiting=lambda: None)


def make_thinker(folder: Path) -> None:
    """Write that model into `folder`, which exists: two tokens that nobody uses become the marks."""
    make(folder)
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    for unused, mark in MARKS.items():
        text = text.replace(json.dumps(unused), json.dumps(mark))
    tokenizer = json.loads(text)
    for token in tokenizer["added_tokens"]:
        token["special"] = token["special"] and token["content"] not in MARKS.values()
    _write(folder / "tokenizer.json", tokenizer)
    config = json.loads((folder / "tokenizer_config.json").read_bytes())
    config.pop("added_tokens_decoder", None)
    config.pop("additional_special_tokens", None)
    begin = "{{ '<think>\n\n</think>\n\n' if enable_thinking is false else '<think>\n' }}"
    config["chat_template"] += "{% if add_generation_prompt %}" + begin + "{% endif %}"
    _write(folder / "tokenizer_config.json", config)


def make(folder: Path) -> None:
    """Write the model into `folder`, which exists. Raises ModelError when the demo model can't be had."""
    demo = demo_model("cpu", progress=sys.stderr.isatty())
    save_file(weights(), str(folder / "model.safetensors"), metadata={"format": "mlx"})
    shutil.copyfile(demo / "tokenizer.json", folder / "tokenizer.json")
    tokenizer = json.loads((demo / "tokenizer_config.json").read_bytes())
    tokenizer["model_max_length"] = CONFIG["max_position_embeddings"]
    _write(folder / "tokenizer_config.json", tokenizer)
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    _write(folder / "generation_config.json", {key: CONFIG[key] for key in ids})
    _write(folder / "config.json", CONFIG)


def weights() -> dict[str, np.ndarray]:
    """All weights by name, float32, (out, in); each row has a norm of about 1."""
    random = np.random.default_rng(SEED)
    hidden, inner, vocabulary = (CONFIG[k] for k in ("hidden_size", "intermediate_size", "vocab_size"))
    head = hidden // CONFIG["num_attention_heads"]
    kv = head * CONFIG["num_key_value_heads"]

    def matrix(out: int, into: int) -> np.ndarray:
        wide: np.ndarray = random.standard_normal((out, into)) / np.sqrt(into)
        return wide.astype(np.float32)

    named = {
        "model.embed_tokens.weight": matrix(vocabulary, hidden),
        "lm_head.weight": matrix(vocabulary, hidden),
        "model.norm.weight": np.ones(hidden, np.float32),
    }
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, shape in shapes.items():
            named[f"{prefix}{name}.weight"] = matrix(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            named[f"{prefix}{name}.weight"] = np.ones(hidden, np.float32)
    return named


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False), encoding="utf-8")


def main() -> None:
    if len(sys.argv) > 1:
        folder = Path(sys.argv[1])
        folder.mkdir(parents=True, exist_ok=True)
        make(folder)
    else:
        folder = tiny_model()
    print(folder)


if __name__ == "__main__":
    main()
