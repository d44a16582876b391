"""`Grammars`: structured output by llguidance: a request's grammar checked, and made into a matcher.

The tokenizer processes check (`check`), the engine makes matchers (`matcher`), both under the same limits, so that
what one accepts the other can build. Either may take a while: called on side threads, for llguidance lets go of the
GIL. Not so while it makes its view of the vocabulary (a quarter of a second for 49,152 tokens), so that is done ahead,
by `prepare`, when there is nothing else to do; or else at the first use.
"""

import contextlib
import functools
import json
import re
import threading
from collections.abc import Callable
from typing import Any

import llguidance
import tokenizers
from llguidance.gbnf_to_lark import any_to_lark

from actors.json_schemas import strict
from actors.model_files import ModelFiles
from protocol.messages import Grammar

# White space between JSON tokens is bounded: some models would go on with it for ever.
_JSON: Any = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}"}
_JSON_LINE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
MAX_CHOICES = 1024
_QUOTED_LINE = re.compile(r"\d+ *\|")
REMEMBERED = 256  # grammars known to be good
IDLE_S = 3.0  # how long a process has nothing to do before it prepares for grammars


class InvalidGrammar(ValueError):
    """A grammar that can't be used. `field` is what the client called it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class Grammars:
    """Grammars over the vocabulary of one model. Thread-safe."""

    def __init__(self, files: ModelFiles, load: Callable[[], tokenizers.Tokenizer | None], vocab_size: int = 0) -> None:
        """`load` is called for the tokenizer once it is needed; None stands for one that is written in Python.

        `vocab_size` is the width of the logits where that is known; masks are as wide.
        """
        self._files = files
        self._load = load
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._tokens: llguidance.LLTokenizer | None = None
        self._limits = llguidance.LLParserLimits(
            max_items_in_row=2000,
            initial_lexer_fuel=1_000_000,
            step_lexer_fuel=200_000,
            step_max_items=50_000,
            max_lexer_states=250_000,
            max_grammar_size=500_000,
        )
        self._is_good = functools.lru_cache(REMEMBERED)(self._check)

    @property
    def mask_words(self) -> int:
        """Words of 32 bits that a mask of the vocabulary takes; 0 while there is no matcher."""
        return 0 if self._tokens is None else (self._tokens.vocab_size + 31) // 32

    def prepare(self) -> None:
        """Do what takes long and needs no grammar. Nothing happens where grammars can't be used."""
        with contextlib.suppress(ValueError):
            self.tokens  # noqa: B018  # a property that is made at its first use

    @property
    def tokens(self) -> llguidance.LLTokenizer:
        """llguidance's view of the vocabulary."""
        with self._lock:
            if self._tokens is None:
                backend = self._load()
                if backend is None:
                    raise ValueError("this model's tokenizer is written in Python, which structured output can't use")
                size = max(self._vocab_size, self._files.vocab_size, backend.get_vocab_size())
                eos = [number for number in self._files.eos_token_ids if number < size]
                if not eos:
                    raise ValueError("this model names no end-of-sequence token, which structured output needs")
                # Its "slices" took a third of the time, and made no mask faster or other.
                self._tokens = llguidance.LLTokenizer(backend.to_str(), n_vocab=size, eos_token=eos, slices=[])
            return self._tokens

    def check(self, grammar: Grammar) -> None:
        """Raises InvalidGrammar saying which part of it is not supported or wrong."""
        self._is_good(grammar.kind, grammar.text, grammar.field)

    def _check(self, kind: str, text: str, field: str) -> bool:
        grammar = Grammar(kind, text, field)
        error = self.matcher(grammar).get_error()
        if error:
            raise InvalidGrammar(field, f"{field}: {_plain(error)}")
        return True

    def matcher(self, grammar: Grammar) -> llguidance.LLMatcher:
        """A matcher at its beginning. It may have an error, which it tells itself. Raises InvalidGrammar."""
        try:
            tokens = self.tokens
            source = _source(grammar.kind, grammar.text)
        except ValueError as error:
            raise InvalidGrammar(grammar.field, f"{grammar.field}: {error}") from None
        return llguidance.LLMatcher(tokens, source, log_level=0, limits=self._limits)


def _source(kind: str, text: str) -> str:
    """The grammar in llguidance's own form. Raises ValueError."""
    match kind:
        case "json_object":
            return llguidance.LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=_JSON)
        case "json":
            return llguidance.LLMatcher.grammar_from_json_schema(_schema(text), overrides=_JSON)
        case "json_line":
            return llguidance.LLMatcher.grammar_from_json_schema(_schema(text), overrides=_JSON_LINE)
        case "regex":
            return llguidance.LLMatcher.grammar_from_regex(text)
        case "choice":
            return llguidance.LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, _choices(text))))
        case _:
            try:
                return llguidance.LLMatcher.grammar_from_lark(any_to_lark(text))
            except Exception as error:  # the converter raises what it meets
                raise ValueError(f"neither a Lark nor a GBNF grammar: {error}") from None


def _schema(text: str) -> str:
    schema = _decoded(text)
    if not isinstance(schema, dict | bool):
        raise ValueError("a JSON schema is an object")
    return json.dumps(strict(schema) if schema is not True else {}) if schema is not False else _never()


def _never() -> str:
    raise ValueError("the schema false allows nothing")


def _choices(text: str) -> list[str]:
    choices = _decoded(text)
    if not isinstance(choices, list) or not all(isinstance(choice, str) and choice for choice in choices):
        raise ValueError("choices are a list of texts, none of them empty")
    if not 0 < len(choices) <= MAX_CHOICES:
        raise ValueError(f"there must be 1 to {MAX_CHOICES} choices, not {len(choices)}")
    return choices


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON: {error}") from None


def _plain(error: str) -> str:
    """llguidance's words in one line, without its drawing of the place."""
    if error.startswith("panic"):
        return "it is too large"
    lines = [line.strip() for line in error.splitlines()]
    kept = [line for line in lines if line and set(line) - set("^|") and not _QUOTED_LINE.match(line)]
    return " ".join(kept).replace("Unimplemented keys:", "not supported:")
