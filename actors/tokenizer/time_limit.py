"""`TimeLimit`: bounds how long a tokenizer process works on one text.

Templates come from downloaded models, and some texts take a tokenizer for ever. A daemon thread watches the jobs: at
its limit a job is interrupted, which stops whatever runs Python (a template's loops); one that goes on regardless, in
native code, ends the process after a grace time, and the streamer has the text tried once more by another.
"""

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog

log = structlog.get_logger()

LEAST = 5.0  # seconds for any text
BYTES_PER_SECOND = 50_000  # what the slowest machine should do, at the lowest priority
GRACE = 3.0  # seconds an interrupted job may go on
LOOK = 0.25  # seconds between two looks


class TooSlow(ValueError):
    """The job took longer than its limit."""

    def __init__(self) -> None:
        super().__init__("the text took too long")


class _Watched:
    def __init__(self, thread: int, seconds: float) -> None:
        self.thread = thread
        self.seconds = seconds
        self.began = time.monotonic()
        self.interrupted = False


def _end_process() -> None:
    os._exit(1)


class TimeLimit:
    """Used by every thread that works on texts. `on_stuck` ends the process; it is called on the watching thread."""

    def __init__(
        self, on_stuck: Callable[[], None] = _end_process, *, least: float = LEAST, grace: float = GRACE
    ) -> None:
        self._on_stuck = on_stuck
        self._least = least
        self._grace = grace
        self._lock = threading.Lock()
        self._watched: set[_Watched] = set()
        threading.Thread(target=self._watch, name="time limit", daemon=True).start()

    @contextmanager
    def on(self, size: int) -> Iterator[None]:
        """Bound the block by the limit for a text of `size` bytes. Raises TooSlow from within it."""
        job = _Watched(threading.get_ident(), self._least + size / BYTES_PER_SECOND)
        with self._lock:
            self._watched.add(job)
        try:
            yield
        finally:
            with self._lock:
                self._watched.discard(job)
                if job.interrupted:  # it may have ended by itself first: nothing may be raised later
                    _interrupt(job.thread, None)

    def _watch(self) -> None:
        while True:
            time.sleep(LOOK)
            now = time.monotonic()
            with self._lock:
                for job in self._watched:
                    over = now - job.began - job.seconds
                    if over > self._grace:
                        log.error("a text takes too long", seconds=round(now - job.began, 1))
                        self._on_stuck()
                    elif over > 0 and not job.interrupted:
                        job.interrupted = True
                        _interrupt(job.thread, TooSlow)


def _interrupt(thread: int, error: type[BaseException] | None) -> None:
    """Raise `error` in another thread at its next instruction; None takes back what has not been raised yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error) if error else None)
