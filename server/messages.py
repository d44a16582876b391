"""`/v1/messages`: Anthropic's Messages API as a `Generation`, and the words of its answers.

Events come in Anthropic's order: message_start, then for each block content_block_start, its deltas and
content_block_stop, then message_delta and message_stop.
"""

from typing import Any

from protocol import Delta
from protocol.messages import End, Grammar, ToolChoice
from server.chat import template_kwargs
from server.choosing import Chooser
from server.errors import ApiError, invalid
from server.generation import Choice, Generation, sampling_params
from server.message_input import chat_messages
from server.request_body import check_depth, decode_request
from server.schemas import FunctionSpec, ToolSpec, UsageBody
from server.schemas_messages import (
    Block,
    CountTokensRequest,
    EventDelta,
    MessageBody,
    MessageEvent,
    MessagesRequest,
    MessagesUsage,
    TextBlock,
    ThinkingBlock,
    TokenCount,
    ToolUseBlock,
)
from server.sse import encode_json, named_event
from server.structured import json_schema, one_grammar, structured_outputs
from server.tools import Tools, arguments_of, check_count, tool_of
from server.unsupported import MESSAGES_UNSUPPORTED

_NAMES = {"stop": "stop_sequences", "thinking_budget": "thinking.budget_tokens"}
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_MODES = {"auto": "auto", "any": "required", "none": "none", "tool": "named"}


def parse_message(body: bytes, model: str, request_id: str) -> tuple[str | None, Generation]:
    """The model asked for, and what to generate. `model` is what answers call it when none was.

    Raises ApiError naming the field that is wrong.
    """
    request = decode_request(body, MessagesRequest, MESSAGES_UNSUPPORTED)
    messages, tools, kwargs = _prompt(request)
    choice = _choice(request, tools)
    thinks = request.thinking is not None and request.thinking.type != "disabled"
    params = sampling_params(
        request,
        max_tokens=request.max_tokens,
        stop=request.stop_sequences,
        grammar=one_grammar(*_format(request), *structured_outputs(request.structured_outputs)),
        thinking_budget=request.thinking.budget_tokens if request.thinking is not None and thinks else None,
        names=_NAMES,
    )
    if params.grammar is not None and choice.mode in ("required", "named"):
        raise invalid(f"{params.grammar.field} can't be combined with a tool_choice that forces a call", "tool_choice")
    generation = Generation(
        prompts=[{"messages": messages}],
        params=params,
        answer=MessagesAnswer(f"msg_{request_id}", request.model or model, request_id, thinks),
        stream=bool(request.stream),
        cache_salt=request.cache_salt or "",
        template_kwargs=kwargs,
        tools=tools,
        tool_choice=choice,
        split_reply=True,
    )
    return request.model, generation


def _prompt(request: CountTokensRequest) -> tuple[list[dict[str, Any]], Tools, dict[str, Any]]:
    """Messages, tools and template variables."""
    messages = chat_messages(request.messages, request.system)
    check_depth(messages, "messages")
    check_count(request.tools)
    tools = []
    for i, tool in enumerate(request.tools or ()):
        if tool.type not in (None, "custom"):
            raise invalid(f"tools[{i}].type: tools of type {tool.type!r} are not supported", f"tools[{i}].type")
        tools.append(tool_of(ToolSpec("function", FunctionSpec(tool.name, tool.description, tool.input_schema))))
    check_depth(tools, "tools")
    thinking = request.thinking
    if thinking is not None and thinking.type not in ("enabled", "disabled", "adaptive"):
        raise invalid(f"thinking.type must be enabled, adaptive or disabled, not {thinking.type!r}", "thinking.type")
    kwargs: dict[str, Any] = {"enable_thinking": thinking is not None and thinking.type != "disabled"}
    last = messages[-1]
    if last["role"] == "assistant" and not last["content"] and "tool_calls" not in last:
        messages.pop()  # it may be empty, and is then no beginning
    elif last["role"] == "assistant":
        kwargs["continue_final_message"] = True
    if request.output_config is not None and request.output_config.effort is not None:
        kwargs["reasoning_effort"] = request.output_config.effort
    return messages, tools, kwargs | template_kwargs(request.chat_template_kwargs)


def _choice(request: CountTokensRequest, tools: Tools) -> ToolChoice:
    given = request.tool_choice
    if given is None:
        return ToolChoice()
    if given.type not in _MODES:
        raise invalid(f"tool_choice.type must be auto, any, tool or none, not {given.type!r}", "tool_choice.type")
    name = given.name or ""
    if given.type == "tool" and not any(tool["function"]["name"] == name for tool in tools):
        raise invalid(f"tool_choice names {name!r}, which is not among the tools", "tool_choice.name")
    if given.type == "any" and not tools:
        raise invalid("tool_choice is any, but there are no tools", "tool_choice")
    return ToolChoice(_MODES[given.type], name, not given.disable_parallel_tool_use)


def _format(request: CountTokensRequest) -> list[Grammar]:
    config = request.output_config
    field, wanted = "output_config.format", config.format if config is not None else None
    if wanted is None:
        field, wanted = "output_format", request.output_format
    if wanted is None or wanted.type == "text":
        return []
    if wanted.type != "json_schema" or wanted.schema is None:
        raise invalid(f"{field} must be of type json_schema, and have a schema", field)
    return [json_schema(wanted.schema, f"{field}.schema")]


class MessagesAnswer:
    """Words one answer; see `server.generation.Answer`."""

    def __init__(self, answer_id: str, model: str, request_id: str, thinks: bool) -> None:
        self._body = MessageBody(answer_id, model, MessagesUsage(0, 0))
        self._request_id = request_id
        self._thinks = thinks
        self._blocks = 0
        self._open: type[Block] | None = None
        self._called = False
        self._end: End | None = None

    def opening(self, index: int, prompt_tokens: int) -> bytes:
        """The events that tell of the message."""
        self._body.usage = MessagesUsage(prompt_tokens, 0)
        return _sse(MessageEvent("message_start", message=self._body), MessageEvent("ping"))

    def around_text(self, index: int) -> None:
        """A text may begin a block."""

    def piece(self, index: int, delta: Delta) -> bytes:
        """The events of a piece."""
        events: list[MessageEvent] = []
        if delta.reasoning and self._thinks:
            if self._open is not ThinkingBlock:
                events += self._start(ThinkingBlock())
            events.append(self._delta(EventDelta("thinking_delta", thinking=delta.reasoning)))
        if delta.text:
            if self._open is not TextBlock:
                events += self._start(TextBlock())
            events.append(self._delta(EventDelta("text_delta", text=delta.text)))
        for call in delta.tool_calls:
            if call.id:
                self._called = True
                events += self._start(ToolUseBlock(tool_id(call.id), call.name))
            if call.arguments:
                events.append(self._delta(EventDelta("input_json_delta", partial_json=call.arguments)))
        return _sse(*events)

    def closing(self, index: int, end: End) -> bytes:
        """The event that ends the last block."""
        self._end = end
        return _sse(*self._stop())

    def ending(self, usage: UsageBody) -> bytes:
        """The events that end the message."""
        assert self._end is not None
        delta = EventDelta(stop_reason=_reason(self._end, self._called), stop_sequence=self._end.stop or None)
        return _sse(MessageEvent("message_delta", delta=delta, usage=_usage(usage)), MessageEvent("message_stop"))

    def failure(self, error: ApiError) -> bytes:
        """The event with the error."""
        return named_event("error", error.anthropic_body(self._request_id))

    def whole(self, choices: list[Choice], usage: UsageBody) -> MessageBody:
        """The response that is sent whole."""
        (choice,) = choices
        body = self._body
        if choice.reasoning and self._thinks:
            body.content.append(ThinkingBlock(choice.reasoning))
        if choice.text:
            body.content.append(TextBlock(choice.text))
        for call in choice.calls:
            body.content.append(ToolUseBlock(tool_id(call.id), call.function.name, arguments_of(call)))
        body.stop_reason = _reason(choice.end, bool(choice.calls))
        body.stop_sequence = choice.end.stop or None
        body.usage = _usage(usage)
        return body

    def _start(self, block: Block) -> list[MessageEvent]:
        events = [*self._stop(), MessageEvent("content_block_start", index=self._blocks, content_block=block)]
        self._open = type(block)
        self._blocks += 1
        return events

    def _stop(self) -> list[MessageEvent]:
        if self._open is None or not self._blocks:
            return []
        events = [MessageEvent("content_block_stop", index=self._blocks - 1)]
        if self._open is ThinkingBlock:
            events.insert(0, self._delta(EventDelta("signature_delta", signature="")))
        return events

    def _delta(self, delta: EventDelta) -> MessageEvent:
        return MessageEvent("content_block_delta", index=self._blocks - 1, delta=delta)


def tool_id(call_id: str) -> str:
    """An id as Anthropic's clients know them; ours begin otherwise."""
    return call_id if call_id.startswith("toolu_") else f"toolu_{call_id.removeprefix('call_')}"


def _reason(end: End, calls: bool) -> str:
    if end.stop:
        return "stop_sequence"
    if end.reason == "stop" and calls:
        return "tool_use"
    return _REASONS.get(end.reason, "end_turn")


def _usage(usage: UsageBody) -> MessagesUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    return MessagesUsage(usage.prompt_tokens - cached, usage.completion_tokens, cached)


def _sse(*events: MessageEvent) -> bytes:
    return b"".join(named_event(event.type, encode_json(event)) for event in events)


async def count_tokens(body: bytes, choose: Chooser) -> TokenCount:
    """How many tokens the prompt of a message would have. Raises ApiError, and what the client raises."""
    asked = decode_request(body, CountTokensRequest, MESSAGES_UNSUPPORTED)
    messages, tools, kwargs = _prompt(asked)
    backend = await choose(asked.model)
    ids = await backend.client().tokenize(messages=messages, tools=tools, template_kwargs=kwargs)
    return TokenCount(len(ids))
