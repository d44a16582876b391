"""`POST /v1/chat/completions`: its requests as a `Generation`, and the words of its answers."""

import secrets
import time
from typing import Any

from msgspec import UNSET, UnsetType

from protocol import Delta
from protocol.messages import End, TokenLogprobs, ToolCallDelta
from server.errors import ApiError, invalid
from server.generation import Choice, Generation, sampling_params, stop_reason
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
    FunctionDelta,
    ToolCallChunk,
    UsageBody,
)
from server.sse import DONE, encode_json, event, failed, split_template
from server.structured import grammar_of
from server.tools import parse_tools
from server.unsupported import CHAT_UNSUPPORTED


def parse_chat(body: bytes, model: str, request_id: str) -> tuple[str | None, Generation]:
    """The model asked for, and what to generate. `model` is what answers call it when none was.

    Raises ApiError naming the field that is wrong.
    """
    request = decode_request(body, ChatRequest, CHAT_UNSUPPORTED)
    check_messages(request.messages)
    tools, choice = parse_tools(request.tools, request.tool_choice, request.parallel_tool_calls)
    check_depth(tools, "tools")
    max_tokens, names = request.max_tokens, {"logprobs": "top_logprobs", "thinking_budget": "thinking_token_budget"}
    if request.max_completion_tokens is not None:
        max_tokens, names["max_tokens"] = request.max_completion_tokens, "max_completion_tokens"
    params = sampling_params(
        request,
        max_tokens=max_tokens,
        stop=request.stop,
        logprobs=_logprobs(request),
        grammar=grammar_of(request),
        thinking_budget=request.thinking_token_budget,
        names=names,
    )
    if params.grammar is not None and choice.mode in ("required", "named"):
        raise invalid(f"{params.grammar.field} can't be combined with a tool_choice that forces a call", "tool_choice")
    include_usage = bool(request.stream_options and request.stream_options.include_usage)
    with_reasoning = request.include_reasoning is not False
    generation = Generation(
        prompts=[{"messages": request.messages}],
        params=params,
        answer=ChatAnswer(f"chatcmpl-{request_id}", request.model or model, include_usage, with_reasoning),
        stream=bool(request.stream),
        n=request.n or 1,
        cache_salt=request.cache_salt or "",
        template_kwargs=template_kwargs(
            request.chat_template_kwargs,
            request.reasoning_effort,
            request.add_generation_prompt,
            request.continue_final_message,
        ),
        tools=tools,
        tool_choice=choice,
        split_reply=True,
    )
    return request.model, generation


def template_kwargs(
    given: dict[str, Any] | None,
    effort: str | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = None,
) -> dict[str, Any]:
    """The variables of the chat template: the effort of the reasoning beside those that were given, which win.

    Raises ApiError when an answer would have to be both begun and continued.
    """
    if add_generation_prompt and continue_final_message:
        raise invalid("continue_final_message can't be combined with add_generation_prompt", "continue_final_message")
    check_depth(given or {}, "chat_template_kwargs")
    implied: dict[str, Any] = {}
    if effort is not None:
        implied = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    if add_generation_prompt is not None:
        implied["add_generation_prompt"] = add_generation_prompt
    if continue_final_message:
        implied["continue_final_message"] = True
    return implied | (given or {})


def _logprobs(request: ChatRequest) -> int | None:
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise invalid("top_logprobs needs logprobs to be true", "top_logprobs")
    return None


def check_messages(messages: list[dict[str, Any]]) -> None:
    """Raises ApiError naming the place where messages are no chat messages."""
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
                if part.type not in ("text", "refusal"):
                    raise invalid(f"{place}.type: parts of type {part.type!r} are not supported", f"{place}.type")
                if (part.text if part.type == "text" else part.refusal) is None:
                    raise invalid(f"{place}.{part.type} is required", f"{place}.{part.type}")
    check_depth(messages, "messages")


class ChatAnswer:
    """Words one answer; see `server.generation.Answer`."""

    def __init__(self, answer_id: str, model: str, include_usage: bool, with_reasoning: bool) -> None:
        self._id = answer_id
        self._created = int(time.time())
        self._model = model
        self._include_usage = include_usage
        self._with_reasoning = with_reasoning
        self._no_usage: UnsetType | None = None if include_usage else UNSET

    def _chunk(
        self, index: int, delta: ChatDelta, end: End | None = None, tokens: list[TokenLogprobs] | None = None
    ) -> bytes:
        choice = ChatChunkChoice(
            index, delta, None if end is None else end.reason, chat_logprobs(tokens), stop_reason(end)
        )
        return encode_json(ChatChunk(self._id, self._created, self._model, [choice], self._no_usage))

    def opening(self, index: int, prompt_tokens: int) -> bytes:
        """The event that names the role."""
        return event(self._chunk(index, ChatDelta(role="assistant", content="")))

    def around_text(self, index: int) -> tuple[bytes, bytes]:
        """The event of a text, without the text."""
        marker = secrets.token_hex(16)
        return split_template(self._chunk(index, ChatDelta(content=marker)), marker)

    def piece(self, index: int, delta: Delta) -> bytes:
        """An event each for reasoning, text with its log-probabilities, and pieces of tool calls."""
        events = []
        if delta.reasoning and self._with_reasoning:
            events.append(self._chunk(index, ChatDelta(reasoning_content=delta.reasoning)))
        if delta.text or delta.logprobs:
            events.append(self._chunk(index, ChatDelta(content=delta.text), tokens=delta.logprobs or None))
        for call in delta.tool_calls:
            events.append(self._chunk(index, ChatDelta(tool_calls=[_call_chunk(call)])))
        return b"".join(map(event, events))

    def closing(self, index: int, end: End) -> bytes:
        """The event with the finish reason."""
        return event(self._chunk(index, ChatDelta(), end))

    def ending(self, usage: UsageBody) -> bytes:
        """The event with the token counts when they were asked for, and the end."""
        if not self._include_usage:
            return DONE
        return event(encode_json(ChatChunk(self._id, self._created, self._model, [], usage))) + DONE

    def failure(self, error: ApiError) -> bytes:
        """The event with the error, and the end."""
        return failed(error)

    def whole(self, choices: list[Choice], usage: UsageBody) -> ChatBody:
        """The response that is sent whole."""
        bodies = [
            ChatChoice(i, self._message(one), one.end.reason, chat_logprobs(one.logprobs), stop_reason(one.end))
            for i, one in enumerate(choices)
        ]
        return ChatBody(self._id, self._created, self._model, bodies, usage)

    def _message(self, choice: Choice) -> AssistantMessage:
        message = AssistantMessage(choice.text)
        if choice.reasoning and self._with_reasoning:
            message.reasoning_content = choice.reasoning
        if choice.calls:
            message.tool_calls = choice.calls
            message.content = choice.text or None
        return message


def _call_chunk(call: ToolCallDelta) -> ToolCallChunk:
    if not call.id:
        return ToolCallChunk(call.index, function=FunctionDelta(arguments=call.arguments))
    return ToolCallChunk(call.index, call.id, "function", FunctionDelta(call.name, call.arguments))
