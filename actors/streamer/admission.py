"""How many streams may be open at once, and when a refused client should come back.

Pure: the clock is passed in. Used by the streamer.
"""

from collections import deque

WATCHED = 64  # ends remembered for the drain rate


class Admission:
    """Counts open streams against the limit and measures how fast they end.

    Clients that have less than their part of the limit find some room beyond it, so that one that floods doesn't shut
    the others out.
    """

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self.limit = max_running + max_waiting
        self.reserve = max(self.limit // 4, 8)
        self._ends: deque[float] = deque(maxlen=WATCHED)

    def has_room(self, open_streams: int) -> bool:
        """Whether one more stream may be opened, whosever it is."""
        return open_streams < self.limit

    def has_share(self, open_streams: int, own: int, clients: int) -> bool:
        """Whether one more may be opened even so, for a client that has `own` of them, one of so many `clients`."""
        return own < self.limit // clients and open_streams < self.limit + self.reserve

    def ended(self, now: float) -> None:
        """A stream ended at `now` (seconds)."""
        self._ends.append(now)

    def retry_after(self, now: float) -> float:
        """Seconds after which a place should be free: the mean time between ends lately, 1 to 60."""
        if len(self._ends) < 2:
            return 1.0
        per_stream = (now - self._ends[0]) / len(self._ends)
        return min(60.0, max(1.0, round(per_stream)))
