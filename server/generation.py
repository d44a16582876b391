"""A request for text, from the parsed body to the last byte of its answer: the part all APIs share.

Called by the endpoints, on the event loop. `Generation` is what an API adapter (`server.chat`, `server.completions`,
`server.responses`, `server.messages`) makes of a body; `Answer` is how that adapter words the response. One request may
hold several prompts with several choices each: each choice is a stream of its own, and they stand and fall together.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from starlette.types import Receive, Send

from protocol import AsyncClient, AsyncStream, Delta
from protocol.codec import CodecError
from protocol.errors import CANCELLED, CallboardError, RequestFailed
from protocol.messages import End, Grammar, SamplingParams, TokenLogprobs, ToolCallDelta, ToolChoice, Usage
from protocol.sampling import InvalidParam, check_params
from server.errors import ApiError, from_client_error, invalid
from server.options import HttpOptions
from server.request_log import RequestRecord
from server.schemas import CompletionTokensDetails, PromptTokensDetails, SamplingFields, ToolCallBody, UsageBody
from server.sse import EVENTS, SseWriter, encode_json
from server.tools import Tools, join_calls

T = TypeVar("T")


class Choice(msgspec.Struct):
    """One finished choice of an answer that is sent whole. `logprobs` is None when nobody asked for them."""

    text: str
    end: End
    logprobs: list[TokenLogprobs] | None = None
    reasoning: str = ""
    calls: list[ToolCallBody] = []

    def pieces(self) -> list[Delta]:
        """All of it as one piece, for APIs whose whole answers are built like streamed ones."""
        calls = [
            ToolCallDelta(index, call.id, call.function.name, call.function.arguments)
            for index, call in enumerate(self.calls)
        ]
        return [Delta(self.text, [], 0, self.logprobs or [], self.reasoning, calls)]


class Answer(Protocol):
    """How an API words its response. `opening` to `failure` give whole events of a streamed one."""

    def opening(self, index: int, prompt_tokens: int) -> bytes:
        """What comes before the first piece of choice `index`."""

    def around_text(self, index: int) -> tuple[bytes, bytes] | None:
        """What stands before and after a piece that is nothing but text, which is JSON-encoded between them; None
        when such pieces go through `piece`, too."""

    def piece(self, index: int, delta: Delta) -> bytes:
        """The events of a piece."""

    def closing(self, index: int, end: End) -> bytes:
        """The events that end choice `index`."""

    def ending(self, usage: UsageBody) -> bytes:
        """What comes after all choices have ended."""

    def failure(self, error: ApiError) -> bytes:
        """What ends a response that fails on the way."""

    def whole(self, choices: list[Choice], usage: UsageBody) -> object:
        """The response that is sent whole."""


class Generation(msgspec.Struct):
    """What a request asks for. Each of `prompts` holds the one of `prompt`, `messages` and `ids` it is made of.

    `media_type` is that of a streamed answer. `prepare` is awaited before anything else, with the clients of the model
    and of all others that are loaded; it may still change what is asked for, or raise ApiError. It may be called again,
    when nothing came of it. `finish` is awaited when all streams are at their end. `keep_alive` is how long the model
    may stay without streams, see `WantModel`.
    """

    prompts: list[dict[str, Any]]
    params: SamplingParams
    answer: Answer
    stream: bool
    n: int = 1
    template_kwargs: dict[str, Any] = {}
    cache_salt: str = ""
    tools: Tools = []
    tool_choice: ToolChoice = ToolChoice()
    split_reply: bool = False
    model: str = ""
    keep_alive: float | None = None
    prepare: Callable[["Generation", Sequence[AsyncClient]], Awaitable[None]] | None = None
    finish: Callable[[AsyncClient, UsageBody], Awaitable[None]] | None = None
    media_type: str = EVENTS


def sampling_params(
    fields: SamplingFields,
    *,
    max_tokens: int | None,
    stop: str | list[str] | None = None,
    logprobs: int | None = None,
    grammar: Grammar | None = None,
    thinking_budget: int | None = None,
    names: Mapping[str, str] | None = None,
) -> SamplingParams:
    """The sampling options of a request, checked. `names` maps our names to the client's where they differ.

    Raises ApiError naming the option that is out of range.
    """
    params = SamplingParams(
        temperature=fields.temperature,
        top_p=fields.top_p,
        seed=fields.seed,
        max_tokens=max_tokens,
        ignore_eos=bool(fields.ignore_eos),
        stop=[stop] if isinstance(stop, str) else stop or [],
        top_k=fields.top_k,
        min_p=fields.min_p,
        repetition_penalty=fields.repetition_penalty,
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        logit_bias=fields.logit_bias or {},
        min_tokens=fields.min_tokens or 0,
        stop_token_ids=fields.stop_token_ids or [],
        xtc_probability=fields.xtc_probability,
        xtc_threshold=fields.xtc_threshold,
        logprobs=logprobs,
        priority=fields.priority or 0,
        grammar=grammar,
        thinking_budget=thinking_budget,
    )
    try:
        check_params(params)
    except InvalidParam as error:
        name = (names or {}).get(error.param, error.param)
        raise invalid(str(error).replace(error.param, name, 1), name) from None
    return params


def stop_reason(end: End | None) -> str | UnsetType:
    """vLLM's `stop_reason`: the stop string that ended a text, left out when none did."""
    return end.stop if end is not None and end.stop else UNSET


async def run(
    generation: Generation,
    clients: Sequence[AsyncClient],
    record: RequestRecord,
    options: HttpOptions,
    receive: Receive,
    send: Send,
    abort: Callable[[], None],
) -> None:
    """Generate with the first of `clients`, and answer. A client that leaves has its streams cancelled at once.

    Raises ApiError when the request fails before the answer began.
    """
    client = clients[0]
    streams: list[AsyncStream] = []
    record.stream = generation.stream
    record.streams, record.choices = streams, generation.n
    try:
        if generation.prepare is not None:
            await generation.prepare(generation, clients)
        for prompt in generation.prompts:
            streams += _start(generation, prompt, client, record, options)
        async with _cancel_when_gone(receive, streams, record):
            if generation.stream:
                writer = SseWriter(send, options.keepalive_interval, options.send_timeout, abort, generation.media_type)
                await _stream(generation, streams, client, writer, record)
            else:
                await _whole(generation, streams, client, record, send)
    except CallboardError as error:
        if not record.client_gone:
            raise from_client_error(error) from None
    finally:
        for stream in streams:
            stream.cancel()


def _start(
    generation: Generation,
    prompt: dict[str, Any],
    client: AsyncClient,
    record: RequestRecord,
    options: HttpOptions,
) -> list[AsyncStream]:
    params = generation.params
    try:
        return client.generate_choices(
            generation.n,
            **prompt,
            **{name: getattr(params, name) for name in params.__struct_fields__},
            label=record.request_id,
            timeout=options.request_timeout,
            template_kwargs=generation.template_kwargs,
            cache_salt=generation.cache_salt,
            tools=generation.tools,
            tool_choice=generation.tool_choice,
            split_reply=generation.split_reply,
            model=generation.model,
            received=record.arrived,
            trace=options.traces,
        )
    except CodecError as error:
        raise invalid(str(error)) from None


@asynccontextmanager
async def _cancel_when_gone(receive: Receive, streams: list[AsyncStream], record: RequestRecord) -> AsyncIterator[None]:
    async def listen() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        record.client_gone = True
        for stream in streams:
            stream.cancel()

    listener = asyncio.create_task(listen())
    try:
        yield
    finally:
        listener.cancel()


async def _whole(
    generation: Generation, streams: list[AsyncStream], client: AsyncClient, record: RequestRecord, send: Send
) -> None:
    with_logprobs = generation.params.logprobs is not None

    async def read(stream: AsyncStream) -> Choice:
        if not with_logprobs and not generation.split_reply:
            return Choice(await stream.text(), _end_of(stream))
        deltas = [delta async for delta in stream]
        return Choice(
            "".join(delta.text for delta in deltas),
            _end_of(stream),
            [token for delta in deltas for token in delta.logprobs] if with_logprobs else None,
            "".join(delta.reasoning for delta in deltas),
            join_calls([call for delta in deltas for call in delta.tool_calls]),
        )

    choices = await _all(read(stream) for stream in streams)
    if record.client_gone:
        return
    usage = _total(streams, generation.n)
    body = encode_json(generation.answer.whole(choices, usage))
    if generation.finish is not None:
        await generation.finish(client, usage)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _stream(
    generation: Generation,
    streams: list[AsyncStream],
    client: AsyncClient,
    writer: SseWriter,
    record: RequestRecord,
) -> None:
    answer = generation.answer

    async def pump(index: int, stream: AsyncStream) -> None:
        around = answer.around_text(index)
        opened = False

        def opening() -> bytes:
            nonlocal opened
            if opened:
                return b""
            opened = True
            return answer.opening(index, stream.prompt_tokens or 0)

        async for delta in stream:
            if around is not None and not (delta.logprobs or delta.reasoning or delta.tool_calls):
                if delta.text:
                    before, after = around
                    await writer.write(opening() + before + encode_json(delta.text) + after)
            elif delta.text or delta.logprobs or delta.reasoning or delta.tool_calls:
                await writer.write(opening() + answer.piece(index, delta))
        end = _end_of(stream)
        await writer.write(opening() + answer.closing(index, end))

    def accepted() -> bool:
        return all(stream.prompt_tokens is not None for stream in streams)

    keep_alive = asyncio.create_task(writer.keep_alive(accepted))
    try:
        await _all(pump(index, stream) for index, stream in enumerate(streams))
        keep_alive.cancel()
        usage = _total(streams, generation.n)
        last = answer.ending(usage)
        if generation.finish is not None:
            await generation.finish(client, usage)
        await writer.finish(last)
    except CallboardError as error:
        keep_alive.cancel()
        if record.client_gone or not writer.started:
            raise
        record.error_code = error.code
        await writer.finish(answer.failure(from_client_error(error)))
    finally:
        keep_alive.cancel()


async def _all(parts: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines together; the first that fails ends the others. One alone runs without a task of its own."""
    first, *others = parts
    if not others:
        return [await first]
    tasks = [asyncio.create_task(part) for part in (first, *others)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _end_of(stream: AsyncStream) -> End:
    """How a stream that was read to its end finished.

    Raises RequestFailed when it was cancelled, by us for a client that left or by the server.
    """
    assert stream.end is not None
    if stream.end.outcome != "finished":
        raise RequestFailed(CANCELLED, stream.end.message or "the request was cancelled")
    return stream.end


def _total(streams: list[AsyncStream], n: int) -> UsageBody:
    usages: list[Usage] = [stream.end.usage for stream in streams if stream.end is not None]
    prompt = sum(usage.prompt_tokens for usage in usages[::n])  # the choices of a prompt share it
    completion = sum(usage.completion_tokens for usage in usages)
    cached = sum(usage.cached_tokens for usage in usages[::n])
    reasoning = sum(usage.reasoning_tokens for usage in usages)
    details = PromptTokensDetails(cached), CompletionTokensDetails(reasoning)
    return UsageBody(prompt, completion, prompt + completion, *details)
