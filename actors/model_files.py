"""What a model folder says about itself, read from its JSON files: context, vocabulary, EOS, chat template.

Owns the reading of `config.json`, `generation_config.json`, `tokenizer_config.json` and their companions.
Called once at the start of the tokenizer, the streamer and the engine, on the main thread; loads neither
MLX nor transformers.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypedDict

import msgspec

from protocol.messages import SamplingParams
from protocol.sampling import InvalidParam, check_params

# For models that name no limit anywhere: recurrent ones have none, and some configs leave it to the code.
UNSTATED_CONTEXT = 32_768

# What the author of XTC recommends; it only matters once a request asks for an `xtc_probability`.
XTC_THRESHOLD = 0.1

_CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_length",
    "max_seq_len",
    "seq_length",
    "n_ctx",
    "model_max_length",
)
_NO_LIMIT = 1e9  # transformers writes about 1e30 for "no limit"


class ModelFiles(msgspec.Struct, frozen=True):
    """A model folder's own description.

    `context` is in tokens. `vocab_size` counts the rows of the embedding, padding included; 0 when the
    config leaves it to the model's code. `eos_token_ids` are all ids that end a generation. `chat_template`
    is Jinja source; `special_tokens` holds the variables it may use (`bos_token`, `eos_token`, …). The
    sampling options are what the model's author recommends, None where the folder says nothing.
    """

    path: Path
    model_type: str
    context: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    chat_template: str | None
    special_tokens: dict[str, str]
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def resolve(self, asked: SamplingParams) -> SamplingParams:
        """`asked` with what the author recommends, else the neutral value, for each option of the sampler that it
        leaves open. `seed`, `max_tokens` and `logprobs` stay as they are."""

        def first(*values: float | None) -> float:
            return next(value for value in values if value is not None)

        return msgspec.structs.replace(
            asked,
            temperature=first(asked.temperature, self.temperature, 1.0),
            top_p=first(asked.top_p, self.top_p, 1.0),
            top_k=max(0, int(first(asked.top_k, self.top_k, 0))),
            min_p=first(asked.min_p, self.min_p, 0.0),
            repetition_penalty=first(asked.repetition_penalty, self.repetition_penalty, 1.0),
            presence_penalty=first(asked.presence_penalty, 0.0),
            frequency_penalty=first(asked.frequency_penalty, 0.0),
            xtc_probability=first(asked.xtc_probability, 0.0),
            xtc_threshold=first(asked.xtc_threshold, XTC_THRESHOLD),
        )


class _Sampling(TypedDict):
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerJson(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, or {} when there is no such file.

    Raises ValueError when the file can't be read or holds something else.
    """
    try:
        # The standard library's reader, for it takes the Infinity and NaN that Hugging Face configs hold.
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} can't be read ({error}); download the model again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object; download the model again")
    return value


def read_model_files(path: str | Path) -> ModelFiles:
    """Read the description of the model in folder `path`.

    Raises ValueError, saying what to change, when the folder is no model or a file in it makes no sense.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give the folder that holds the model's config.json")
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds no config.json; give the folder of a model in MLX or Hugging Face form")
    config = read_json(folder / "config.json")
    generation = read_json(folder / "generation_config.json")
    tokenizer = read_json(folder / "tokenizer_config.json")
    special = read_special_tokens(folder)
    text_config = config.get("text_config")
    levels = [config, text_config] if isinstance(text_config, dict) else [config]
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ValueError(f'{folder / "config.json"} names no "model_type"; add the architecture\'s name')
    return ModelFiles(
        path=folder,
        model_type=model_type,
        context=_context(levels, tokenizer),
        vocab_size=next(_sizes(levels, ("vocab_size",)), 0),
        eos_token_ids=_eos_token_ids(folder, levels, generation, tokenizer, special.get("eos_token")),
        chat_template=_chat_template(folder, tokenizer),
        special_tokens=special,
        **_sampling(folder, generation),
    )


def read_special_tokens(folder: Path) -> dict[str, str]:
    """Text of each named special token of the tokenizer in `folder`, by its name (`eos_token`, …)."""
    named = {**read_json(folder / "special_tokens_map.json"), **read_json(folder / "tokenizer_config.json")}
    tokens = {}
    for name, value in named.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def _sizes(levels: Iterable[dict[str, Any]], keys: Iterable[str]) -> Iterator[int]:
    for level in levels:
        for key in keys:
            value = level.get(key)
            if isinstance(value, int | float) and 1 <= value < _NO_LIMIT:
                yield int(value)


def _context(levels: list[dict[str, Any]], tokenizer: dict[str, Any]) -> int:
    stated = next(_sizes(levels, _CONTEXT_KEYS), None)
    if stated is None:
        return next(_sizes([tokenizer], ("model_max_length",)), UNSTATED_CONTEXT)
    return max([stated, *(_stretched(level) for level in levels)])


def _stretched(level: dict[str, Any]) -> int:
    """Context that YaRN scaling reaches, 0 without it: switching it on leaves max_position_embeddings as is."""
    rope = level.get("rope_scaling") or level.get("rope_parameters")
    if not isinstance(rope, dict) or "yarn" not in (rope.get("type"), rope.get("rope_type")):
        return 0
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
    if not isinstance(factor, int | float) or not isinstance(original, int | float):
        return 0
    return int(factor * original)


def _eos_token_ids(
    folder: Path,
    levels: list[dict[str, Any]],
    generation: dict[str, Any],
    tokenizer: dict[str, Any],
    eos_token: str | None,
) -> tuple[int, ...]:
    ids: list[int] = []
    for level in (generation, *levels):
        stated = level.get("eos_token_id")
        if stated is None:
            continue
        ids = stated if isinstance(stated, list) else [stated]
        if not all(type(i) is int and i >= 0 for i in ids):
            raise ValueError(
                f"eos_token_id in the JSON files of {folder} must be a token id or a list of them, not {stated!r}"
            )
        break
    of_tokenizer = None if eos_token is None else _id_of(folder, tokenizer, eos_token)
    return tuple(dict.fromkeys(ids if of_tokenizer is None else [*ids, of_tokenizer]))


def _id_of(folder: Path, tokenizer: dict[str, Any], token: str) -> int | None:
    for key, entry in (tokenizer.get("added_tokens_decoder") or {}).items():
        if isinstance(entry, dict) and entry.get("content") == token and key.isdecimal():
            return int(key)
    added = read_json(folder / "added_tokens.json").get(token)
    if isinstance(added, int):
        return added
    try:
        whole = msgspec.json.decode((folder / "tokenizer.json").read_bytes(), type=_TokenizerJson)
    except (OSError, msgspec.DecodeError):
        return None  # absent, or broken, which loading the tokenizer itself reports
    return next((entry.id for entry in whole.added_tokens if entry.content == token), None)


def _sampling(folder: Path, generation: dict[str, Any]) -> _Sampling:
    stated = {name: generation.get(name) for name in _Sampling.__annotations__}
    if generation.get("do_sample") is False:
        stated |= {"temperature": 0.0, "top_p": None, "top_k": None, "min_p": None}
    try:
        checked = msgspec.convert(stated, _Sampling)
        check_params(SamplingParams(**checked))
    except (msgspec.ValidationError, InvalidParam) as error:
        raise ValueError(f"{folder / 'generation_config.json'}: {error}; correct or remove it") from None
    return checked


def _chat_template(folder: Path, tokenizer: dict[str, Any]) -> str | None:
    try:
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{folder / 'chat_template.jinja'} can't be read: {error}") from None
    template = tokenizer.get("chat_template")
    if template is None:
        template = read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        template = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
    if isinstance(template, dict):
        template = template.get("default") or next(iter(template.values()), None)
    if template is not None and not isinstance(template, str):
        raise ValueError(
            f'"chat_template" of {folder} must be a text or a list of named ones with "default" among them; '
            "write the template into chat_template.jinja"
        )
    return template
