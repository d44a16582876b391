"""Token ids to text while they are generated: one factory per model, one tiny object per stream.

Owns the rules of what text is certain after a token. Used by the streamer on its main thread, once per
token, so a push costs well under a microsecond on the two kinds of decoder that nearly all models have:

- byte-level (GPT-2, Llama 3, Qwen, Mistral's Tekken …): a token is some bytes of UTF-8;
- byte fallback (Llama 2, Mistral, Gemma, Phi 3 …): a token is text, or one byte of UTF-8 as `<0xE4>`.

Both are decoded here from a table of pieces (`pieces.py`). `tokenizers.decoders.DecodeStream` isn't used: it keeps
back text as long as it ends in U+FFFD, decodes all of that again at each step, and raises once a byte-fallback
character turns out to be part of an invalid run. Every other decoder, and tokenizers without the library,
decode a short window of ids again at each token.

Whatever the kind, the pieces of a stream joined are the text that the generated ids add to the prompt's,
special tokens and ids outside the vocabulary left out, without a character that the end cut off.
"""

from codecs import utf_8_decode
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from actors.streamer.pieces import Pieces, Vocabulary, read_vocabulary
from actors.tokenizer.text_tokenizer import TextTokenizer, load_tokenizer

_INVALID = "\ufffd"
_MAX_UNFINISHED = 3  # bytes: a UTF-8 character has at most four
_CONTEXT = 8  # ids that a decoded window keeps before the next one


class DetokenizerStream(Protocol):
    """The detokenizer of one stream of generated tokens."""

    def push(self, token_id: int) -> str:
        """Take the next token; returns the text that became certain, often none."""
        ...

    def flush(self) -> str:
        """End the stream; returns what is still to be sent. An unfinished character is dropped."""
        ...


class DetokenizerFactory:
    """Makes the streams of one model. `tokenizer` is shared by all of them; `token_bytes` spells single tokens."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        vocabulary = read_vocabulary(tokenizer)
        self.token_bytes: Mapping[int, bytes] = vocabulary.spelling
        self._make = _maker(tokenizer, vocabulary)

    @classmethod
    def load(cls, model_path: str | Path, trust_remote_code: bool = False) -> "DetokenizerFactory":
        """The factory for the model in folder `model_path`; raises ValueError as `load_tokenizer` does."""
        return cls(load_tokenizer(model_path, trust_remote_code))

    def stream(self, prompt_ids: Sequence[int] = ()) -> DetokenizerStream:
        """A stream whose tokens continue `prompt_ids`: a leading space is dropped only where the prompt
        holds no text, and a character that the prompt began is completed."""
        return self._make(prompt_ids)


def _maker(tokenizer: TextTokenizer, vocabulary: Vocabulary) -> Callable[[Sequence[int]], DetokenizerStream]:
    if vocabulary.pieces is None:
        return partial(WindowStream, partial(tokenizer.decode, skip_special_tokens=True))
    if vocabulary.strip is None:
        return partial(ByteLevelStream, vocabulary.pieces)
    return partial(ByteFallbackStream, vocabulary.pieces, *vocabulary.strip)


def _unfinished(pieces: Pieces, prompt_ids: Sequence[int]) -> bytes:
    """The bytes at the end of a prompt that begin a character."""
    tail = b""
    for token_id in reversed(prompt_ids):
        piece = pieces[token_id]
        if isinstance(piece, str):
            break
        if piece is not None:
            tail = piece + tail
            if len(tail) >= _MAX_UNFINISHED:
                break
    return _split(tail[-_MAX_UNFINISHED:], "replace")[1]


def _split(data: bytes, errors: str) -> tuple[str, bytes]:
    """The text of `data`, and the bytes at its end that begin a character."""
    text, used = utf_8_decode(data, errors, False)
    rest = data[used:]
    if len(rest) == 2 and b"\xed\xa0" <= rest < b"\xee":
        # Python waits for the third byte of an encoded surrogate, but no character begins like that.
        return text + utf_8_decode(rest, errors, True)[0], b""
    return text, rest


class ByteLevelStream:
    """Tokens are pieces of UTF-8; invalid bytes become U+FFFD as in the whole text (Unicode's "maximal
    subparts", which both Rust and Python follow)."""

    __slots__ = ("_pending", "_pieces")

    def __init__(self, pieces: Pieces, prompt_ids: Sequence[int]) -> None:
        self._pieces = pieces
        self._pending = _unfinished(pieces, prompt_ids)

    def push(self, token_id: int) -> str:
        """See `DetokenizerStream.push`."""
        piece = self._pieces[token_id]
        if piece is None:
            return ""
        if isinstance(piece, str):
            if not self._pending:
                return piece
            self._pending = b""
            return _INVALID + piece
        text, self._pending = _split(self._pending + piece, "replace")
        return text

    def flush(self) -> str:
        """See `DetokenizerStream.flush`."""
        self._pending = b""
        return ""


class ByteFallbackStream:
    """Tokens are text, or single bytes in runs.

    The library decodes a run as a whole: if any of it is invalid, each of its bytes becomes U+FFFD. Here a
    character is sent as soon as it is complete, and from the first invalid byte to the end of the run each
    byte becomes U+FFFD. So the two differ only for characters that come before the first invalid byte of
    their run, which to keep would mean holding text back without bound.
    """

    __slots__ = ("_broken", "_pending", "_pieces", "_strip", "_strip_count")

    def __init__(self, pieces: Pieces, strip: str, strip_count: int, prompt_ids: Sequence[int]) -> None:
        self._pieces = pieces
        self._strip = strip
        self._strip_count = strip_count
        self._broken = False
        self._pending = b""
        for token_id in prompt_ids:
            if not self._strip_count:
                break
            self.push(token_id)
        self._broken = False
        self._pending = _unfinished(pieces, prompt_ids)

    def push(self, token_id: int) -> str:
        """See `DetokenizerStream.push`."""
        piece = self._pieces[token_id]
        if piece is None:
            return ""
        if isinstance(piece, str):
            text = _INVALID * len(self._pending) + piece
            self._pending = b""
            self._broken = False
        else:
            text = self._take_byte(piece)
        return self._strip_start(text) if self._strip_count else text

    def flush(self) -> str:
        """See `DetokenizerStream.flush`."""
        self._pending = b""
        return ""

    def _take_byte(self, byte: bytes) -> str:
        if self._broken:
            return _INVALID
        data = self._pending + byte
        try:
            text, self._pending = _split(data, "strict")
        except UnicodeDecodeError:
            self._broken = True
            self._pending = b""
            return _INVALID * len(data)
        return text

    def _strip_start(self, text: str) -> str:
        count = 0
        while count < min(self._strip_count, len(text)) and text[count] == self._strip:
            count += 1
        self._strip_count = 0 if count < len(text) else self._strip_count - count
        return text[count:]


class WindowStream:
    """Decodes the last 8 to 16 ids again at each token and sends what is new, as vLLM and Hugging Face's
    TextStreamer do, with bounded holding back: of U+FFFD at the end only the last three may still become a
    character. `decode` turns ids into text without special tokens."""

    __slots__ = ("_decode", "_sent", "_window")

    def __init__(self, decode: Callable[[list[int]], str], prompt_ids: Sequence[int]) -> None:
        self._decode = decode
        size = _CONTEXT
        self._window = list(prompt_ids[-size:])
        text = decode(self._window)
        while not text and size < len(prompt_ids):
            size *= 2
            self._window = list(prompt_ids[-size:])
            text = decode(self._window)
        self._sent = _certain(text)

    def push(self, token_id: int) -> str:
        """See `DetokenizerStream.push`."""
        self._window.append(token_id)
        text = self._decode(self._window)
        certain = max(_certain(text), self._sent)
        new = text[self._sent : certain]
        self._sent = certain
        if len(self._window) >= 2 * _CONTEXT:
            held = len(text) - certain
            del self._window[:-_CONTEXT]
            self._sent = max(len(self._decode(self._window)) - held, 0)
        return new

    def flush(self) -> str:
        """See `DetokenizerStream.flush`."""
        return ""


def _certain(text: str) -> int:
    """How many characters of a decoded text can't change when more ids follow."""
    ending = text[-_MAX_UNFINISHED:]
    return len(text) - (len(ending) - len(ending.rstrip(_INVALID)))
