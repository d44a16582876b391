"""`MemoryPool`: blocks in memory under one byte budget. Pure bookkeeping; the facade calls it on the engine's thread.

Blocks of a prompt form a chain by their parents. Least recently used goes first, but a block never before its
children: a chain without its head is useless, one without its tail only shorter. So what is in the pool is always
closed towards the root, as far as it was when it came in.

Snapshots of recurrent state hang on a block and leave with it at the latest. They have a share of the budget of their
own, so that neither kind drives out the other.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

P = TypeVar("P")


@dataclass(eq=False)
class Entry(Generic[P]):
    """One block. `refs` counts its users; `pinned` holds for good; `used` is the pool's clock at the last use.
    For those who watch: when that was (`at`, Unix seconds), how often it was found, and the LoRA adapter it
    was computed with."""

    key: bytes
    parent: bytes | None
    ids: bytes
    payload: P
    nbytes: int
    is_snapshot: bool = False
    refs: int = 0
    pinned: bool = False
    used: int = 0
    children: int = 0
    snapshot: "Entry[P] | None" = None
    at: float = 0.0
    hits: int = 0
    adapter: str = ""

    @property
    def held(self) -> bool:
        """Whether it must stay because someone uses it."""
        return self.refs > 0 or self.pinned or (self.snapshot is not None and self.snapshot.held)


# Candidates for eviction as (used, key), least recently used first. Items out of date are skipped when met.
_Heap = list[tuple[int, bytes]]


class MemoryPool(Generic[P]):
    """Entries by key.

    `budget` bytes hold blocks and snapshots together; snapshots get no more than `snapshot_share` of it.
    """

    def __init__(self, budget: int, snapshot_share: float = 0.25) -> None:
        self.budget = budget
        self.snapshot_budget = int(budget * snapshot_share)
        self.block_bytes = 0
        self.snapshot_bytes = 0
        self.pinned_bytes = 0
        self._snapshot_share = snapshot_share
        self._entries: dict[bytes, Entry[P]] = {}
        self._orphans: dict[bytes, int] = {}  # children of blocks that aren't here, by parent
        self._blocks: _Heap = []
        self._snapshots: _Heap = []
        self._clock = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return self.block_bytes + self.snapshot_bytes

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[Entry[P]]:
        return iter(self._entries.values())

    def get(self, key: bytes) -> Entry[P] | None:
        """The entry of a key, without counting as a use."""
        return self._entries.get(key)

    def put(self, entry: Entry[P]) -> tuple[bool, list[Entry[P]]]:
        """Take an entry in; whether there was room, and what had to go for it.

        What is held, and the entry's own ancestors, never go. Raises ValueError for a key that is here already.
        """
        if entry.key in self._entries:
            raise ValueError("this key is in the pool already")
        gone: list[Entry[P]] = []
        parent = self._entries.get(entry.parent) if entry.parent is not None else None
        if entry.is_snapshot and parent is None:
            return False, gone
        # A reference for as long as it takes keeps the ancestors: they can't go before the parent does.
        if parent is not None:
            parent.refs += 1
        try:
            fits = self._make_room(entry, gone)
        finally:
            if parent is not None:
                parent.refs -= 1
                self._offer(parent)
        if fits:
            self._clock += 1
            entry.used = self._clock
            self._link(entry)
        return fits, gone

    def touch(self, keys: Iterable[bytes]) -> None:
        """Mark entries as used now, all at the same time. Unknown keys are left out."""
        self._clock += 1
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None:
                entry.used = self._clock
                self._offer(entry)

    def acquire(self, keys: Sequence[bytes]) -> list[Entry[P]]:
        """Reference entries until `release`. Raises KeyError, having referenced nothing, if one isn't here."""
        entries = [self._entries[key] for key in keys]
        for entry in entries:
            entry.refs += 1
        self.touch(keys)
        return entries

    def release(self, entry: Entry[P]) -> None:
        """Give one reference back. Raises ValueError when there is none."""
        if entry.refs <= 0:
            raise ValueError("released more often than acquired")
        entry.refs -= 1
        self._offer(entry)

    def pin(self, keys: Iterable[bytes]) -> int:
        """Keep entries for good; how many of them are here."""
        entries = [self._entries[key] for key in keys if key in self._entries]
        for entry in entries:
            self.pinned_bytes += 0 if entry.pinned else entry.nbytes
            entry.pinned = True
        return len(entries)

    def resize(self, budget: int) -> list[Entry[P]]:
        """Have another budget from now on; what had to go for it. What is held stays, beyond the budget if need be."""
        self.budget = budget
        self.snapshot_budget = int(budget * self._snapshot_share)
        gone: list[Entry[P]] = []
        while self.snapshot_bytes > self.snapshot_budget and self._evict_snapshot(gone):
            pass
        while self.nbytes > budget and (self._evict_block(gone) or self._evict_snapshot(gone)):
            pass
        return gone

    def _make_room(self, entry: Entry[P], gone: list[Entry[P]]) -> bool:
        if entry.nbytes > (self.snapshot_budget if entry.is_snapshot else self.budget):
            return False
        if entry.is_snapshot:
            while self.snapshot_bytes + entry.nbytes > self.snapshot_budget:
                if not self._evict_snapshot(gone):
                    return False
        while self.nbytes + entry.nbytes > self.budget:
            if not self._evict_block(gone):
                return False
        return True

    def _evict_block(self, gone: list[Entry[P]]) -> bool:
        entry = self._next(self._blocks)
        if entry is None:
            return False
        if entry.snapshot is not None:
            self._unlink(entry.snapshot, gone)
        self._unlink(entry, gone)
        return True

    def _evict_snapshot(self, gone: list[Entry[P]]) -> bool:
        entry = self._next(self._snapshots)
        if entry is None:
            return False
        self._unlink(entry, gone)
        return True

    def _next(self, heap: _Heap) -> Entry[P] | None:
        while heap:
            used, key = heapq.heappop(heap)
            entry = self._entries.get(key)
            if entry is not None and entry.used == used and self._may_go(entry):
                return entry
        return None

    @staticmethod
    def _may_go(entry: Entry[P]) -> bool:
        return not entry.held and entry.children == 0

    def _offer(self, entry: Entry[P]) -> None:
        """Put an entry that may go in its queue. One that can't now is offered when that changes."""
        if entry.is_snapshot and entry.parent is not None and not entry.held:
            # Its block may have waited for it.
            block = self._entries.get(entry.parent)
            if block is not None and self._may_go(block):
                self._push(self._blocks, block)
        if self._may_go(entry):
            self._push(self._snapshots if entry.is_snapshot else self._blocks, entry)

    def _push(self, heap: _Heap, entry: Entry[P]) -> None:
        heapq.heappush(heap, (entry.used, entry.key))
        if len(heap) > 64 + 4 * len(self._entries):
            heap[:] = sorted({item for item in heap if self._current(item)})

    def _current(self, item: tuple[int, bytes]) -> bool:
        entry = self._entries.get(item[1])
        return entry is not None and entry.used == item[0] and self._may_go(entry)

    def _link(self, entry: Entry[P]) -> None:
        self._entries[entry.key] = entry
        if entry.is_snapshot:
            self.snapshot_bytes += entry.nbytes
            self._entries[entry.parent or b""].snapshot = entry
        else:
            self.block_bytes += entry.nbytes
            entry.children = self._orphans.pop(entry.key, 0)
            self._count_child(entry.parent, 1)
        self._offer(entry)

    def _unlink(self, entry: Entry[P], gone: list[Entry[P]]) -> None:
        del self._entries[entry.key]
        gone.append(entry)
        if entry.is_snapshot:
            self.snapshot_bytes -= entry.nbytes
            self._entries[entry.parent or b""].snapshot = None
        else:
            self.block_bytes -= entry.nbytes
            self._count_child(entry.parent, -1)

    def _count_child(self, parent: bytes | None, change: int) -> None:
        if parent is None:
            return
        entry = self._entries.get(parent)
        if entry is not None:
            entry.children += change
            self._offer(entry)
            return
        count = self._orphans.get(parent, 0) + change
        if count:
            self._orphans[parent] = count
        else:
            self._orphans.pop(parent, None)
