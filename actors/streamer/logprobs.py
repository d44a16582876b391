"""`LogprobColumn`: the log-probabilities of one stream, held until the text of their tokens is sent.

Owned by a `Stream`, on the streamer's one thread. A token goes out with the first character of its text; one that
adds no text by itself (the first bytes of a character, a special token) with the next character. So what a stop
string cuts off never appears, and what is gathered for a slow reader stays beside its text.
"""

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from protocol.ids import unpack_ids
from protocol.messages import Step, TokenLogprobs


class StepLogprobs(NamedTuple):
    """What a step brought for the one token of a row, as in the columns of `Step`."""

    logprob: float
    top_ids: bytes
    top_logprobs: bytes


def by_row(step: Step) -> dict[int, StepLogprobs]:
    """The log-probabilities of a step, by rid."""
    columns = zip(step.logprob_rids, step.logprobs, step.top_ids, step.top_logprobs, strict=True)
    return {rid: StepLogprobs(own, top_ids, top) for rid, own, top_ids, top in columns}


class LogprobColumn:
    """`spelling` gives the bytes of a token; None for a stream without text, whose tokens are spelled by nobody."""

    def __init__(self, spelling: Mapping[int, bytes] | None) -> None:
        self._spelling = spelling
        self._held: deque[TokenLogprobs] = deque()
        self._ready: list[TokenLogprobs] = []

    def add(self, token: int, offset: int, brought: StepLogprobs) -> None:
        """The next token, whose text begins after `offset` characters."""
        logprob, top_ids, top_logprobs = brought
        spelling = self._spelling
        if spelling is None:
            self._held.append(TokenLogprobs(token, logprob, top_ids, top_logprobs, offset=offset))
            return
        top_tokens = [spelling[one] for one in unpack_ids(top_ids)]
        self._held.append(TokenLogprobs(token, logprob, top_ids, top_logprobs, spelling[token], top_tokens, offset))

    def release(self, sent: int | None = None) -> int:
        """Let out what begins in the first `sent` characters of the text; None lets out all that is held.

        Returns about how many bytes that is.
        """
        size = 0
        while self._held and (sent is None or self._held[0].offset < sent):
            token = self._held.popleft()
            self._ready.append(token)
            size += 16 + 2 * len(token.top_ids) + len(token.token) + sum(map(len, token.top_tokens))
        return size

    @property
    def ready(self) -> bool:
        """Whether there is something to take."""
        return bool(self._ready)

    def take(self) -> list[TokenLogprobs]:
        """What was let out since the last time."""
        taken, self._ready = self._ready, []
        return taken
