"""The streamer process: owns every stream, and is all that clients ever talk to.

Takes requests from clients, has texts tokenized, hands ids to the engine, turns each step's tokens into text, and
sends every connection one message per step. One thread; engine and tokenizers may be replaced beneath it: open
streams go on where they were (`recovery.py` says in which order).
"""

import secrets
import time
from collections import Counter
from collections.abc import Iterable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import structlog
import zmq

from actors.base import Actor, StartError
from actors.model_files import read_model_files
from actors.pooling import read_pooling
from actors.quotas import Quotas
from actors.streamer.admission import Admission
from actors.streamer.clients import FAILED, ClientConnection, Clients
from actors.streamer.detokenizer import DetokenizerFactory
from actors.streamer.dialect import Dialect
from actors.streamer.engine_link import EngineLink, Loss
from actors.streamer.forced_calls import forced_calls
from actors.streamer.kept import KeptValues
from actors.streamer.logprobs import by_row
from actors.streamer.meter import Meter
from actors.streamer.pool_calls import PoolCalls
from actors.streamer.prefix_calls import PrefixCalls
from actors.streamer.recovery import POISON, Recovery
from actors.streamer.reply import Reply
from actors.streamer.requests import find_fault
from actors.streamer.stream import MAX_UNREAD, WINDOW, Phase, Stream
from actors.streamer.tokenizer_pool import Job, TokenizerPool, text_size
from actors.streamer.turns import Turns
from actors.streamer.warm_prompts import WarmPrompt, read_warm_prompts
from actors.streamer.zap import Doorkeeper
from actors.trail import read_trail
from protocol import errors
from protocol.codec import CodecError, client_codec
from protocol.ids import unpack_ids
from protocol.keys import KeysError
from protocol.limits import check_messages
from protocol.messages import (
    PROTOCOL_VERSION,
    Accepted,
    AskFigures,
    AskPrefixes,
    CallFailed,
    Cancel,
    CancelLabel,
    CancelStream,
    Charge,
    ClientMessage,
    Credit,
    Decoded,
    Detokenize,
    Detokenized,
    Done,
    Drain,
    Embed,
    Embedded,
    Encoded,
    End,
    EngineStats,
    EngineUse,
    Figures,
    Forget,
    Generate,
    Hello,
    Keep,
    Kept,
    ListModels,
    ModelCard,
    Models,
    Ping,
    Pong,
    Pool,
    Rank,
    Ranked,
    Recall,
    Refused,
    Step,
    Stop,
    Submit,
    SystemState,
    Thinking,
    Tokenize,
    Tokenized,
    TokenizerResult,
    Welcome,
)
from protocol.sampling import InvalidParam
from protocol.sockets import bind_router, bind_tcp

log = structlog.get_logger()

TOO_LONG = (
    "the request ran over its time limit of {:g} s; ask for fewer tokens (max_tokens), or raise the request's "
    "timeout or the server's --timeout"
)
CRASHED = "this request brought the engine down {} times while it was alone under suspicion, so it was given up"
SLEPT = 10.0  # a gap of so many seconds in this loop means that the machine slept: no deadline is judged by it
TICK = 0.25  # seconds between looks at deadlines and silent clients
MESSAGES_PER_TURN = 1000  # from clients, so that a flood can't keep the engine's steps waiting
WARM_PRIORITY = 1 << 30  # warm prompts come after all requests
MAX_NAME = 128  # characters of a client's name or label that are kept in logs
MAX_WAITING_CALLS = 1024  # tokenize and detokenize calls that may wait


class StreamerActor(Actor):
    """See the module's text. Streams are kept by rid; clients know them by their own refs."""

    def start(self) -> tuple[str, ModelCard | None]:
        path = self.config.model_path
        try:
            self._files = read_model_files(path)
            self._detokenizers = DetokenizerFactory.load(path, trust_remote_code=self.config.trust_remote_code)
            pool = self._read_pool()
        except (OSError, ValueError) as error:
            raise StartError(f"the tokenizer of {path} can't be loaded: {error}") from error
        try:
            file = self.config.warm_prompts if self.config.prefix_cache else ""
            self._warm_prompts = read_warm_prompts(Path(file)) if file else []
        except ValueError as error:
            raise StartError(str(error)) from error
        self._warmed = 0  # epoch of the engine that has them
        self._dialect = Dialect(self._files, self._detokenizers.tokenizer)
        self._kept = KeptValues()
        self._streams: dict[int, Stream] = {}
        self._rids = 0
        self._incarnation = secrets.randbits(62)
        self._card: ModelCard | None = None
        self._draining = False
        self._aborts: list[int] = []
        self._admission = Admission(self.config.max_num_seqs, self.config.max_waiting)
        self._tokenizers = TokenizerPool(self)
        self._engine = EngineLink(self, self._on_step, self._on_broken_link)
        self._recovery = Recovery(self.config.max_num_seqs)
        self._turns = Turns()
        self._told: EngineUse | None = None
        self._jobs: dict[int, Job] = {}
        self._pools = PoolCalls(
            pool, self._context, self._next_rid, self._tokenizers.submit, self._submit_pooled, self._drop_pooled
        )
        self._http_workers: set[str] = set()
        self._ended: list[dict[str, Any]] = []  # log lines of streams whose end is not sent yet
        self._malformed = 0
        self._malformed_logged = 0
        self._meter = Meter(time.monotonic())
        self._quotas = Quotas()
        self._next_tick = time.monotonic() + TICK
        endpoint = self.me.endpoint()
        self._socket = bind_router(self.context, endpoint)
        self._doorkeeper: Doorkeeper | None = None
        if self.config.zmq_tcp:
            self._listen_on_tcp()
        self._clients = Clients(self._socket)
        self._prefixes = PrefixCalls(self._engine, self._clients.send)
        self.add_socket(self._socket, self._serve_clients)
        return endpoint, None

    def _listen_on_tcp(self) -> None:
        path = self.config.zmq_keys
        try:
            if path:
                self._doorkeeper = Doorkeeper(self, Path(path))
            bind_tcp(self._socket, self.config.zmq_tcp, self._doorkeeper.keys if self._doorkeeper else None)
        except (zmq.ZMQError, KeysError) as error:
            raise StartError(f"can't listen on tcp://{self.config.zmq_tcp}: {error}") from error

    def _read_pool(self) -> Pool:
        if self.config.task != "rank":
            return read_pooling(self._files.path) if self.config.task == "embed" else Pool("last")
        words = [self._detokenizers.tokenizer.encode(word, add_special_tokens=False) for word in ("yes", "no")]
        if any(len(ids) != 1 for ids in words):
            raise ValueError("'yes' and 'no' are no single tokens of this model, so it is no reranker that we know")
        return Pool("last", among=[ids[0] for ids in words])

    def _next_rid(self) -> int:
        self._rids += 1
        return self._rids

    def _submit_pooled(self, rid: int) -> None:
        self._recovery.add(rid)
        self._submit_due()

    def _drop_pooled(self, rids: Iterable[int]) -> None:
        for rid in rids:
            self._recovery.remove(rid)
            self._aborts.append(rid)

    def close(self) -> None:
        self._tokenizers.close()
        self._engine.close()
        if self._doorkeeper is not None:
            self._doorkeeper.close()
        self.poller.unregister(self._socket)
        if self.config.house:  # its clients need not wait for silence to know that the model was unloaded
            for client in self._clients:
                self._clients.send(client.identity, Refused(PROTOCOL_VERSION, "the model was unloaded"))
        self._socket.close(linger=500)

    def open_streams(self) -> int:
        return len(self._streams) + len(self._pools)

    def ended_streams(self) -> int:
        return self._meter.over

    def wait_ms(self) -> float | None:
        return max(0.0, (self._next_tick - time.monotonic()) * 1000)

    def turn(self) -> None:
        now = time.monotonic()
        if now >= self._next_tick:
            late = now - self._next_tick
            if late > 1.0:
                self._clients.excuse(late)
            if late > SLEPT:
                for stream in self._streams.values():
                    stream.deadline += late
                self._pools.excuse(late)
            self._next_tick = now + TICK
            self._look_at_the_clock(now)
        self._flush()

    # The supervisor.

    def on_system(self, state: SystemState) -> None:
        if state.card is not None:
            self._card = state.card
        self._tokenizers.follow(state.actors)
        self._follow_engine(state)
        workers = {f"http-{a.index}.{a.epoch}" for a in state.actors if a.role == "http" and a.state == "ready"}
        for name in self._http_workers - workers:
            for client in self._clients.named(name):
                self._end_client(client, errors.CANCELLED, "the HTTP worker died")
        self._http_workers = workers
        if self._warm_prompts and self._engine.ready and self._tokenizers.known and self._warmed != self._engine.epoch:
            self._warmed = self._engine.epoch
            for prompt in self._warm_prompts:
                self._warm(prompt)

    def _warm(self, prompt: WarmPrompt) -> None:
        """Have a prompt computed and kept. There is no stream: nobody takes the one token it ends with."""

        def done(result: TokenizerResult) -> None:
            assert isinstance(result, Encoded)
            count = len(result.ids) // 4
            if result.code or not 0 < count < self._context():
                log.error("a warm prompt can't be computed", error=result.message or "too long", tokens=count)
            elif self._engine.ready:
                submit = Submit(
                    self._engine.epoch,
                    self.me.epoch,
                    self._next_rid(),
                    result.ids,
                    count,
                    1,
                    0.0,
                    1.0,
                    0,
                    priority=WARM_PRIORITY,
                    cache_salt=prompt.cache_salt,
                    warm=True,
                )
                self._engine.submit(submit)

        size = text_size(prompt.prompt, prompt.messages)
        self._tokenizers.submit(Job(size, done, prompt.prompt, prompt.messages, template_kwargs=prompt.template_kwargs))

    def _follow_engine(self, state: SystemState) -> None:
        loss = self._engine.lost(state.actors)
        if loss is not None:
            self._aborts.clear()
            trail = read_trail(self.me.run_dir, self._engine.epoch)
            poison = self._recovery.engine_down(planned=loss is Loss.PLANNED, trail=trail)
            log.warning(
                "engine lost",
                how=loss.value,
                epoch=self._engine.epoch,
                streams=len(self._streams),
                suspects=self._recovery.suspects,
            )
            for rid in poison:
                stream = self._streams.get(rid)
                if stream is None:
                    log.error("text given up", rid=rid)
                    self._pools.fail(rid, errors.CRASHED_ENGINE, CRASHED.format(POISON))
                    continue
                log.error(
                    "request given up", rid=rid, label=stream.label[:MAX_NAME], prompt_tokens=stream.prompt_tokens
                )
                self._end(stream, "failed", code=errors.CRASHED_ENGINE, message=CRASHED.format(POISON))
        if self._engine.found(state.actors):
            self._recovery.engine_up()
            self._told = None
            self._submit_due()

    def _on_broken_link(self, why: str) -> None:
        self._aborts.clear()
        self.control.report(EngineUse(self._engine.epoch, self._recovery.stepped, self._recovery.suspicious, why))
        self._recovery.engine_down(planned=True)

    def on_drain(self, order: Drain) -> None:
        self._draining = True

    def on_stop(self, order: Stop) -> None:
        self._draining = True
        self._end_all("failed", order.code, order.message)

    # Clients.

    def _serve_clients(self) -> None:
        for _ in range(MESSAGES_PER_TURN):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 2:
                self._malformed += 1
                continue
            identity, frame = frames
            client = self._clients.get(identity)
            if client is not None:
                client.heard = time.monotonic()
            try:
                message = client_codec.decode(frame)
            except CodecError as error:
                self._malformed += 1
                if client is not None:
                    text = f"not a message of protocol version {PROTOCOL_VERSION}: {error}"
                    self._clients.send(identity, CallFailed(-1, errors.INVALID_REQUEST, text))
                continue
            if isinstance(message, Hello):
                self._greet(identity, message)
            elif client is None:
                self._clients.send(identity, Refused(PROTOCOL_VERSION, "say Hello first"))
            else:
                try:
                    self._answer(client, message)
                except Exception:  # one client's message must not end all others' streams
                    log.exception("a message failed", client=client.name, message=type(message).__name__)
                    self._answer_failure(client, message)

    def _greet(self, identity: bytes, hello: Hello) -> None:
        if hello.version != PROTOCOL_VERSION:
            text = (
                f"the client speaks protocol version {hello.version}, "
                f"this server version {PROTOCOL_VERSION}; update the older one"
            )
            self._clients.send(identity, Refused(PROTOCOL_VERSION, text))
            return
        self._clients.add(identity, hello.name[:MAX_NAME], time.monotonic())
        self._clients.send(identity, Welcome(PROTOCOL_VERSION, self._incarnation, WINDOW, self._models()))

    def _models(self) -> list[ModelCard]:
        return self._card.all() if self._card is not None else []

    def _answer(self, client: ClientConnection, message: ClientMessage) -> None:
        match message:
            case Generate():
                self._generate(client, message)
            case Credit(refs=refs, counts=counts):
                self._meter.told(message.ttfts)
                for ref, count in zip(refs, counts, strict=False):
                    stream = self._streams.get(client.streams.get(ref, -1))
                    if stream is not None:
                        stream.credit(count)
                        self._send_due(stream)
            case Cancel(ref=ref):
                stream = self._streams.get(client.streams.get(ref, -1))
                if stream is not None:
                    self._end(stream, "cancelled", code=errors.CANCELLED, message="cancelled by the client")
            case Ping(seq=seq):
                self._clients.send(client.identity, Pong(seq, self._incarnation))
            case Tokenize() | Detokenize():
                self._text_call(client, message)
            case Embed() | Rank():
                self._pool_call(client, message)
            case ListModels(ref=ref):
                self._clients.send(client.identity, Models(ref, self._models()))
            case CancelLabel(ref=ref, label=label):
                found = [stream for stream in self._streams.values() if stream.label == label]
                for stream in found:
                    self._end(stream, "cancelled", code=errors.CANCELLED, message="cancelled on request")
                self._clients.send(client.identity, Done(ref, len(found)))
            case AskFigures():
                self._clients.send(client.identity, self._figures(message))
            case AskPrefixes(ref=ref):
                self._prefixes.ask(client.identity, ref, time.monotonic())
            case Charge():
                self._clients.send(client.identity, self._quotas.charge(message, time.monotonic()))
            case CancelStream(ref=ref, rid=rid):
                stream = self._streams.get(rid)
                if stream is not None:
                    self._end(stream, "cancelled", code=errors.CANCELLED, message="cancelled on request")
                self._clients.send(client.identity, Done(ref, int(stream is not None)))
            case Keep(ref=ref, key=key, value=value):
                self._clients.send(client.identity, Done(ref, int(self._kept.put(key, value))))
            case Recall(ref=ref, key=key):
                self._clients.send(client.identity, Kept(ref, self._kept.get(key)))
            case Forget(ref=ref, key=key):
                self._clients.send(client.identity, Done(ref, int(self._kept.drop(key))))

    def _answer_failure(self, client: ClientConnection, message: ClientMessage) -> None:
        """Say of a message that it could not be served, by a fault of ours."""
        if isinstance(message, Generate):
            for ref in (message.ref, *message.more_refs):
                stream = self._streams.get(client.streams.pop(ref, -1))
                if stream is not None:
                    self._end(stream, "failed", code=errors.INTERNAL_ERROR, message=FAILED)
                else:
                    end = End(ref, "failed", code=errors.INTERNAL_ERROR, message=FAILED)
                    self._clients.gather(client.identity, None, end)
        elif not isinstance(message, Hello | Ping | Cancel | Credit):
            self._clients.send(client.identity, CallFailed(message.ref, errors.INTERNAL_ERROR, FAILED))

    def _give_up(self, stream: Stream) -> None:
        """A fault of ours in the work for one stream ends that one alone. Called where it was caught."""
        log.exception("a stream failed", rid=stream.rid, label=stream.label[:MAX_NAME])
        if stream.rid in self._streams:
            self._end(stream, "failed", code=errors.INTERNAL_ERROR, message=FAILED)

    def _figures(self, asked: AskFigures) -> Figures:
        now = time.monotonic()
        shown = islice(self._streams.values(), min(max(0, asked.streams), len(self._streams)))
        names = {client.identity: client.name for client in self._clients}
        return Figures(
            asked.ref,
            self._meter.counts(self._malformed, self._clients.send_faults),
            self._meter.engine,
            dict(Counter(stream.phase.value for stream in self._streams.values())),
            len(self._clients),
            [stream.live(now, names.get(stream.client, "")) for stream in shown],
            [] if asked.since is None else self._meter.samples(asked.since),
        )

    def _generate(self, client: ClientConnection, request: Generate) -> None:
        now = time.monotonic()
        # Before anything is made of the request: its options are not known to be in bounds yet.
        refusal = self._refusal(client, request)
        refs = [request.ref, *request.more_refs]
        if refusal is not None:
            code, message, param = refusal
            retry = self._admission.retry_after(now) if code in (errors.QUEUE_FULL, errors.LOADING) else 0.0
            if code == errors.DRAINING:
                retry = 1.0 if self.config.house else max(1.0, self.config.drain_timeout)
            for ref in refs:
                end = End(ref, "rejected", code=code, message=message, retry_after=retry, param=param)
                self._meter.refused(end)
                self._clients.gather(client.identity, None, end)
            return
        params = self._files.resolve(request.params)
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=secrets.randbits(63))
        forced = forced_calls(request.tools, request.tool_choice)
        if forced is not None:
            params = msgspec.structs.replace(params, grammar=forced)
        timeout = self.config.timeout if request.timeout is None else min(request.timeout, self.config.timeout)
        first = self._rids + 1
        for choice, ref in enumerate(refs):
            self._rids += 1
            stream = Stream(
                self._rids,
                client.identity,
                request,
                params,
                deadline=now + timeout,
                now=now,
                choice=choice,
                like=first if choice else 0,
                adapter=request.model if request.model in self.config.adapters else "",
            )
            self._streams[stream.rid] = stream
            client.streams[ref] = stream.rid
        rids = range(first, self._rids + 1)
        if request.ids is not None and params.grammar is None:
            self._encoded(rids, request, Encoded(0, 0, request.ids))
            return
        job = Job(
            size=text_size(request.prompt, request.messages),
            done=partial(self._encoded, rids, request),
            text=request.prompt,
            messages=request.messages,
            add_special_tokens=request.add_special_tokens,
            template_kwargs=request.template_kwargs,
            tools=[] if request.tool_choice.mode == "none" else request.tools,
            grammar=params.grammar,
            client=client.identity,
        )
        job.wanted = len(rids)
        if request.trace:
            for rid in rids:
                if (trace := self._streams[rid].trace) is not None:
                    trace.asked = time.monotonic()
        self._jobs.update(dict.fromkeys(rids, job))
        self._tokenizers.submit(job)

    def _refusal(self, client: ClientConnection, request: Generate) -> tuple[str, str, str] | None:
        """Why a request can't be taken at all: code, message and the option at fault; None when it can."""
        for ref in (request.ref, *request.more_refs):
            if ref in client.streams:
                return errors.INVALID_REQUEST, f"ref {ref} is in use by an open stream of this connection", "ref"
        try:
            find_fault(request, self._vocab_size())
        except InvalidParam as error:
            return errors.INVALID_REQUEST, str(error), error.param
        if self.config.task != "generate":
            return errors.INVALID_REQUEST, f"{self.config.model_name} was started to {self.config.task} texts", "model"
        if request.model not in ("", self.config.model_name, *self.config.adapters):
            names = ", ".join(map(repr, (self.config.model_name, *self.config.adapters)))
            text = f"the model {request.model!r} is not served here; use {names}"
            return errors.MODEL_NOT_FOUND, text, "model"
        if self._draining:
            return errors.DRAINING, "the server is shutting down", ""
        if self._card is None or not self._tokenizers.known:
            return errors.LOADING, "the model is still loading", ""
        more = len(request.more_refs)
        full = not self._admission.has_room(len(self._streams) + more)
        if full and not self._has_share(client, more):
            return errors.QUEUE_FULL, f"{len(self._streams)} requests are running or waiting already", ""
        return None

    def _has_share(self, client: ClientConnection, more: int) -> bool:
        """Whether a client has less than its part of a full server."""
        others = self._clients.with_streams(client)
        return self._admission.has_share(len(self._streams) + more, len(client.streams) + more, others)

    def _encoded(self, rids: range, request: Generate, result: TokenizerResult) -> None:
        for rid in rids:
            self._jobs.pop(rid, None)
        assert isinstance(result, Encoded)
        if request.ids is not None and not result.code:
            result = msgspec.structs.replace(result, ids=request.ids)
        thinking = self._dialect.thinking(result.ids) if request.messages is not None else None
        for rid in rids:
            stream = self._streams.get(rid)
            if stream is not None:
                try:
                    self._prompt_known(stream, request, result, thinking)
                except Exception:
                    self._give_up(stream)

    def _prompt_known(self, stream: Stream, request: Generate, result: Encoded, thinking: Thinking | None) -> None:
        if result.code:
            outcome = "rejected" if result.code == errors.INVALID_REQUEST else "failed"
            self._end(stream, outcome, code=result.code, message=result.message, param=result.param)
            return
        param = "prompt" if request.messages is None else "messages"
        count, odd = divmod(len(result.ids), 4)
        context = self._context()
        if odd or not count:
            text = "the prompt is empty" if not odd else "ids must be uint32, four bytes each"
            self._end(stream, "rejected", code=errors.INVALID_REQUEST, message=text, param=param)
            return
        if count >= context:
            text = (
                f"This model's maximum context length is {context} tokens, "
                f"but the prompt has {count}; shorten it to at most {context - 1}."
            )
            self._end(stream, "rejected", code=errors.PROMPT_TOO_LONG, message=text, param=param)
            return
        room = context - count
        budget = room if request.params.max_tokens is None else min(room, request.params.max_tokens)
        detokenizer = self._detokenizers.stream(unpack_ids(result.ids)) if request.return_text else None
        spelling = self._detokenizers.token_bytes if request.return_text else None
        reply = None
        calls = bool(request.tools) and request.tool_choice.mode != "none"
        if request.split_reply and (calls or thinking is not None):
            opened = thinking is not None and thinking.open
            reply = Reply(self._dialect, request.tools, request.tool_choice, thinking=opened)
        now = time.monotonic()
        stream.encoded(result.ids, budget, detokenizer, now, spelling, thinking, reply)
        if stream.trace is not None:
            stream.trace.ids_known(result, now)
        client = self._clients.get(stream.client)
        if client is not None:
            stream.turn = self._turns.next(client.turns, request.params.priority)
        self._recovery.add(stream.rid, request.params.priority)
        self._submit_due()  # the engine first, which is what takes time
        self._clients.send(stream.client, Accepted(stream.ref, stream.rid, count))

    def _submit_due(self) -> None:
        """Give the engine what it may have now, and tell the supervisor what its death would mean."""
        for rid in self._recovery.due():
            stream = self._streams.get(rid)
            epochs = self._engine.epoch, self.me.epoch
            if stream is not None and stream.trace is not None:
                stream.trace.submitted = time.monotonic()
            self._engine.submit(self._pools.submit(rid, *epochs) if stream is None else stream.submit(*epochs))
        if self._engine.ready and (self._told is None or not self._told.stepped):
            use = EngineUse(self._engine.epoch, self._recovery.stepped, self._recovery.suspicious)
            if use != self._told:
                self._told = use
                self.control.report(use)

    def _context(self) -> int:
        return self._card.context if self._card is not None else self._files.context

    def _vocab_size(self) -> int:
        return self._card.vocab_size if self._card is not None else self._files.vocab_size

    def _pool_call(self, client: ClientConnection, call: Embed | Rank) -> None:
        wanted = "embed" if isinstance(call, Embed) else "rank"
        code, message = "", ""
        if self.config.task != wanted:
            flag = "embed" if wanted == "embed" else "rerank"
            code = errors.INVALID_REQUEST
            message = f"{self.config.model_name} was not started for this; see `callboard serve --task {flag}`"
        elif self._draining:
            code, message = errors.DRAINING, "the server is shutting down"
        elif self._card is None or not self._tokenizers.known:
            code, message = errors.LOADING, "the model is still loading"
        elif not self._admission.has_room(len(self._pools)):
            code, message = errors.QUEUE_FULL, f"{len(self._pools)} texts are waiting already"
        if code:
            self._clients.send(client.identity, CallFailed(call.ref, code, message, "model"))
            return

        def send(answer: Embedded | Ranked | CallFailed) -> None:
            self._clients.send(client.identity, answer)

        self._pools.begin(client.identity, call, send, time.monotonic() + self.config.timeout)

    def _text_call(self, client: ClientConnection, call: Tokenize | Detokenize) -> None:
        identity, ref = client.identity, call.ref
        if self._tokenizers.waiting >= MAX_WAITING_CALLS or not self._tokenizers.known:
            code = errors.QUEUE_FULL if self._tokenizers.known else errors.LOADING
            self._clients.send(identity, CallFailed(ref, code, "no tokenizer is free; try again later"))
            return

        def done(result: TokenizerResult) -> None:
            if result.code:
                param = result.param if isinstance(result, Encoded) else "ids"
                self._clients.send(identity, CallFailed(ref, result.code, result.message, param))
            elif isinstance(result, Decoded):
                self._clients.send(identity, Detokenized(ref, result.text))
            else:
                self._clients.send(identity, Tokenized(ref, result.ids))

        if isinstance(call, Detokenize):
            self._tokenizers.submit(Job(len(call.ids), done, ids=call.ids, client=identity))
        elif (call.text is None) == (call.messages is None):
            text = "give exactly one of text and messages"
            self._clients.send(identity, CallFailed(ref, errors.INVALID_REQUEST, text, "text"))
        elif call.messages is not None and (fault := _fault_of(call.messages)):
            self._clients.send(identity, CallFailed(ref, errors.INVALID_REQUEST, str(fault), fault.param))
        else:
            size = len(call.text) if call.text is not None else sum(len(str(m)) for m in call.messages or ())
            job = Job(
                size,
                done,
                text=call.text,
                messages=call.messages,
                add_special_tokens=call.add_special_tokens,
                template_kwargs=call.template_kwargs,
                tools=call.tools,
                client=identity,
            )
            self._tokenizers.submit(job)

    # The engine.

    def _on_step(self, step: Step) -> None:
        now = time.monotonic()
        self._meter.engine = step.stats
        if step.prefixes is not None:
            self._prefixes.take(step.prefixes, now)
        self._recovery.admitted(step.admitted)
        self._recovery.decoded(step.rids)
        for rid in step.admitted:
            stream = self._streams.get(rid)
            if stream is not None:
                self._turns.served(stream.turn, stream.params.priority)
                stream.admitted(step.admitted_at if step.admitted_at >= 0 else now)
        for rid, tokens in zip(step.cached_rids, step.cached_tokens, strict=True):
            stream = self._streams.get(rid)
            if stream is not None:
                stream.cached(tokens)
        self._recovery.decoded(step.pooled_rids)
        self._meter.pooled(len(step.pooled_rids))
        for rid, vector in zip(step.pooled_rids, step.pooled, strict=True):
            self._recovery.remove(rid)
            self._pools.take(rid, vector)
        for trace in step.traces:
            stream = self._streams.get(trace.rid)
            if stream is not None and stream.trace is not None:
                stream.trace.stepped(trace, now)
        reasons = dict(zip(step.ended, step.reasons, strict=True))
        logprobs = by_row(step)
        stops = {rid for rid, reason in reasons.items() if reason == "stop"}  # whose last token is not shown
        shown = (rid for rid in step.rids if rid in self._streams and rid not in stops)
        first = self._meter.step(shown, now)
        for rid, token in zip(step.rids, unpack_ids(step.tokens), strict=True):
            stream = self._streams.get(rid)
            if stream is None:
                continue
            if reasons.get(rid) != "stop":
                try:
                    stream.push(token, now, logprobs.get(rid))
                except Exception:
                    self._give_up(stream)
                    continue
                if rid in first:
                    self._meter.begun(stream.timing(now), stream.lead)
                if stream.stopped:
                    self._aborts.append(rid)
                    self._end(stream, "finished", "stop")
                elif rid not in reasons:
                    self._send_due(stream)
        texts = dict(zip(step.ended, step.errors, strict=False))
        for rid, reason in reasons.items():
            stream = self._streams.get(rid)
            if stream is None:
                self._pools.fail(rid, reason, texts.get(rid, ""))
                continue
            if reason in ("stop", "length"):
                try:
                    stream.finish_text()
                except Exception:
                    self._give_up(stream)
                    continue
                self._end(stream, "finished", "stop" if stream.stopped else reason)
            else:
                outcome = "rejected" if reason in (errors.INVALID_REQUEST, errors.PROMPT_TOO_LONG) else "failed"
                self._end(stream, outcome, code=reason, message=texts.get(rid, ""))
        self._submit_due()

    # Streams.

    def _send_due(self, stream: Stream) -> None:
        if stream.due(self.config.stream_interval):
            self._clients.gather(stream.client, (stream.ref, *stream.take()), None)
        elif stream.unread > MAX_UNREAD:
            text = f"more than {MAX_UNREAD} bytes were waiting for the client to read them"
            self._end(stream, "failed", code=errors.SLOW_CONSUMER, message=text)

    def _end(
        self,
        stream: Stream,
        outcome: str,
        reason: str = "",
        code: str = "",
        message: str = "",
        retry_after: float = 0.0,
        param: str = "",
    ) -> None:
        """End a stream, once: tell the engine when it may still work on it, and the client in any case."""
        now = time.monotonic()
        if outcome != "finished" and stream.phase is not Phase.TOKENIZING:
            self._aborts.append(stream.rid)
        del self._streams[stream.rid]
        self._recovery.remove(stream.rid)
        job = self._jobs.pop(stream.rid, None)
        if job is not None:
            self._tokenizers.cancel(job)
        self._admission.ended(now)
        delta = (stream.ref, *stream.take()) if stream.has_rest else None
        end = stream.end(now, outcome, reason, code, message, retry_after, param)
        self._meter.ended(stream.rid, end, stream.lead or 0.0)
        client = self._clients.get(stream.client)
        if client is None:
            return
        client.streams.pop(stream.ref, None)
        self._clients.gather(stream.client, delta, end)
        if not client.name.startswith("http-"):
            line = {
                "client": client.name,
                "label": stream.label[:MAX_NAME],
                "outcome": outcome,
                "reason": reason or code,
                "prompt_tokens": end.usage.prompt_tokens,
                "tokens": end.usage.completion_tokens,
                "cached": end.usage.cached_tokens,
                "queue": end.timing.queue,
                "prefill": end.timing.prefill,
                "ttft": end.timing.ttft,
                "total": end.timing.total,
            }
            self._ended.append(line)

    def _end_client(self, client: ClientConnection, code: str, message: str) -> None:
        self._pools.forget(client.identity)
        for rid in list(client.streams.values()):
            stream = self._streams.get(rid)
            if stream is not None:
                self._end(stream, "cancelled", code=code, message=message)

    def _end_all(self, outcome: str, code: str, message: str) -> None:
        self._pools.fail_all(code, message)
        for stream in list(self._streams.values()):
            self._end(stream, outcome, code=code, message=message)
        self._flush()

    def _look_at_the_clock(self, now: float) -> None:
        if self._malformed != self._malformed_logged:
            self._malformed_logged = self._malformed
            log.warning("malformed messages", so_far=self._malformed)
        if not self._engine.ready:
            self._meter.engine = EngineStats()
        self._meter.tick(now)
        for client in self._clients.silent(now):
            log.warning("client silent", client=client.name, streams=len(client.streams))
            self._end_client(client, errors.CANCELLED, "the client was silent for 3 s")
        self._pools.look_at_the_clock(now)
        self._prefixes.look()
        for stream in [stream for stream in self._streams.values() if now > stream.deadline]:
            self._end(stream, "failed", code=errors.TIMEOUT, message=TOO_LONG.format(stream.timeout))

    def _flush(self) -> None:
        while True:
            gone, garbled = self._clients.flush()
            for client in gone:
                self._end_client(client, errors.CANCELLED, "the client is gone")
                self._clients.forget(client)
            for client in garbled:
                for rid in list(client.streams.values()):
                    self._end(self._streams[rid], "failed", code=errors.INTERNAL_ERROR, message=FAILED)
            if not (gone or garbled):
                break
        if self._aborts:
            aborts, self._aborts = self._aborts, []
            self._engine.abort(aborts)
            self._submit_due()  # a suspect that was cancelled makes room for the next
        for line in self._ended:
            log.info("request", **line)
        self._ended.clear()


def _fault_of(messages: list[dict[str, Any]]) -> InvalidParam | None:
    try:
        check_messages(messages)
    except InvalidParam as error:
        return error
    return None
