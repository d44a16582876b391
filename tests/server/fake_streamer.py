"""`FakeStreamer`: speaks the streamer's side of the client protocol, with streams that a test drives by hand.

A test tool. `on_generate` decides what a new stream does; by default it is accepted, says three pieces of text and
finishes.
"""

from collections.abc import Callable

import msgspec
from fake_router import FakeRouter

from protocol.codec import client_codec
from protocol.ids import pack_floats, pack_ids
from protocol.messages import (
    PROTOCOL_VERSION,
    Accepted,
    AskFigures,
    CallFailed,
    Cancel,
    CancelStream,
    Charge,
    Credit,
    Deltas,
    Done,
    Embed,
    Embedded,
    End,
    Figures,
    Generate,
    Hello,
    Ping,
    Pong,
    Timing,
    Tokenize,
    Tokenized,
    TokenLogprobs,
    ToolCallDelta,
    Usage,
    Welcome,
)

WINDOW = 64


class FakeStream:
    """One request as the streamer sees it; its methods send to the client, from any thread."""

    def __init__(self, streamer: "FakeStreamer", identity: bytes, request: Generate) -> None:
        self.streamer = streamer
        self.identity = identity
        self.request = request
        self.ref = request.ref
        self.credit = WINDOW
        self.cancelled = False
        self.ended = False

    def accept(self, prompt_tokens: int = 5) -> None:
        """The request passed every check."""
        self.streamer.send(self.identity, Accepted(self.ref, self.ref + 1000, prompt_tokens))

    def text(self, *texts: str) -> None:
        """Send each text as a delta of one token, in one message each."""
        for text in texts:
            self.credit -= 1
            self.streamer.send(self.identity, Deltas([self.ref], [text], [b""], [1]))

    def piece(self, text: str = "", reasoning: str = "", *calls: ToolCallDelta) -> None:
        """Send one delta of a reply that is split."""
        self.credit -= 1
        deltas = Deltas([self.ref], [text], [b""], [1], reasoning=[reasoning], tool_calls=[[*calls]])
        self.streamer.send(self.identity, deltas)

    def tokens(self, text: str, *tokens: TokenLogprobs) -> None:
        """Send one delta with log-probabilities."""
        self.credit -= 1
        self.streamer.send(self.identity, Deltas([self.ref], [text], [b""], [len(tokens)], logprobs=[[*tokens]]))

    def finish(self, reason: str = "stop", prompt: int = 5, completion: int = 3, cached: int = 2) -> None:
        """The stream finished."""
        timing = Timing(tokenize=0.001, queue=0.002, prefill=0.003, ttft=0.006, total=0.1)
        self.end(End(self.ref, "finished", reason, usage=Usage(prompt, completion, cached), timing=timing))

    def reject(self, code: str, message: str, retry_after: float = 0.0, param: str = "") -> None:
        """The request is refused."""
        self.end(End(self.ref, "rejected", code=code, message=message, retry_after=retry_after, param=param))

    def fail(self, code: str, message: str) -> None:
        """The stream failed."""
        self.end(End(self.ref, "failed", code=code, message=message))

    def end(self, end: End) -> None:
        """Send a terminal record, once."""
        if not self.ended:
            self.ended = True
            self.streamer.send(self.identity, Deltas([], [], [], [], [end]))


def say_hello(stream: FakeStream) -> None:
    """The default behaviour of a stream."""
    stream.accept()
    stream.text("Hello", ", ", "world")
    stream.finish()


def embed(call: Embed) -> Embedded:
    """The same vector for every text, of as many tokens as it has words."""
    counts = [len(text.split()) for text in call.texts] or [len(ids) // 4 for ids in call.ids]
    return Embedded(call.ref, [pack_floats([2.0, 1.0, 2.0])] * len(counts), counts)


class FakeStreamer(FakeRouter):
    """The router clients connect to. `streams` holds every request in the order of arrival."""

    def __init__(self, endpoint: str, incarnation: int = 1) -> None:
        self.incarnation = incarnation
        self.on_generate: Callable[[FakeStream], None] = say_hello
        self.streams: list[FakeStream] = []
        self.names: list[str] = []
        self.silent = False
        self.cancels_are_answered = True
        self.figures = Figures(0)
        self.asked: list[AskFigures] = []
        self.cancelled_rids: list[int] = []
        self.charges: list[Charge] = []
        self.ttfts: list[float] = []
        self.on_charge: Callable[[Charge], Done | CallFailed] = lambda charge: Done(charge.ref, 1)
        self.embeds: list[Embed] = []
        self.on_embed: Callable[[Embed], Embedded | CallFailed] = embed
        self.on_tokenize: Callable[[bytes, Tokenize], None] = self.tokenize
        super().__init__(endpoint)

    def on_frame(self, identity: bytes, frame: bytes) -> None:
        """Answer as the streamer does."""
        if self.silent:
            return
        message = client_codec.decode(frame)
        match message:
            case Hello(name=name):
                self.names.append(name)
                self.send(identity, Welcome(PROTOCOL_VERSION, self.incarnation, WINDOW))
            case Ping(seq=seq):
                self.send(identity, Pong(seq, self.incarnation))
            case AskFigures(ref=ref):
                self.asked.append(message)
                self.send(identity, msgspec.structs.replace(self.figures, ref=ref))
            case Charge():
                self.charges.append(message)
                self.send(identity, self.on_charge(message))
            case Embed():
                self.embeds.append(message)
                self.send(identity, self.on_embed(message))
            case Tokenize(text=str()):
                self.on_tokenize(identity, message)
            case CancelStream(ref=ref, rid=rid):
                self.cancelled_rids.append(rid)
                self.send(identity, Done(ref, int(rid == 1)))
            case Generate():
                for ref in (message.ref, *message.more_refs):
                    stream = FakeStream(self, identity, message)
                    stream.ref = ref
                    self.streams.append(stream)
                    self.on_generate(stream)
            case Cancel(ref=ref):
                for stream in self._streams_of(identity, [ref]):
                    if not stream.ended:
                        stream.cancelled = True
                        if self.cancels_are_answered:
                            stream.end(End(ref, "cancelled"))
            case Credit(refs=refs, counts=counts, ttfts=ttfts):
                self.ttfts += ttfts
                for ref, count in zip(refs, counts, strict=True):
                    for stream in self._streams_of(identity, [ref]):
                        stream.credit += count

    def tokenize(self, identity: bytes, call: Tokenize) -> None:
        """Answer a call for the ids of a text: one for each word."""
        self.send(identity, Tokenized(call.ref, pack_ids(range(len((call.text or "").split())))))

    def _streams_of(self, identity: bytes, refs: list[int]) -> list[FakeStream]:
        return [stream for stream in self.streams if stream.identity == identity and stream.ref in refs]

    def stream(self, index: int = -1, count: int = 1) -> FakeStream:
        """Wait until there are `count` streams, and return one."""
        self.wait_for(lambda: len(self.streams) >= count)
        return self.streams[index]
