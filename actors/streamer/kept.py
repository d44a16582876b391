"""`KeptValues`: values that clients keep here for each other, in memory, within bounds.

Owned by the streamer, on its one thread: it is the one process that all HTTP workers share. What was used least
recently goes first.
"""

from collections import OrderedDict

MAX_BYTES = 256 << 20
MAX_VALUE = 16 << 20
MAX_VALUES = 10_000


class KeptValues:
    """A dictionary with limits."""

    def __init__(self, max_bytes: int = MAX_BYTES, max_values: int = MAX_VALUES) -> None:
        self._values: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0
        self._max_bytes = max_bytes
        self._max_values = max_values

    def put(self, key: str, value: bytes) -> bool:
        """Keep a value. Returns False when it is too large for that."""
        self.drop(key)
        size = len(key) + len(value)
        if size > min(MAX_VALUE, self._max_bytes):
            return False
        self._values[key] = value
        self._bytes += size
        while self._bytes > self._max_bytes or len(self._values) > self._max_values:
            self.drop(next(iter(self._values)))
        return True

    def get(self, key: str) -> bytes | None:
        """The value, which counts as used now; None when there is none."""
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
        return value

    def drop(self, key: str) -> bool:
        """Forget a value. Returns whether there was one."""
        value = self._values.pop(key, None)
        if value is None:
            return False
        self._bytes -= len(key) + len(value)
        return True
