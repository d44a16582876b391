"""`Readers`: the threads that read block files into memory of the engine. They need no index, only names.

They hand on what they find wrong; dealing with it is the store's thread's business.
"""

import errno
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import structlog

from cache_store.block import Read
from cache_store.block_file import BadBlock, read_block
from cache_store.ticket import Ticket

# The process is out of something, or we may not: no fault of the file.
_NOT_THE_FILE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN}

_log = structlog.get_logger()


class Fault(NamedTuple):
    """A block that could not be read."""

    fingerprint: bytes
    key: bytes
    missing: bool


class _Task(NamedTuple):
    ticket: Ticket
    number: int
    fingerprint: bytes
    path: Path
    read: Read


class Readers:
    """Reads blocks in the order they were asked for, on several threads. `on_fault` is called on one of them."""

    def __init__(self, threads: int, on_fault: Callable[[Fault], None]) -> None:
        self.blocks = 0
        self.nbytes = 0
        self.bytes_per_second = 0.0
        self._on_fault = on_fault
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closing = False
        self._threads = [
            threading.Thread(target=self._run, name=f"block-reader-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, ticket: Ticket, number: int, fingerprint: bytes, path: Path, read: Read) -> None:
        """Read one block of a load."""
        self._tasks.put(_Task(ticket, number, fingerprint, path, read))

    def close(self, seconds: float) -> None:
        """Read no more. Loads that have not begun fail."""
        self._closing = True
        for _ in self._threads:
            self._tasks.put(None)
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            good = False
            try:
                if not self._closing:
                    good = self._read(task) if task.ticket.wanted else self._skip(task)
            except Exception:
                _log.exception("a block could not be read", path=str(task.path))
            finally:
                ticket, number = task.ticket, task.number
                del task  # the targets are the engine's again
                ticket.report(number, good)

    def _skip(self, task: _Task) -> bool:
        # Who removed one file by hand has removed others: learn that now, not by one miss after the other.
        if not task.ticket.cancelled and not task.path.exists():
            self._on_fault(Fault(task.fingerprint, task.read.key, missing=True))
        return False

    def _read(self, task: _Task) -> bool:
        began = time.monotonic()
        try:
            nbytes = read_block(task.path, task.fingerprint, task.read.key, task.read.layout, task.read.targets)
        except FileNotFoundError:
            self._on_fault(Fault(task.fingerprint, task.read.key, missing=True))
            return False
        except (BadBlock, OSError) as error:
            if not isinstance(error, OSError) or error.errno not in _NOT_THE_FILE:
                _log.warning(
                    "a prefix block is damaged and will be computed again", file=task.path.name, why=str(error)
                )
                self._on_fault(Fault(task.fingerprint, task.read.key, missing=False))
            return False
        self._count(nbytes, time.monotonic() - began)
        return True

    def _count(self, nbytes: int, seconds: float) -> None:
        with self._lock:
            self.blocks += 1
            self.nbytes += nbytes
            rate = nbytes / max(seconds, 1e-6)
            # Per thread, which understates several: on the safe side of "recompute where that is faster".
            self.bytes_per_second += (rate - self.bytes_per_second) * (0.1 if self.bytes_per_second else 1.0)
