"""A request for text, from the parsed body to the last byte of its answer: the part both APIs share.

Called by the endpoints, on the event loop. `Generation` is what an API adapter (`server.chat`,
`server.completions`) makes of a body; `Answer` is how that adapter words the response. One request may hold several
prompts: each is a stream of its own, and they stand and fall together.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.types import Receive, Send

from protocol import AsyncClient, AsyncStream
from protocol.codec import CodecError
from protocol.errors import CANCELLED, CallboardError, RequestFailed
from protocol.messages import End, SamplingParams, TokenLogprobs, Usage
from protocol.sampling import InvalidParam, check_params
from server.errors import from_client_error, invalid
from server.options import HttpOptions
from server.request_log import RequestRecord
from server.schemas import PromptTokensDetails, SamplingFields, UsageBody
from server.sse import SseWriter, encode_json

T = TypeVar("T")


class Choice(msgspec.Struct):
    """One finished choice of an answer that is sent whole. `logprobs` is None when nobody asked for them."""

    text: str
    reason: str
    logprobs: list[TokenLogprobs] | None


class Answer(Protocol):
    """How an API words its response. `opening` to `usage` give whole events of a streamed one."""

    def opening(self, index: int) -> bytes:
        """What comes before the first text of choice `index`."""

    def around_text(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and after a piece of text, which is JSON-encoded between them."""

    def text(self, index: int, text: str, logprobs: list[TokenLogprobs]) -> bytes:
        """The event of a text with the log-probabilities of its tokens, for requests that asked for them."""

    def closing(self, index: int, reason: str) -> bytes:
        """The event that ends choice `index`."""

    def usage(self, usage: UsageBody) -> bytes:
        """The event with the token counts, after all choices have ended."""

    def whole(self, choices: list[Choice], usage: UsageBody) -> msgspec.Struct:
        """The response that is sent whole."""


class Generation(msgspec.Struct):
    """What a request asks for. Each of `prompts` holds the one of `prompt`, `messages` and `ids` it is made of."""

    prompts: list[dict[str, Any]]
    params: SamplingParams
    answer: Answer
    stream: bool
    include_usage: bool
    template_kwargs: dict[str, Any] = {}
    cache_salt: str = ""


def sampling_params(
    fields: SamplingFields, max_tokens: int | None, logprobs: int | None, names: Mapping[str, str] | None = None
) -> SamplingParams:
    """The sampling options of a request, checked. `names` maps our names to the client's where they differ.

    Raises ApiError naming the option that is out of range.
    """
    stop = [] if fields.stop is None else fields.stop
    params = SamplingParams(
        temperature=fields.temperature,
        top_p=fields.top_p,
        seed=fields.seed,
        max_tokens=max_tokens,
        ignore_eos=bool(fields.ignore_eos),
        stop=[stop] if isinstance(stop, str) else stop,
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
    )
    try:
        check_params(params)
    except InvalidParam as error:
        name = (names or {}).get(error.param, error.param)
        raise invalid(str(error).replace(error.param, name, 1), name) from None
    return params


def new_id(prefix: str) -> str:
    """An id for a response, such as `chatcmpl-…`."""
    return f"{prefix}-{secrets.token_hex(16)}"


async def run(
    generation: Generation,
    client: AsyncClient,
    record: RequestRecord,
    options: HttpOptions,
    receive: Receive,
    send: Send,
    abort: Callable[[], None],
) -> None:
    """Generate and answer. A client that leaves has its streams cancelled at once.

    Raises ApiError when the request fails before the answer began.
    """
    streams: list[AsyncStream] = []
    record.stream = generation.stream
    record.streams = streams
    try:
        for prompt in generation.prompts:
            streams.append(_start(generation, prompt, client, record, options))
        async with _cancel_when_gone(receive, streams, record):
            if generation.stream:
                writer = SseWriter(send, options.keepalive_interval, options.send_timeout, abort)
                await _stream(generation, streams, writer, record)
            else:
                await _whole(generation, streams, record, send)
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
) -> AsyncStream:
    try:
        return client.generate(
            **prompt,
            **msgspec.structs.asdict(generation.params),
            label=record.request_id,
            timeout=options.request_timeout,
            template_kwargs=generation.template_kwargs,
            cache_salt=generation.cache_salt,
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


async def _whole(generation: Generation, streams: list[AsyncStream], record: RequestRecord, send: Send) -> None:
    with_logprobs = generation.params.logprobs is not None

    async def read(stream: AsyncStream) -> Choice:
        if not with_logprobs:
            return Choice(await stream.text(), _end_of(stream).reason, None)
        deltas = [delta async for delta in stream]
        logprobs = [token for delta in deltas for token in delta.logprobs]
        return Choice("".join(delta.text for delta in deltas), _end_of(stream).reason, logprobs)

    choices = await _all(read(stream) for stream in streams)
    if record.client_gone:
        return
    body = encode_json(generation.answer.whole(choices, _total(streams)))
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _stream(generation: Generation, streams: list[AsyncStream], writer: SseWriter, record: RequestRecord) -> None:
    answer = generation.answer
    with_logprobs = generation.params.logprobs is not None

    async def pump(index: int, stream: AsyncStream) -> None:
        before, after = answer.around_text(index)
        opening = answer.opening(index)
        async for delta in stream:
            if with_logprobs and (delta.text or delta.logprobs):
                await writer.write(opening + answer.text(index, delta.text, delta.logprobs))
                opening = b""
            elif delta.text:
                await writer.write(opening + before + encode_json(delta.text) + after)
                opening = b""
        await writer.write(opening + answer.closing(index, _end_of(stream).reason))

    def accepted() -> bool:
        return all(stream.prompt_tokens is not None for stream in streams)

    keep_alive = asyncio.create_task(writer.keep_alive(accepted))
    try:
        await _all(pump(index, stream) for index, stream in enumerate(streams))
        keep_alive.cancel()
        await writer.finish(answer.usage(_total(streams)) if generation.include_usage else b"")
    except CallboardError as error:
        keep_alive.cancel()
        if record.client_gone or not writer.started:
            raise
        record.error_code = error.code
        await writer.fail(from_client_error(error))
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


def _total(streams: list[AsyncStream]) -> UsageBody:
    usages: list[Usage] = [stream.end.usage for stream in streams if stream.end is not None]
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    cached = sum(usage.cached_tokens for usage in usages)
    return UsageBody(prompt, completion, prompt + completion, PromptTokensDetails(cached))
