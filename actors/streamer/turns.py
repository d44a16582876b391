"""Clients take turns: who of several clients is served next, wherever requests wait. Pure; used by the streamer.

`FairQueue` holds what waits here (texts for the tokenizers). `Turns` numbers the streams that wait in the engine, which
admits rows of equal priority by that number: start-time fair queueing (Goyal, Vin, Cheng 1996), where each stream costs
one. A client that floods so has its own streams wait, and the next of another client comes after at most two of each of
the others (the bound of that algorithm).
"""

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_PRIORITIES = 256  # that numbers are kept for: clients choose them


class FairQueue(Generic[T]):
    """First come, first served within a client; the clients are served in turn."""

    def __init__(self) -> None:
        self._lanes: dict[bytes, deque[T]] = {}  # none empty; the first client's turn is next
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, client: bytes, item: T) -> None:
        """Add an item behind those of its client."""
        self._lanes.setdefault(client, deque()).append(item)
        self._length += 1

    def give_back(self, client: bytes, item: T) -> None:
        """Put an item that was taken before all others."""
        lane = self._lanes.pop(client, None) or deque()
        lane.appendleft(item)
        self._lanes = {client: lane, **self._lanes}
        self._length += 1

    def take(self) -> T:
        """The next item. Raises IndexError when there is none."""
        if not self._lanes:
            raise IndexError("nothing waits")
        client, lane = next(iter(self._lanes.items()))
        del self._lanes[client]
        item = lane.popleft()
        if lane:
            self._lanes[client] = lane
        self._length -= 1
        return item

    def discard(self, client: bytes, item: T) -> None:
        """Drop an item; one that isn't here is normal."""
        lane = self._lanes.get(client)
        if lane is None or item not in lane:
            return
        lane.remove(item)
        self._length -= 1
        if not lane:
            del self._lanes[client]


class Turns:
    """Numbers for streams: of those that wait, the one with the lowest should be next."""

    def __init__(self) -> None:
        self._now: dict[int, int] = {}  # by priority: the highest number that was served

    def next(self, own: dict[int, int], priority: int = 0) -> int:
        """The number of one more stream of a client. `own` is kept for the client, and empty at first."""
        number = max(self._now.get(priority, 0), own.get(priority, 0))
        _keep(own, priority, number + 1)
        return number

    def served(self, number: int, priority: int = 0) -> None:
        """A stream with this number left the queue."""
        if number > self._now.get(priority, 0):
            _keep(self._now, priority, number)


def _keep(numbers: dict[int, int], priority: int, number: int) -> None:
    if len(numbers) >= MAX_PRIORITIES and priority not in numbers:
        numbers.clear()  # their streams are as good as those of a client that comes new
    numbers[priority] = number
