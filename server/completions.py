"""`POST /v1/completions`: its requests as a `Generation`, and the words of its answers."""

import secrets
import time
from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from protocol import AsyncClient, Delta
from protocol.messages import End, TokenLogprobs
from server.errors import ApiError, invalid
from server.generation import Choice, Generation, sampling_params, stop_reason
from server.logprobs import completion_logprobs
from server.request_body import decode_request
from server.schemas import CompletionBody, CompletionChoice, CompletionRequest, UsageBody
from server.sse import DONE, encode_json, event, failed, split_template
from server.structured import grammar_of
from server.unsupported import COMPLETION_UNSUPPORTED

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 256  # of one request
MAX_ID = 2**32 - 1


def parse_completion(body: bytes, model: str, request_id: str) -> tuple[str | None, Generation]:
    """The model asked for, and what to generate. `model` is what answers call it when none was.

    Raises ApiError naming the field that is wrong.
    """
    request = decode_request(body, CompletionRequest, COMPLETION_UNSUPPORTED)
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    include_usage = bool(request.stream_options and request.stream_options.include_usage)
    if request.echo and request.logprobs is not None:
        raise invalid("echo can't be combined with logprobs: those of the prompt are not computed", "echo")
    prompts = prompts_of(request.prompt, "prompt", MAX_PROMPTS)
    n = request.n or 1
    if len(prompts) * n > MAX_PROMPTS:
        raise invalid(f"a request may have {MAX_PROMPTS} choices, not {len(prompts)} × {n}", "n")
    answer = CompletionAnswer(f"cmpl-{request_id}", request.model or model, include_usage)

    async def echo(generation: Generation, clients: Sequence[AsyncClient]) -> None:
        answer.echoes = []
        for prompt in generation.prompts:
            text = prompt["prompt"] if "prompt" in prompt else await clients[0].detokenize(prompt["ids"])
            answer.echoes += [text] * n

    generation = Generation(
        prompts=prompts,
        params=sampling_params(
            request,
            max_tokens=max_tokens,
            stop=request.stop,
            logprobs=request.logprobs,
            grammar=grammar_of(request),
        ),
        answer=answer,
        stream=bool(request.stream),
        n=n,
        cache_salt=request.cache_salt or "",
        prepare=echo if request.echo else None,
    )
    return request.model, generation


def prompts_of(given: str | list[str | int | list[int]], field: str, most: int) -> list[dict[str, Any]]:
    """One entry per text, by what it is: a string, or token ids. Raises ApiError."""
    if isinstance(given, str):
        return [{"prompt": given}]
    if not given:
        raise invalid(f"{field} must not be empty", field)
    kinds = {type(item) for item in given}
    if len(kinds) > 1:
        raise invalid(f"{field} must hold only strings, only token ids, or only lists of token ids", field)
    if kinds == {int}:
        return [{"ids": _ids(given, field)}]
    if len(given) > most:
        raise invalid(f"{field} holds {len(given)} texts, but one request may hold {most}", field)
    if kinds == {str}:
        return [{"prompt": text} for text in given]
    return [{"ids": _ids(ids, f"{field}[{i}]")} for i, ids in enumerate(given)]


def _ids(ids: Any, field: str) -> list[int]:
    if not ids:
        raise invalid(f"{field} must not be empty", field)
    if min(ids) < 0 or max(ids) > MAX_ID:
        raise invalid(f"{field} holds a number that is no token id", field)
    checked: list[int] = ids
    return checked


class CompletionAnswer:
    """Words one answer; see `server.generation.Answer`. `echoes` are the prompts to be repeated, by choice."""

    def __init__(self, answer_id: str, model: str, include_usage: bool) -> None:
        self._id = answer_id
        self._created = int(time.time())
        self._model = model
        self._include_usage = include_usage
        self._no_usage: UnsetType | None = None if include_usage else UNSET
        self.echoes: list[str] = []

    def _chunk(self, index: int, text: str, end: End | None = None, tokens: list[TokenLogprobs] | None = None) -> bytes:
        choice = CompletionChoice(
            index, text, None if end is None else end.reason, completion_logprobs(tokens), stop_reason(end)
        )
        return encode_json(CompletionBody(self._id, self._created, self._model, [choice], self._no_usage))

    def opening(self, index: int, prompt_tokens: int) -> bytes:
        """A completion begins with its text, or with the prompt's."""
        return event(self._chunk(index, self.echoes[index])) if self.echoes else b""

    def around_text(self, index: int) -> tuple[bytes, bytes]:
        """The event of a text, without the text."""
        marker = secrets.token_hex(16)
        return split_template(self._chunk(index, marker), marker)

    def piece(self, index: int, delta: Delta) -> bytes:
        """The event of a text with the log-probabilities of its tokens."""
        return event(self._chunk(index, delta.text, tokens=delta.logprobs))

    def closing(self, index: int, end: End) -> bytes:
        """The event with the finish reason."""
        return event(self._chunk(index, "", end))

    def ending(self, usage: UsageBody) -> bytes:
        """The event with the token counts when they were asked for, and the end."""
        if not self._include_usage:
            return DONE
        return event(encode_json(CompletionBody(self._id, self._created, self._model, [], usage))) + DONE

    def failure(self, error: ApiError) -> bytes:
        """The event with the error, and the end."""
        return failed(error)

    def whole(self, choices: list[Choice], usage: UsageBody) -> CompletionBody:
        """The response that is sent whole."""
        echoes = self.echoes or [""] * len(choices)
        bodies = [
            CompletionChoice(
                i, echo + choice.text, choice.end.reason, completion_logprobs(choice.logprobs), stop_reason(choice.end)
            )
            for i, (choice, echo) in enumerate(zip(choices, echoes, strict=True))
        ]
        return CompletionBody(self._id, self._created, self._model, bodies, usage)
