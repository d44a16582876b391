"""`Client`: the blocking client. Thread-safe: streams may be read on different threads, each by one."""

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
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
    Kept,
    ListModels,
    ModelCard,
    Models,
    Prefixes,
    Rank,
    Ranked,
    ServerMessage,
    Tokenize,
    Tokenized,
)


class Stream:
    """One stream of a `Client`: iterate over it to get `Delta`s; afterwards `end` says how it went, and `stats` in
    figures.

    At most the server's window of deltas is buffered for a consumer that takes its time. Raises RequestRejected or
    RequestFailed from the iteration when the stream did not finish.
    """

    def __init__(
        self,
        client: "Client",
        ref: int,
        label: str,
        credit_every: int,
        ended: "queue.SimpleQueue[Stream] | None" = None,
    ) -> None:
        """With `ended` nobody reads before the end: all is taken as it comes, and the stream put there when it has
        ended."""
        self.ref = ref
        self.name = label or str(ref)
        self.tokens = 0  # that have come
        self.prompt_tokens: int | None = None
        self.end: End | None = None
        self._client = client
        self._queue: queue.SimpleQueue[Delta | End | CallboardError] = queue.SimpleQueue()
        self._credit_every = credit_every
        self._ended = ended
        self._taken = 0
        self._done = False

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        if self._done:
            raise StopIteration
        if self._taken >= self._credit_every and self._ended is None:
            self._client._grant(self.ref, self._taken)
            self._taken = 0
        item = self._queue.get()
        if isinstance(item, Delta):
            self._taken += 1
            return item
        self._done = True
        if isinstance(item, CallboardError):
            raise item
        self.end = item
        error = error_of(item)
        if error is not None:
            raise error
        raise StopIteration

    def text(self) -> str:
        """Read to the end and return all text."""
        return "".join(delta.text for delta in self)

    def result(self) -> Result:
        """Read to the end and return all of it. Raises as the iteration does."""
        deltas = list(self)
        return whole(deltas, self.end)

    @property
    def buffered(self) -> int:
        """Deltas that have come and were not taken."""
        return self._queue.qsize()

    @property
    def stats(self) -> StreamStats | None:
        """Token counts and times, once the stream was read to its end."""
        return StreamStats.of(self.end) if self.end is not None else None

    def cancel(self) -> None:
        """Ask the server to end the stream; the iteration then ends. Idempotent."""
        if not self._done:
            self._client._cancel(self.ref)


class Client:
    """Talks to a running server over ZeroMQ.

    Without arguments it takes `$CALLBOARD_ENDPOINT` or the only running server; `name` picks one of several.
    Raises ServerNotFound when there is none. `model` says which of several models to talk to (default: the first one);
    it is loaded if need be, which may take `load_wait` seconds. Raises RequestRejected when it can't be had.

    When the server is lost, open streams raise ServerLost, and the client connects to its successor, for which it
    looks `reconnect` seconds long; requests made meanwhile wait. `on_lost` is called with the error, on the
    connection's thread, after the streams were told.

    `keys` is for servers reached over tcp: a client's key file (`callboard keys`) or what it holds; without them
    `$CALLBOARD_KEYS` names the file.
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        endpoint: str | None = None,
        model: str | None = None,
        load_wait: float = LOAD_WAIT,
        reconnect: float = RECONNECT,
        keys: ClientKeys | str | Path | None = None,
    ) -> None:
        self._lock = threading.RLock()
        self.on_lost: Callable[[CallboardError], None] | None = None
        self._streams: dict[int, Stream] = {}
        self._calls: dict[int, queue.SimpleQueue[ServerMessage | CallboardError]] = {}
        self._refs = itertools.count(1)
        self._locator = Locator(name, endpoint, model, load_wait)
        self._repeats = Repeats()

        def connect(found: str) -> Connection:
            return Connection(
                found,
                self._on_message,
                self._on_lost,
                find=self._locator.find_again,
                reconnect=reconnect,
                on_demand=self._locator.of_several,
                keys=client_keys_for(found, keys),
            )

        self._connection, self._model = self._locator.connect(connect)
        self._credit_every = max(1, self._connection.welcome.window // 4)

    def generate(
        self,
        prompt: str | None = None,
        messages: Messages | None = None,
        ids: Iterable[int] | None = None,
        **options: Any,
    ) -> Stream:
        """Start a stream from a text, chat messages or token ids.

        Options: all of `protocol.messages.SamplingParams` by name (temperature, top_p, top_k, seed, max_tokens,
        logit_bias, logprobs, …; `stop` is a string or several), timeout in seconds, return_ids, return_text,
        add_special_tokens, label, model, template_kwargs, cache_salt, tools, tool_choice, split_reply.
        Raises TypeError for other options, CodecError for values that can't be sent, ServerLost.
        """
        return self.generate_choices(1, prompt, messages, ids, **options)[0]

    def generate_many(self, prompts: Iterable[Prompt], *, at_once: int = AT_ONCE, **options: Any) -> list[Result]:
        """The whole answers to many prompts, in their order; each is a text, a list of token ids, or a list of chat
        messages. `at_once` of them are under way at a time, and what a busy server refuses is asked again.

        Options as in `generate`, for all of them. One that fails says so in its `error`; nothing is raised for it.
        """
        batch = Batch(prompts, at_once)
        ended: queue.SimpleQueue[Stream] = queue.SimpleQueue()
        numbers: dict[Stream, int] = {}
        try:
            while True:
                while (wanted := batch.next()) is not None:
                    number, prompt = wanted
                    numbers[self._start(1, ended, **prompt, **options)[0]] = number
                if not batch.open:
                    return batch.results()
                stream = ended.get()
                pause = batch.done(numbers.pop(stream), _read_all(stream))
                if pause:
                    time.sleep(pause)
        finally:
            for stream in numbers:
                stream.cancel()

    def generate_choices(
        self,
        n: int,
        prompt: str | None = None,
        messages: Messages | None = None,
        ids: Iterable[int] | None = None,
        **options: Any,
    ) -> list[Stream]:
        """Start `n` streams for one prompt, which is computed once; otherwise like `generate`."""
        return self._start(n, None, prompt, messages, ids, **options)

    def _start(
        self,
        n: int,
        ended: "queue.SimpleQueue[Stream] | None",
        prompt: str | None = None,
        messages: Messages | None = None,
        ids: Iterable[int] | None = None,
        **options: Any,
    ) -> list[Stream]:
        refs = [next(self._refs) for _ in range(n)]
        options.setdefault("model", self._model)
        request = build_generate(
            refs[0], prompt=prompt, messages=messages, ids=ids, options=options, more_refs=refs[1:]
        )
        streams = [Stream(self, ref, request.label, self._credit_every, ended) for ref in refs]
        with self._lock:  # so that a loss comes before both or after both
            self._connection.send(request)
            self._streams.update(zip(refs, streams, strict=True))
            if self._locator.of_several:
                self._repeats.sent(request)
        return streams

    def tokenize(
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
        answer = self._call(Tokenize(ref, text, messages, add_special_tokens, template_kwargs or {}, tools or []))
        assert isinstance(answer, Tokenized)
        return unpack_ids(answer.ids)

    def detokenize(self, ids: Iterable[int]) -> str:
        """Text of token ids, special tokens included. Raises RequestRejected."""
        answer = self._call(Detokenize(next(self._refs), pack_ids(ids)))
        assert isinstance(answer, Detokenized)
        return answer.text

    def models(self) -> list[ModelCard]:
        """The models this server serves."""
        answer = self._call(ListModels(next(self._refs)))
        assert isinstance(answer, Models)
        return answer.models

    def cancel_label(self, label: str) -> int:
        """End all streams with this label, whoever asked for them; returns how many."""
        answer = self._call(CancelLabel(next(self._refs), label))
        assert isinstance(answer, Done)
        return answer.count

    def figures(self, streams: int = 0, since: float | None = None) -> Figures:
        """What the server counts, `streams` of its open streams at most, and its samples after `since`."""
        answer = self._call(AskFigures(next(self._refs), streams, since))
        assert isinstance(answer, Figures)
        return answer

    def prefixes(self) -> PrefixTree:
        """The prefixes that are kept, as a tree. Raises RequestRejected while there is no engine."""
        answer = self._call(AskPrefixes(next(self._refs)))
        assert isinstance(answer, Prefixes)
        return answer.tree

    def cancel_stream(self, rid: int) -> bool:
        """End the stream that `figures` shows as `rid`; returns whether there was one."""
        answer = self._call(CancelStream(next(self._refs), rid))
        assert isinstance(answer, Done)
        return answer.count > 0

    def embed(self, texts: Iterable[str] = (), *, ids: Iterable[Iterable[int]] = ()) -> list[tuple[list[float], int]]:
        """The vector of each text, or of each list of token ids, and how many tokens it has. Raises RequestRejected."""
        call = Embed(next(self._refs), [*texts], [pack_ids(one) for one in ids])
        answer = self._call(call)
        assert isinstance(answer, Embedded)
        return list(zip(map(unpack_floats, answer.vectors), answer.counts, strict=True))

    def rank(self, query: str, documents: Iterable[str], instruction: str = "") -> list[tuple[float, int]]:
        """How well each document answers the query, 0 to 1, and how many tokens that took. Raises RequestRejected."""
        answer = self._call(Rank(next(self._refs), query, [*documents], instruction))
        assert isinstance(answer, Ranked)
        return list(zip(answer.scores, answer.counts, strict=True))

    def cancel(self, stream: Stream) -> None:
        """Ask the server to end `stream`. Idempotent."""
        stream.cancel()

    def close(self) -> None:
        """Cancel what is open and disconnect. Idempotent."""
        with self._lock:
            open_refs = list(self._streams)
        for ref in open_refs:
            self._cancel(ref)
        self._locator.close()
        self._connection.close()
        self._on_lost(ServerLost(SERVER_LOST, "the client was closed"))

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, message: ClientCall) -> ServerMessage:
        answers: queue.SimpleQueue[ServerMessage | CallboardError] = queue.SimpleQueue()
        try:
            with self._lock:
                self._calls[message.ref] = answers
                self._connection.send(message)
            answer = answers.get()
        finally:
            with self._lock:
                self._calls.pop(message.ref, None)
        if isinstance(answer, CallboardError):
            raise answer
        if isinstance(answer, CallFailed):
            raise RequestRejected(answer.code, answer.message, param=answer.param)
        return answer

    def _grant(self, ref: int, count: int) -> None:
        with contextlib.suppress(CallboardError):
            self._connection.send(Credit([ref], [count]))

    def _cancel(self, ref: int) -> None:
        with self._lock:
            self._repeats.begun(ref)
        with contextlib.suppress(CallboardError):
            self._connection.send(Cancel(ref))

    # Called on the connection's thread.

    def _on_message(self, message: ServerMessage) -> None:
        with self._lock:
            match message:
                case Deltas():
                    unread = []
                    for ref, item in split_deltas(message):
                        stream = self._streams.get(ref)
                        if stream is None or (isinstance(item, End) and self._repeats.holds_back(item)):
                            continue
                        self._repeats.begun(ref)
                        stream._queue.put(item)
                        if isinstance(item, End):
                            del self._streams[ref]
                            if stream._ended is not None:
                                stream._ended.put(stream)
                        else:
                            stream.tokens += item.count
                            if stream._ended is not None:
                                unread.append(ref)
                    if unread:
                        with contextlib.suppress(CallboardError):
                            self._connection.send(Credit(unread, [1] * len(unread)))
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
                    if message.ref in self._calls:
                        self._calls[message.ref].put(message)

    def _on_lost(self, error: CallboardError) -> None:
        with self._lock:
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
                stream._queue.put(lost.of(stream.name, stream.tokens))
                if stream._ended is not None:
                    stream._ended.put(stream)
                self._cancel(ref)  # should its request have been queued for the successor already
            for answers in self._calls.values():
                answers.put(error)
        if self.on_lost is not None:
            self.on_lost(error)


def _read_all(stream: Stream) -> Result:
    """What a stream that has ended brought."""
    deltas = []
    try:
        for delta in stream:
            deltas.append(delta)
    except CallboardError as error:
        return whole(deltas, stream.end, error)
    return whole(deltas, stream.end)
