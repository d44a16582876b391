"""`POST /v1/completions`: its requests as a `Generation`, and the words of its answers."""

import secrets
import time
from typing import Any

from msgspec import UNSET, UnsetType

from protocol.messages import TokenLogprobs
from server.errors import invalid
from server.generation import Choice, Generation, new_id, sampling_params
from server.logprobs import completion_logprobs
from server.request_body import decode_request
from server.schemas import CompletionBody, CompletionChoice, CompletionRequest, UsageBody
from server.sse import encode_json, event, split_template
from server.unsupported import COMPLETION_UNSUPPORTED

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 256  # of one request
MAX_ID = 2**32 - 1


def parse_completion(body: bytes, model: str) -> tuple[str | None, Generation]:
    """The model asked for, and what to generate. `model` is the name that answers carry.

    Raises ApiError naming the field that is wrong.
    """
    request = decode_request(body, CompletionRequest, COMPLETION_UNSUPPORTED)
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    include_usage = bool(request.stream_options and request.stream_options.include_usage)
    generation = Generation(
        prompts=_prompts(request.prompt),
        params=sampling_params(request, max_tokens, request.logprobs),
        answer=CompletionAnswer(model, include_usage),
        stream=bool(request.stream),
        include_usage=include_usage,
        cache_salt=request.cache_salt or "",
    )
    return request.model, generation


def _prompts(prompt: str | list[str | int | list[int]]) -> list[dict[str, Any]]:
    """One entry per choice, by what the prompt is: a string, strings, ids, or lists of ids."""
    if isinstance(prompt, str):
        return [{"prompt": prompt}]
    if not prompt:
        raise invalid("prompt must not be empty", "prompt")
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise invalid("prompt must hold only strings, only token ids, or only lists of token ids", "prompt")
    if kinds == {int}:
        return [{"ids": _ids(prompt, "prompt")}]
    if len(prompt) > MAX_PROMPTS:
        raise invalid(f"prompt holds {len(prompt)} prompts, but one request may hold {MAX_PROMPTS}", "prompt")
    if kinds == {str}:
        return [{"prompt": text} for text in prompt]
    return [{"ids": _ids(ids, f"prompt[{i}]")} for i, ids in enumerate(prompt)]


def _ids(ids: Any, field: str) -> list[int]:
    if not ids:
        raise invalid(f"{field} must not be empty", field)
    if min(ids) < 0 or max(ids) > MAX_ID:
        raise invalid(f"{field} holds a number that is no token id", field)
    checked: list[int] = ids
    return checked


class CompletionAnswer:
    """Words one answer; see `server.generation.Answer`."""

    def __init__(self, model: str, include_usage: bool) -> None:
        self._id = new_id("cmpl")
        self._created = int(time.time())
        self._model = model
        self._no_usage: UnsetType | None = None if include_usage else UNSET

    def _chunk(
        self,
        index: int,
        text: str,
        finish_reason: str | None = None,
        logprobs: list[TokenLogprobs] | None = None,
    ) -> CompletionBody:
        choices = [CompletionChoice(index, text, finish_reason, completion_logprobs(logprobs))]
        return CompletionBody(self._id, self._created, self._model, choices, self._no_usage)

    def opening(self, index: int) -> bytes:
        """A completion begins with its text."""
        return b""

    def around_text(self, index: int) -> tuple[bytes, bytes]:
        """The event of a text, without the text."""
        marker = secrets.token_hex(16)
        return split_template(self._chunk(index, marker), marker)

    def text(self, index: int, text: str, logprobs: list[TokenLogprobs]) -> bytes:
        """The event of a text with the log-probabilities of its tokens."""
        return event(encode_json(self._chunk(index, text, logprobs=logprobs)))

    def closing(self, index: int, reason: str) -> bytes:
        """The event with the finish reason."""
        return event(encode_json(self._chunk(index, "", reason)))

    def usage(self, usage: UsageBody) -> bytes:
        """The event with the token counts."""
        return event(encode_json(CompletionBody(self._id, self._created, self._model, [], usage)))

    def whole(self, choices: list[Choice], usage: UsageBody) -> CompletionBody:
        """The response that is sent whole."""
        bodies = [
            CompletionChoice(i, choice.text, choice.reason, completion_logprobs(choice.logprobs))
            for i, choice in enumerate(choices)
        ]
        return CompletionBody(self._id, self._created, self._model, bodies, usage)
