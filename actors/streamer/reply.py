"""`Reply`: splits what a model writes into text, reasoning and tool calls, while it is written.

Owned by a `Stream`, on the streamer's one thread. Works on text behind the stop strings, so it does not care how
tokens cut it. Text that may be the beginning of a mark is held back, and white space around marks is dropped.

    CONTENT --think begins--> REASONING --think ends--> CONTENT
    CONTENT --a call begins--> CALL --it ends--> CONTENT
"""

import secrets
from enum import Enum
from typing import Any

from actors.streamer.dialect import Dialect
from actors.streamer.json_call import JsonCalls
from actors.streamer.tool_format import Call
from protocol.messages import ToolCallDelta, ToolChoice


class State(Enum):
    """Where in the reply the text stands."""

    CONTENT = "content"
    REASONING = "reasoning"
    CALL = "call"


class Reply:
    """Gathers `texts`, `reasoning` and `calls`; who takes them clears them.

    A reply whose calls are forced (`choice` is required or named) is bare JSON behind the reasoning: a list of calls,
    or the arguments of the named one.
    """

    def __init__(
        self, dialect: Dialect, tools: list[dict[str, Any]], choice: ToolChoice, *, thinking: bool = False
    ) -> None:
        self.texts: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[ToolCallDelta] = []
        self.state = State.REASONING if thinking else State.CONTENT
        self.call_count = 0
        self._dialect = dialect
        self._tools = tools
        self._choice = choice
        self._forced = bool(tools) and choice.mode in ("required", "named")
        self._watches_tools = bool(tools) and choice.mode == "auto"
        self._held = ""  # may become a mark, or white space before one
        self._at_start = True  # of the content, or of the reasoning
        self._call = ""  # text of the call that is being written
        self._json: JsonCalls | None = JsonCalls() if self._forced and choice.mode == "required" else None

    @property
    def has_rest(self) -> bool:
        """Whether anything was gathered."""
        return bool(self.texts or self.reasoning or self.calls)

    @property
    def ends_with_calls(self) -> bool:
        """Whether the finish reason of a reply that stopped is its tool calls."""
        return self.call_count > 0 and self._choice.mode != "named"

    def special(self, token: int) -> str:
        """The text of a special token that belongs to a mark, or stands inside a call; "" for others."""
        text = self._dialect.specials.get(token, "")
        if not text or self.state is State.CALL:
            return text
        marks = [*(self._dialect.think or ()), self._dialect.tools.begin if self._watches_tools else ""]
        return text if any(text in mark for mark in marks) else ""

    def push(self, text: str) -> int:
        """Take more text; returns how many bytes, about, it added to what is gathered."""
        before = len(self.texts), len(self.reasoning), len(self.calls)
        self._held += text
        while self._advance():
            pass
        added = [*self.texts[before[0] :], *self.reasoning[before[1] :]]
        calls = self.calls[before[2] :]
        return sum(map(len, added)) + sum(64 + len(call.arguments) for call in calls)

    def flush(self) -> None:
        """No more text comes."""
        if self.state is State.CALL:
            begin = self._dialect.tools.begin
            self._end_call(self._call + self._held, begin)
        elif self._held:
            self._emit(self._held)
        self._held = ""

    def _advance(self) -> bool:
        """Go on to the next mark in what is held. Returns whether there was one."""
        match self.state:
            case State.CONTENT:
                marks = self._content_marks()
            case State.REASONING:
                assert self._dialect.think is not None
                marks = [self._dialect.think[1]]
            case State.CALL:
                marks = [self._dialect.tools.end] if self._dialect.tools.end else []
        found = min(((at, mark) for mark in marks if (at := self._held.find(mark)) >= 0), default=None)
        if found is None:
            keep = _unfinished(self._held, marks)
            if marks and self.state is not State.CALL:
                keep = max(keep, _blank_end(self._held, keep))
            self._emit(self._held[: len(self._held) - keep])
            self._held = self._held[len(self._held) - keep :]
            return False
        at, mark = found
        before, self._held = self._held[:at], self._held[at + len(mark) :]
        if self.state is State.CALL:
            self._emit(before)
            self._end_call(self._call, self._dialect.tools.begin, mark)
            self.state = State.CONTENT
            self._at_start = True
            return True
        self._emit(before.rstrip())
        self._at_start = True
        if self.state is State.REASONING:
            self.state = State.CONTENT
        elif self._dialect.think is not None and mark == self._dialect.think[0]:
            self.state = State.REASONING
        else:
            self.state = State.CALL
            self._call = ""
            self._json = JsonCalls() if self._dialect.tools.is_json else None
        return True

    def _content_marks(self) -> list[str]:
        marks = [self._dialect.think[0]] if self._dialect.think is not None else []
        return [*marks, self._dialect.tools.begin] if self._watches_tools else marks

    def _emit(self, text: str) -> None:
        if not text:
            return
        if self.state is State.CALL:
            self._call += text
            if self._json is not None:
                self._pass_on(self._json.push(text))
            return
        if self._at_start and (self.state is State.REASONING or self._content_marks()):
            text = text.lstrip()
            if not text:
                return
        self._at_start = False
        if self.state is State.REASONING:
            self.reasoning.append(text)
        elif not self._forced:
            self.texts.append(text)
        elif self._json is not None:
            self._pass_on(self._json.push(text))
        else:
            if not self.call_count:
                self._begin(self._choice.name)
            self.calls.append(ToolCallDelta(0, arguments=text))

    def _pass_on(self, pieces: list[tuple[str, str]]) -> None:
        for name, arguments in pieces:
            if name:
                self._begin(name)
            elif self._counts:
                self.calls.append(ToolCallDelta(self.call_count - 1, arguments=arguments))

    def _begin(self, name: str, own_id: str = "", arguments: str = "") -> None:
        self.call_count += 1
        if self._counts:
            call_id = own_id or f"call_{secrets.token_hex(12)}"
            self.calls.append(ToolCallDelta(self.call_count - 1, call_id, name, arguments))

    @property
    def _counts(self) -> bool:
        # Nobody takes a second call of a request without parallel calls.
        return self._choice.parallel or self.call_count <= 1

    def _end_call(self, text: str, begin: str, end: str = "") -> None:
        if self._json is not None and self._json.began:
            return
        try:
            calls: list[Call] = self._dialect.tools.parse(text, self._tools)
        except ValueError:
            self.texts.append(begin + text + end)  # no call after all: nothing of what was written is lost
            return
        for call in calls:
            self._begin(call.name, call.id, call.arguments)


def _unfinished(text: str, marks: list[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a mark."""
    longest = max((len(mark) for mark in marks), default=0)
    for length in range(min(longest - 1, len(text)), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0


def _blank_end(text: str, keep: int) -> int:
    """Characters at the end of `text`, the last `keep` and the white space before them."""
    return len(text) - len(text[: len(text) - keep].rstrip())
