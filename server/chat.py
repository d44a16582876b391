"""`POST /v1/chat/completions`: its requests as a `Generation`, and the words of its answers."""

import secrets
import time
from typing import Any

from msgspec import UNSET, UnsetType

from protocol.messages import TokenLogprobs
from server.errors import invalid
from server.generation import Choice, Generation, new_id, sampling_params
from server.logprobs import chat_logprobs
from server.request_body import check_depth, convert_field, decode_request
from server.schemas import (
    AssistantMessage,
    ChatBody,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatMessage,
    ChatRequest,
    UsageBody,
)
from server.sse import encode_json, event, split_template
from server.unsupported import CHAT_UNSUPPORTED


def parse_chat(body: bytes, model: str) -> tuple[str | None, Generation]:
    """The model asked for, and what to generate. `model` is the name that answers carry.

    Raises ApiError naming the field that is wrong.
    """
    request = decode_request(body, ChatRequest, CHAT_UNSUPPORTED)
    _check_messages(request.messages)
    template_kwargs = request.chat_template_kwargs or {}
    check_depth(template_kwargs, "chat_template_kwargs")
    logprobs = _logprobs(request)
    if request.max_completion_tokens is not None:
        names = {"max_tokens": "max_completion_tokens", "logprobs": "top_logprobs"}
        params = sampling_params(request, request.max_completion_tokens, logprobs, names)
    else:
        params = sampling_params(request, request.max_tokens, logprobs, {"logprobs": "top_logprobs"})
    include_usage = bool(request.stream_options and request.stream_options.include_usage)
    generation = Generation(
        prompts=[{"messages": request.messages}],
        params=params,
        answer=ChatAnswer(model, include_usage),
        stream=bool(request.stream),
        include_usage=include_usage,
        cache_salt=request.cache_salt or "",
        template_kwargs=template_kwargs,
    )
    return request.model, generation


def _logprobs(request: ChatRequest) -> int | None:
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise invalid("top_logprobs needs logprobs to be true", "top_logprobs")
    return None


def _check_messages(messages: list[dict[str, Any]]) -> None:
    if not messages:
        raise invalid("messages must not be empty", "messages")
    checked: list[ChatMessage] = convert_field(messages, list[ChatMessage], "messages")
    for i, message in enumerate(checked):
        field = f"messages[{i}].content"
        if message.content is None or message.content is UNSET:
            if message.role != "assistant":
                raise invalid(f"{field} must be a string or a list of text parts", field)
        elif isinstance(message.content, list):
            for j, part in enumerate(message.content):
                place = f"{field}[{j}]"
                if part.type != "text":
                    raise invalid(f"{place}.type: parts of type {part.type!r} are not supported", f"{place}.type")
                if part.text is None:
                    raise invalid(f"{place}.text is required", f"{place}.text")
    check_depth(messages, "messages")


class ChatAnswer:
    """Words one answer; see `server.generation.Answer`."""

    def __init__(self, model: str, include_usage: bool) -> None:
        self._id = new_id("chatcmpl")
        self._created = int(time.time())
        self._model = model
        self._no_usage: UnsetType | None = None if include_usage else UNSET

    def _chunk(
        self,
        index: int,
        delta: ChatDelta,
        finish_reason: str | None = None,
        logprobs: list[TokenLogprobs] | None = None,
    ) -> ChatChunk:
        choices = [ChatChunkChoice(index, delta, finish_reason, chat_logprobs(logprobs))]
        return ChatChunk(self._id, self._created, self._model, choices, self._no_usage)

    def opening(self, index: int) -> bytes:
        """The event that names the role."""
        return event(encode_json(self._chunk(index, ChatDelta(role="assistant", content=""))))

    def around_text(self, index: int) -> tuple[bytes, bytes]:
        """The event of a text, without the text."""
        marker = secrets.token_hex(16)
        return split_template(self._chunk(index, ChatDelta(content=marker)), marker)

    def text(self, index: int, text: str, logprobs: list[TokenLogprobs]) -> bytes:
        """The event of a text with the log-probabilities of its tokens."""
        return event(encode_json(self._chunk(index, ChatDelta(content=text), logprobs=logprobs)))

    def closing(self, index: int, reason: str) -> bytes:
        """The event with the finish reason."""
        return event(encode_json(self._chunk(index, ChatDelta(), reason)))

    def usage(self, usage: UsageBody) -> bytes:
        """The event with the token counts."""
        return event(encode_json(ChatChunk(self._id, self._created, self._model, [], usage)))

    def whole(self, choices: list[Choice], usage: UsageBody) -> ChatBody:
        """The response that is sent whole."""
        bodies = [
            ChatChoice(i, AssistantMessage(choice.text), choice.reason, chat_logprobs(choice.logprobs))
            for i, choice in enumerate(choices)
        ]
        return ChatBody(self._id, self._created, self._model, bodies, usage)
