"""Text to ids and back, by the library and by transformers."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from actors.tokenizer.text_tokenizer import InvalidText, LibraryTokenizer, PythonTokenizer, load_tokenizer


def save_small(folder: Path, *, eos_is_special: bool = True) -> Tokenizer:
    """A word tokenizer whose post-processor adds `<s>`."""
    words = ["<unk>", "<s>", "</s>", "hello", "world", "<tool>"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<unk>", "<s>"])
    tokenizer.add_tokens([AddedToken("</s>", normalized=False, special=eos_is_special)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def test_special_tokens_are_added_as_the_post_processor_says(tmp_path: Path) -> None:
    save_small(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("hello world") == [1, 3, 4]
    assert tokenizer.encode("hello world", add_special_tokens=False) == [3, 4]
    assert tokenizer.encode("<s>hello</s>", add_special_tokens=False) == [1, 3, 2]
    assert tokenizer.vocab_size == 6


def test_decode_keeps_special_tokens_and_ignores_unknown_ids(tmp_path: Path) -> None:
    save_small(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode([1, 3, 2, 4_000_000_000]) == "<s>hello</s>"
    assert tokenizer.decode([1, 3, 2], skip_special_tokens=True) == "hello"
    assert tokenizer.decode([]) == ""


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    small = save_small(tmp_path)
    small.enable_truncation(2)
    small.enable_padding(length=8)
    small.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode("hello world hello") == [1, 3, 4, 3]


@pytest.mark.parametrize(
    "config",
    [{"eos_token": "</s>"}, {"added_tokens_decoder": {"2": {"content": "</s>", "special": True}}}],
)
def test_a_token_that_only_the_config_calls_special(tmp_path: Path, config: dict[str, object]) -> None:
    save_small(tmp_path, eos_is_special=False)
    assert load_tokenizer(tmp_path).decode([3, 2], skip_special_tokens=True) == "hello</s>"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": "<unheard>"}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode([3, 2], skip_special_tokens=True) == "hello"
    assert tokenizer.encode("hello</s>") == [1, 3, 2]
    assert tokenizer.vocab_size == 6


def test_the_fast_path_gives_the_same_ids(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(tiny_model)
    backend = tokenizer.backend
    assert backend is not None

    @settings(max_examples=200, deadline=None)
    @given(st.text(st.characters(exclude_categories=["Cs"])))
    def check(text: str) -> None:
        assert tokenizer.encode(text) == backend.encode(text).ids

    check()


def test_200_000_tokens(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(tiny_model)
    text = "The engine streams tokens to many readers, and none of them waits. " * 15_000
    began = time.process_time()
    ids = tokenizer.encode(text)
    # About 0.4 s on two cores; a quadratic path would take minutes.
    assert time.process_time() - began < 20
    assert len(ids) >= 200_000
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("text", ["ab\ud800", "ab\udfff cd", "ab\udc80\ud83d"])
def test_a_lone_surrogate_is_named(tiny_model: Path, text: str) -> None:
    with pytest.raises(InvalidText, match=f"lone surrogate .U.{ord(text[2]):04X}. at character 2"):
        load_tokenizer(tiny_model).encode(text)


def test_a_broken_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json can't be loaded"):
        load_tokenizer(tmp_path)


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match=r"holds no tokenizer\.json.*trust-remote-code"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_written_in_python(tmp_path: Path) -> None:
    from transformers import ByT5Tokenizer

    ByT5Tokenizer().save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, PythonTokenizer)
    assert tokenizer.backend is None
    ids = tokenizer.encode("héllo 😀")
    assert ids[-1] == 1  # this one ends plain prompts with </s>
    assert tokenizer.encode("héllo 😀", add_special_tokens=False) == ids[:-1]
    assert tokenizer.decode([*ids, 70_000]) == "héllo 😀</s>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "héllo 😀"
    with pytest.raises(InvalidText):
        tokenizer.encode("\ud800")


def test_a_sentencepiece_folder_gets_a_library_tokenizer(tmp_path: Path) -> None:
    import sentencepiece

    corpus = tmp_path / "corpus.txt"
    corpus.write_text("the capital of France is Paris\nhello world\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, LibraryTokenizer)
    ids = tokenizer.encode("hello Paris 😀", add_special_tokens=False)
    assert tokenizer.decode(ids) == "hello Paris 😀"


LOADED = """
import sys
from actors.tokenizer.text_tokenizer import load_tokenizer
load_tokenizer(sys.argv[1]).encode("hello")
print(*(name for name in ("transformers", "mlx", "mlx.core", "torch") if name in sys.modules))
"""


def test_what_loading_imports(tiny_model: Path, tmp_path: Path) -> None:
    from transformers import ByT5Tokenizer

    def loaded(folder: Path) -> list[str]:
        command = [sys.executable, "-c", LOADED, str(folder)]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.split()

    assert loaded(tiny_model) == []
    ByT5Tokenizer().save_pretrained(tmp_path)
    assert loaded(tmp_path) == ["transformers"]
