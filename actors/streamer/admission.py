"""How many streams may be open at once, and when a refused client should come back.

Pure: the clock is passed in. Used by the streamer.
"""

from collections import deque

WATCHED = 64  # ends remembered for the drain rate


class Admission:
    """Counts open streams against the limit and measures how fast they end."""

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self.limit = max_running + max_waiting
        self._ends: deque[float] = deque(maxlen=WATCHED)

    def has_room(self, open_streams: int) -> bool:
        """Whether one more stream may be opened."""
        return open_streams < self.limit

    def ended(self, now: float) -> None:
        """A stream ended at `now` (seconds)."""
        self._ends.append(now)

    def retry_after(self, now: float) -> float:
        """Seconds after which a place should be free: the mean time between ends lately, 1 to 60."""
        if len(self._ends) < 2:
            return 1.0
        per_stream = (now - self._ends[0]) / len(self._ends)
        return min(60.0, max(1.0, round(per_stream)))
