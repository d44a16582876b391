"""`Restoring`: one row on its way from blocks in the store to caches of its own.

Owned by `actors.engine.prefix`, on the engine's one thread. Every step is short; a load from the SSD runs beside the
step loop on the store's threads.

    building --> loading (blocks from the SSD) --> keeping (they go to memory, too) --> ready
                    |
                    +--> failed (what was wrong is no longer in the store: look again)
"""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import mlx.core as mx

from actors.engine.block_cuts import PackedBlock
from actors.engine.block_layout import BlockLayout
from actors.engine.block_restore import Restore, needed
from actors.engine.scheduler import BLOCK
from cache_store.block import Read
from cache_store.keys import snapshot_key
from cache_store.store import PrefixStore, Tier
from cache_store.ticket import Ticket


class Phase(Enum):
    """Where a restore is."""

    BUILDING = "building"
    LOADING = "loading"
    KEEPING = "keeping"
    READY = "ready"
    FAILED = "failed"


class Restoring:
    """Restores the blocks `keys` for a row of `length` ids whose fresh caches are `caches`."""

    def __init__(
        self,
        layout: BlockLayout,
        store: PrefixStore[PackedBlock],
        keys: Sequence[bytes],
        tiers: Sequence[Tier],
        snapshot: Tier | None,
        caches: list[Any],
        length: int,
    ) -> None:
        first = needed(layout, len(keys))
        self.phase = Phase.BUILDING
        self.from_ssd = [place for place in range(first, len(keys)) if tiers[place] is Tier.SSD]
        self.tokens = BLOCK * len(keys)
        self.snapshot_from_ssd = snapshot is Tier.SSD
        self._layout = layout
        self._store = store
        self.keys = list(keys)
        self._length = length
        self._held = [keys[place] for place in range(first, len(keys)) if tiers[place] is Tier.MEMORY]
        self._snapshot_key = snapshot_key(keys[-1]) if snapshot is not None else b""
        if snapshot is Tier.MEMORY:
            self._held.append(self._snapshot_key)
        held = dict(zip(self._held, store.acquire(self._held), strict=True))
        blocks = [held.get(key) if place >= first else None for place, key in enumerate(keys)]
        self._restore = Restore(layout, caches, blocks, held.get(self._snapshot_key), room=length - 1)
        self._ticket: Ticket | None = None
        self._kept = 0

    @property
    def loads(self) -> bool:
        """Whether anything comes from the SSD."""
        return bool(self.from_ssd) or self.snapshot_from_ssd

    def build(self, budget: int) -> list[mx.array]:
        """Arrays of about `budget` bytes to dispatch, while building."""
        return self._restore.build(budget, views=self.loads)

    def built(self) -> None:
        """What `build` gave has been computed."""
        if not self._restore.done:
            return
        if not self.loads:
            self.phase = Phase.READY
            return
        reads = [
            Read(self.keys[place], self._layout.description, self._restore.targets(place)) for place in self.from_ssd
        ]
        if self.snapshot_from_ssd:
            reads.append(Read(self._snapshot_key, self._layout.description, self._restore.snapshot_targets()))
        self._ticket = self._store.load(reads)
        self.phase = Phase.LOADING

    def poll(self) -> None:
        """See how far the load is."""
        if self.phase is Phase.LOADING and self._ticket is not None and self._ticket.finished:
            self.phase = Phase.FAILED if self._ticket.failed or self._ticket.cancelled else Phase.KEEPING

    def keep(self, budget: int, cut: Callable[[list[Any], int, int], list[mx.array]]) -> list[mx.array]:
        """Cut loaded blocks of about `budget` bytes for memory; `cut(caches, start, end)` makes one."""
        arrays: list[mx.array] = []
        caches = self._restore.finish(self.tokens) if not self._kept else self._restore.caches
        while self._kept < len(self.keys) and (budget > 0 or not arrays):
            end = BLOCK * (self._kept + 1)
            if self._kept in self.from_ssd or (end == self.tokens and self.snapshot_from_ssd):
                arrays += cut(caches, end - BLOCK, end)
                budget -= self._layout.block.nbytes
            self._kept += 1
        if self._kept == len(self.keys):
            self.phase = Phase.READY
        return arrays

    def finish(self) -> tuple[list[Any], int]:
        """The caches and how many tokens are in them: all but the last of a prompt that was found whole."""
        tokens = min(self.tokens, self._length - 1)
        if self._kept:
            caches = self._restore.caches
            if tokens < self.tokens:
                for cache in caches:
                    cache.trim(self.tokens - tokens)
        else:
            caches = self._restore.finish(tokens)
        self.release()
        return caches, tokens

    def release(self) -> None:
        """Hold no block any more. Where threads are still reading into the arrays, keep this object until `idle`."""
        self._store.release(self._held)
        self._held = []
        if self._ticket is not None:
            self._ticket.cancel()

    @property
    def idle(self) -> bool:
        """Whether no thread writes to its arrays."""
        return self._ticket is None or self._ticket.finished
