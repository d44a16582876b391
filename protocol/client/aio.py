"""`AsyncClient`: the client for asyncio programs, the HTTP workers among them.

All state belongs to the event loop's thread; the connection's thread hands each message over with one call.
"""

import asyncio
import itertools
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

from protocol.client.connection import Connection
from protocol.client.locate import LOAD_WAIT, Locator
from protocol.client.repeats import Repeats
from protocol.client.requests import RECONNECT, Delta, Lost, Messages, build_generate, error_of, split_deltas
from protocol.client.results import AT_ONCE, Batch, Prompt, Result, StreamStats, whole
from protocol.errors import SERVER_LOST, CallboardError, RequestRejected, ServerLost
from protocol.figures import PrefixTree
from protocol.ids import pack_ids, unpack_floats, unpack_ids
from protocol.keys import ClientKeys, client_keys_for
from protocol.messages import (
    Accepted,
    AskFigures,
    AskPrefixes,
    CallFailed,
    Cancel,
    CancelLabel,
    CancelStream,
    Charge,
    ClientCall,
    Credit,
    Deltas,
    Detokenize,
    Detokenized,
    Done,
    Embed,
    Embedded,
    End,
    Figures,
    Forget,
    Keep,
    Kept,
    ListModels,
    ModelCard,
    Models,
    Prefixes,
    Quota,
    Rank,
    Ranked,
    Recall,
    ServerMessage,
    Tokenize,
    Tokenized,
)


class AsyncStream:
    """One stream of an `AsyncClient`: `async for delta in stream`; afterwards `end` says how it went.

    Taking the next delta tells the server that the one before was used, so the consumer's pace bounds what is
    buffered. Raises RequestRejected or RequestFailed from the iteration when the stream did not finish.
    """

    def __init__(self, client: "AsyncClient", ref: int, label: str, received: float = -1.0) -> None:
        self.ref = ref
        self.name = label or str(ref)
        self.tokens = 0  # that have come
        self.prompt_tokens: int | None = None
        self.end: End | None = None
        self.first_used = -1.0  # when its first delta was used, by `time.monotonic`
        self._unused_since = received  # until its first delta is used, if anybody wants to know
        self._client = client
        self._items: deque[Delta | End | CallboardError] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._unacknowledged = False
        self._done = False

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        if self._unacknowledged:
            self._unacknowledged = False
            self._client._grant(self.ref, self._unused_since)
            self._unused_since = -1.0
            if self.first_used < 0:
                self.first_used = time.monotonic()
        if self._done:
            raise StopAsyncIteration
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        item = self._items.popleft()
        if isinstance(item, Delta):
            self._unacknowledged = True
            return item
        self._done = True
        if isinstance(item, CallboardError):
            raise item
        self.end = item
        error = error_of(item)
        if error is not None:
            raise error
        raise StopAsyncIteration

    async def text(self) -> str:
        """Read to the end and return all text."""
        return "".join([delta.text async for delta in self])

    async def result(self) -> Result:
        """Read to the end and return all of it. Raises as the iteration does."""
        deltas = [delta async for delta in self]
        return whole(deltas, self.end)

    @property
    def buffered(self) -> int:
        """Deltas that have come and were not taken."""
        return len(self._items)

    @property
    def stats(self) -> StreamStats | None:
        """Token counts and times, once the stream was read to its end."""
        return StreamStats.of(self.end) if self.end is not None else None

    def cancel(self) -> None:
        """Ask the server to end the stream; the iteration then ends. Idempotent."""
        if not self._done:
            self._client._cancel(self.ref)

    def _deliver(self, item: Delta | End | CallboardError) -> None:
        self._items.append(item)
        if isinstance(item, Delta):
            self.tokens += item.count
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class AsyncClient:
    """Talks to a running server over ZeroMQ, from one event loop.

    Make it with `await AsyncClient.connect(…)`, or use `async with AsyncClient(…) as client`. Arguments are those
    of `Client`; `name_in_logs` is how the server's logs call this client. It reconnects as `Client` does, with
    `on_lost` called on the event loop; a `reconnect` time of 0 makes the first loss final.
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        endpoint: str | None = None,
        model: str | None = None,
        load_wait: float = LOAD_WAIT,
        name_in_logs: str = "",
        reconnect: float = RECONNECT,
        keys: ClientKeys | str | Path | None = None,
    ) -> None:
        self._reconnect = reconnect
        self._keys = keys
        self._locator = Locator(name, endpoint, model, load_wait)
        self._repeats = Repeats()
        self._name_in_logs = name_in_logs
        self._streams: dict[int, AsyncStream] = {}
        self._calls: dict[int, asyncio.Future[ServerMessage]] = {}
        self._refs = itertools.count(1)
        self._credits: dict[int, int] = {}
        self._first_used: list[float] = []  # when the requests were received whose first deltas are used now
        self.on_lost: Callable[[CallboardError], None] | None = None

    @classmethod
    async def connect(cls, name: str | None = None, *, endpoint: str | None = None, **options: Any) -> "AsyncClient":
        """Make a client with these options and connect it. Raises ServerNotFound."""
        client = cls(name, endpoint=endpoint, **options)
        await client.open()
        return client

    async def open(self) -> None:
        """Connect. Raises ServerNotFound when there is no such server, or it doesn't answer, and RequestRejected when
        the model can't be had."""
        self._loop = asyncio.get_running_loop()
        connecting = self._loop.run_in_executor(None, self._connect)
        try:
            self._connection, self._model = await asyncio.shield(connecting)
        except asyncio.CancelledError:
            self._locator.close()
            connecting.add_done_callback(_close_unwanted)
            raise

    def _connect(self) -> tuple[Connection, str]:
        def hand_over(message: ServerMessage) -> None:
            self._call_soon(self._on_message, message)

        def lost(error: CallboardError) -> None:
            self._call_soon(self._on_lost, error)

        def connect(endpoint: str) -> Connection:
            return Connection(
                endpoint,
                hand_over,
                lost,
                name=self._name_in_logs,
                find=self._locator.find_again,
                reconnect=self._reconnect,
                on_demand=self._locator.of_several,
                keys=client_keys_for(endpoint, self._keys),
            )

        return self._locator.connect(connect)

    def _call_soon(self, callback: Callable[[Any], None], argument: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, argument)
        except RuntimeError:
            pass  # the loop has ended, and nobody waits any more

    async def __aenter__(self) -> "AsyncClient":
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def generate(
        self,
        prompt: str | None = None,
        messages: Messages | None = None,
        ids: Iterable[int] | None = None,
        **options: Any,
    ) -> AsyncStream:
        """Start a stream from a text, chat messages or token ids; options and errors as in `Client.generate`."""
        return self.generate_choices(1, prompt, messages, ids, **options)[0]

    async def generate_many(self, prompts: Iterable[Prompt], *, at_once: int = AT_ONCE, **options: Any) -> list[Result]:
        """The whole answers to many prompts, as `Client.generate_many` gives them."""
        batch = Batch(prompts, at_once)
        reading: dict[asyncio.Task[Result], int] = {}
        try:
            while True:
                while (wanted := batch.next()) is not None:
                    number, prompt = wanted
                    reading[asyncio.create_task(_read_all(self.generate(**prompt, **options)))] = number
                if not reading:
                    return batch.results()
                done, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
                pause = max([batch.done(reading.pop(task), task.result()) for task in done])
                if pause:
                    await asyncio.sleep(pause)
        finally:
            for task in reading:
                task.cancel()

    def generate_choices(
        self,
        n: int,
        prompt: str | None = None,
        messages: Messages | None = None,
        ids: Iterable[int] | None = None,
        received: float = -1.0,
        **options: Any,
    ) -> list[AsyncStream]:
        """Start `n` streams for one prompt, which is computed once; otherwise like `generate`.

        A program that was asked itself says when it `received` that request, by `time.monotonic` on the server's
        machine: the server then counts the time to first token from there until this program wants the second delta.
        """
        refs = [next(self._refs) for _ in range(n)]
        options.setdefault("model", self._model)
        request = build_generate(
            refs[0], prompt=prompt, messages=messages, ids=ids, options=options, more_refs=refs[1:], received=received
        )
        self._connection.send(request)
        streams = [AsyncStream(self, ref, request.label, received) for ref in refs]
        self._streams.update(zip(refs, streams, strict=True))
        if self._locator.of_several:
            self._repeats.sent(request)
        return streams

    async def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Messages | None = None,
        add_special_tokens: bool = True,
        template_kwargs: dict[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> list[int]:
        """Token ids of a text, or of chat messages under the model's template. Raises RequestRejected."""
        if (text is None) == (messages is None):
            raise TypeError("give exactly one of text and messages=")
        ref = next(self._refs)
        call = Tokenize(ref, text, messages, add_special_tokens, template_kwargs or {}, tools or [])
        answer = await self._call(call)
        assert isinstance(answer, Tokenized)
        return unpack_ids(answer.ids)

    async def detokenize(self, ids: Iterable[int]) -> str:
        """Text of token ids, special tokens included. Raises RequestRejected."""
        answer = await self._call(Detokenize(next(self._refs), pack_ids(ids)))
        assert isinstance(answer, Detokenized)
        return answer.text

    async def models(self) -> list[ModelCard]:
        """The models this server serves."""
        answer = await self._call(ListModels(next(self._refs)))
        assert isinstance(answer, Models)
        return answer.models

    async def cancel_label(self, label: str) -> int:
        """End all streams with this label, whoever asked for them; returns how many."""
        answer = await self._call(CancelLabel(next(self._refs), label))
        assert isinstance(answer, Done)
        return answer.count

    async def figures(self, streams: int = 0, since: float | None = None) -> Figures:
        """What the server counts, `streams` of its open streams at most, and its samples after `since`."""
        answer = await self._call(AskFigures(next(self._refs), streams, since))
        assert isinstance(answer, Figures)
        return answer

    async def prefixes(self) -> PrefixTree:
        """The prefixes that are kept, as a tree. Raises RequestRejected while there is no engine."""
        answer = await self._call(AskPrefixes(next(self._refs)))
        assert isinstance(answer, Prefixes)
        return answer.tree

    async def cancel_stream(self, rid: int) -> bool:
        """End the stream that `figures` shows as `rid`; returns whether there was one."""
        answer = await self._call(CancelStream(next(self._refs), rid))
        assert isinstance(answer, Done)
        return answer.count > 0

    async def charge(self, name: str, quotas: list[Quota], *, requests: int = 0, tokens: int = 0) -> None:
        """Account for requests or tokens of an API key. Raises RequestRejected when a request goes beyond a quota."""
        await self._call(Charge(next(self._refs), name, quotas, requests, tokens))

    async def keep(self, key: str, value: bytes) -> None:
        """Have the server keep a value in memory, for all clients, as long as there is room."""
        await self._call(Keep(next(self._refs), key, value))

    async def recall(self, key: str) -> bytes | None:
        """What is kept under a key; None when nothing is (any more)."""
        answer = await self._call(Recall(next(self._refs), key))
        assert isinstance(answer, Kept)
        return answer.value

    async def forget(self, key: str) -> bool:
        """Drop what is kept under a key; returns whether there was something."""
        answer = await self._call(Forget(next(self._refs), key))
        assert isinstance(answer, Done)
        return answer.count > 0

    async def embed(
        self, texts: Iterable[str] = (), *, ids: Iterable[Iterable[int]] = ()
    ) -> list[tuple[list[float], int]]:
        """The vector of each text, or of each list of token ids, and how many tokens it has. Raises RequestRejected."""
        call = Embed(next(self._refs), [*texts], [pack_ids(one) for one in ids])
        answer = await self._call(call)
        assert isinstance(answer, Embedded)
        return list(zip(map(unpack_floats, answer.vectors), answer.counts, strict=True))

    async def rank(self, query: str, documents: Iterable[str], instruction: str = "") -> list[tuple[float, int]]:
        """How well each document answers the query, 0 to 1, and how many tokens that took. Raises RequestRejected."""
        answer = await self._call(Rank(next(self._refs), query, [*documents], instruction))
        assert isinstance(answer, Ranked)
        return list(zip(answer.scores, answer.counts, strict=True))

    def cancel(self, stream: AsyncStream) -> None:
        """Ask the server to end `stream`. Idempotent."""
        stream.cancel()

    async def close(self) -> None:
        """Cancel what is open and disconnect. Idempotent."""
        for ref in list(self._streams):
            self._cancel(ref)
        self._locator.close()
        await self._loop.run_in_executor(None, self._connection.close)
        self._end_all(ServerLost(SERVER_LOST, "the client was closed"))

    def fail_open_streams(self, error: CallboardError) -> None:
        """End every open stream and call with `error`, for a program that knows better that the server is gone."""
        self._end_all(error)

    async def _call(self, message: ClientCall) -> ServerMessage:
        future: asyncio.Future[ServerMessage] = self._loop.create_future()
        self._calls[message.ref] = future
        try:
            self._connection.send(message)
            answer = await future
        finally:
            self._calls.pop(message.ref, None)
        if isinstance(answer, CallFailed):
            raise RequestRejected(answer.code, answer.message, param=answer.param, retry_after=answer.retry_after)
        return answer

    def _grant(self, ref: int, unused_since: float) -> None:
        # Gathered over one turn of the loop: a step brings a delta for every stream.
        if not self._credits:
            self._loop.call_soon(self._send_credits)
        self._credits[ref] = self._credits.get(ref, 0) + 1
        if unused_since >= 0:
            self._first_used.append(unused_since)

    def _send_credits(self) -> None:
        # A turn later, the loop has given the system what was written.
        now = time.monotonic()
        credits, self._credits = self._credits, {}
        since, self._first_used = self._first_used, []
        self._send_if_connected(Credit(list(credits), list(credits.values()), [now - moment for moment in since]))

    def _cancel(self, ref: int) -> None:
        self._repeats.begun(ref)
        self._send_if_connected(Cancel(ref))

    def _send_if_connected(self, message: Credit | Cancel) -> None:
        try:
            self._connection.send(message)
        except CallboardError:
            pass  # lost or closed: the server has ended the stream, or will for want of pings

    def _on_message(self, message: ServerMessage) -> None:
        match message:
            case Deltas():
                for ref, item in split_deltas(message):
                    stream = self._streams.get(ref)
                    if stream is not None and not (isinstance(item, End) and self._repeats.holds_back(item)):
                        self._repeats.begun(ref)
                        stream._deliver(item)
                        if isinstance(item, End):
                            del self._streams[ref]
            case Accepted(ref=ref, prompt_tokens=prompt_tokens):
                self._repeats.begun(ref)
                if ref in self._streams:
                    self._streams[ref].prompt_tokens = prompt_tokens
            case (
                Tokenized()
                | Detokenized()
                | Models()
                | CallFailed()
                | Done()
                | Kept()
                | Embedded()
                | Ranked()
                | Figures()
                | Prefixes()
            ):
                future = self._calls.get(message.ref)
                if future is not None and not future.done():
                    future.set_result(message)

    def _on_lost(self, error: CallboardError) -> None:
        self._end_all(error)
        if self.on_lost is not None:
            self.on_lost(error)

    def _end_all(self, error: CallboardError) -> None:
        repeated = self._repeats.due()
        if repeated and self._connection.is_over:
            repeated = []
            self._repeats.forget()
        streams = {ref: stream for ref, stream in self._streams.items() if ref not in self._repeats}
        self._streams = {ref: stream for ref, stream in self._streams.items() if ref in self._repeats}
        for request in repeated:
            self._connection.send(request)
        lost = Lost(error, [stream.name for stream in streams.values()])
        for ref, stream in streams.items():
            stream._deliver(lost.of(stream.name, stream.tokens))
            self._cancel(ref)  # should its request have been queued for the successor already
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)


def _close_unwanted(connecting: "asyncio.Future[tuple[Connection, str]]") -> None:
    """Nobody waits for this connection any more."""
    if not connecting.cancelled() and connecting.exception() is None:
        connection, _ = connecting.result()
        threading.Thread(target=connection.close, daemon=True).start()  # which waits for its thread


async def _read_all(stream: AsyncStream) -> Result:
    """What a stream brings, read to its end. Cancelled, it cancels the stream."""
    deltas = []
    try:
        async for delta in stream:
            deltas.append(delta)
    except CallboardError as error:
        return whole(deltas, stream.end, error)
    finally:
        stream.cancel()
    return whole(deltas, stream.end)
