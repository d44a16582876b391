"""`Trail`: what the engine is at, in a file that outlives its sudden death.

The engine notes the rows that are new to it and those it prefills, before it touches them; after its death the streamer
reads which rows can be to blame. A page written before a kill -9 stays. Used on the engine's one thread, and read once
by the streamer. Some microseconds per note.
"""

import os
from array import array
from collections.abc import Iterable
from pathlib import Path


def trail_path(run_dir: Path, epoch: int) -> Path:
    """Where the engine of this epoch leaves its trail."""
    return run_dir / f"engine-{epoch}.trail"


class Trail:
    """Rows under suspicion: taken in since the turn before, or prefilled or joined in this turn or the two before:
    their step may still be in flight, or its tokens on their way to the streamer."""

    def __init__(self, run_dir: Path, epoch: int) -> None:
        """Begin a trail. Raises OSError."""
        self._file = os.open(trail_path(run_dir, epoch), os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
        self._new: set[int] = set()
        self._last: set[int] = set()
        self._before: set[int] = set()
        self._written: set[int] = {-1}
        self._write(set())

    def took(self, rid: int) -> None:
        """A row is about to be taken in."""
        self._new.add(rid)
        self._write(self._written | self._new)

    def turn(self, rids: Iterable[int]) -> None:
        """A turn is about to prefill or join these rows."""
        now = set(rids)
        self._write(self._new | self._before | self._last | now)
        self._new, self._last, self._before = set(), now, self._last

    def _write(self, rids: set[int]) -> None:
        if rids == self._written:
            return
        self._written = rids
        os.pwrite(self._file, array("q", [len(rids), *rids]).tobytes(), 0)


def read_trail(run_dir: Path, epoch: int) -> set[int] | None:
    """The rows that a dead engine was at, and forget them; None when it left no trail."""
    path = trail_path(run_dir, epoch)
    try:
        data = path.read_bytes()
        path.unlink()
    except OSError:
        return None
    numbers = array("q", data[: len(data) // 8 * 8]).tolist()
    if not numbers or len(numbers) <= numbers[0]:
        return None
    return set(numbers[1 : 1 + numbers[0]])
