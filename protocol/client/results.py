"""Whole answers: what a stream that was read to its end has brought, and batches of them.

Pure; `Client` and `AsyncClient` build their `result` and `generate_many` on it.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any

import msgspec

from protocol.client.requests import Delta, Messages
from protocol.errors import DRAINING, LOADING, OUT_OF_MEMORY, QUEUE_FULL, CallboardError
from protocol.messages import End, TokenLogprobs, ToolCallDelta

AT_ONCE = 256  # streams of one batch that are open at a time
LATER = (QUEUE_FULL, LOADING, OUT_OF_MEMORY, DRAINING)
PATIENCE = 60  # refusals in a row, with nothing open, after which a batch gives up

Prompt = str | list[int] | Messages


class StreamStats(msgspec.Struct, frozen=True):
    """What the server says of one stream: token counts, and where its time went, in seconds (-1: not reached).

    `cached_tokens` of the prompt were found instead of computed. `tokenize`, `queue` and `prefill` follow one another
    from the request's arrival to the first token, after `ttft` seconds in all; the stream ended after `total`.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    tokenize: float = -1.0
    queue: float = -1.0
    prefill: float = -1.0
    ttft: float = -1.0
    total: float = -1.0

    @classmethod
    def of(cls, end: End) -> "StreamStats":
        """Those in a stream's end."""
        return cls(*msgspec.structs.astuple(end.usage), *msgspec.structs.astuple(end.timing))

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first one, per second; 0 when there is none."""
        seconds = self.total - self.ttft
        return (self.completion_tokens - 1) / seconds if self.completion_tokens > 1 and seconds > 0 else 0.0


class Result(msgspec.Struct, frozen=True):
    """A whole answer. `reason` is stop, length or tool_calls; of a stream that failed, `error` says why, and the rest
    is what had come by then. `stats` is None for one that never got to an end of its own."""

    text: str = ""
    ids: list[int] = []
    reason: str = ""
    stats: StreamStats | None = None
    error: CallboardError | None = None
    logprobs: list[TokenLogprobs] = []
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = []


def whole(deltas: list[Delta], end: End | None, error: CallboardError | None = None) -> Result:
    """The answer that these pieces are."""
    return Result(
        "".join(delta.text for delta in deltas),
        [token for delta in deltas for token in delta.ids],
        end.reason if end is not None else "",
        StreamStats.of(end) if end is not None else None,
        error,
        [token for delta in deltas for token in delta.logprobs],
        "".join(delta.reasoning for delta in deltas),
        [call for delta in deltas for call in delta.tool_calls],
    )


def as_prompt(prompt: Prompt) -> dict[str, Any]:
    """The argument of `generate` for a text, token ids, or chat messages. Raises TypeError for anything else."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, list) and prompt and all(isinstance(item, dict) for item in prompt):
        return {"messages": prompt}
    if isinstance(prompt, list) and all(isinstance(item, int) for item in prompt):
        return {"ids": prompt}
    raise TypeError("a prompt is a text, a list of token ids, or a list of chat messages")


class Batch:
    """Which prompts of a batch to ask for when, and the results, in the order of the prompts.

    What a busy server refuses is asked again later, with no more open than it took.
    """

    def __init__(self, prompts: Iterable[Prompt], at_once: int = AT_ONCE) -> None:
        """Raises TypeError for a prompt that is none, and ValueError when `at_once` is below 1."""
        if at_once < 1:
            raise ValueError(f"at_once must be at least 1, not {at_once}")
        self._prompts = [as_prompt(prompt) for prompt in prompts]
        self._waiting = deque(range(len(self._prompts)))
        self._results: list[Result | None] = [None] * len(self._prompts)
        self._limit = at_once
        self._open = 0
        self._refused = 0  # in a row

    @property
    def open(self) -> int:
        """Prompts that were asked for and are not done."""
        return self._open

    def next(self) -> tuple[int, dict[str, Any]] | None:
        """One more to ask for now: its number, and the argument of `generate`. None when there is none."""
        if not self._waiting or self._open >= self._limit:
            return None
        self._open += 1
        number = self._waiting.popleft()
        return number, self._prompts[number]

    def done(self, number: int, result: Result) -> float:
        """Take in what became of a prompt. Returns seconds to wait before anything more is asked for: above 0 only when
        the server is busy with others."""
        self._open -= 1
        error = result.error
        if error is not None and error.code in LATER and error.retry_after and self._refused < PATIENCE:
            self._waiting.appendleft(number)
            self._limit = max(1, self._open)
            self._refused += not self._open
            return 0.0 if self._open else error.retry_after
        self._refused = 0
        self._results[number] = result
        return 0.0

    def results(self) -> list[Result]:
        """All of them, once nothing is open or waiting."""
        return [result for result in self._results if result is not None]
