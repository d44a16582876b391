import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

SCRIPT = Path(__file__).with_name("tiny.py")
LAST_NUMBERS = {
    "model.embed_tokens.weight": ((49_152, 64), [0.019058, -0.274669, 0.114105]),
    "lm_head.weight": ((49_152, 64), [0.125247, 0.018907, 0.14008]),
    "model.layers.0.self_attn.k_proj.weight": ((32, 64), [-0.038754, 0.15377, 0.105075]),
    "model.layers.1.mlp.down_proj.weight": ((64, 176), [0.043389, -0.074959, 0.030727]),
}


def test_is_the_llama_that_was_agreed_on(tiny_model: Path) -> None:
    config = json.loads((tiny_model / "config.json").read_bytes())
    assert config["hidden_size"] == 64
    assert config["num_hidden_layers"] == 2
    assert config["hidden_size"] // config["num_attention_heads"] == 32
    assert config["num_key_value_heads"] == 1
    assert config["vocab_size"] == 49_152
    assert config["max_position_embeddings"] == 65_536
    assert not config["tie_word_embeddings"]


def test_has_the_same_weights_everywhere(tiny_model: Path) -> None:
    with safe_open(str(tiny_model / "model.safetensors"), "np") as weights:
        arrays = {name: weights.get_tensor(name) for name in weights.keys()}  # noqa: SIM118  # no mapping
    assert {array.dtype.name for array in arrays.values()} == {"float32"}
    assert len(arrays) == 3 + 2 * 9
    for name, (shape, last) in LAST_NUMBERS.items():
        assert arrays[name].shape == shape
        # Not compared by bits: numpy promises no last digit across processors.
        assert arrays[name][-1, -3:] == pytest.approx(last, abs=1e-5), name


def test_speaks_the_demo_model_s_language(tiny_model: Path, demo_model: Path) -> None:
    tokenizer = (tiny_model / "tokenizer.json").read_bytes()
    assert tokenizer == (demo_model / "tokenizer.json").read_bytes()
    assert Tokenizer.from_str(tokenizer.decode()).get_vocab_size() == 49_152
    tiny, demo = (json.loads((f / "tokenizer_config.json").read_bytes()) for f in (tiny_model, demo_model))
    assert tiny["chat_template"] == demo["chat_template"]
    assert tiny["model_max_length"] == 65_536


def test_can_be_made_by_hand(tmp_path: Path, tiny_model: Path) -> None:
    def run(*arguments: str) -> str:
        command = [sys.executable, str(SCRIPT), *arguments]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=tmp_path).stdout

    assert run().strip() == str(tiny_model)
    made = tmp_path / "made"
    assert run(str(made)).strip() == str(made)
    assert sorted(os.listdir(made)) == sorted(os.listdir(tiny_model))
    for name in os.listdir(made):
        assert (made / name).read_bytes() == (tiny_model / name).read_bytes(), name
