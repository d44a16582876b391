"""`TextPieces`: a long text tokenized piece by piece, with the ids that the whole text gives.

Used by `actors.tokenizer.text_jobs` on a tokenizer's thread for long texts. A text of megabytes is one call into the
`tokenizers` library that nothing can interrupt; in pieces the thread can step aside, stop, or be stopped after each.

Where a text may be cut: such a tokenizer first splits it at its added tokens, then each stretch between them by a
regular expression that is matched again and again from left to right, and works on each word so found by itself. So the
splitting may begin anew at the start of any word. A word is only taken for found when two more have followed it: the
expression may look at what comes next, and the last ones may go on behind the window.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import tokenizers

WINDOW = 1024  # characters tokenized at once, less than a millisecond's work
MARGIN = 64  # characters by which an expression may look ahead, at most


class TextPieces:
    """Tokenizes by pieces with `backend`; see `can_cut` for which ones that is possible with."""

    def __init__(self, backend: tokenizers.Tokenizer, window: int = WINDOW) -> None:
        self._window = window
        # Without post-processor, which may change the offsets; the model and its cache are shared.
        self._bare = tokenizers.Tokenizer(backend.model)
        self._bare.pre_tokenizer = backend.pre_tokenizer
        self._normalized = backend.normalizer is not None
        if self._normalized:
            self._bare.normalizer = backend.normalizer
        self._ids = {token.content: id_ for id_, token in backend.get_added_tokens_decoder().items()}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def encode(self, text: str) -> Iterator[list[int]]:
        """Ids of `text`, some at a time, without what a post-processor adds."""
        start = 0
        for found in self._added.finditer(text) if self._added else ():
            yield from self._stretch(text, start, found.start())
            yield [self._ids[found[0]]]
            start = found.end()
        yield from self._stretch(text, start, len(text))

    def _stretch(self, text: str, start: int, end: int) -> Iterator[list[int]]:
        width = self._window
        while start + width < end:
            encoding = self._bare.encode(text[start : start + width], add_special_tokens=False)
            tokens = self._last_cut(encoding, text, start, width)
            if not tokens:
                width *= 2  # one word is as long as the window
                continue
            yield encoding.ids[:tokens]
            start += encoding.offsets[tokens][0]
            width = self._window
        if start < end:
            yield self._bare.encode(text[start:end], add_special_tokens=False).ids

    def _last_cut(self, encoding: tokenizers.Encoding, text: str, start: int, width: int) -> int:
        """How many of the window's tokens are sure, and end where another word begins; 0 for none."""
        words, offsets = encoding.word_ids, encoding.offsets
        followers = 0
        for index in range(len(words) - 1, 0, -1):
            if words[index] == words[index - 1]:
                continue
            at = offsets[index][0]
            # Nothing combines with an ASCII character before it, so normalization may begin anew there.
            if followers >= 2 and at <= width - MARGIN and (not self._normalized or text[start + at].isascii()):
                return index
            followers += 1
        return 0


def can_cut(backend: tokenizers.Tokenizer) -> bool:
    """Whether the text may be cut with this tokenizer as `TextPieces` does it.

    It needs exactly one splitting expression without a look behind, and nothing that treats the beginning of a text as
    special. So it holds for the byte-level tokenizers (GPT-2, Llama 3, Qwen, SmolLM …), not for those in the
    manner of SentencePiece.
    """
    if backend.normalizer is not None and _state(backend.normalizer)["type"] != "NFC":
        return False
    if backend.pre_tokenizer is None:
        return False
    state = _state(backend.pre_tokenizer)
    splitters = state["pretokenizers"] if state["type"] == "Sequence" else [state]
    while splitters and splitters[0]["type"] == "Digits":
        splitters = splitters[1:]  # looks at neighbouring characters alone
    return (
        bool(splitters)
        and _begins_anew(splitters[0])
        and all(_only_maps_bytes(splitter) for splitter in splitters[1:])
        and not any(
            token.lstrip or token.rstrip or token.single_word for token in backend.get_added_tokens_decoder().values()
        )
    )


def _state(part: Any) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(part.__getstate__())
    return state


def _begins_anew(splitter: dict[str, Any]) -> bool:
    if splitter["type"] == "ByteLevel":
        return splitter["use_regex"] is True and splitter["add_prefix_space"] is False
    if splitter["type"] != "Split" or splitter["behavior"] != "Isolated" or splitter["invert"]:
        return False
    expression = splitter["pattern"].get("Regex", "")
    return bool(expression) and not re.search(r"\(\?<|\\[AbBGKz]|(?<![\[\\])[\^$]", expression)


def _only_maps_bytes(splitter: dict[str, Any]) -> bool:
    return splitter["type"] == "ByteLevel" and splitter["use_regex"] is False and splitter["add_prefix_space"] is False
