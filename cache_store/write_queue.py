"""`WriteQueue`: blocks on their way to the SSD, bounded in bytes; and `Throttle`, which spares the drive.

The engine's thread puts in, the store's thread takes out.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from cache_store.block import Tensor

LINGER = 5.0  # seconds that a block may wait for a model that works without a break


class Write(NamedTuple):
    """One block to write. Who has written it releases the views of its tensors."""

    key: bytes
    parent: bytes | None
    ids: bytes
    is_snapshot: bool
    layout: str
    tensors: list[Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return sum(tensor.data.nbytes for tensor in self.tensors)

    def drop(self) -> None:
        """Release the views."""
        for tensor in self.tensors:
            tensor.data.release()


class WriteQueue:
    """Urgent blocks before others, else first in, first out. Its bytes count until `done` says they are written.

    Writing takes processor time that a model on a CPU wants itself. So while it works (`set_at_work`) the others wait
    for a break, as long as they fill no more than half of the queue, and LINGER seconds at most. `clock` returns
    seconds.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self.nbytes = 0
        self.blocks = 0
        self._clock = clock
        self._urgent: deque[Write] = deque()
        self._others: deque[tuple[float, Write]] = deque()  # with the time when they came
        self._at_work = False
        self._changed = threading.Condition()
        self._called = False

    def has_room(self, nbytes: int) -> bool:
        """Whether so many bytes fit. A single block always does."""
        return self.nbytes == 0 or self.nbytes + nbytes <= self.limit

    def put(self, write: Write, urgent: bool) -> None:
        """Add a block."""
        with self._changed:
            self.nbytes += write.nbytes
            self.blocks += 1
            if urgent:
                self._urgent.append(write)
            else:
                self._others.append((self._clock(), write))
            if self._due:
                self._changed.notify()

    def set_at_work(self, at_work: bool) -> None:
        """Say whether the model works."""
        if at_work == self._at_work:
            return
        with self._changed:
            self._at_work = at_work
            self._changed.notify()

    @property
    def _due(self) -> bool:
        return bool(self._urgent or self._others) and self._wait == 0

    @property
    def _wait(self) -> float:
        """Seconds until the first of the blocks is due."""
        if self._urgent or not self._at_work or self.nbytes > self.limit // 2 or not self._others:
            return 0.0
        return max(0.0, self._others[0][0] + LINGER - self._clock())

    def take(self, blocks: int, nbytes: int, seconds: float) -> list[Write]:
        """The next blocks, up to so many and so many bytes, at least one if one is due.

        Waits for the first at most `seconds`, and not when `call` was called.
        """
        with self._changed:
            if not self._due and not self._called:
                self._changed.wait(min(seconds, self._wait) if self._others else seconds)
            self._called = False
            batch: list[Write] = []
            while len(batch) < blocks and nbytes > 0 and self._due:
                batch.append(self._urgent.popleft() if self._urgent else self._others.popleft()[1])
                nbytes -= batch[-1].nbytes
            return batch

    def done(self, nbytes: int) -> None:
        """A block that was taken is through."""
        with self._changed:
            self.nbytes -= nbytes
            self.blocks -= 1

    def call(self) -> None:
        """Let `take` return now: there is something else to do."""
        with self._changed:
            self._called = True
            self._changed.notify()


class Throttle:
    """Spreads bytes over time: a bucket that holds one second's worth. `clock` returns seconds."""

    def __init__(self, bytes_per_second: float, clock: Callable[[], float]) -> None:
        self._rate = bytes_per_second
        self._clock = clock
        self._free_at = clock()

    def delay(self, nbytes: int) -> float:
        """Seconds to wait before writing so many bytes, which count from now on."""
        now = self._clock()
        self._free_at = max(self._free_at, now - 1.0) + nbytes / self._rate
        return max(0.0, self._free_at - now)
