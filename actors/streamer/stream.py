"""`Stream`: everything the system knows of one request, and the rules of its life, without any socket.

Owned by the streamer's one thread. The actor feeds it (`encoded`, `admitted`, `push`, `credit`) and asks it for
what is to be sent (`take`) and for its end (`end`). An engine or tokenizer can be replaced at any point, as all
that is needed to go on stands here.

    tokenizing -> waiting -> prefilling -> running -> ended        (`ended` can follow any phase, once)
"""

from array import array
from collections.abc import Mapping
from enum import Enum

from actors.streamer.detokenizer import DetokenizerStream
from actors.streamer.logprobs import LogprobColumn, StepLogprobs
from actors.streamer.reply import Reply, State
from actors.streamer.request_trace import RequestTrace
from actors.streamer.stop_strings import StopMatcher
from protocol.figures import LiveStream
from protocol.ids import pack_ids
from protocol.messages import (
    End,
    Generate,
    SamplingParams,
    Submit,
    Thinking,
    Timing,
    TokenLogprobs,
    ToolCallDelta,
    Usage,
)

WINDOW = 64  # deltas a client may have unacknowledged before its text is gathered here
MAX_UNREAD = 1 << 20  # bytes gathered for a client that does not read; beyond it the stream ends
MAX_LEAD = 600.0  # seconds that we believe


# What one delta carries: text, ids, the number of tokens they stand for, log-probabilities, reasoning, tool calls.
Piece = tuple[str, bytes, int, list[TokenLogprobs], str, list[ToolCallDelta]]


class Phase(Enum):
    """Where a stream is in its life."""

    TOKENIZING = "tokenizing"
    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    ENDED = "ended"


class Stream:
    """State of one request. Times are seconds of the monotonic clock the actor passes in.

    `params` are the request's sampling options, each resolved as `Submit.params` wants them, the seed included.
    It is choice number `choice` of the request, whose first choice is row `like`; `adapter` is for the engine.
    """

    def __init__(
        self,
        rid: int,
        client: bytes,
        request: Generate,
        params: SamplingParams,
        *,
        deadline: float,
        now: float,
        choice: int = 0,
        like: int = 0,
        adapter: str = "",
    ) -> None:
        self.rid = rid
        self.client = client
        self.choice = choice
        self.ref = request.more_refs[choice - 1] if choice else request.ref
        self.label = request.label
        self.params = params
        self.deadline = deadline
        self.timeout = round(deadline - now, 3)
        self.phase = Phase.TOKENIZING
        self.prompt = b""
        self.tokens = array("I")
        self.budget = 0
        self.turn = 0  # among the streams of all clients
        self.trace = RequestTrace(now) if request.trace else None
        # Seconds that its client had the request before us, if it says so.
        self.lead = min(max(now - request.received, 0.0), MAX_LEAD) if request.received >= 0 else None
        self._cache_salt = request.cache_salt
        self._cached_tokens = 0
        self._return_ids = request.return_ids
        self._detokenizer: DetokenizerStream | None = None
        self._stops = StopMatcher(params.stop) if params.stop else None
        self._logprobs: LogprobColumn | None = None
        self._like = like
        self._adapter = adapter
        self._thinking: Thinking | None = None
        self._reply: Reply | None = None
        self._reasoning_tokens = 0
        self._decoded = 0  # characters of the text so far, and how many of them no stop string can cut off
        self._certain = 0
        self._texts: list[str] = []
        self._ids = array("I")
        self._unread = 0
        self._count = 0
        self._in_flight = 0
        self._sent_first = False
        self._began = now
        self._encoded = -1.0
        self._admitted = -1.0
        self._first = -1.0

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt in tokens, 0 while it is not tokenized."""
        return len(self.prompt) // 4

    @property
    def stopped(self) -> bool:
        """A stop string has matched: nothing after it will be sent."""
        return self._stops is not None and self._stops.matched is not None

    @property
    def unread(self) -> int:
        """Bytes gathered because the client has no credit left."""
        return self._unread

    def encoded(
        self,
        prompt: bytes,
        budget: int,
        detokenizer: DetokenizerStream | None,
        now: float,
        spelling: Mapping[int, bytes] | None = None,
        thinking: Thinking | None = None,
        reply: Reply | None = None,
    ) -> None:
        """The prompt's ids are known; `budget` tokens may be generated. Without a detokenizer only ids are sent.

        `spelling` gives the bytes of the tokens among the log-probabilities. `thinking` is for the engine; with
        `reply` the text is split.
        """
        self._thinking = thinking
        if detokenizer is not None and reply is not None:
            self._reply = reply
            self._texts = reply.texts
        self.prompt = prompt
        self.budget = budget
        self._detokenizer = detokenizer
        if self.params.logprobs is not None:
            self._logprobs = LogprobColumn(spelling)
        self._encoded = now
        self.phase = Phase.WAITING

    def submit(self, epoch: int, streamer: int) -> Submit:
        """The message that makes an engine generate the rest of this stream, from any point of its life."""
        params = self.params
        assert params.temperature is not None
        assert params.top_p is not None
        assert params.seed is not None
        return Submit(
            epoch,
            streamer,
            self.rid,
            self.prompt + pack_ids(self.tokens),
            prompt_tokens=self.prompt_tokens,
            budget=self.budget - len(self.tokens),
            temperature=params.temperature,
            top_p=params.top_p,
            seed=params.seed,
            choice=self.choice,
            ignore_eos=params.ignore_eos,
            params=params,
            priority=params.priority,
            cache_salt=self._cache_salt,
            thinking=self._thinking,
            like=0 if self.tokens else self._like,
            adapter=self._adapter,
            turn=self.turn,
            trace=self.trace is not None,
        )

    def admitted(self, now: float) -> None:
        """The engine has begun the prefill."""
        if self.phase is Phase.WAITING:
            self.phase = Phase.PREFILLING
            self._admitted = now

    def cached(self, tokens: int) -> None:
        """So many tokens of the prompt were not computed but found. What a resume finds doesn't count."""
        if self._first < 0:
            self._cached_tokens = min(tokens, self.prompt_tokens)

    def push(self, token: int, now: float, logprobs: StepLogprobs | None = None) -> None:
        """The engine generated `token`, which is none that ends the stream."""
        if self._first < 0:
            self._first = now
            self.phase = Phase.RUNNING
        self.tokens.append(token)
        self._count += 1
        if self._return_ids:
            self._ids.append(token)
            self._unread += 4
        if self._logprobs is not None and logprobs is not None:
            self._logprobs.add(token, self._decoded, logprobs)
        if self._reply is not None:
            self._push_to_reply(token, self._reply)
        elif self._detokenizer is not None:
            self._add(self._detokenizer.push(token))
        elif self._logprobs is not None:
            self._unread += self._logprobs.release()

    def _push_to_reply(self, token: int, reply: Reply) -> None:
        assert self._detokenizer is not None
        before = reply.state
        self._add(self._detokenizer.push(token) or reply.special(token))
        if State.REASONING in (before, reply.state):
            self._reasoning_tokens += 1

    def _add(self, text: str) -> None:
        self._decoded += len(text)
        if self._stops is not None:
            text = self._stops.push(text, armed=len(self.tokens) > self.params.min_tokens)
        if text:
            self._send(text)

    def _send(self, text: str) -> None:
        self._certain += len(text)
        if self._reply is not None:
            self._unread += self._reply.push(text)
        else:
            self._texts.append(text)
            self._unread += len(text) if text.isascii() else len(text.encode())
        if self._logprobs is not None:
            self._unread += self._logprobs.release(self._certain)

    def due(self, interval: int) -> bool:
        """Whether a delta should go out now: the first token at once, then every `interval` tokens."""
        if self._in_flight >= WINDOW or not (self._texts or self._ids or self._has_more):
            return False
        return not self._sent_first or self._count >= interval

    def take(self) -> Piece:
        """What was gathered since the last delta."""
        ids = pack_ids(self._ids) if self._ids else b""
        logprobs = self._logprobs.take() if self._logprobs is not None else []
        reasoning, calls = "", list[ToolCallDelta]()
        if self._reply is not None:
            reasoning, calls = "".join(self._reply.reasoning), self._reply.calls.copy()
            self._reply.reasoning.clear()
            self._reply.calls.clear()
        taken = "".join(self._texts), ids, self._count, logprobs, reasoning, calls
        self._texts.clear()
        self._ids = array("I")
        self._unread = 0
        self._count = 0
        self._in_flight += 1
        self._sent_first = True
        return taken

    def credit(self, count: int) -> None:
        """The client has used `count` deltas."""
        self._in_flight = max(0, self._in_flight - max(0, count))

    def finish_text(self) -> None:
        """No more tokens come: release what was held back for an unfinished character or a possible stop."""
        if self._detokenizer is not None:
            self._add(self._detokenizer.flush())
        if self._stops is not None:
            rest = self._stops.flush()
            if rest:
                self._send(rest)
        if self._reply is not None:
            self._reply.flush()
        if self._logprobs is not None and not self.stopped:
            self._logprobs.release()

    @property
    def has_rest(self) -> bool:
        """Whether anything is still to be sent, whatever the client's credit."""
        return bool(self._texts or self._ids or self._count or self._has_more)

    @property
    def _has_more(self) -> bool:
        logprobs = self._logprobs is not None and self._logprobs.ready
        return logprobs or (self._reply is not None and self._reply.has_rest)

    def timing(self, now: float) -> Timing:
        """Where its time went so far."""

        def span(begin: float, end: float) -> float:
            return round(end - begin, 6) if begin >= 0 and end >= 0 else -1.0

        return Timing(
            tokenize=span(self._began, self._encoded),
            queue=span(self._encoded, self._admitted),
            prefill=span(self._admitted, self._first),
            ttft=span(self._began, self._first),
            total=span(self._began, now),
        )

    def live(self, now: float, client: str) -> LiveStream:
        """How it stands, for those that watch the server; `client` is the name of its client."""
        timing = self.timing(now)
        decoding = now - self._first
        lead = self.lead or 0.0
        return LiveStream(
            self.rid,
            self.label,
            client,
            self.phase.value,
            self.prompt_tokens,
            self._cached_tokens,
            len(self.tokens),
            self.budget,
            timing.total + lead,
            timing.ttft + lead if timing.ttft >= 0 else -1.0,
            round((len(self.tokens) - 1) / decoding, 2) if len(self.tokens) > 1 and decoding > 0 else 0.0,
        )

    def end(
        self,
        now: float,
        outcome: str,
        reason: str = "",
        code: str = "",
        message: str = "",
        retry_after: float = 0.0,
        param: str = "",
    ) -> End:
        """The terminal record. To be called once; the stream is ended afterwards."""
        assert self.phase is not Phase.ENDED
        self.phase = Phase.ENDED
        timing = self.timing(now)
        usage = Usage(self.prompt_tokens, len(self.tokens), self._cached_tokens, self._reasoning_tokens)
        if reason == "stop" and self._reply is not None and self._reply.ends_with_calls:
            reason = "tool_calls"
        matched = (self._stops.matched if self._stops is not None else None) or ""
        trace = self.trace.ended(now) if self.trace is not None else None
        return End(self.ref, outcome, reason, code, message, usage, timing, retry_after, param, matched, trace)
