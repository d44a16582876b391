"""`ToolFormat`: how a model writes tool calls, and mlx-lm's parser for it.

Owned by the streamer's `Dialect`, used on its one thread. mlx-lm's parsers are pure Python; they are imported from
their files, for `import mlx_lm` would load MLX.
"""

import importlib
import importlib.machinery
import importlib.util
import json
import sys
from collections.abc import Collection
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

_PACKAGE = "_callboard_tool_parsers"
JSON_TOOLS = "json_tools"

# What these parsers search the rest of the text from, each time that it occurs, and the most characters looked at.
_SEARCHED_FROM = {"gemma4": "call:", "function_gemma": "call:", "glm47": "<arg_key>"}
_MOST_SEARCHED = 1 << 20

# In this order, as mlx_lm.tokenizer_utils._infer_tool_parser: what the chat template must hold, all of one entry.
_IN_TEMPLATE: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<|tool_call>", "<tool_call|>"), "gemma4"),
    (("<start_function_call>",), "function_gemma"),
    (("<longcat_tool_call>",), "longcat"),
    (("<arg_key>",), "glm47"),
    (("<|tool_list_start|>",), "pythonic"),
    (("<|tool_call_start|>",), "pythonic"),
    (("<tool_call>\\n<function=",), "qwen3_coder"),
    (("<tool_call>\n<function=",), "qwen3_coder"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (('<function name="', '<param name="'), "minicpm5"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<atem:function_calls>",), "muse_spark"),
)
_IN_VOCABULARY = (
    (("<|open|>", "<|close|>", "<|sep|>"), "kimi_k3"),
    (("<|tool_call_start|>", "<|tool_call_end|>"), "pythonic"),
)


class Call(NamedTuple):
    """One tool call that a model made. `arguments` are an object in JSON; `id` is the model's own, "" without one."""

    name: str
    arguments: str
    id: str = ""


class ToolFormat:
    """A format by the name of mlx-lm's parser. `begin` and `end` surround calls; an empty `end` is the end of text."""

    def __init__(self, name: str) -> None:
        """Raises ValueError when mlx-lm has no such parser."""
        parser = _load(name)
        self.name = name
        self.begin: str = parser.tool_call_start
        self.end: str = parser.tool_call_end
        self._parse = parser.parse_tool_call

    @property
    def is_json(self) -> bool:
        """Whether a call is an object with name and arguments, which can be passed on while it is written."""
        return self.name == JSON_TOOLS

    def parse(self, text: str, tools: list[dict[str, Any]]) -> list[Call]:
        """The calls in what stands between the marks. Raises ValueError when it makes no sense."""
        again = _SEARCHED_FROM.get(self.name)
        if again is not None and text.count(again) * len(text) > _MOST_SEARCHED:
            raise ValueError(f"no tool call: {again!r} over and over")  # and everybody would wait for the parser
        try:
            parsed = self._parse(text, tools)
            return [_call(one) for one in (parsed if isinstance(parsed, list) else [parsed])]
        except ValueError:
            raise
        except Exception as error:  # the parsers work on what a model wrote; some take it for Python's literals
            raise ValueError(f"no tool call: {type(error).__name__}: {error}") from None


def _call(parsed: Any) -> Call:
    name = parsed.get("name")
    arguments = parsed.get("arguments", parsed.get("parameters", {}))
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("a tool call has a name, and arguments that are an object")
    own = parsed.get("id")
    written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    return Call(well_formed(name), well_formed(written), well_formed(own) if isinstance(own, str) else "")


def well_formed(text: str) -> str:
    """`text` with surrogates that escapes in JSON may leave joined where they are pairs, else replaced: no UTF-8 can
    carry them."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def infer_format(template: str | None, vocabulary: Collection[str], named: str | None = None) -> str:
    """The name of the format: the one the model's files name, else what its template or vocabulary shows, else
    JSON between `<tool_call>` marks."""
    if named:
        return named
    for wanted, name in _IN_TEMPLATE:
        if template is not None and all(part in template for part in wanted):
            return name
    for wanted, name in _IN_VOCABULARY:
        if all(token in vocabulary for token in wanted):
            return name
    return JSON_TOOLS


def _load(name: str) -> ModuleType:
    try:
        _register_package()
        return importlib.import_module(f"{_PACKAGE}.{name}")
    except ImportError as error:
        raise ValueError(f"mlx-lm has no parser for tool calls called {name!r} ({error})") from None


def _register_package() -> None:
    """Make mlx-lm's folder of parsers a package of its own; some of them import each other."""
    if _PACKAGE in sys.modules:
        return
    found = importlib.util.find_spec("mlx_lm")  # of a top-level name: nothing is run
    if found is None or not found.submodule_search_locations:
        raise ImportError("mlx_lm is not installed")
    folder = Path(found.submodule_search_locations[0]) / "tool_parsers"
    spec = importlib.machinery.ModuleSpec(_PACKAGE, None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    sys.modules[_PACKAGE] = importlib.util.module_from_spec(spec)
