"""What `Client` and `AsyncClient` share: building requests, the deltas a program sees, and errors from ends."""

from collections.abc import Iterable
from typing import Any

import msgspec

from protocol.errors import CANCELLED, CallboardError, RequestFailed, RequestRejected
from protocol.ids import pack_ids, unpack_ids
from protocol.messages import Deltas, End, Generate, SamplingParams

Messages = list[dict[str, Any]]


class Delta(msgspec.Struct, frozen=True):
    """A piece of a stream: `text` and, when asked for, `ids`; `count` tokens in all."""

    text: str
    ids: list[int]
    count: int


def build_generate(
    ref: int,
    *,
    prompt: str | None,
    messages: Messages | None,
    ids: Iterable[int] | None,
    options: dict[str, Any],
) -> Generate:
    """Make the message of a `generate` call.

    Raises TypeError for an unknown option or when not exactly one of prompt, messages and ids is given.
    """
    if sum(given is not None for given in (prompt, messages, ids)) != 1:
        raise TypeError("give exactly one of prompt=, messages= and ids=")
    sampling = {name: options.pop(name) for name in SamplingParams.__struct_fields__ if name in options}
    if isinstance(sampling.get("stop"), str):
        sampling["stop"] = [sampling["stop"]]
    if sampling.get("stop") is None:
        sampling.pop("stop", None)
    allowed = {
        "label",
        "model",
        "return_text",
        "return_ids",
        "add_special_tokens",
        "timeout",
        "template_kwargs",
    }
    unknown = options.keys() - allowed
    if unknown:
        raise TypeError(f"unknown option {', '.join(sorted(unknown))}")
    return Generate(
        ref,
        SamplingParams(**sampling),
        prompt=prompt,
        messages=messages,
        ids=None if ids is None else pack_ids(ids),
        **options,
    )


def split_deltas(message: Deltas) -> Iterable[tuple[int, Delta | End]]:
    """Yield what a `Deltas` message brings for each stream, the pieces before the ends."""
    for ref, text, ids, count in zip(message.refs, message.texts, message.ids, message.counts, strict=True):
        yield ref, Delta(text, unpack_ids(ids) if ids else [], count)
    for end in message.ends:
        yield end.ref, end


def error_of(end: End) -> CallboardError | None:
    """The exception a stream's end stands for; None when it finished or was cancelled by its own client."""
    if end.outcome == "finished" or (end.outcome == "cancelled" and end.code in ("", CANCELLED)):
        return None
    kind = RequestRejected if end.outcome == "rejected" else RequestFailed
    return kind(end.code, end.message, param=end.param, retry_after=end.retry_after)
