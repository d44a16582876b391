"""What is read from a model folder's JSON files, and what the user is told when they make no sense."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.model_files import UNSTATED_CONTEXT, read_model_files
from protocol.messages import SamplingParams

CONFIG = {"model_type": "llama", "vocab_size": 1000, "max_position_embeddings": 4096, "eos_token_id": 2}


def folder(tmp_path: Path, **files: Any) -> Path:
    """A model folder; `config={…}` is config.json, and so on. `config` has a default."""
    for name, content in {"config": CONFIG, **files}.items():
        (tmp_path / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return tmp_path


def test_the_tiny_model(tiny_model: Path) -> None:
    files = read_model_files(tiny_model)
    assert files.model_type == "llama"
    assert files.context == 65_536
    assert files.vocab_size == 49_152
    assert files.eos_token_ids == (2,)
    assert files.chat_template is not None
    assert "<|im_start|>" in files.chat_template
    assert files.special_tokens["eos_token"] == "<|im_end|>"
    assert files.temperature is None
    assert files.top_p is None


@pytest.mark.parametrize(
    ("config", "context"),
    [
        ({"max_position_embeddings": 8192}, 8192),
        ({"n_positions": 1024}, 1024),
        ({"max_sequence_length": 2048}, 2048),
        ({"seq_length": 512}, 512),
        ({"text_config": {"max_position_embeddings": 131_072}}, 131_072),
        ({"max_position_embeddings": None, "text_config": {"n_ctx": 77}}, 77),
        ({"max_position_embeddings": 4096, "text_config": {"max_position_embeddings": 8}}, 4096),
        ({"max_position_embeddings": -1, "n_positions": 640}, 640),
        ({}, UNSTATED_CONTEXT),
    ],
)
def test_context(tmp_path: Path, config: dict[str, Any], context: int) -> None:
    assert read_model_files(folder(tmp_path, config={"model_type": "x", **config})).context == context


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}, 131_072),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096}, 32_768),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32_768}, 32_768),
        (None, 32_768),
    ],
)
def test_context_stretched_by_yarn(tmp_path: Path, rope: dict[str, Any] | None, context: int) -> None:
    config = {**CONFIG, "max_position_embeddings": 32_768, "rope_scaling": rope}
    assert read_model_files(folder(tmp_path, config=config)).context == context


@pytest.mark.parametrize(("stated", "context"), [(2048, 2048), (1e30, UNSTATED_CONTEXT), (int(1e30), UNSTATED_CONTEXT)])
def test_context_of_the_tokenizer_is_the_last_resort(tmp_path: Path, stated: float, context: int) -> None:
    path = folder(tmp_path, config={"model_type": "mamba"}, tokenizer_config={"model_max_length": stated})
    assert read_model_files(path).context == context


def test_vocab_size_may_be_left_to_the_code(tmp_path: Path) -> None:
    assert read_model_files(folder(tmp_path, config={"model_type": "gemma3"})).vocab_size == 0
    nested = {"model_type": "gemma3", "text_config": {"vocab_size": 262_208}}
    assert read_model_files(folder(tmp_path, config=nested)).vocab_size == 262_208


ADDED = {"7": {"content": "<|eot|>", "special": True}}


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({}, (2,)),
        ({"generation_config": {"eos_token_id": [5, 6]}}, (5, 6)),
        ({"generation_config": {"eos_token_id": 5}}, (5,)),
        ({"generation_config": {"eos_token_id": None}}, (2,)),
        ({"tokenizer_config": {"eos_token": "<|eot|>", "added_tokens_decoder": ADDED}}, (2, 7)),
        ({"tokenizer_config": {"eos_token": {"content": "<|eot|>"}, "added_tokens_decoder": ADDED}}, (2, 7)),
        ({"tokenizer_config": {"eos_token": "<|eot|>"}, "added_tokens": {"<|eot|>": 8}}, (2, 8)),
        (
            {
                "tokenizer_config": {"eos_token": "<|eot|>"},
                "tokenizer": {"model": {}, "added_tokens": [{"id": 9, "content": "<|eot|>", "special": True}]},
            },
            (2, 9),
        ),
        ({"tokenizer_config": {"eos_token": "<|eot|>"}, "tokenizer": "broken"}, (2,)),
        ({"tokenizer_config": {"eos_token": "<|eot|>"}}, (2,)),
        ({"special_tokens_map": {"eos_token": "<|eot|>"}, "added_tokens": {"<|eot|>": 2}}, (2,)),
    ],
)
def test_eos_token_ids(tmp_path: Path, files: dict[str, Any], ids: tuple[int, ...]) -> None:
    assert read_model_files(folder(tmp_path, **files)).eos_token_ids == ids


def test_eos_of_the_text_config(tmp_path: Path) -> None:
    config = {"model_type": "x", "text_config": {"eos_token_id": [1, 106]}}
    assert read_model_files(folder(tmp_path, config=config)).eos_token_ids == (1, 106)


def test_sampling_options_of_the_author(tmp_path: Path) -> None:
    generation = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
    files = read_model_files(folder(tmp_path, generation_config=generation))
    assert (files.temperature, files.top_p, files.top_k) == (0.7, 0.8, 20)
    assert (files.min_p, files.repetition_penalty) == (None, 1.05)


def test_options_left_open_come_from_the_author_then_are_off(tmp_path: Path) -> None:
    generation = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05}
    files = read_model_files(folder(tmp_path, generation_config=generation))
    off = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "xtc_probability": 0.0, "xtc_threshold": 0.1}
    assert files.resolve(SamplingParams(seed=3)) == SamplingParams(**generation, **off, seed=3)
    asked = SamplingParams(
        temperature=0.0,
        top_p=1.0,
        top_k=-1,
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        xtc_probability=0.25,
        xtc_threshold=0.2,
        max_tokens=7,
        logprobs=2,
    )
    assert files.resolve(asked) == msgspec.structs.replace(asked, top_k=0)


def test_without_recommendations_all_is_off(tmp_path: Path) -> None:
    resolved = read_model_files(folder(tmp_path)).resolve(SamplingParams())
    assert (resolved.temperature, resolved.top_p, resolved.top_k, resolved.min_p) == (1.0, 1.0, 0, 0.0)
    assert (resolved.repetition_penalty, resolved.logprobs, resolved.max_tokens) == (1.0, None, None)


def test_do_sample_false_means_greedy(tmp_path: Path) -> None:
    generation = {"do_sample": False, "temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.1}
    files = read_model_files(folder(tmp_path, generation_config=generation))
    assert (files.temperature, files.top_p, files.repetition_penalty) == (0.0, None, 1.1)


def test_chat_template_sources(tmp_path: Path) -> None:
    path = folder(tmp_path)
    assert read_model_files(path).chat_template is None
    folder(tmp_path, chat_template={"chat_template": "processor"})
    assert read_model_files(path).chat_template == "processor"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "named"}]
    folder(tmp_path, tokenizer_config={"chat_template": named})
    assert read_model_files(path).chat_template == "named"
    folder(tmp_path, tokenizer_config={"chat_template": "single"})
    assert read_model_files(path).chat_template == "single"
    (path / "chat_template.jinja").write_text("fïle", encoding="utf-8")
    assert read_model_files(path).chat_template == "fïle"


def test_special_tokens(tmp_path: Path) -> None:
    tokenizer = {"bos_token": None, "eos_token": {"content": "</s>"}, "add_bos_token": True, "image_token": "<i>"}
    files = read_model_files(folder(tmp_path, tokenizer_config=tokenizer, special_tokens_map={"bos_token": "<s>"}))
    assert files.special_tokens == {"eos_token": "</s>", "image_token": "<i>"}


def test_infinity_in_a_config(tmp_path: Path) -> None:
    text = '{"model_type": "mamba2", "time_step_limit": [0.0, Infinity], "vocab_size": 512}'
    assert read_model_files(folder(tmp_path, config=text)).vocab_size == 512


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config": "{"}, "config.json can't be read"),
        ({"config": "[]"}, "config.json must hold a JSON object"),
        ({"config": {"vocab_size": 3}}, 'names no "model_type"'),
        ({"generation_config": {"temperature": "hot"}}, "generation_config.json: Expected `float | null`"),
        ({"generation_config": {"temperature": -1}}, "generation_config.json: temperature must be at least 0"),
        ({"generation_config": {"top_k": -5}}, "generation_config.json: top_k must be at least -1"),
        ({"generation_config": {"eos_token_id": "</s>"}}, "must be a token id or a list"),
        ({"generation_config": {"eos_token_id": [True]}}, "must be a token id or a list"),
        ({"tokenizer_config": {"chat_template": 3}}, '"chat_template" of .* must be a text'),
    ],
)
def test_errors_say_what_to_change(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_model_files(folder(tmp_path, **files))


def test_no_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        read_model_files(tmp_path)
    with pytest.raises(ValueError, match="is not a folder"):
        read_model_files(tmp_path / "missing")
