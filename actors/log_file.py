"""`LogFile`: what the system logs, in a file of bounded size: the old half is a file of its own, then goes.

Written by the supervisor's threads: its own lines, and those of its children as they pass through it.
"""

import io
import os
import sys
import threading
from pathlib import Path


class LogFile:
    """Appends to `path`. When it holds `most` bytes it is renamed to `path.1`, the older ones up to `path.KEEP`."""

    def __init__(self, path: Path, most: int, keep: int = 1) -> None:
        self.path = path
        self._most = most
        self._keep = keep
        self._lock = threading.Lock()
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  # open as long as the process lives
        os.chmod(path, 0o600)
        self._size = self._file.tell()

    def write(self, line: bytes) -> None:
        """Append a line. A full disk loses it, and nothing else."""
        with self._lock:
            try:
                self._size += self._file.write(line) or 0
                if self._size >= self._most:
                    self._rotate()
            except (OSError, ValueError):
                pass

    def close(self) -> None:
        """No more is written."""
        with self._lock:
            self._file.close()

    def _rotate(self) -> None:
        self._file.close()
        for number in range(self._keep, 0, -1):
            older = Path(f"{self.path}.{number - 1}") if number > 1 else self.path
            if older.exists():
                os.replace(older, f"{self.path}.{number}")
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115
        os.chmod(self.path, 0o600)
        self._size = 0


class Tee(io.TextIOBase):
    """A text stream that writes to stderr and to log files."""

    def __init__(self, files: list[LogFile]) -> None:
        self._files = files

    def write(self, text: str) -> int:
        """Write text as it is."""
        sys.stderr.write(text)
        for file in self._files:
            file.write(text.encode(errors="replace"))
        return len(text)

    def flush(self) -> None:
        """Files are not buffered."""
        sys.stderr.flush()
