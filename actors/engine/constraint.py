"""`Constraint`: which tokens one row may generate next, by its grammar and its thinking budget.

Made on a side thread by `actors.engine.constraints` and used there; one thread at a time. A grammar holds for the
answer: while the row reasons, every token is allowed. When the thinking budget is used up, the end of the reasoning is
the only thing allowed.
"""

from collections.abc import Iterable, Sequence

import llguidance

from protocol.messages import Thinking


class Constraint:
    """`consumed` counts the generated tokens it knows of; they must be given to it in their order."""

    def __init__(
        self,
        matcher: llguidance.LLMatcher | None,
        thinking: Thinking | None = None,
        budget: int | None = None,
        stop_ids: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> None:
        self.matcher = matcher
        self.consumed = 0
        self.stop_ids = tuple(stop_ids)
        self._min_tokens = min_tokens
        self._begin = list(thinking.begin) if thinking is not None else []
        self._end = list(thinking.end) if thinking is not None else []
        self._thinking = thinking is not None and thinking.open
        self._budget = budget if self._end else None
        self._thought = 0
        self._recent: list[int] = []  # the last tokens of the reasoning, as many as its end has
        self._opening = 0  # tokens of the begin of reasoning that were generated
        self._forced: list[int] = []
        self._force_end()

    def consume(self, tokens: Iterable[int]) -> None:
        """Take generated tokens."""
        for token in tokens:
            self._consume(token)

    def _consume(self, token: int) -> None:
        self.consumed += 1
        if self._thinking:
            self._think(token)
        elif self._begin and self._opening == self.consumed - 1 and token == self._begin[self._opening]:
            self._opening += 1
            if self._opening == len(self._begin):
                self._thinking, self._begin = True, []
                self._force_end()
        else:
            self._begin = []
            if self.matcher is not None and not self.matcher.is_stopped():
                self.matcher.consume_token(token)

    def _think(self, token: int) -> None:
        self._thought += 1
        self._recent = [*self._recent, token][-len(self._end) :]
        if self._recent == self._end:
            self._thinking, self._forced = False, []
        elif self._forced:
            del self._forced[0]
        else:
            self._force_end()

    def _force_end(self) -> None:
        if self._thinking and self._budget is not None and self._thought >= self._budget:
            self._forced = self._end.copy()

    @property
    def only(self) -> int | None:
        """The one token that is allowed next, whatever the grammar says."""
        if self._forced:
            return self._forced[0]
        if self._opening and not self._thinking and self._begin:
            return self._begin[self._opening]
        return None

    @property
    def also(self) -> int | None:
        """A token that is allowed beside those of the grammar: reasoning may begin."""
        return self._begin[0] if self._begin and not self.consumed and self._budget != 0 else None

    @property
    def asks_grammar(self) -> bool:
        """Whether the grammar decides about the next token. At its end it allows the end of the text alone."""
        return self.matcher is not None and not self._thinking and self.only is None and not self.matcher.is_error()

    @property
    def may_not_stop(self) -> bool:
        """Whether `stop_ids` are to be masked, unless nothing else is left."""
        return self.consumed < self._min_tokens and self.only is None

    @property
    def error(self) -> str:
        """What went wrong, "" when nothing did."""
        if self.matcher is None or not self.matcher.is_error():
            return ""
        return self.matcher.get_error() or "the grammar came to an end"
