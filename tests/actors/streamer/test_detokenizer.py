"""Streamed text against the library's decoding of the whole, for each kind of decoder."""

import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from actors.streamer.detokenizer import (
    ByteFallbackStream,
    ByteLevelStream,
    DetokenizerFactory,
    WindowStream,
)
from actors.tokenizer.text_tokenizer import LibraryTokenizer, PythonTokenizer

INVALID = "\ufffd"
TEXTS = [
    "The capital of France is Paris.",
    "naïve café, 25 °C — “quoted”…",
    "你好，世界。这是一个测试",
    "مرحبا بالعالم שלום",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽 skin",
    "e\u0301 a\u0308 combining \u200d joiner",
    "  leading and   inner spaces\n\n\ttabs ",
    "",
]
MERGED = ["the", "Ġthe", "Ġcap", "ital", "Ġ", "ĠĠ"]
SPECIAL = ["<s>", "</s>"]


@cache
def byte_level() -> tuple[Tokenizer, dict[int, bytes]]:
    """Single bytes, some two-byte halves of characters, a few words; and each id's bytes."""
    alphabet = {chr(b): b for b in [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]}
    others = [b for b in range(256) if b not in alphabet.values()]
    alphabet |= {chr(0x100 + i): b for i, b in enumerate(others)}
    char_of = {b: c for c, b in alphabet.items()}
    halves = [
        bytes([0xF0, 0x9F]),
        bytes([0x98, 0x80]),
        bytes([0xE4, 0xBD]),
        bytes([0xA0, 0xE5]),
        bytes([0x80, 0x41]),
    ]
    tokens = [*SPECIAL, *alphabet, *("".join(char_of[b] for b in half) for half in halves), *MERGED]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken("<tool call>", normalized=False), AddedToken("[工具]", normalized=False)])
    data = {i: bytes(alphabet[c] for c in token) for token, i in vocab.items()}
    data |= dict.fromkeys(range(len(SPECIAL)), b"")
    data |= {tokenizer.token_to_id(token): token.encode() for token in ("<tool call>", "[工具]")}
    return tokenizer, data


@cache
def byte_fallback(strip: bool) -> tuple[Tokenizer, dict[str, int]]:
    """In the manner of Llama 2 (`strip`) or Gemma."""
    words = ["▁the", "▁cap", "ital", "▁", "▁▁", "é", "…", *"abcdefghijklmnopqrstuvwxyzTFP.,"]
    tokens = ["<unk>", *SPECIAL, *(f"<0x{b:02X}>" for b in range(256)), *words]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    steps = [normalizers.Prepend("▁")] if strip else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    chain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*chain, decoders.Strip(" ", 1, 0)] if strip else chain)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ["<unk>", *SPECIAL]])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    return tokenizer, vocab


@cache
def word_piece() -> Tokenizer:
    words = ["[UNK]", "[CLS]", "the", "cap", "##ital", "of", "fr", "##ance", ".", ",", "'", "s", "t", "do", "n"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[CLS]"])
    return tokenizer


@cache
def unigram() -> Tokenizer:
    pieces = [
        ("<unk>", 0.0),
        ("▁the", -1.0),
        ("▁cap", -1.5),
        ("ital", -1.5),
        ("▁", -2.0),
        ("你", -3.0),
        ("好", -3.0),
    ]
    pieces += [(char, -4.0) for char in "abcdefghijklmnopqrstuvwxyz."]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<unk>"])
    return tokenizer


@cache
def suffix_bpe() -> Tokenizer:
    vocab = {"h": 0, "i": 1, "i</w>": 2, "hi</w>": 3, "h</w>": 4}
    tokenizer = Tokenizer(models.BPE(vocab, [("h", "i</w>")], end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    return tokenizer


def factory_of(tokenizer: Tokenizer) -> DetokenizerFactory:
    return DetokenizerFactory(LibraryTokenizer(tokenizer))


def streamed(factory: DetokenizerFactory, ids: Sequence[int], prompt: Sequence[int] = ()) -> str:
    stream = factory.stream(prompt)
    return "".join(stream.push(i) for i in ids) + stream.flush()


# The last byte of a character stands for 64 code points, so these have every beginning that there is.
SOME_CHARACTERS = [chr(c).encode() for c in range(0x80, 0x110000, 0x40) if not 0xD800 <= c < 0xE000]
BEGINNINGS = {char[:size] for char in SOME_CHARACTERS for size in range(1, len(char))}


def without_cut_character(whole: str, raw: bytes) -> str:
    """`whole`, the text of `raw`, less the U+FFFD of a character that its end cut off."""
    return whole[:-1] if any(raw[-size:] in BEGINNINGS for size in (1, 2, 3)) else whole


def test_each_decoder_gets_its_kind_of_stream() -> None:
    assert isinstance(factory_of(byte_level()[0]).stream(), ByteLevelStream)
    assert isinstance(factory_of(byte_fallback(True)[0]).stream(), ByteFallbackStream)
    assert isinstance(factory_of(byte_fallback(False)[0]).stream(), ByteFallbackStream)
    for tokenizer in (word_piece(), unigram(), suffix_bpe(), Tokenizer(models.BPE({"a": 0}, []))):
        assert isinstance(factory_of(tokenizer).stream(), WindowStream)


# -- byte level --


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 300), max_size=60))
def test_byte_level_equals_the_whole_at_every_cut(ids: list[int]) -> None:
    tokenizer, data = byte_level()
    stream, sent, raw = factory_of(tokenizer).stream(), "", b""
    for i, token_id in enumerate(ids, 1):
        sent += stream.push(token_id)
        raw += data.get(token_id, b"")
        assert sent == without_cut_character(tokenizer.decode(ids[:i]), raw)
    assert stream.flush() == ""


BYTES = [1, 2, 0x7F, 0x80, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC2, 0xDF, 0xE0, 0xE4, 0xED, 0xEF, 0xF0, 0xF4, 0xF5, 0xFF]


@settings(max_examples=500, deadline=None)
@given(st.lists(st.sampled_from(BYTES), max_size=12))
def test_byte_level_border_bytes(raw: list[int]) -> None:
    tokenizer, data = byte_level()
    id_of = {piece: i for i, piece in data.items()}
    ids = [id_of[bytes([b])] for b in raw]
    expected = without_cut_character(tokenizer.decode(ids), bytes(raw))
    assert streamed(factory_of(tokenizer), ids) == expected
    for at in range(len(ids)):
        rest = streamed(factory_of(tokenizer), ids[at:], ids[:at])
        assert without_cut_character(tokenizer.decode(ids[:at]), bytes(raw[:at])) + rest == expected


def test_real_tokenizer_random_ids(tiny_model: Path) -> None:
    factory = DetokenizerFactory.load(tiny_model)
    backend = factory.tokenizer.backend
    assert backend is not None

    @settings(max_examples=200, deadline=None)
    @given(st.lists(st.integers(0, 49_400), max_size=50))
    def check(ids: list[int]) -> None:
        whole, sent = backend.decode(ids, skip_special_tokens=True), streamed(factory, ids)
        assert whole in (sent, sent + INVALID)

    check()


def test_real_tokenizer_random_texts(tiny_model: Path) -> None:
    factory = DetokenizerFactory.load(tiny_model)

    @settings(max_examples=200, deadline=None)
    @given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.sampled_from(TEXTS))
    def check(text: str) -> None:
        ids = factory.tokenizer.encode(text)
        text = factory.tokenizer.decode(ids)  # this vocabulary lacks some bytes
        assert streamed(factory, ids) == text
        for at in range(len(ids) + 1):
            cut = streamed(factory, ids[:at])
            assert text.startswith(cut)
            assert cut + streamed(factory, ids[at:], ids[:at]) == text

    check()


def test_a_written_replacement_character_is_sent_at_once(tiny_model: Path) -> None:
    factory = DetokenizerFactory.load(tiny_model)
    ids = factory.tokenizer.encode(INVALID)
    stream = factory.stream()
    assert "".join(stream.push(i) for i in ids) == INVALID


def test_special_tokens_and_unknown_ids_add_nothing() -> None:
    tokenizer, data = byte_level()
    stream = factory_of(tokenizer).stream()
    id_of = {piece: i for i, piece in data.items()}
    assert stream.push(id_of["你".encode()[:2]]) == ""
    assert stream.push(tokenizer.token_to_id("</s>")) == ""
    assert stream.push(4_000_000_000) == ""
    assert stream.push(id_of["你".encode()[2:]]) == "你"
    assert stream.push(tokenizer.token_to_id("<tool call>")) == "<tool call>"


# -- byte fallback --


def runs_decoded(tokens: list[str]) -> str:
    """What a stream should show of byte-fallback tokens, special tokens left out."""
    text, run = "", b""

    def close(run: bytes, last: bool) -> str:
        for end in range(len(run), -1, -1):
            try:
                good = run[:end].decode()
            except UnicodeDecodeError:
                continue
            rest = run[end:]
            cut_off = last and rest in BEGINNINGS
            return good + ("" if cut_off else INVALID * len(rest))
        raise AssertionError

    for token in tokens:
        if token.startswith("<0x"):
            run += bytes([int(token[3:5], 16)])
        else:
            text += close(run, False) + token.replace("▁", " ")
            run = b""
    return text + close(run, True)


@settings(max_examples=300, deadline=None)
@given(st.booleans(), st.lists(st.sampled_from([*BYTES, "▁the", "▁", "é", "a"]), max_size=14))
def test_byte_fallback_shows_characters_and_marks_the_rest_of_an_invalid_run(
    strip: bool, spec: list[int | str]
) -> None:
    tokenizer, vocab = byte_fallback(strip)
    tokens = [part if isinstance(part, str) else f"<0x{part:02X}>" for part in spec]
    expected = runs_decoded(tokens)
    if strip and expected.startswith(" "):
        expected = expected[1:]
    assert streamed(factory_of(tokenizer), [vocab[token] for token in tokens]) == expected


byte_runs = st.one_of(
    st.sampled_from(["▁the", "▁", "▁▁", "é", "a"]).map(lambda token: [token]),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=3).map(
        lambda text: [*(f"<0x{b:02X}>" for b in text.encode()), "a"]
    ),
    # Invalid from its first byte, so nothing of it could have been sent before.
    st.tuples(st.sampled_from([0x80, 0xBF, 0xC0, 0xFF]), st.lists(st.sampled_from(BYTES), max_size=4)).map(
        lambda run: [*(f"<0x{b:02X}>" for b in (run[0], *run[1])), "a"]
    ),
)


@settings(max_examples=300, deadline=None)
@given(st.booleans(), st.lists(byte_runs, max_size=8))
def test_byte_fallback_equals_the_library(strip: bool, runs: list[list[str]]) -> None:
    tokenizer, vocab = byte_fallback(strip)
    ids = [vocab[token] for run in runs for token in run]
    # Special tokens are left out before bytes are put together, so they don't end a run.
    ids = [i for token_id in ids for i in (token_id, vocab["</s>"])]
    assert streamed(factory_of(tokenizer), ids) == tokenizer.decode(ids)


@pytest.mark.parametrize("strip", [True, False])
@pytest.mark.parametrize("text", TEXTS)
def test_byte_fallback_continues_a_prompt_at_every_cut(strip: bool, text: str) -> None:
    tokenizer, _ = byte_fallback(strip)
    factory = factory_of(tokenizer)
    ids = tokenizer.encode(text).ids
    whole = tokenizer.decode(ids)
    for at in range(len(ids) + 1):
        cut = streamed(factory, ids[:at])
        assert INVALID not in cut
        assert cut + streamed(factory, ids[at:], ids[:at]) == whole


def test_leading_space_is_dropped_only_at_the_very_beginning() -> None:
    tokenizer, vocab = byte_fallback(True)
    factory = factory_of(tokenizer)
    the, start = vocab["▁the"], vocab["<s>"]
    assert streamed(factory, [the, the]) == "the the"
    assert streamed(factory, [the, the], [start]) == "the the"
    assert streamed(factory, [the, the], [start, the]) == " the the"
    assert streamed(factory, [the], [start, vocab["▁"]]) == " the"
    gemma, vocab = byte_fallback(False)
    assert streamed(factory_of(gemma), [vocab["▁the"]]) == " the"


def test_a_cut_character_is_dropped_and_a_broken_one_is_marked() -> None:
    tokenizer, vocab = byte_fallback(True)
    factory = factory_of(tokenizer)
    half = [vocab[f"<0x{b:02X}>"] for b in "😀".encode()[:3]]
    assert streamed(factory, [vocab["a"], *half]) == "a"
    assert streamed(factory, [*half, vocab["a"]]) == INVALID * 3 + "a" == tokenizer.decode([*half, vocab["a"]])


# -- every other decoder --


@pytest.mark.parametrize("make", [word_piece, unigram, suffix_bpe])
def test_windowed_streams_equal_the_whole(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    factory = factory_of(tokenizer)

    @settings(max_examples=300, deadline=None)
    @given(st.lists(st.integers(0, tokenizer.get_vocab_size() + 3), max_size=50), st.integers(0, 50))
    def check(ids: list[int], at: int) -> None:
        prompt, rest = ids[:at], ids[at:]
        whole = tokenizer.decode(ids)
        assert streamed(factory, ids) == whole
        assert tokenizer.decode(prompt) + streamed(factory, rest, prompt) == whole

    check()


def test_windowed_streams_find_the_prompts_text_behind_special_tokens() -> None:
    tokenizer = unigram()
    the, unknown = tokenizer.token_to_id("▁the"), tokenizer.token_to_id("<unk>")
    assert streamed(factory_of(tokenizer), [the], [the] + [unknown] * 20) == " the"
    assert streamed(factory_of(tokenizer), [the], [unknown] * 20) == "the"


@cache
def python_tokenizer() -> PythonTokenizer:
    from transformers import ByT5Tokenizer

    return PythonTokenizer(ByT5Tokenizer())


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizers_without_the_library(text: str) -> None:
    factory = DetokenizerFactory(python_tokenizer())
    ids = factory.tokenizer.encode(text, add_special_tokens=False)
    assert isinstance(factory.stream(), WindowStream)
    assert streamed(factory, [*ids, 1, 70_000]) == text
    for at in range(len(ids)):
        assert streamed(factory, ids[:at]) == text.encode()[:at].decode(errors="ignore")


# -- cost --


def test_windows_stay_small_when_bytes_never_form_a_character() -> None:
    sizes = []

    def decode(ids: list[int]) -> str:
        sizes.append(len(ids))
        return INVALID * len(ids)

    stream = WindowStream(decode, [])
    sent = "".join(stream.push(0x80) for _ in range(1000))
    assert len(sent) >= 1000 - 3
    assert max(sizes) <= 16


def test_invalid_bytes_cost_no_more_than_text(tiny_model: Path) -> None:
    factory = DetokenizerFactory.load(tiny_model)
    backend = factory.tokenizer.backend
    assert backend is not None
    bad = backend.token_to_id("¡")
    assert backend.decode([bad]) == INVALID
    stream = factory.stream()
    began = time.process_time()
    sent = [stream.push(bad) for _ in range(50_000)]
    # 30 ms; the library's DecodeStream would take minutes, as it decodes everything again at each step.
    assert time.process_time() - began < 2.0
    assert "".join(sent) == INVALID * 50_000


def test_byte_level_tokens_are_spelled_by_their_bytes() -> None:
    tokenizer, data = byte_level()
    spelling = factory_of(tokenizer).token_bytes
    named = {i: token.encode() for i, token in enumerate(SPECIAL)}
    assert {i: spelling[i] for i in data} == data | named
    assert spelling[len(data) + 1000] == b""


@pytest.mark.parametrize("strip", [False, True])
def test_byte_fallback_tokens_are_spelled_by_their_bytes(strip: bool) -> None:
    tokenizer, vocab = byte_fallback(strip)
    spelling = factory_of(tokenizer).token_bytes
    expected = {"▁the": b" the", "ital": b"ital", "▁": b" ", "é": "é".encode(), "<0xE4>": b"\xe4", "</s>": b"</s>"}
    assert {token: spelling[vocab[token]] for token in expected} == expected


def test_other_tokens_are_spelled_as_they_are_decoded_alone() -> None:
    assert factory_of(word_piece()).token_bytes[1] == b"[CLS]"
    assert factory_of(word_piece()).token_bytes[2] == b"the"
    assert factory_of(unigram()).token_bytes[3] == b"ital"
