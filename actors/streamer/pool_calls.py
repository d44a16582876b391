"""`PoolCalls`: calls that embed or rank texts, each many rows of the engine.

Owned by the streamer, on its one thread. A call is answered once, when all its rows are there, or when one fails.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from actors.streamer.tokenizer_pool import Job
from protocol import errors
from protocol.ids import unpack_floats
from protocol.messages import CallFailed, Embed, Embedded, Encoded, Pool, Rank, Ranked, Submit, TokenizerResult

MAX_TEXTS = 2048
_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"

Answer = Embedded | Ranked | CallFailed


@dataclass
class _Call:
    """One call: where its answer goes, and what it has."""

    client: bytes
    call: Embed | Rank
    send: Callable[[Answer], None]
    deadline: float
    rids: dict[int, int] = field(default_factory=dict)  # to places
    results: dict[int, bytes] = field(default_factory=dict)
    ids: dict[int, bytes] = field(default_factory=dict)


class PoolCalls:
    """Open calls. `next_rid` and `tokenize` are the streamer's own; it calls `submit` for each row that `want` told it
    of, once for each engine that gets it, until `drop` takes it back."""

    def __init__(
        self,
        pool: Pool,
        context: Callable[[], int],
        next_rid: Callable[[], int],
        tokenize: Callable[[Job], None],
        want: Callable[[int], None],
        drop: Callable[[Iterable[int]], None],
    ) -> None:
        self._pool = pool
        self._context = context
        self._next_rid = next_rid
        self._tokenize = tokenize
        self._want = want
        self._drop = drop
        self._calls: dict[int, _Call] = {}  # by the rid of each row

    def __len__(self) -> int:
        return len(self._calls)

    def begin(self, client: bytes, call: Embed | Rank, send: Callable[[Answer], None], deadline: float) -> None:
        """Take a call; `send` gets its answer."""
        texts = prompts(call)
        given = call.ids if isinstance(call, Embed) else []
        if bool(texts) == bool(given):
            send(CallFailed(call.ref, errors.INVALID_REQUEST, "there is nothing to do", "input"))
            return
        if len(texts) + len(given) > MAX_TEXTS:
            text = f"one call may have {MAX_TEXTS} texts, not {len(texts) + len(given)}"
            send(CallFailed(call.ref, errors.INVALID_REQUEST, text, "input"))
            return
        begun = _Call(client, call, send, deadline)
        for place in range(len(texts) or len(given)):
            begun.rids[self._next_rid()] = place
        self._calls.update(dict.fromkeys(begun.rids, begun))
        for rid, place in [*begun.rids.items()]:
            if rid not in self._calls:
                return  # one failed, and the call with it
            if given:
                self._encoded(rid, Encoded(0, 0, given[place]))
            else:
                special = isinstance(call, Embed)
                done = partial(self._encoded, rid)
                self._tokenize(
                    Job(len(texts[place]), done, text=texts[place], add_special_tokens=special, client=client)
                )

    def _encoded(self, rid: int, result: TokenizerResult) -> None:
        call = self._calls.get(rid)
        if call is None:
            return
        assert isinstance(result, Encoded)
        count = len(result.ids) // 4
        if result.code:
            self._fail(call, result.code, result.message)
        elif not count:
            self._fail(call, errors.INVALID_REQUEST, f"input[{call.rids[rid]}] is empty")
        elif count > self._context():
            text = f"input[{call.rids[rid]}] has {count} tokens, and the model's context {self._context()}"
            self._fail(call, errors.PROMPT_TOO_LONG, text)
        else:
            call.ids[rid] = result.ids
            self._want(rid)

    def submit(self, rid: int, epoch: int, streamer: int) -> Submit:
        """The engine's message of one row."""
        ids = self._calls[rid].ids[rid]
        return Submit(epoch, streamer, rid, ids, len(ids) // 4, 1, 0.0, 1.0, 0, pool=self._pool)

    def take(self, rid: int, vector: bytes) -> None:
        """The engine computed a row."""
        call = self._calls.pop(rid, None)
        if call is None:
            return
        call.results[rid] = vector
        if len(call.results) < len(call.rids):
            return
        counts = [len(call.ids[one]) // 4 for one in call.rids]
        vectors = [call.results[one] for one in call.rids]
        if isinstance(call.call, Rank):
            call.send(Ranked(call.call.ref, [unpack_floats(one)[0] for one in vectors], counts))
        else:
            call.send(Embedded(call.call.ref, vectors, counts))

    def fail(self, rid: int, code: str, message: str) -> None:
        """The engine could not compute a row."""
        call = self._calls.get(rid)
        if call is not None:
            self._fail(call, code, message)

    def fail_all(self, code: str, message: str) -> None:
        """None of the calls can be answered."""
        for call in {id(call): call for call in self._calls.values()}.values():
            self._fail(call, code, message)

    def look_at_the_clock(self, now: float) -> None:
        """End calls that take too long."""
        for call in {id(call): call for call in self._calls.values()}.values():
            if now > call.deadline:
                self._fail(call, errors.TIMEOUT, "the call ran over its time limit")

    def excuse(self, seconds: float) -> None:
        """The machine slept for so long."""
        for call in {id(call): call for call in self._calls.values()}.values():
            call.deadline += seconds

    def forget(self, client: bytes) -> None:
        """A client is gone."""
        gone = [rid for rid, call in self._calls.items() if call.client == client]
        for rid in gone:
            del self._calls[rid]
        self._drop(gone)

    def _fail(self, call: _Call, code: str, message: str) -> None:
        open_rids = [rid for rid in call.rids if self._calls.pop(rid, None) is not None]
        self._drop(open_rids)
        call.send(CallFailed(call.call.ref, code, message, "input"))


def prompts(call: Embed | Rank) -> list[str]:
    """The texts of a call; those of a ranking as the Qwen3 rerankers were trained."""
    if isinstance(call, Embed):
        return call.texts
    begin = f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n<|im_start|>user\n"
    end = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    instruction = call.instruction or _INSTRUCTION
    return [
        f"{begin}<Instruct>: {instruction}\n<Query>: {call.query}\n<Document>: {document}{end}"
        for document in call.documents
    ]
