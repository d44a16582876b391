"""Options of the OpenAI API, vLLM and mlx-lm that clients may send and Callboard doesn't serve yet.

Each stands with the values that ask for nothing: its defaults. With such a value it is accepted, with any other the
request is refused by name. A name with a dot is that of an option inside an object. An option that becomes supported
moves to `server.schemas`.
"""

from typing import Any

import msgspec

from server.errors import UNSUPPORTED, ApiError

_NO = (None,)

_SHARED: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    # vLLM and mlx-lm
    "repetition_context_size": _NO,
    "presence_context_size": _NO,
    "frequency_context_size": _NO,
    "role_mapping": _NO,
    "length_penalty": (None, 1),
    "use_beam_search": (None, False),
    "bad_words": (None, []),
    "allowed_token_ids": _NO,
    "include_stop_str_in_output": (None, False),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "truncate_prompt_tokens": _NO,
    "prompt_logprobs": _NO,
    "logits_processors": (None, []),
    "adapters": _NO,
    "draft_model": _NO,
    "num_draft_tokens": _NO,
    "return_token_ids": (None, False),
    "guided_json_object": (None, False),
    "guided_whitespace_pattern": _NO,
    "structural_tag": _NO,
    "structured_outputs.structural_tag": _NO,
    "structured_outputs.whitespace_pattern": _NO,
    "structured_outputs.disable_additional_properties": (None, False),
}

# What only chat and completions have.
_ELSEWHERE: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "echo": (None, False),
    "logprobs": (None, False),
    "response_format": (None, {"type": "text"}),
    "guided_json": _NO,
    "guided_regex": _NO,
    "guided_choice": _NO,
    "guided_grammar": _NO,
    "thinking_token_budget": _NO,
    "reasoning_effort": _NO,
    "include_reasoning": (None, True),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
}

CHAT_UNSUPPORTED: dict[str, tuple[Any, ...]] = _SHARED | {
    "functions": (None, []),
    "function_call": (None, "none"),
    "audio": _NO,
    "modalities": (None, ["text"]),
    "prediction": _NO,
    "verbosity": (None, "medium"),
    "web_search_options": _NO,
    "service_tier": (None, "auto", "default"),
    "chat_template": _NO,
    "documents": (None, []),
    "add_special_tokens": (None, False),
    "echo": (None, False),
}

COMPLETION_UNSUPPORTED: dict[str, tuple[Any, ...]] = _SHARED | {
    "suffix": (None, ""),
    "prompt_embeds": _NO,
    "add_special_tokens": (None, True),
}

RESPONSES_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **_SHARED,
    **_ELSEWHERE,
    "background": (None, False),
    "conversation": _NO,
    "max_tool_calls": _NO,
    "prompt": _NO,
    "context_management": _NO,
    "service_tier": (None, "auto", "default"),
    "truncation": (None, "disabled"),
    "text.verbosity": (None, "medium"),
    "reasoning.summary": (None, "auto"),  # what there is: none
    "reasoning.generate_summary": (None, "auto"),
}

MESSAGES_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **_SHARED,
    **_ELSEWHERE,
    "stop": (None, []),
    "top_logprobs": (None, 0),
    "container": _NO,
    "mcp_servers": (None, []),
}

OLLAMA_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "context": (None, []),
}

# Embedding and ranking.
POOLED_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "truncate_prompt_tokens": _NO,
    "add_special_tokens": (None, True),
    "normalize": (None, True),
    "use_activation": (None, True),
    "max_tokens_per_doc": _NO,
    "max_chunks_per_doc": _NO,
}

TOKENIZE_UNSUPPORTED: dict[str, tuple[Any, ...]] = {"chat_template": _NO, "mm_processor_kwargs": _NO}

# Names that say who asks or how to cache, and change nothing in the answer.
HARMLESS = frozenset(
    {
        *("metadata", "store", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "stream_options"),
        "guided_decoding_backend",
        "context_management",  # where it isn't refused: what would be left out of a long conversation stays in it
    }
)


def check_unsupported(fields: dict[str, msgspec.Raw], table: dict[str, tuple[Any, ...]]) -> None:
    """Refuse the first option of `table` whose value asks for something.

    Raises ApiError naming it.
    """
    for name, accepted in table.items():
        outer, _, inner = name.partition(".")
        raw = fields.get(outer)
        if raw is not None and inner:
            raw = _inside(raw).get(inner)
        if raw is not None and not _is_one_of(raw, accepted):
            raise ApiError(UNSUPPORTED, f"{name} is not supported yet; leave it out", param=name)


def _inside(raw: msgspec.Raw) -> dict[str, msgspec.Raw]:
    try:
        return msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:  # no object; its type is checked with the others
        return {}


def _is_one_of(raw: msgspec.Raw, accepted: tuple[Any, ...]) -> bool:
    try:
        value = msgspec.json.decode(raw)
    except msgspec.ValidationError:  # a number beyond all ranges
        return False
    # 1 and 1.0 are one number in JSON, 1 and true are not.
    return any(isinstance(value, bool) == isinstance(one, bool) and value == one for one in accepted)
