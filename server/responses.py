"""`/v1/responses`: OpenAI's Responses API as a `Generation`, and the words of its answers.

Responses are kept by the model's streamer, in memory, so that any HTTP worker finds them: the answer, and the
conversation up to it for `previous_response_id`, which may be one with another model.
"""

import secrets
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from protocol import AsyncClient, Delta
from protocol.messages import End, Grammar, ToolChoice
from server.backends import Backends
from server.chat import check_messages, template_kwargs
from server.errors import NOT_FOUND, ApiError, invalid
from server.generation import Choice, Generation, sampling_params
from server.request_body import check_depth, decode_request
from server.response_events import ResponseEvents
from server.response_input import input_messages, output_messages
from server.schemas import FunctionName, FunctionSpec, NamedToolChoice, ToolSpec, UsageBody
from server.schemas_responses import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ReasoningOptions,
    ResponseBody,
    ResponseDeleted,
    ResponseError,
    ResponseEvent,
    ResponsesRequest,
    ResponseToolChoice,
    ResponseUsage,
    TextFormat,
    TextOptions,
)
from server.sse import encode_json, named_event
from server.structured import json_schema, one_grammar, structured_outputs
from server.tools import Tools, parse_tools
from server.unsupported import RESPONSES_UNSUPPORTED

_NAMES = {"max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}


class KeptResponse(msgspec.Struct):
    """What is kept of a response: its body, and the conversation with its answer."""

    body: dict[str, Any]
    messages: list[dict[str, Any]]


def parse_response(body: bytes, model: str, request_id: str) -> tuple[str | None, Generation]:
    """The model asked for, and what to generate. `model` is what answers call it when none was.

    Raises ApiError naming the field that is wrong.
    """
    request = decode_request(body, ResponsesRequest, RESPONSES_UNSUPPORTED)
    messages = input_messages(request.input)
    check_depth(request.input if isinstance(request.input, list) else [], "input")
    tools, choice = _tools(request)
    reasoning = request.reasoning or ReasoningOptions()
    with_logprobs = "message.output_text.logprobs" in (request.include or ()) or request.top_logprobs is not None
    params = sampling_params(
        request,
        max_tokens=request.max_output_tokens,
        stop=request.stop,
        logprobs=(request.top_logprobs or 0) if with_logprobs else None,
        grammar=one_grammar(*_format(request.text), *structured_outputs(request.structured_outputs)),
        names=_NAMES,
    )
    if params.grammar is not None and choice.mode in ("required", "named"):
        raise invalid(f"{params.grammar.field} can't be combined with a tool_choice that forces a call", "tool_choice")
    shown = ResponseBody(
        # A client may choose the id of its request, and what is kept is for those alone that were told the answer's.
        f"resp_{secrets.token_hex(12)}_{request_id}",
        int(time.time()),
        request.model or model,
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        metadata=request.metadata or {},
        parallel_tool_calls=choice.parallel,
        previous_response_id=request.previous_response_id,
        reasoning=reasoning,
        store=request.store is not False,
        temperature=request.temperature,
        text=request.text or TextOptions(TextFormat("text")),
        tool_choice=request.tool_choice or "auto",
        tools=list(request.tools or ()),
        top_p=request.top_p,
        user=request.user,
    )
    answer = ResponseAnswer(shown)
    instructions = [{"role": "system", "content": request.instructions}] if request.instructions else []
    conversation: list[dict[str, Any]] = []

    async def prepare(generation: Generation, clients: Sequence[AsyncClient]) -> None:
        earlier: list[dict[str, Any]] = []
        if request.previous_response_id is not None:
            earlier = (await recall(clients, request.previous_response_id, "previous_response_id")).messages
        conversation[:] = [*earlier, *messages]
        if not conversation:
            raise invalid("input must not be empty", "input")
        check_messages(conversation)
        generation.prompts = [{"messages": [*instructions, *conversation]}]

    async def finish(client: AsyncClient, usage: UsageBody) -> None:
        if shown.store:
            kept = KeptResponse(msgspec.to_builtins(answer.body), [*conversation, *output_messages(answer.body.output)])
            await client.keep(f"response:{shown.id}", encode_json(kept))

    generation = Generation(
        prompts=[],
        params=params,
        answer=answer,
        stream=bool(request.stream),
        cache_salt=request.cache_salt or "",
        template_kwargs=template_kwargs(request.chat_template_kwargs, reasoning.effort),
        tools=tools,
        tool_choice=choice,
        split_reply=True,
        prepare=prepare,
        finish=finish,
    )
    return request.model, generation


def _tools(request: ResponsesRequest) -> tuple[Tools, ToolChoice]:
    specs = []
    for i, tool in enumerate(request.tools or ()):
        if tool.type != "function":
            raise invalid(f"tools[{i}].type: tools of type {tool.type!r} are not supported", f"tools[{i}].type")
        if not tool.name:
            raise invalid(f"tools[{i}].name is required", f"tools[{i}].name")
        specs.append(ToolSpec("function", FunctionSpec(tool.name, tool.description, tool.parameters, tool.strict)))
    return parse_tools(specs, _choice(request.tool_choice), request.parallel_tool_calls)


def _choice(choice: str | ResponseToolChoice | None) -> str | NamedToolChoice | None:
    if not isinstance(choice, ResponseToolChoice):
        return choice
    if choice.type == "function" and choice.function is None and choice.name:
        return NamedToolChoice("function", FunctionName(choice.name))
    if choice.type == "allowed_tools" and choice.allowed_tools is None and choice.mode and choice.tools is not None:
        nested = {"type": choice.type, "allowed_tools": {"mode": choice.mode, "tools": choice.tools}}
        return msgspec.convert(nested, NamedToolChoice)
    return choice


def _format(text: TextOptions | None) -> list[Grammar]:
    wanted = text.format if text is not None else None
    if wanted is None or wanted.type == "text":
        return []
    if wanted.type == "json_object":
        return [Grammar("json_object", "", "text.format")]
    if wanted.type != "json_schema":
        raise invalid(f"text.format.type must be text, json_object or json_schema, not {wanted.type!r}", "text.format")
    if wanted.schema is None:
        raise invalid("text.format.schema is required", "text.format.schema")
    return [json_schema(wanted.schema, "text.format.schema")]


class ResponseAnswer:
    """Words one answer; see `server.generation.Answer`. `body` is the response as it stands."""

    def __init__(self, body: ResponseBody) -> None:
        self.body = body
        self._events = ResponseEvents()

    def opening(self, index: int, prompt_tokens: int) -> bytes:
        """The events that tell of the response."""
        created = self._events.about("response.created", self.body)
        return _sse(created, self._events.about("response.in_progress", self.body))

    def around_text(self, index: int) -> None:
        """Every piece has a sequence number."""

    def piece(self, index: int, delta: Delta) -> bytes:
        """The events of a piece."""
        return _sse(*self._events.take(delta))

    def closing(self, index: int, end: End) -> bytes:
        """The events that end the last item."""
        complete = end.reason != "length"
        self.body.status = "completed" if complete else "incomplete"
        self.body.incomplete_details = None if complete else IncompleteDetails("max_output_tokens")
        return _sse(*self._events.close(self.body.status))

    def ending(self, usage: UsageBody) -> bytes:
        """The event with the whole response."""
        self._finish(usage)
        return _sse(self._events.about(f"response.{self.body.status}", self.body))

    def failure(self, error: ApiError) -> bytes:
        """The event of a response that failed."""
        self.body.status = "failed"
        self.body.error = ResponseError(error.shown.code, error.message)
        return _sse(self._events.about("response.failed", self.body))

    def whole(self, choices: list[Choice], usage: UsageBody) -> ResponseBody:
        """The response that is sent whole."""
        (choice,) = choices
        for piece in choice.pieces():
            list(self._events.take(piece))
        self.closing(0, choice.end)
        self._finish(usage)
        return self.body

    def _finish(self, usage: UsageBody) -> None:
        self.body.output = self._events.items
        self.body.usage = ResponseUsage(
            usage.prompt_tokens,
            InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
            usage.completion_tokens,
            OutputTokensDetails(usage.completion_tokens_details.reasoning_tokens),
            usage.total_tokens,
        )


def _sse(*events: ResponseEvent) -> bytes:
    return b"".join(named_event(event.type, encode_json(event)) for event in events)


async def recall(clients: Sequence[AsyncClient], response_id: str, param: str | None = None) -> KeptResponse:
    """A response that one of `clients` has kept. Raises ApiError, naming `param`, when there is none (any more)."""
    for client in clients:
        if (kept := await client.recall(f"response:{response_id}")) is not None:
            return msgspec.json.decode(kept, type=KeptResponse)
    raise ApiError(NOT_FOUND, f"there is no response {response_id!r} (any more)", param=param)


class ResponseEndpoints:
    """Responses that were kept."""

    def __init__(self, backends: Backends) -> None:
        self._backends = backends

    async def get(self, request: Request) -> Response:
        """One response. Raises ApiError when there is none."""
        kept = await recall(self._backends.clients(), request.path_params["id"])
        return Response(encode_json(kept.body), media_type="application/json")

    async def delete(self, request: Request) -> Response:
        """Forget one. Raises ApiError when there is none."""
        wanted = request.path_params["id"]
        if not any([await client.forget(f"response:{wanted}") for client in self._backends.clients()]):
            raise ApiError(NOT_FOUND, f"there is no response {wanted!r} (any more)")
        return Response(encode_json(ResponseDeleted(wanted)), media_type="application/json")
