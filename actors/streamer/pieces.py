"""What single tokens add to a text: the table of pieces that `detokenizer.py` puts together, and their spelling.

Owns the reading of a tokenizer's decoder. Used by the streamer on its main thread.
"""

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import tokenizers

from actors.tokenizer.text_tokenizer import TextTokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

Piece = str | bytes | None


class Vocabulary(NamedTuple):
    """How a model's tokens become text. `pieces` is None where single tokens have no rule but the tokenizer's
    decoder; `strip` is the leading character to strip and how many at most, None for byte-level tokens."""

    pieces: "Pieces | None"
    strip: tuple[str, int] | None
    spelling: "Spelling"


def read_vocabulary(tokenizer: TextTokenizer) -> Vocabulary:
    """The vocabulary of a tokenizer, as its decoder has it."""
    backend = tokenizer.backend
    if backend is None or backend.decoder is None:
        return Vocabulary(None, None, Spelling(tokenizer, None))
    decoder: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    stages: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    if [stage["type"] for stage in stages] == ["ByteLevel"]:
        pieces = Pieces(backend, _byte_level_piece)
        return Vocabulary(pieces, None, Spelling(tokenizer, pieces))
    rules = _byte_fallback_rules(stages)
    if rules is None:
        return Vocabulary(None, None, Spelling(tokenizer, None))
    replaced, strip, strip_count = rules
    pieces = Pieces(backend, partial(_byte_fallback_piece, replaced))
    return Vocabulary(pieces, (strip, strip_count), Spelling(tokenizer, pieces))


class Pieces(dict[int, Piece]):
    """What each token id adds to a text, filled as ids are met.

    A str is whole characters, bytes are a part of a UTF-8 sequence, None adds nothing (special tokens).
    """

    def __init__(self, backend: tokenizers.Tokenizer, piece_of: Callable[[str], Piece]) -> None:
        super().__init__()
        self._id_to_token = backend.id_to_token
        self._piece_of = piece_of
        self._special = {t.content for t in backend.get_added_tokens_decoder().values() if t.special}

    def __missing__(self, token_id: int) -> Piece:
        token = self._id_to_token(token_id)
        if token is None:
            return None  # outside the vocabulary; not remembered, as such ids have no bound
        piece = self[token_id] = None if token in self._special else self._piece_of(token)
        return piece


class Spelling(dict[int, bytes]):
    """The bytes each token id stands for by itself, filled as ids are met: a leading space included, a special
    token as its own name, nothing for ids that have no token. Only to be asked for ids that the model can bring."""

    def __init__(self, tokenizer: TextTokenizer, pieces: Pieces | None) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._pieces = pieces

    def __missing__(self, token_id: int) -> bytes:
        piece = None if self._pieces is None else self._pieces[token_id]
        if piece is None:
            piece = self._tokenizer.decode([token_id], skip_special_tokens=False)
        self[token_id] = data = piece.encode() if isinstance(piece, str) else piece
        return data


def _byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level token stands for (GPT-2's `bytes_to_unicode`): printable
    Latin-1 characters are themselves, the other bytes follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _byte_level_piece(token: str) -> Piece:
    try:
        data = bytes([_ALPHABET[char] for char in token])
    except KeyError:  # an added token with characters outside the alphabet is plain text
        return token
    try:
        return data.decode() or None
    except UnicodeDecodeError:
        return data


def _byte_fallback_rules(stages: list[dict[str, Any]]) -> tuple[list[tuple[str, str]], str, int] | None:
    """The replacements and the leading characters to strip (which, how many at most) of a decoder of the
    shape Replace* ByteFallback Fuse Strip?, None for any other."""
    kinds = [stage["type"] for stage in stages]
    if "ByteFallback" not in kinds:
        return None
    at = kinds.index("ByteFallback")
    if any(kind != "Replace" for kind in kinds[:at]):
        return None
    replaced = []
    for stage in stages[:at]:
        if "String" not in stage["pattern"]:
            return None
        replaced.append((stage["pattern"]["String"], stage["content"]))
    if kinds[at + 1 :] == ["Fuse"]:
        return replaced, "", 0
    if kinds[at + 1 :] == ["Fuse", "Strip"] and stages[-1]["stop"] == 0:
        return replaced, stages[-1]["content"], stages[-1]["start"]
    return None


def _byte_fallback_piece(replaced: list[tuple[str, str]], token: str) -> Piece:
    for old, new in replaced:
        token = token.replace(old, new)
    byte = _BYTE_TOKEN.fullmatch(token)
    return token if byte is None else bytes.fromhex(byte[1])
