"""`JsonCalls`: tool calls written as JSON objects with name and arguments, passed on while they are written.

Used by `actors.streamer.reply` on the streamer's one thread.
"""

import json
import re

from actors.streamer.json_value import JsonValue
from actors.streamer.tool_format import well_formed

_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
LONGEST_HEAD = 4096  # characters; what is longer is found when the whole call is there


class JsonCalls:
    """Splits `{"name": …, "arguments": {…}}`, one after another, or as a list of them.

    Each piece is (name, arguments): the name is given with the first piece of a call, and "" after it.
    """

    def __init__(self) -> None:
        self.began = False  # the head of a call was complete
        self._text = ""
        self._arguments: JsonValue | None = None

    def push(self, text: str) -> list[tuple[str, str]]:
        """Take more text; returns what it brings."""
        self._text += text
        pieces: list[tuple[str, str]] = []
        while True:
            if self._arguments is None:
                # What is left of the call before, a closing brace, is skipped.
                head = _HEAD.search(self._text)
                if head is None:
                    self._text = self._text[-LONGEST_HEAD:]
                    return pieces
                self.began = True
                self._arguments = JsonValue()
                self._text = self._text[head.end() :]
                pieces.append((_text_of(head[1]), ""))
            taken = self._arguments.take(self._text)
            if taken:
                pieces.append(("", self._text[:taken]))
                self._text = self._text[taken:]
            if not self._arguments.done:
                return pieces
            self._arguments = None


def _text_of(quoted: str) -> str:
    try:
        text = json.loads(quoted, strict=False)
    except ValueError:
        return quoted[1:-1]
    return well_formed(text) if isinstance(text, str) else quoted
