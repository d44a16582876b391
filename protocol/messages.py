"""Every message that crosses a process border, as msgspec Structs.

Owned by `protocol`; encoded and decoded only by `protocol.codec`. The Structs are frozen, array-like
and tagged with an integer, so a message is a MessagePack array `[tag, field, field, …]`. Fields are
only ever appended, with a default: recorded frames of every version must decode for ever.

Who sends what, by tag:

    1–19   client    -> streamer     20–39  streamer -> client
    40–49  streamer <-> tokenizer    60–69  streamer <-> engine
    80–99  supervisor <-> every actor (the control channel); 91 and 92 also client <-> house

Token ids travel as little-endian uint32 bytes (`protocol.ids`). `ref` is the client's own number for a
request, unique among the open requests of its connection; `rid` is ours, unique within one streamer
incarnation; `label` is a text for logs and may repeat. `epoch` numbers an incarnation of an actor,
unique within one run; a message with the wrong one is dropped. With several models, `house` is the supervisor of the
HTTP workers, and each loaded model has a supervisor of its own, its cast, which is an actor of the house.
"""

from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from protocol.figures import Counts, LiveStream, PrefixTree, Sample
from protocol.ids import unpack_floats, unpack_ids

PROTOCOL_VERSION = 1


class Grammar(Struct, frozen=True, array_like=True):
    """What the generated text must be.

    `kind` is json_object (`text` is not used), json (a JSON schema), json_line (the same, in one line, with a space
    behind each comma and colon), regex, choice (a JSON list of texts) or grammar (Lark, or GBNF). `field` is what the
    client called it; errors name it.
    """

    kind: str
    text: str = ""
    field: str = "grammar"


class Thinking(Struct, frozen=True, array_like=True):
    """How a model marks its reasoning, in token ids, for the engine. `open`: the prompt ends inside of it."""

    begin: list[int]
    end: list[int]
    open: bool = False


class Pool(Struct, frozen=True, array_like=True):
    """What becomes of a text's hidden states: `mode` first, last or mean, to unit length when `normalize`; or, with
    `among`, the probabilities of these tokens behind the last one."""

    mode: str
    normalize: bool = True
    among: list[int] = []


class SamplingParams(Struct, frozen=True, array_like=True, omit_defaults=False):
    """What one request asks of the sampler and the stop logic. `None` means the model's own default, or off.

    Ranges are checked by `protocol.sampling.check_params`. `max_tokens` absent means up to the context.
    Before `min_tokens` tokens neither an end-of-sequence token, nor one of `stop_token_ids`, nor a stop string
    ends the text. `logit_bias` is added to the logits of these ids. `top_k` 0 or -1 is off. `logprobs` asks for the
    log-probability of each generated token and of so many of the most probable ones; None asks for none. A lower
    `priority` runs earlier, as in vLLM. `grammar` holds for the answer, not for the reasoning before it; reasoning is
    ended after `thinking_budget` tokens.
    """

    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    ignore_eos: bool = False
    stop: list[str] = []
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    stop_token_ids: list[int] = []
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    logprobs: int | None = None
    priority: int = 0
    grammar: Grammar | None = None
    thinking_budget: int | None = None


class TokenLogprobs(Struct, frozen=True, array_like=True):
    """Natural log-probabilities at one generated token: its own, and those of the most probable ones.

    `top_ids` (uint32-LE) and `top_logprobs` (float32-LE) are of equal length, the most probable first; the
    generated token may be among them. `token` and `top_tokens` are the bytes the tokens stand for, which may be a
    part of a UTF-8 character; empty when the request wants no text. `offset` counts the characters of the
    generated text before this token.
    """

    token_id: int
    logprob: float
    top_ids: bytes = b""
    top_logprobs: bytes = b""
    token: bytes = b""
    top_tokens: list[bytes] = []
    offset: int = 0

    @property
    def top(self) -> list[tuple[int, float, bytes]]:
        """The most probable tokens: id, log-probability and bytes of each."""
        ids = unpack_ids(self.top_ids)
        return list(zip(ids, unpack_floats(self.top_logprobs), self.top_tokens or [b""] * len(ids), strict=True))


class Usage(Struct, frozen=True, array_like=True):
    """Token counts of one request. `cached_tokens` is the part of the prompt that was not computed, `reasoning_tokens`
    the part of the completion that is reasoning, its marks included."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class ToolCallDelta(Struct, frozen=True, array_like=True):
    """A piece of tool call number `index`. The first one brings `id` and `name`; `arguments`, joined, are JSON."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class ToolChoice(Struct, frozen=True, array_like=True):
    """Which tools may be called. `mode` is auto, none, required, or named with the tool's `name`. Without `parallel`
    one call at most is asked for."""

    mode: str = "auto"
    name: str = ""
    parallel: bool = True


class Timing(Struct, frozen=True, array_like=True):
    """Where the time of one request went, in seconds on the streamer's monotonic clock; -1 = not reached."""

    tokenize: float = -1.0
    queue: float = -1.0
    prefill: float = -1.0
    ttft: float = -1.0
    total: float = -1.0


class Trace(Struct, frozen=True, array_like=True):
    """When one traced request was where, in seconds of the monotonic clock that all processes of the server's machine
    share; -1 for what it did not come by.

    The streamer `received` it and handed its text on (`asked`); a tokenizer had it from `tokenizing` to `tokenized`;
    its ids were known (`encoded`) and given to the engine (`submitted`), which took it in (`queued`), and `stepped`
    when the step with its first token was sent; the streamer had that (`arrived`), and `ended` the stream. Between
    `queued` and `stepped` the engine's thread spent `in_model`, `in_python` and `in_sockets` seconds.
    """

    received: float = -1.0
    asked: float = -1.0
    tokenizing: float = -1.0
    tokenized: float = -1.0
    encoded: float = -1.0
    submitted: float = -1.0
    queued: float = -1.0
    stepped: float = -1.0
    arrived: float = -1.0
    ended: float = -1.0
    in_model: float = -1.0
    in_python: float = -1.0
    in_sockets: float = -1.0


class EngineTrace(Struct, frozen=True, array_like=True):
    """The engine's part of a `Trace`, for row `rid`."""

    rid: int
    queued: float
    stepped: float
    in_model: float
    in_python: float
    in_sockets: float


class ModelCard(Struct, frozen=True, array_like=True):
    """What clients may know of the model a cast serves. `context` and `vocab_size` are in tokens.

    `adapters` are the folders of its LoRA adapters, by their names: each can be asked for as a model, whose card names
    its base as `parent` and its folder as `root`.
    """

    name: str
    context: int = 0
    vocab_size: int = 0
    has_chat_template: bool = True
    created: int = 0
    task: str = "generate"
    parent: str = ""
    root: str = ""
    adapters: dict[str, str] = {}

    def all(self) -> "list[ModelCard]":
        """The card itself, and one for each of its adapters."""
        base = self.name
        return [
            self,
            *(replace(self, name=n, parent=base, root=root, adapters={}) for n, root in self.adapters.items()),
        ]


# -- client -> streamer ------------------------------------------------------------------------------


class Hello(Struct, frozen=True, array_like=True, tag=1):
    """First message of a connection. `name` says who connects (logs, and HTTP workers by `http-I.EPOCH`)."""

    version: int
    name: str = ""


class Ping(Struct, frozen=True, array_like=True, tag=2):
    """Sent every second; answered by `Pong`. Silence of 3 s cancels the client's streams."""

    seq: int


class Generate(Struct, frozen=True, array_like=True, tag=3):
    """Ask for one stream. Exactly one of `prompt`, `messages` and `ids` is set.

    `model` names the model, or one of its LoRA adapters; "" is the model.
    `return_text` / `return_ids` choose what the deltas carry (ids alone skip the detokenizer).
    `add_special_tokens` holds for `prompt`; a chat template writes its own. `timeout` is in seconds. Only requests
    with the same `cache_salt` share prefixes. `tools` are functions as the OpenAI API describes them. With
    `split_reply` reasoning and tool calls come apart from the text, in columns of their own. Each of `more_refs` is one
    more choice for the same prompt, whose computation they share; choice number i + 1 is a stream of its own under
    `more_refs[i]`. With `trace` the stream's end tells when the request was where. A client that was asked itself says
    when it `received` the request, in seconds of the monotonic clock that the machine's processes share, and reports
    the times to first tokens in its `Credit`; -1 for others.
    """

    ref: int
    params: SamplingParams
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    ids: bytes | None = None
    label: str = ""
    model: str = ""
    return_text: bool = True
    return_ids: bool = False
    add_special_tokens: bool = True
    timeout: float | None = None
    template_kwargs: dict[str, Any] = {}
    cache_salt: str = ""
    tools: list[dict[str, Any]] = []
    tool_choice: ToolChoice = ToolChoice()
    split_reply: bool = False
    more_refs: list[int] = []
    trace: bool = False
    received: float = -1.0


class Cancel(Struct, frozen=True, array_like=True, tag=4):
    """End the stream `ref`. Idempotent; an unknown ref is normal. The stream ends as `cancelled`."""

    ref: int


class Credit(Struct, frozen=True, array_like=True, tag=5):
    """The consumer has taken `counts[i]` deltas of stream `refs[i]`. Of each stream whose first one is among them and
    whose request said when it was received, `ttfts` holds the seconds from then until its consumer had it."""

    refs: list[int]
    counts: list[int]
    ttfts: list[float] = []


class Tokenize(Struct, frozen=True, array_like=True, tag=6):
    """Turn `text` or `messages` into ids without generating. Answered by `Tokenized` or `CallFailed`."""

    ref: int
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    template_kwargs: dict[str, Any] = {}
    tools: list[dict[str, Any]] = []


class Detokenize(Struct, frozen=True, array_like=True, tag=7):
    """Turn ids into text. Answered by `Detokenized` or `CallFailed`."""

    ref: int
    ids: bytes


class ListModels(Struct, frozen=True, array_like=True, tag=8):
    """Ask what is served. Answered by `Models`."""

    ref: int


class CancelLabel(Struct, frozen=True, array_like=True, tag=9):
    """End all streams with this label, whoever asked for them. Answered by `Done` with their number."""

    ref: int
    label: str


class Keep(Struct, frozen=True, array_like=True, tag=10):
    """Keep `value` under `key` for all clients, in memory, as long as there is room. Answered by `Done`."""

    ref: int
    key: str
    value: bytes


class Recall(Struct, frozen=True, array_like=True, tag=11):
    """Ask for what was kept. Answered by `Kept`."""

    ref: int
    key: str


class Forget(Struct, frozen=True, array_like=True, tag=12):
    """Drop what was kept. Answered by `Done`, with 0 when there was nothing."""

    ref: int
    key: str


class Embed(Struct, frozen=True, array_like=True, tag=13):
    """Turn `texts`, or `ids` (uint32-LE each), into vectors. Answered by `Embedded` or `CallFailed`."""

    ref: int
    texts: list[str] = []
    ids: list[bytes] = []


class Rank(Struct, frozen=True, array_like=True, tag=14):
    """Say how well each document answers the query. Answered by `Ranked` or `CallFailed`."""

    ref: int
    query: str
    documents: list[str]
    instruction: str = ""


class AskPrefixes(Struct, frozen=True, array_like=True, tag=15):
    """Ask which prefixes are kept. Answered by `Prefixes`, which may be some seconds old, or by `CallFailed` while
    there is no engine."""

    ref: int


class AskFigures(Struct, frozen=True, array_like=True, tag=17):
    """Ask what the streamer counts: `streams` of the open streams at most, and the samples after `since` (Unix seconds;
    None asks for no samples). Answered by `Figures`."""

    ref: int
    streams: int = 0
    since: float | None = None


class CancelStream(Struct, frozen=True, array_like=True, tag=18):
    """End the stream `rid`, whoever asked for it. Answered by `Done` with 0 when it is gone."""

    ref: int
    rid: int


class Quota(Struct, frozen=True, array_like=True):
    """At most `amount` requests or tokens (`kind`) in any `seconds`."""

    kind: str
    amount: int
    seconds: float


class Charge(Struct, frozen=True, array_like=True, tag=19):
    """Account for requests or tokens of the API key called `name`, whichever HTTP worker took them. Answered by `Done`;
    a request beyond one of `quotas` by `CallFailed` with the code rate_limit_exceeded. The house of several models
    takes it from its HTTP workers, and answers with a `ModelAnswer`."""

    ref: int
    name: str
    quotas: list[Quota]
    requests: int = 0
    tokens: int = 0


# -- streamer -> client ------------------------------------------------------------------------------


class Welcome(Struct, frozen=True, array_like=True, tag=20):
    """Answer to `Hello`. `incarnation` is a random number per streamer start; `window` is how many deltas
    a stream may have unacknowledged before its text is gathered in the streamer."""

    version: int
    incarnation: int
    window: int
    models: list[ModelCard] = []


class Refused(Struct, frozen=True, array_like=True, tag=21):
    """The connection can't be served (another protocol version); `message` names both versions."""

    version: int
    message: str


class Pong(Struct, frozen=True, array_like=True, tag=22):
    """Answer to `Ping`. Another incarnation than before means: every open stream is lost."""

    seq: int
    incarnation: int


class Accepted(Struct, frozen=True, array_like=True, tag=23):
    """The request passed every check and waits for the engine. `rid` is its id inside the system."""

    ref: int
    rid: int
    prompt_tokens: int


class End(Struct, frozen=True, array_like=True):
    """The one terminal record of a request, carried by `Deltas.ends`.

    `outcome` is finished, cancelled, rejected or failed. `reason` is the finish reason (stop, length) of a
    finished one; `code` (see `protocol.errors`) and `message` say what went wrong with the others.
    `retry_after` is in seconds, 0 when retrying makes no sense. `param` names the offending option, `stop` the stop
    string that ended the text. The reason of a reply that stopped behind tool calls is tool_calls. `trace` is there
    when it was asked for.
    """

    ref: int
    outcome: str
    reason: str = ""
    code: str = ""
    message: str = ""
    usage: Usage = field(default_factory=Usage)
    timing: Timing = field(default_factory=Timing)
    retry_after: float = 0.0
    param: str = ""
    stop: str = ""
    trace: Trace | None = None


class Deltas(Struct, frozen=True, array_like=True, tag=24):
    """What one step brought for all streams of one connection, in columns of equal length.

    `texts[i]` and `ids[i]` belong to stream `refs[i]`; `counts[i]` is the number of tokens they stand for.
    `ends` holds the terminal records of streams that ended; a stream's last text comes in the same message
    as its end or earlier. `logprobs` is empty when no stream here asked for them; else `logprobs[i]` holds the
    tokens whose text `texts[i]` begins to bring, none for streams that did not ask. `reasoning` and `tool_calls` are
    empty when no stream here has any; in one delta the reasoning comes before the text, and that before the calls.
    """

    refs: list[int]
    texts: list[str]
    ids: list[bytes]
    counts: list[int]
    ends: list[End] = []
    logprobs: list[list[TokenLogprobs]] = []
    reasoning: list[str] = []
    tool_calls: list[list[ToolCallDelta]] = []


class Tokenized(Struct, frozen=True, array_like=True, tag=26):
    """Answer to `Tokenize`."""

    ref: int
    ids: bytes


class Detokenized(Struct, frozen=True, array_like=True, tag=27):
    """Answer to `Detokenize`."""

    ref: int
    text: str


class Models(Struct, frozen=True, array_like=True, tag=28):
    """Answer to `ListModels`."""

    ref: int
    models: list[ModelCard]


class CallFailed(Struct, frozen=True, array_like=True, tag=29):
    """Answer to a `ClientCall` that could not be carried out, and to a message
    that could not be decoded (`ref` -1)."""

    ref: int
    code: str
    message: str
    param: str = ""
    retry_after: float = 0.0


class Done(Struct, frozen=True, array_like=True, tag=30):
    """Answer to `CancelLabel`, `CancelStream`, `Charge`, `Keep` and `Forget`: how many streams or values it touched."""

    ref: int
    count: int


class Kept(Struct, frozen=True, array_like=True, tag=31):
    """Answer to `Recall`; None when nothing is kept under the key (any more)."""

    ref: int
    value: bytes | None


class Embedded(Struct, frozen=True, array_like=True, tag=32):
    """Answer to `Embed`: a vector (float32-LE) and the number of tokens for each text."""

    ref: int
    vectors: list[bytes]
    counts: list[int]


class Ranked(Struct, frozen=True, array_like=True, tag=33):
    """Answer to `Rank`: a score from 0 to 1 and the number of tokens for each document."""

    ref: int
    scores: list[float]
    counts: list[int]


class Prefixes(Struct, frozen=True, array_like=True, tag=38):
    """Answer to `AskPrefixes`."""

    ref: int
    tree: PrefixTree


class Figures(Struct, frozen=True, array_like=True, tag=37):
    """Answer to `AskFigures`. `phases` counts the open streams; `engine` is of the last step."""

    ref: int
    counts: Counts = field(default_factory=Counts)
    engine: "EngineStats" = field(default_factory=lambda: EngineStats())
    phases: dict[str, int] = {}
    connections: int = 0
    streams: list[LiveStream] = []
    samples: list[Sample] = []


# -- streamer <-> tokenizer --------------------------------------------------------------------------


class Encode(Struct, frozen=True, array_like=True, tag=40):
    """Text or chat messages to ids. `job` is the streamer's number for it.

    `long`: to be done beside the short jobs, at low priority. A `grammar` is checked along with the text.
    """

    epoch: int
    job: int
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    template_kwargs: dict[str, Any] = {}
    long: bool = False
    tools: list[dict[str, Any]] = []
    grammar: Grammar | None = None


class Encoded(Struct, frozen=True, array_like=True, tag=41):
    """Result of `Encode`. A non-empty `code` (see `protocol.errors`) means it failed. `began` and `ended` say when it
    was done, in seconds of the monotonic clock."""

    epoch: int
    job: int
    ids: bytes = b""
    code: str = ""
    message: str = ""
    param: str = ""
    began: float = -1.0
    ended: float = -1.0


class Decode(Struct, frozen=True, array_like=True, tag=42):
    """Ids to text, special tokens kept. `long` as in `Encode`."""

    epoch: int
    job: int
    ids: bytes
    long: bool = False


class Decoded(Struct, frozen=True, array_like=True, tag=43):
    """Result of `Decode`."""

    epoch: int
    job: int
    text: str = ""
    code: str = ""
    message: str = ""


# -- streamer <-> engine -----------------------------------------------------------------------------


class Attach(Struct, frozen=True, array_like=True, tag=60):
    """A streamer incarnation takes over the engine; rows of an earlier one are dropped."""

    epoch: int
    streamer: int


class Submit(Struct, frozen=True, array_like=True, tag=61):
    """One request for the engine, or the rest of one that an earlier engine had begun.

    `ids` is the prompt (`prompt_tokens` of them) followed by the tokens generated so far; the next token is
    number `len(ids) - prompt_tokens` of its (seed, choice) sequence. `budget` is how many tokens may still
    be generated. `temperature` and `top_p` are resolved values, never absent. So are those of `params`: none is
    None but `max_tokens` (`budget` counts), `logprobs`, `grammar` and `thinking_budget`; an option that is off has its
    neutral value. Only requests with the same `cache_salt` share prefixes. `warm`: the prompt's blocks are to stay in
    memory for good. `thinking` says when `grammar` begins to hold and what `thinking_budget` counts. The prompt of row
    `like` is the same: while it is not computed, this row waits for it instead of computing it again. With `pool` the
    row is embedded and nothing is generated. `adapter` names the LoRA adapter that it is computed with. Rows of equal
    priority are admitted in the order of their `turn`, so that clients take turns. With `trace` the step that brings
    its first token tells when it came and what was done.
    """

    epoch: int
    streamer: int
    rid: int
    ids: bytes
    prompt_tokens: int
    budget: int
    temperature: float
    top_p: float
    seed: int
    choice: int = 0
    ignore_eos: bool = False
    params: SamplingParams | None = None
    priority: int = 0
    cache_salt: str = ""
    warm: bool = False
    thinking: Thinking | None = None
    like: int = 0
    pool: Pool | None = None
    adapter: str = ""
    turn: int = 0
    trace: bool = False


class Abort(Struct, frozen=True, array_like=True, tag=62):
    """Drop these rows. Idempotent; rows that are gone are normal. No answer is sent."""

    epoch: int
    streamer: int
    rids: list[int]


class TellPrefixes(Struct, frozen=True, array_like=True, tag=64):
    """Somebody looks on: the next `Step`, which may be for nothing else, is to bring the prefix blocks."""

    epoch: int
    streamer: int


class PrefixStats(Struct, frozen=True, array_like=True):
    """The prefix cache of an engine. Sums since the start: prompt tokens found in memory and on the SSD, and those that
    had to be computed; seconds that committing and restoring blocks took of the engine's thread.

    Bytes in memory and their limit now; bytes of the SSD directory, whoever wrote them, and their limit; bytes that
    wait to be written; reads or files that were wrong. Sum of bytes that left memory as requests needed it (`yielded`).
    Blocks that rows hold now (`acquired`), each as often as it is held.
    """

    memory_tokens: int = 0
    ssd_tokens: int = 0
    computed_tokens: int = 0
    committing: float = 0.0
    restoring: float = 0.0
    memory_blocks: int = 0
    memory_bytes: int = 0
    memory_limit: int = 0
    ssd_bytes: int = 0
    ssd_limit: int = 0
    queued_bytes: int = 0
    faults: int = 0
    yielded: int = 0
    acquired: int = 0


class EngineStats(Struct, frozen=True, array_like=True):
    """The engine's load after a step. `step` counts completed turns that ran the model.

    Sums since the start: seconds the engine's thread spent `in_model` (building its graph, feeding the device, waiting
    for it), `in_python` (planning, joining, sampling's set-up, reading results) and `in_sockets`; tokens prefilled and
    decoded; rows parked for want of memory. `memory` and `cache` are bytes: all that MLX holds, and the rows' caches in
    it.
    """

    step: int = 0
    running: int = 0
    prefilling: int = 0
    waiting: int = 0
    memory: int = 0
    in_model: float = 0.0
    in_python: float = 0.0
    in_sockets: float = 0.0
    prefilled: int = 0
    decoded: int = 0
    parked: int = 0
    cache: int = 0
    prefix: PrefixStats = field(default_factory=PrefixStats)


class Step(Struct, frozen=True, array_like=True, tag=63):
    """What one step of the engine brought for all rows, in columns.

    `tokens` (uint32-LE) holds one token per entry of `rids`. `admitted` names rows whose prefill began, at the time
    `admitted_at` of the monotonic clock.
    `ended[i]` ended with `reasons[i]` (stop, length, or an error code of `protocol.errors`) and, for errors,
    `errors[i]`. The token that ended a row with stop (end of sequence, or one of its `stop_token_ids`) is among
    the tokens. `logprob_rids` names those of `rids` whose requests asked for log-probabilities, with that of the
    row's token in `logprobs`, and the most probable ones in `top_ids` (uint32-LE) and `top_logprobs` (float32-LE),
    the most probable first. `cached_tokens[i]` tokens of the prompt of `cached_rids[i]` were not computed but found.
    `pooled` (float32-LE) are the results of rows `pooled_rids`, which end with them. `unread`: a command of this
    streamer could not be read. `prefixes` answers `TellPrefixes`.
    """

    epoch: int
    streamer: int
    rids: list[int]
    tokens: bytes
    admitted: list[int] = []
    ended: list[int] = []
    reasons: list[str] = []
    errors: list[str] = []
    stats: EngineStats = field(default_factory=EngineStats)
    logprob_rids: list[int] = []
    logprobs: list[float] = []
    top_ids: list[bytes] = []
    top_logprobs: list[bytes] = []
    cached_rids: list[int] = []
    cached_tokens: list[int] = []
    pooled_rids: list[int] = []
    pooled: list[bytes] = []
    unread: bool = False
    traces: list[EngineTrace] = []
    prefixes: PrefixTree | None = None
    admitted_at: float = -1.0


# -- supervisor <-> actors ---------------------------------------------------------------------------


class Ready(Struct, frozen=True, array_like=True, tag=80):
    """An actor can serve. `endpoint` is where it listens ("" for one that doesn't)."""

    role: str
    index: int
    epoch: int
    pid: int
    endpoint: str = ""
    card: ModelCard | None = None


class StartFailed(Struct, frozen=True, array_like=True, tag=81):
    """An actor can't start; `message` is what the user should read."""

    role: str
    index: int
    epoch: int
    message: str


class Alive(Struct, frozen=True, array_like=True, tag=82):
    """Answer of an actor's main loop to `Probe`. `streams` counts open streams (streamer, HTTP worker), `http` the
    requests an HTTP worker has answered, by `METHOD PATH STATUS`. `ended` counts the streamer's streams and calls that
    are over."""

    role: str
    index: int
    epoch: int
    seq: int
    streams: int = 0
    stats: EngineStats | None = None
    http: dict[str, int] = {}
    ended: int = 0


class Probe(Struct, frozen=True, array_like=True, tag=83):
    """Asks an actor's main loop whether it lives."""

    seq: int


class ActorState(Struct, frozen=True, array_like=True):
    """One actor as the supervisor sees it. `state` is starting, ready, stopping or dead.

    `memory` (bytes) and `cpu` (seconds) are of the process; `restarts` counts its predecessors, `crashes` those of them
    that were not replaced on demand.
    """

    name: str
    role: str
    index: int
    pid: int
    state: str
    epoch: int
    endpoint: str = ""
    memory: int = 0
    cpu: float = 0.0
    restarts: int = 0
    crashes: int = 0


class SystemState(Struct, frozen=True, array_like=True, tag=84):
    """The system as the supervisor sees it, sent to every actor on each change and to HTTP workers on each
    heartbeat. `status` is loading, ok, degraded, draining or failed; `message` says why it failed. `http` sums what all
    HTTP workers have answered, by `METHOD PATH STATUS`. `started` is in Unix seconds."""

    status: str
    model: str
    actors: list[ActorState]
    engine: EngineStats = field(default_factory=EngineStats)
    card: ModelCard | None = None
    message: str = ""
    http: dict[str, int] = {}
    supervisor: ActorState | None = None
    started: float = 0.0


class Drain(Struct, frozen=True, array_like=True, tag=85):
    """Refuse new work, finish what runs. `seconds` is how long it may take at most."""

    seconds: float


class Stop(Struct, frozen=True, array_like=True, tag=86):
    """End now: tell every open stream (`code`, `message`), then exit. The engine may take `flush` seconds more to write
    prefixes to the SSD."""

    code: str
    message: str
    flush: float = 0.0


class EngineUse(Struct, frozen=True, array_like=True, tag=87):
    """The streamer tells the supervisor of the engine incarnation `epoch`: whether it has completed a decode step, and
    whether a suspect is in it (a row that may bring it down). Sent when either changes. `broken` says why the streamer
    can't work with it any more, so that it has to be replaced."""

    epoch: int
    stepped: bool
    suspects: bool
    broken: str = ""


class ModelState(Struct, frozen=True, array_like=True):
    """One of several models, as the house sees it. `state` is unloaded, waiting (for memory), loading, ready, unloading
    or failed; `message` says why.

    `progress` of loading goes from 0 to 1, by the time that it took before. Bytes: `claim` is what it may take,
    `memory` what its processes take now, `size` its weights. Seconds: `idle_ttl` until it is unloaded for want of
    streams and `expires` what is left of it (0: never), `retry_after` until asking again makes sense. `streams` are
    open now, `loads` counts. `endpoint` is its streamer's while it is ready. `task` is as in `ModelCard`; `adapters`
    are names.
    """

    name: str
    state: str
    aliases: list[str] = []
    message: str = ""
    progress: float = 0.0
    claim: int = 0
    memory: int = 0
    pinned: bool = False
    idle_ttl: float = 0.0
    expires: float = 0.0
    retry_after: float = 0.0
    streams: int = 0
    loads: int = 0
    endpoint: str = ""
    task: str = "generate"
    adapters: list[str] = []
    size: int = 0


class ModelsState(Struct, frozen=True, array_like=True, tag=88):
    """All models, in the order they were named in, sent by the house to every HTTP worker at each change and on each
    heartbeat. `budget` and the `claimed` part of it are in bytes. What a `SystemState` says of the model holds while
    this names it ready or unloading."""

    models: list[ModelState]
    budget: int = 0
    claimed: int = 0


class WantModel(Struct, frozen=True, array_like=True, tag=89):
    """An HTTP worker has requests for a model. Sent at the first one and then every second while `waiting` requests
    wait for it to be loaded; not answered. `keep_alive`: seconds without streams after which it may be unloaded, from
    now on; below 0 never, 0 as soon as its streams have ended, None as before. `model` is a name or an alias."""

    model: str
    waiting: int = 1
    keep_alive: float | None = None


class CastUse(Struct, frozen=True, array_like=True, tag=90):
    """A cast tells the house of its use: `streams` that are open, requests that have `ended`, and the `memory` of all
    its processes in bytes."""

    epoch: int
    streams: int = 0
    ended: int = 0
    memory: int = 0


class ModelOrder(Struct, frozen=True, array_like=True, tag=91):
    """Asks the house of several models: list, load, unload, pin or unpin `model` (a name or an alias; "" is the first
    one), or restart its engine ("": those of all). `rid` is the asker's own number. load is answered once the model is
    ready, unload once it is gone, restart once there are new engines. `keep_alive` as in `WantModel`."""

    rid: int
    action: str
    model: str = ""
    keep_alive: float | None = None


class ModelAnswer(Struct, frozen=True, array_like=True, tag=92):
    """Answer to `ModelOrder`. A non-empty `code` (see `protocol.errors`) means that it was not done. `models` is the
    one that was named, or all for list; `endpoint` is where the one named can be reached while it is ready."""

    rid: int
    code: str = ""
    message: str = ""
    models: list[ModelState] = []
    endpoint: str = ""
    retry_after: float = 0.0


Watch = AskFigures | AskPrefixes | CancelStream | Charge
ClientCall = Tokenize | Detokenize | ListModels | CancelLabel | Keep | Recall | Forget | Embed | Rank | Watch
ClientMessage = Hello | Ping | Generate | Cancel | Credit | ClientCall
CallAnswer = Tokenized | Detokenized | Models | CallFailed | Done | Kept | Embedded | Ranked | Figures | Prefixes
ServerMessage = Welcome | Refused | Pong | Accepted | Deltas | CallAnswer
TokenizerJob = Encode | Decode
TokenizerResult = Encoded | Decoded
EngineCommand = Attach | Submit | Abort | TellPrefixes
HouseReport = WantModel | CastUse | ModelOrder | SystemState | Charge
ActorReport = Ready | StartFailed | Alive | EngineUse | HouseReport
SupervisorOrder = Probe | SystemState | Drain | Stop | ModelsState | ModelAnswer
