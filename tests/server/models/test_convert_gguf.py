"""The conversion on a small GGUF file made here; the demo model itself is checked in `test_demo.py`."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from tokenizers import Tokenizer

from server.models.convert_gguf import convert, model_name, plain_weights, unpermute

HEADS, KV_HEADS, HEAD = 4, 2, 8
HIDDEN = HEADS * HEAD
TOKENS = ["<end>", "<start>", "<stop>", "a", "b", "ab", "1", "2"]


def test_names() -> None:
    assert model_name("token_embd.scales") == "model.embed_tokens.scales"
    assert model_name("blk.12.ffn_down.weight") == "model.layers.12.mlp.down_proj.weight"
    with pytest.raises(KeyError):
        model_name("blk.0.ssm_in.weight")


def test_unpermute_undoes_llama_cpp() -> None:
    rows = np.arange(2 * 8 * 3).reshape(16, 3)
    # As llama.cpp's converter has it: the two halves of each head's rows, interleaved.
    permuted = rows.reshape(2, 2, 4, 3).swapaxes(1, 2).reshape(16, 3)
    assert not np.array_equal(permuted, rows)
    assert np.array_equal(np.array(unpermute(mx.array(permuted), 2)), rows)


@pytest.mark.parametrize("bits", [4, 8])
def test_plain_weights_are_not_rounded(bits: int) -> None:
    random = np.random.default_rng(bits)
    levels = random.integers(0, 2**bits, (3, 64), dtype=np.uint32)
    per_word = 32 // bits
    shifts = np.arange(per_word, dtype=np.uint32) * bits
    words = (levels.reshape(3, -1, per_word) << shifts).sum(-1, dtype=np.uint32)
    scales = random.standard_normal((3, 2)).astype(np.float16)
    biases = random.standard_normal((3, 2)).astype(np.float16)
    plain = plain_weights({"w.weight": mx.array(words), "w.scales": mx.array(scales), "w.biases": mx.array(biases)})
    wide = levels.reshape(3, 2, 32) * scales[..., None].astype(np.float64) + biases[..., None]
    assert list(plain) == ["w.weight"]
    assert plain["w.weight"].dtype == mx.float32
    assert np.array_equal(np.array(plain["w.weight"]), wide.reshape(3, 64).astype(np.float32))


def metadata() -> dict[str, mx.array | str | list[str]]:
    integers = {
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": 16,
        "llama.block_count": 1,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.context_length": 128,
        "llama.vocab_size": len(TOKENS),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
    }
    return {
        **{key: mx.array(value, mx.uint32) for key, value in integers.items()},
        "llama.rope.freq_base": mx.array(1e4, mx.float32),
        "llama.attention.layer_norm_rms_epsilon": mx.array(1e-5, mx.float32),
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": mx.array([3, 3, 3, 1, 1, 1, 1, 1], mx.int32),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.chat_template": "{{ messages }}",
    }


def weights() -> dict[str, mx.array]:
    random = np.random.default_rng(0)
    shapes = {
        "token_embd.weight": (len(TOKENS), HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_k.weight": (KV_HEADS * HEAD, HIDDEN),
        "blk.0.attn_v.weight": (KV_HEADS * HEAD, HIDDEN),
    }
    return {name: mx.array(random.standard_normal(s).astype(np.float16)) for name, s in shapes.items()}


def test_convert_writes_a_model_folder(tmp_path: Path) -> None:
    arrays = weights()
    mx.save_gguf(str(tmp_path / "m.gguf"), arrays, metadata())
    convert(tmp_path / "m.gguf", tmp_path, quantized=False)

    written = mx.load(str(tmp_path / "model.safetensors"))
    prefix = "model.layers.0.self_attn"
    assert isinstance(written, dict)
    assert {array.dtype for array in written.values()} == {mx.float32}
    q, k, v = (written[f"{prefix}.{part}_proj.weight"] for part in "qkv")
    assert mx.array_equal(q, unpermute(arrays["blk.0.attn_q.weight"], HEADS))
    assert mx.array_equal(k, unpermute(arrays["blk.0.attn_k.weight"], KV_HEADS))
    assert mx.array_equal(v, arrays["blk.0.attn_v.weight"])

    config = json.loads((tmp_path / "config.json").read_bytes())
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (HEADS, KV_HEADS)
    assert (config["max_position_embeddings"], config["rms_norm_eps"]) == (128, 1e-5)
    assert "quantization" not in config
    generation = json.loads((tmp_path / "generation_config.json").read_bytes())
    assert (generation["eos_token_id"], generation["temperature"], generation["top_p"]) == (2, 0.2, 0.9)

    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("<start>ab12").ids == [1, 5, 6, 7]
    assert tokenizer.decode([1, 5, 6], skip_special_tokens=True) == "ab1"
    settings = json.loads((tmp_path / "tokenizer_config.json").read_bytes())
    assert (settings["bos_token"], settings["eos_token"]) == ("<start>", "<stop>")
    assert settings["chat_template"] == "{{ messages }}"


@pytest.mark.parametrize("key", ["general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre"])
def test_another_dialect_is_refused(tmp_path: Path, key: str) -> None:
    mx.save_gguf(str(tmp_path / "m.gguf"), weights(), {**metadata(), key: "other"})
    with pytest.raises(ValueError, match=key):
        convert(tmp_path / "m.gguf", tmp_path, quantized=False)
    assert not (tmp_path / "config.json").exists()
