"""What `Client` and `AsyncClient` share: building requests, the deltas a program sees, and errors from ends."""

from collections.abc import Iterable
from itertools import repeat
from typing import Any

import msgspec

from protocol.codec import CodecError
from protocol.errors import CANCELLED, CallboardError, RequestFailed, RequestRejected, ServerLost
from protocol.ids import pack_ids, unpack_ids
from protocol.messages import Deltas, End, Generate, SamplingParams, TokenLogprobs, ToolCallDelta, ToolChoice

Messages = list[dict[str, Any]]
_NONE: list[Any] = []

RECONNECT = 30.0  # seconds that a client looks for the successor of a server that it lost


class Delta(msgspec.Struct, frozen=True):
    """A piece of a stream: `text` and, when asked for, `ids` and `logprobs`; `count` tokens in all.

    `logprobs` are of the tokens whose text begins in this piece. `reasoning` comes before the text, and `tool_calls`
    after it; both are only there for a request with `split_reply`.
    """

    text: str
    ids: list[int]
    count: int
    logprobs: list[TokenLogprobs] = []
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = []


def build_generate(
    ref: int,
    *,
    prompt: str | None,
    messages: Messages | None,
    ids: Iterable[int] | None,
    options: dict[str, Any],
    more_refs: list[int] | None = None,
    received: float = -1.0,
) -> Generate:
    """Make the message of a `generate` call.

    Raises TypeError for an unknown option or when not exactly one of prompt, messages and ids is given, and
    CodecError for a sampling option of a wrong type.
    """
    if sum(given is not None for given in (prompt, messages, ids)) != 1:
        raise TypeError("give exactly one of prompt=, messages= and ids=")
    sampling = _sampling({name: options.pop(name) for name in SamplingParams.__struct_fields__ if name in options})
    allowed = {
        "label",
        "model",
        "return_text",
        "return_ids",
        "add_special_tokens",
        "timeout",
        "template_kwargs",
        "cache_salt",
        "tools",
        "tool_choice",
        "split_reply",
        "trace",
    }
    unknown = options.keys() - allowed
    if unknown:
        raise TypeError(f"unknown option {', '.join(sorted(unknown))}")
    choice = options.get("tool_choice")
    if isinstance(choice, str):
        options["tool_choice"] = ToolChoice(choice)
    return Generate(
        ref,
        sampling,
        prompt=prompt,
        messages=messages,
        ids=None if ids is None else pack_ids(ids),
        more_refs=more_refs or [],
        received=received,
        **options,
    )


def _sampling(given: dict[str, Any]) -> SamplingParams:
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    params = SamplingParams(**{name: value for name, value in given.items() if value is not None})
    try:
        # The server can't tell whose request a message was that it could not decode, so types are checked here.
        checked: SamplingParams = msgspec.convert(msgspec.structs.astuple(params), SamplingParams)
    except msgspec.ValidationError as error:
        wrong = str(error)
        for i, name in enumerate(SamplingParams.__struct_fields__):
            wrong = wrong.replace(f"$[{i}]", name)
        raise CodecError(f"a sampling option can't be sent: {wrong}") from None
    return checked


def split_deltas(message: Deltas) -> Iterable[tuple[int, Delta | End]]:
    """Yield what a `Deltas` message brings for each stream, the pieces before the ends."""
    logprobs = message.logprobs or repeat(_NONE)
    reasoning = message.reasoning or repeat("")
    calls = message.tool_calls or repeat(_NONE)
    columns = zip(message.refs, message.texts, message.ids, message.counts, logprobs, reasoning, calls, strict=False)
    for ref, text, ids, count, tokens, thought, called in columns:
        yield ref, Delta(text, unpack_ids(ids) if ids else [], count, tokens, thought, called)
    for end in message.ends:
        yield end.ref, end


def error_of(end: End) -> CallboardError | None:
    """The exception a stream's end stands for; None when it finished or was cancelled by its own client."""
    if end.outcome == "finished" or (end.outcome == "cancelled" and end.code in ("", CANCELLED)):
        return None
    kind = RequestRejected if end.outcome == "rejected" else RequestFailed
    return kind(end.code, end.message, param=end.param, retry_after=end.retry_after)


class Lost:
    """What a lost server means for each of the streams `names` that were open: makes their errors."""

    def __init__(self, error: CallboardError, names: Iterable[str]) -> None:
        self._error = error
        self._names = tuple(names)

    def of(self, name: str, tokens: int) -> CallboardError:
        """The error of one stream, which had brought `tokens` tokens."""
        error = self._error
        if not isinstance(error, ServerLost):
            return error
        lost = ServerLost(error.code, f"{error.message}; stream {name} is lost after {tokens} tokens")
        lost.streams = self._names
        return lost
