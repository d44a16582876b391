"""Turn the demo model's GGUF file into a model folder that mlx-lm reads.

Runs as a short-lived child process, since it loads MLX:

    python -P -m server.models.convert_gguf GGUF FOLDER --weights float32|quantized

`float32` gives plain weights; `quantized` keeps the file's own (Q4_1 is MLX's affine 4-bit in groups of 32,
Q8_0 its affine 8-bit), bit for bit. Only the GGUF dialect of that file is understood: llama with a GPT-2
style tokenizer of the `smollm` kind.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

GROUP_SIZE = 32
EMBEDDING_BITS = 8
BITS = 4
CONTROL_TOKEN = 3  # of GGUF's token types

_PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


# From the examples of SmolLM2's model card; a GGUF file holds none. At temperature 1 so small a model babbles.
RECOMMENDED_SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}


def model_name(gguf_name: str) -> str:
    """Name in a Hugging Face llama of the GGUF tensor `gguf_name`.

    Raises KeyError for a tensor that a llama doesn't have.
    """
    parts = gguf_name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_PARTS[parts[2]]}.{parts[3]}"
    return f"{_TOP[parts[0]]}.{parts[1]}"


def unpermute(rows: mx.array, heads: int) -> mx.array:
    """Undo llama.cpp's order of the rows of q and k projections.

    llama.cpp interleaves the two halves that rotary embedding pairs; mlx-lm wants them one after the other.
    `rows` is (heads x head_dim, ...): whole rows move, so packed words, scales and biases go the same way.
    """
    out = rows.shape[0]
    paired = rows.reshape(heads, out // heads // 2, 2, *rows.shape[1:])
    return paired.swapaxes(1, 2).reshape(rows.shape)


def plain_weights(arrays: dict[str, mx.array]) -> dict[str, mx.array]:
    """Replace each weight / scales / biases triple by its float32 weight.

    Scales and biases are widened first: multiplied as float16 the products would be rounded.
    """
    plain = {}
    for name, array in arrays.items():
        base, _, kind = name.rpartition(".")
        if kind in ("scales", "biases"):
            continue
        scales = arrays.get(f"{base}.scales")
        if scales is None:
            plain[name] = array.astype(mx.float32)
            continue
        plain[name] = mx.dequantize(
            array,
            scales.astype(mx.float32),
            arrays[f"{base}.biases"].astype(mx.float32),
            group_size=GROUP_SIZE,
            bits=array.shape[-1] * 32 // (scales.shape[-1] * GROUP_SIZE),
        )
    return plain


def model_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """`config.json` of the model, without quantization."""

    def integer(key: str) -> int:
        return int(metadata[key].item())

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": integer("llama.embedding_length"),
        "intermediate_size": integer("llama.feed_forward_length"),
        "num_hidden_layers": integer("llama.block_count"),
        "num_attention_heads": integer("llama.attention.head_count"),
        "num_key_value_heads": integer("llama.attention.head_count_kv"),
        "max_position_embeddings": integer("llama.context_length"),
        "rope_theta": float(metadata["llama.rope.freq_base"].item()),
        # Stored as float32: rounding gives back the decimal number that was meant.
        "rms_norm_eps": round(float(metadata["llama.attention.layer_norm_rms_epsilon"].item()), 9),
        "vocab_size": integer("llama.vocab_size"),
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
        "bos_token_id": integer("tokenizer.ggml.bos_token_id"),
        "eos_token_id": integer("tokenizer.ggml.eos_token_id"),
        "pad_token_id": integer("tokenizer.ggml.padding_token_id"),
    }


def write_tokenizer(metadata: dict[str, Any], folder: Path, context: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` (byte-level BPE, each digit on its own)."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = []
    for merge in metadata["tokenizer.ggml.merges"]:
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate(tokens)}, merges, ignore_merges=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"].tolist()
    special = {i: text for i, text in enumerate(tokens) if kinds[i] == CONTROL_TOKEN}
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special.values()])
    tokenizer.save(str(folder / "tokenizer.json"))

    def token(kind: str) -> str:
        return tokens[int(metadata[f"tokenizer.ggml.{kind}_token_id"].item())]

    flags = {"special": True, "normalized": False, "lstrip": False, "rstrip": False, "single_word": False}
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": context,
            "bos_token": token("bos"),
            "eos_token": token("eos"),
            "unk_token": token("unknown"),
            "pad_token": token("padding"),
            "added_tokens_decoder": {str(i): {"content": text, **flags} for i, text in special.items()},
            "chat_template": metadata["tokenizer.chat_template"],
        },
    )


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False), encoding="utf-8")


def check_dialect(metadata: dict[str, Any]) -> None:
    """Raise ValueError for a GGUF file of another architecture or tokenizer."""
    wanted = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
    }
    for key, value in wanted.items():
        if metadata.get(key) != value:
            raise ValueError(f"{key} is {metadata.get(key)!r}; only {value!r} can be converted")


def convert(gguf: Path, folder: Path, *, quantized: bool) -> None:
    """Write the model folder. Raises ValueError for a file of another dialect, OSError when writing fails."""
    # The stubs give the union of all formats' results.
    loaded: Any = mx.load(str(gguf), return_metadata=True)
    arrays: dict[str, mx.array] = loaded[0]
    metadata: dict[str, Any] = loaded[1]
    check_dialect(metadata)
    config = model_config(metadata)
    if quantized:
        config["quantization"] = {
            "group_size": GROUP_SIZE,
            "bits": BITS,
            "mode": "affine",
            "model.embed_tokens": {"group_size": GROUP_SIZE, "bits": EMBEDDING_BITS},
        }
    else:
        arrays = plain_weights(arrays)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for name, array in arrays.items():
        part = name.split(".")[2] if name.startswith("blk.") else ""
        weights[model_name(name)] = unpermute(array, heads[part]) if part in heads else array
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    write_tokenizer(metadata, folder, config["max_position_embeddings"])
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(folder / "generation_config.json", ids | RECOMMENDED_SAMPLING)
    write_json(folder / "config.json", config)


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert the demo model's GGUF file.")
    parser.add_argument("gguf", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--weights", choices=("float32", "quantized"), required=True)
    arguments = parser.parse_args()
    # Moving and widening numbers needs no GPU, and none may be there.
    mx.set_default_device(mx.cpu)
    convert(arguments.gguf, arguments.folder, quantized=arguments.weights == "quantized")


if __name__ == "__main__":
    main()
