"""`Ticket`: how far one load from the SSD is. Filled by I/O threads, read by the engine's thread."""

import threading
from collections.abc import Callable


class Ticket:
    """Progress of one load, block by block in the order asked for.

    The targets belong to the I/O threads until `finished`, also after `cancel`.
    """

    def __init__(self, blocks: int, wake: Callable[[], None] | None = None) -> None:
        self.done = 0  # good blocks so far, counted from the first without a gap
        self.cancelled = False
        self._results: list[bool | None] = [None] * blocks
        self._open = blocks
        self._wake = wake
        self._lock = threading.Lock()

    @property
    def finished(self) -> bool:
        """Nothing will be written to the targets any more."""
        return self._open == 0

    @property
    def failed(self) -> bool:
        """Some block was not good; `done` says how many before it were, once `finished`."""
        return False in self._results

    def cancel(self) -> None:
        """Read no further block. Those being read right now still end."""
        self.cancelled = True

    @property
    def wanted(self) -> bool:
        """Whether reading on makes sense: blocks behind a bad one help nobody."""
        return not self.cancelled and not self.failed

    def report(self, number: int, good: bool) -> None:
        """An I/O thread is through with one block."""
        with self._lock:
            self._results[number] = good
            while self.done < len(self._results) and self._results[self.done]:
                self.done += 1
            self._open -= 1
        if self._wake is not None:
            self._wake()
