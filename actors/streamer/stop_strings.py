"""Stop strings over streamed text: the earliest match wins, and nothing of it is ever sent.

Owns the text of one stream that may still belong to a match. Used by the streamer on its main thread,
after the detokenizer, so it works on characters and doesn't care how tokens cut them.
"""

from functools import lru_cache


class StopMatcher:
    """Cuts one stream's text at the first stop string, however the text comes in pieces.

    What `push` and `flush` return, joined, is exactly `text[:min(text.find(s) for s in stops that occur)]`,
    or the whole text. Of matches that overlap, the one that starts earliest counts: one that is complete
    waits while another that began before it is undecided. `matched` is the stop string that ended the text
    (the shortest of those that start there), None so far. A match that ends in a piece that was pushed unarmed
    doesn't count.

    Each stop string has a Knuth-Morris-Pratt automaton, so the time is linear in text × stop strings, and
    what is held back is shorter than the longest of them.
    """

    __slots__ = ("_active", "_best", "_first_chars", "_held", "_stops", "matched")

    def __init__(self, stops: list[str]) -> None:
        self.matched: str | None = None
        self._stops = {stop: _borders(stop) for stop in stops if stop}
        self._first_chars = frozenset(stop[0] for stop in self._stops)
        # How much of each stop string the text's end holds; those that hold nothing are left out.
        self._active: dict[str, int] = {}
        self._held = ""
        # The best complete match: where it starts, from the start of what is held, and the stop string.
        self._best: tuple[int, str] | None = None

    def push(self, text: str, armed: bool = True) -> str:
        """Take more text; returns what is safe to send, nothing after a match. Unarmed, it can only begin one."""
        if self.matched is not None:
            return ""
        if not self._active and self._first_chars.isdisjoint(text):
            return text
        before = len(self._held)
        self._held += text
        for stop, borders in self._stops.items():
            if stop not in self._active and stop[0] not in text:
                continue
            length, end = _advance(stop, borders, self._active.pop(stop, 0), text)
            while not armed and length == len(stop):
                length, end = _advance(stop, borders, borders[-1], text, end)
            if length < len(stop):
                if length:
                    self._active[stop] = length
                continue
            start = before + end - length
            if self._best is None or (start, length) < (self._best[0], len(self._best[1])):
                self._best = (start, stop)
        undecided = len(self._held) - max(self._active.values(), default=0)
        if self._best is not None and self._best[0] <= undecided:
            return self._end()
        return self._send(undecided)

    def flush(self) -> str:
        """End the text; returns what was held back and belongs to no match."""
        if self.matched is not None:
            return ""
        self._active.clear()
        return self._end() if self._best is not None else self._send(len(self._held))

    def _end(self) -> str:
        assert self._best is not None
        start, self.matched = self._best
        safe, self._held = self._held[:start], ""
        return safe

    def _send(self, count: int) -> str:
        safe, self._held = self._held[:count], self._held[count:]
        if self._best is not None:
            self._best = (self._best[0] - count, self._best[1])
        return safe


@lru_cache(maxsize=256)
def _borders(stop: str) -> tuple[int, ...]:
    """For each prefix of `stop`, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = borders[length - 1]
        if stop[i] == stop[length]:
            length += 1
        borders[i] = length
    return tuple(borders)


def _advance(stop: str, borders: tuple[int, ...], length: int, text: str, begin: int = 0) -> tuple[int, int]:
    """Move the automaton of `stop` over `text[begin:]` from a match of `length` characters, up to a complete one.

    Returns the length of the match then, and how many characters of `text` were taken.
    """
    taken = begin
    for taken, char in enumerate(text[begin:] if begin else text, begin + 1):
        while length and stop[length] != char:
            length = borders[length - 1]
        if stop[length] == char:
            length += 1
            if length == len(stop):
                return length, taken
    return length, taken
