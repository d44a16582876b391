"""`JsonValue`: finds the end of one JSON object or array in text that comes in pieces.

Used by `actors.streamer.json_call` on the streamer's one thread.
"""

import re

_IN_STRING = re.compile(r'[^"\\]*')
_OUTSIDE = re.compile(r'[^"{}\[\]]*')


class JsonValue:
    """Counts brackets outside of strings. What isn't JSON has no end, or an early one."""

    def __init__(self) -> None:
        self.done = False
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def take(self, text: str) -> int:
        """How many characters of `text` belong to the value."""
        at = 0
        while at < len(text) and not self.done:
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            skipped = (_IN_STRING if self._in_string else _OUTSIDE).match(text, at)
            assert skipped is not None
            at = skipped.end()
            if at == len(text):
                break
            char = text[at]
            at += 1
            if char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = not self._in_string
            elif char in "{[":
                self._depth += 1
            else:
                self._depth -= 1
                self.done = self._depth <= 0
        return at
