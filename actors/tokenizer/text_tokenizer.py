"""Text to token ids and back, for one model: the tokenizer behind one interface, whatever the folder holds.

Owns loading it. Used on the main thread of a tokenizer process and, for its decoder, by the streamer's
detokenizer. A folder with `tokenizer.json` is read by the `tokenizers` library alone; transformers is
imported only for the others, and never loads MLX.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from actors.model_files import read_json, read_special_tokens
from actors.tokenizer.text_pieces import TextPieces, can_cut


class InvalidText(ValueError):
    """A text that can't be tokenized because it is no Unicode text. The message names the place."""


class TextTokenizer(Protocol):
    """One model's tokenizer.

    `vocab_size` counts all ids it knows. `backend` is the `tokenizers` object it works with, None for a
    tokenizer that is written in Python.
    """

    vocab_size: int
    backend: tokenizers.Tokenizer | None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`, with the BOS and the like that the tokenizer's post-processor adds to a plain
        prompt unless `add_special_tokens` is off (a rendered chat template holds its own).

        Raises InvalidText for a lone surrogate.
        """
        ...

    def encode_in_pieces(self, text: str, add_special_tokens: bool = True) -> Iterator[list[int]]:
        """The ids that `encode` gives, some at a time where this tokenizer allows it: see `TextPieces`."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of `ids`; ids outside the vocabulary add nothing."""
        ...


class LibraryTokenizer:
    """A tokenizer of the `tokenizers` library."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend: tokenizers.Tokenizer | None = backend
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self._decode = backend.decode
        # The batch form without offsets takes 60 % of the time of `encode`.
        self._encode = backend.encode_batch_fast
        self._pieces = TextPieces(backend) if can_cut(backend) else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """See `TextTokenizer.encode`."""
        check_text(text)
        return self._encode([text], add_special_tokens=add_special_tokens)[0].ids

    def encode_in_pieces(self, text: str, add_special_tokens: bool = True) -> Iterator[list[int]]:
        """See `TextTokenizer.encode_in_pieces`."""
        around = self._around() if add_special_tokens else ([], [])
        if self._pieces is None or around is None:
            yield self.encode(text, add_special_tokens)
            return
        check_text(text)
        yield around[0]
        yield from self._pieces.encode(text)
        yield around[1]

    def _around(self) -> tuple[list[int], list[int]] | None:
        """What the post-processor puts before and behind a text; None when that is not what it does."""
        text, processed = self.encode("a", add_special_tokens=False), self.encode("a")
        for start in range(len(processed) - len(text) + 1):
            if processed[start : start + len(text)] == text:
                return processed[:start], processed[start + len(text) :]
        return None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """See `TextTokenizer.decode`."""
        return self._decode(ids, skip_special_tokens=skip_special_tokens)


class PythonTokenizer:
    """A tokenizer that transformers or the model's own code implements in Python."""

    backend: tokenizers.Tokenizer | None = None

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = len(tokenizer)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """See `TextTokenizer.encode`."""
        check_text(text)
        ids: list[int] = self._tokenizer.encode(
            text, add_special_tokens=add_special_tokens, truncation=False, padding=False, verbose=False
        )
        return ids

    def encode_in_pieces(self, text: str, add_special_tokens: bool = True) -> Iterator[list[int]]:
        """See `TextTokenizer.encode_in_pieces`; here it is all one piece."""
        yield self.encode(text, add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """See `TextTokenizer.decode`."""
        known = [i for i in ids if i < self.vocab_size]
        text: str = self._tokenizer.decode(
            known, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text


def check_text(text: str) -> None:
    """Raise InvalidText when `text` holds a lone surrogate, which no UTF-8 can carry."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise InvalidText(
            f"the text holds a lone surrogate (U+{code:04X}) at character {error.start}, so it is not valid Unicode"
        ) from None


def load_tokenizer(model_path: str | Path, trust_remote_code: bool = False) -> TextTokenizer:
    """The tokenizer of the model in folder `model_path`, read from that folder alone.

    `trust_remote_code` lets a folder without `tokenizer.json` run tokenizer code of its own. Raises
    ValueError, saying what to change, when the folder holds no tokenizer that can be loaded.
    """
    folder = Path(model_path)
    file = folder / "tokenizer.json"
    if not file.is_file():
        return _load_with_transformers(folder, trust_remote_code)
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{file} can't be loaded ({error}); download the model again") from None
    _declare_special_tokens(backend, folder)
    return LibraryTokenizer(backend)


def _declare_special_tokens(backend: tokenizers.Tokenizer, folder: Path) -> None:
    """Mark as special what only `tokenizer_config.json` calls so: transformers reads it from there, and an
    EOS that isn't special would show in the text."""
    named = read_special_tokens(folder)
    config = read_json(folder / "tokenizer_config.json")
    wanted = {named[name] for name in ("bos_token", "eos_token") if name in named}
    for entry in (config.get("added_tokens_decoder") or {}).values():
        if isinstance(entry, dict) and entry.get("special") is True:
            wanted.add(entry["content"])
    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for content in sorted(wanted):
        token = added.get(content) or tokenizers.AddedToken(content, normalized=False)
        if token.special or backend.token_to_id(content) is None:
            continue
        token.special = True
        backend.add_special_tokens([token])


def _load_with_transformers(folder: Path, trust_remote_code: bool) -> TextTokenizer:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # a model's own code may raise anything
        reason = " ".join(str(error).split())
        hint = "" if trust_remote_code else "; if it needs code of its own, allow it with --trust-remote-code"
        raise ValueError(
            f"{folder} holds no tokenizer.json, and transformers finds no other tokenizer there ({reason}){hint}"
        ) from None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if isinstance(backend, tokenizers.Tokenizer):
        return LibraryTokenizer(backend)
    return PythonTokenizer(tokenizer)
