"""`MemoryGuard`: what gives way when rows need memory: first the free pool and cached prefixes, at last the newest row.

Owned by `actors.engine.engine`, on the engine's one thread. One budget is for rows' caches and cached blocks together.
The scheduler plans as if all of it but what is pinned were free, and parks the newest row when that is not enough; the
guard then makes room for what was planned. So no row is parked, or waits, for a block that can be had again.

    | pinned | rows, as planned → …                … ← blocks: what rows leave, at most their own budget |
"""

import time
from collections.abc import Callable
from typing import Any

import structlog

from actors.engine.memory import Pool
from cache_store.store import PrefixStore

log = structlog.get_logger()

TELL_EVERY = 60.0  # seconds between two lines of the log about memory that is short


class MemoryGuard:
    """`budget` bytes for rows and blocks. Without `store` there are no blocks."""

    def __init__(
        self,
        budget: int,
        store: PrefixStore[Any] | None,
        pool: Pool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.yielded = 0  # bytes of blocks that were let go for rows
        self._budget = budget
        self._store = store
        self._pool = pool
        self._clock = clock
        self._told = -TELL_EVERY

    @property
    def pinned_bytes(self) -> int:
        """What rows can't get."""
        return self._store.pinned_bytes if self._store is not None else 0

    def make_room(self, planned: int) -> int:
        """Rows and pinned blocks take `planned` bytes: let go of cached blocks that are in the way. Returns how much of
        the budget the blocks that stay take.

        Blocks that a row is being restored from stay meanwhile, beyond the budget if need be: that row's slot, which
        is planned for, is not taken yet.
        """
        if self._store is None:
            return 0
        left = self._budget - planned + self._store.pinned_bytes
        gone = self._store.keep_within(left)
        if gone:
            self.yielded += gone
            self._pool.want_back()
            self._tell(gone)
        return max(min(self._store.nbytes, left), 0)

    def _tell(self, gone: int) -> None:
        assert self._store is not None
        if self._clock() - self._told >= TELL_EVERY:
            self._told = self._clock()
            log.info("cached prefixes make room for requests", evicted_kb=gone >> 10, left_kb=self._store.nbytes >> 10)
