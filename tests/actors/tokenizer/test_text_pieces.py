"""Long texts tokenized piece by piece: the same ids as in one go."""

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from actors.tokenizer.text_pieces import MARGIN, TextPieces, can_cut
from actors.tokenizer.text_tokenizer import LibraryTokenizer

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
SPECIAL = "<|end|>"
# What splitting expressions treat in different ways, and what normalization joins.
PARTS = ["a", "b", "Ab", "the", " the", " ", "  ", "\n", "\r\n", "\t", "7", "123", "4567", ".", "!!", ",", "'s", "’"]
PARTS += ["é", "e\u0301", "\u0301", "漢字", "🙂", "<", "<|", "<|end", SPECIAL, "aaaaaaaaaaaaaaaaaaaa", " " * 40]


TAILS = ["  \n  \n b", "   b", "12345", "it's", f"<{SPECIAL}!", "e\u0301"]


def byte_level(expression: str | None, normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    """A small byte-level BPE in the manner of Llama 3 (with an expression) or GPT-2."""
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = (
        pre_tokenizers.ByteLevel(add_prefix_space=False)
        if expression is None
        else pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(expression), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    # Whole words become tokens, so that a word cut in two gives other ids.
    tokenizer.train_from_iterator(["no" + tail + "so" for tail in (*PARTS, *TAILS)] * 20, trainer)
    tokenizer.add_special_tokens([SPECIAL])
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": lambda: byte_level(None),
    "llama3": lambda: byte_level(LLAMA3),
    "qwen": lambda: byte_level(LLAMA3, normalizers.NFC()),
}


def joined(pieces: Iterable[list[int]]) -> list[int]:
    """All ids, in one list."""
    return [id_ for piece in pieces for id_ in piece]


@pytest.fixture(scope="module", params=[*KINDS, "demo"])
def backend(request: pytest.FixtureRequest, tiny_model: Path) -> Tokenizer:
    if request.param == "demo":
        return Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    return KINDS[request.param]()


@given(parts=st.lists(st.sampled_from(PARTS), max_size=150), window=st.integers(MARGIN + 1, 2 * MARGIN))
@settings(max_examples=150, deadline=None)
def test_pieces_give_the_ids_of_the_whole(backend: Tokenizer, parts: list[str], window: int) -> None:
    text = "".join(parts)
    assert joined(TextPieces(backend, window).encode(text)) == backend.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("tail", TAILS)
def test_wherever_a_window_ends(backend: Tokenizer, tail: str) -> None:
    pieces = TextPieces(backend, 2 * MARGIN)
    for start in range(3 * MARGIN):
        text = "no, " * (start // 4) + "." * (start % 4) + tail + " and so on" * 20
        assert joined(pieces.encode(text)) == backend.encode(text, add_special_tokens=False).ids


def test_pieces_are_small(backend: Tokenizer) -> None:
    assert can_cut(backend)
    pieces = list(TextPieces(backend).encode("Some words, and 12 numbers. " * 2000))
    assert len(pieces) > 20
    assert max(map(len, pieces)) < 2000


def test_one_endless_word_is_one_piece(backend: Tokenizer) -> None:
    text = "a b " + "x" * 20_000
    assert joined(TextPieces(backend).encode(text)) == backend.encode(text, add_special_tokens=False).ids


def test_what_the_post_processor_adds_is_around_the_pieces() -> None:
    backend = byte_level(LLAMA3)
    end = backend.token_to_id(SPECIAL)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL} $A {SPECIAL} {SPECIAL}", special_tokens=[(SPECIAL, end)]
    )
    tokenizer = LibraryTokenizer(backend)
    text = "Some words " * 500
    for add in (True, False):
        assert joined(tokenizer.encode_in_pieces(text, add)) == tokenizer.encode(text, add)


def with_pre_tokenizer(pre_tokenizer: pre_tokenizers.PreTokenizer) -> Tokenizer:
    tokenizer = byte_level(None)
    tokenizer.pre_tokenizer = pre_tokenizer
    return tokenizer


def with_added(token: AddedToken) -> Tokenizer:
    tokenizer = byte_level(None)
    tokenizer.add_tokens([token])
    return tokenizer


@pytest.mark.parametrize(
    "tokenizer",
    [
        pytest.param(lambda: with_pre_tokenizer(pre_tokenizers.Metaspace()), id="metaspace"),
        pytest.param(lambda: with_pre_tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=True)), id="prefix space"),
        pytest.param(lambda: byte_level(r"(?<=a)b|\w+|\W"), id="looks behind"),
        pytest.param(lambda: byte_level(r"^\s|\w+|\W"), id="knows the beginning"),
        pytest.param(lambda: byte_level(LLAMA3, normalizers.Prepend("▁")), id="prepends"),
        pytest.param(lambda: with_added(AddedToken("<x>", lstrip=True)), id="strips around an added token"),
    ],
)
def test_others_are_tokenized_in_one_go(tokenizer: Callable[[], Tokenizer]) -> None:
    backend = tokenizer()
    assert not can_cut(backend)
    text = "Some words " * 500
    assert list(LibraryTokenizer(backend).encode_in_pieces(text)) == [backend.encode(text).ids]
