"""`PrefixStore`: the prefix blocks of one engine, in memory and on the SSD. Called by the engine's one thread.

No call waits for the disk, but `flush` and `close`, which belong to a clean stop. Payloads stay on the engine's
thread: the SSD's threads see views of their bytes, and `poll` drops a payload only when its views are released.
"""

import heapq
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Generic, NamedTuple, Protocol, TypeVar

from cache_store.block import Block, Read
from cache_store.keys import BLOCK_SIZE
from cache_store.pool import Entry, MemoryPool
from cache_store.ssd import SsdStore
from cache_store.stats import SsdStats, StoreStats
from cache_store.ticket import Ticket
from cache_store.tree import Node, chains
from cache_store.write_queue import Write
from protocol.figures import PrefixTree

B = TypeVar("B", bound=Block)

WRITES_PER_POLL = 8  # blocks from the backlog that one `poll` queues, so that it stays short


class Tier(Enum):
    """Where a block is."""

    MEMORY = "memory"
    SSD = "ssd"


class Watcher(Protocol):
    """Hears what comes to memory and leaves it, on the engine's thread."""

    def stored(self, key: bytes, parent: bytes | None, ids: bytes, adapter: str) -> None:
        """A block is in memory now; `ids` are its tokens as uint32-LE, `adapter` names the LoRA adapter it is of."""

    def removed(self, keys: Sequence[bytes]) -> None:
        """Blocks are not in memory any more."""


class Hit(NamedTuple):
    """How many leading blocks of a prompt are in memory, and how many after those on the SSD."""

    memory: int
    ssd: int


class PrefixStore(Generic[B]):
    """Blocks by key.

    Each block put in is findable at once, by default written to the SSD soon, and kept in memory while the budget
    allows. `memory_bytes` bounds what is kept; blocks evicted while they wait to be written come on top, bounded by
    the SSD store's queue. Without `ssd` there is memory only. `watcher` hears of blocks in memory, not of snapshots.
    """

    def __init__(
        self,
        *,
        memory_bytes: int,
        snapshot_share: float = 0.25,
        ssd: SsdStore | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        self._watcher = watcher
        self._pool: MemoryPool[B] = MemoryPool(memory_bytes, snapshot_share)
        self._memory_bytes = memory_bytes
        self._ssd = ssd
        self._writing: dict[bytes, Entry[B]] = {}  # in the SSD's queue, whether still in the pool or not
        self._loose: dict[bytes, Entry[B]] = {}  # neither, but still in use
        # In the pool, not yet queued: by urgency, oldest first.
        self._backlog: tuple[OrderedDict[bytes, Entry[B]], ...] = (OrderedDict(), OrderedDict())
        self._evicted_blocks = 0
        self._unwritten_blocks = 0
        self._memory_hit_tokens = 0
        self._acquired = 0
        self._ssd_hit_tokens = 0
        self._missed_tokens = 0

    def set_model(self, fingerprint: bytes, name: str) -> None:
        """Say whose blocks these are. Until then they stay in memory only."""
        if self._ssd is not None:
            self._ssd.set_model(fingerprint, name)

    def lookup(self, keys: Sequence[bytes]) -> Hit:
        """How much of a prompt's chain is there. Counts and touches nothing."""
        memory = 0
        while memory < len(keys) and self._find(keys[memory]) is not None:
            memory += 1
        ssd = self._ssd.leading(keys[memory:]) if self._ssd is not None else 0
        return Hit(memory, ssd)

    def where(self, key: bytes) -> Tier | None:
        """Where one block or snapshot is."""
        if self._find(key) is not None:
            return Tier.MEMORY
        return Tier.SSD if self._ssd is not None and self._ssd.leading([key]) else None

    def count(self, *, hit_tokens: int, missed_tokens: int, ssd_tokens: int = 0) -> None:
        """Note what an admission found: tokens from memory, from the SSD, and those to compute."""
        self._memory_hit_tokens += hit_tokens
        self._ssd_hit_tokens += ssd_tokens
        self._missed_tokens += missed_tokens
        if self._ssd is not None:
            self._ssd.count(hit_tokens + ssd_tokens, missed_tokens)

    def acquire(self, keys: Sequence[bytes]) -> list[B]:
        """The blocks, which stay in memory until `release`. Raises KeyError, holding none, if one isn't in memory."""
        entries = []
        for key in keys:
            entry = self._find(key)
            if entry is None:
                raise KeyError(key)
            entries.append(entry)
        now = time.time()
        self._acquired += len(entries)
        for entry in entries:
            entry.refs += 1
            entry.hits += 1
            entry.at = now
        for entry in entries:  # all are held by now: to make room for one can't put another out
            if entry.key not in self._pool and not self._take_in(entry) and entry.key not in self._writing:
                self._loose[entry.key] = entry
        self._pool.touch(keys)
        if self._ssd is not None:
            self._ssd.touch(keys)
        return [entry.payload for entry in entries]

    def release(self, keys: Sequence[bytes]) -> None:
        """Give back what `acquire` gave. Raises KeyError or ValueError for what was not acquired."""
        for key in keys:
            entry = self._find(key)
            if entry is None:
                raise KeyError(key)
            self._pool.release(entry)
            self._acquired -= 1
            if not entry.refs:
                self._loose.pop(key, None)

    def put(
        self,
        key: bytes,
        parent: bytes | None,
        ids: bytes,
        block: B,
        *,
        urgent: bool = False,
        snapshot: bool = False,
        adapter: str = "",
    ) -> bool:
        """Take a block in; False when its key is in memory already, which keeps the one that was there.

        `ids` are the block's tokens as little-endian uint32. A snapshot's key is `snapshot_key(parent)`. `urgent`
        blocks are written before others. `adapter` names the LoRA adapter that it was computed with, for the watcher.
        """
        known = self._find(key)
        if known is not None:
            if key not in self._pool:
                self._take_in(known)
            return False
        entry = Entry(key, parent, ids, block, block.nbytes, is_snapshot=snapshot, at=time.time(), adapter=adapter)
        kept = self._take_in(entry)
        if self._ssd is not None and not self._ssd.leading([key]) and not self._queue(entry, urgent):
            if kept:
                self._backlog[not urgent][key] = entry
            else:
                self._unwritten_blocks += 1
        return True

    def pin(self, keys: Sequence[bytes]) -> int:
        """Keep blocks in memory for good; how many of them are there."""
        return self._pool.pin(keys)

    def entries(self) -> Iterator[Entry[B]]:
        """What is kept in memory."""
        return iter(self._pool)

    @property
    def nbytes(self) -> int:
        """Bytes that are kept in memory."""
        return self._pool.nbytes

    @property
    def acquired(self) -> int:
        """Blocks and snapshots that were acquired and not released, each as often as it was."""
        return self._acquired

    @property
    def pinned_bytes(self) -> int:
        """Those of them that stay for good."""
        return self._pool.pinned_bytes

    def keep_within(self, nbytes: int) -> int:
        """Keep so many bytes in memory, and never more than `memory_bytes`, until told otherwise. Bytes let go; what
        somebody holds stays."""
        gone = self._pool.resize(max(min(nbytes, self._memory_bytes), 0))
        self._leave(gone)
        return sum(entry.nbytes for entry in gone)

    def load(self, reads: Sequence[Read], wake: Callable[[], None] | None = None) -> Ticket:
        """Start reading blocks from the SSD. `wake` is called on an I/O thread after each block."""
        if self._ssd is None:
            ticket = Ticket(len(reads))
            for number in range(len(reads)):
                ticket.report(number, False)
            return ticket
        return self._ssd.load(reads, wake)

    def poll(self) -> None:
        """Take in what the SSD's threads have done. Once per turn of the engine; microseconds when there is nothing."""
        if self._ssd is None:
            return
        while self._ssd.written:
            key, good = self._ssd.written.popleft()
            entry = self._writing.pop(key)
            if key in self._pool:
                if not good:
                    self._backlog[1][key] = entry
            elif entry.refs:
                self._loose[key] = entry
            elif not good:
                self._unwritten_blocks += 1
        if any(self._backlog):
            self._work_off()

    @property
    def busy(self) -> bool:
        """Whether there is something to write, so that `poll` has something to do."""
        return bool(self._writing) or any(self._backlog)

    def set_at_work(self, at_work: bool) -> None:
        """Say whether the model works: what nobody waits for is then written a little later."""
        if self._ssd is not None:
            self._ssd.set_at_work(at_work)

    def flush(self, seconds: float, progress: Callable[[int], None] | None = None) -> bool:
        """Write everything that isn't, for a clean stop; True when all is. `progress` gets the bytes left."""
        return True if self._ssd is None else self._ssd.flush(seconds, self.poll, self._unwritten_bytes, progress)

    def close(self) -> None:
        """End the SSD's threads. What is not written by now is lost."""
        if self._ssd is not None:
            self._ssd.close()
        self._writing.clear()

    def stats(self) -> StoreStats:
        """Figures since the start."""
        return StoreStats(
            memory_blocks=len(self._pool),
            memory_bytes=self._pool.nbytes,
            memory_limit_bytes=self._pool.budget,
            snapshot_bytes=self._pool.snapshot_bytes,
            evicted_blocks=self._evicted_blocks,
            unwritten_blocks=self._unwritten_blocks,
            memory_hit_tokens=self._memory_hit_tokens,
            ssd_hit_tokens=self._ssd_hit_tokens,
            missed_tokens=self._missed_tokens,
            ssd=self._ssd.stats() if self._ssd is not None else SsdStats(),
        )

    def tree(self, blocks: int, most: int) -> PrefixTree:
        """Those who look on: the `blocks` used last in each tier, as at most so many chains. Takes milliseconds."""
        kept = [entry for entry in self._pool if not entry.is_snapshot]
        memory = heapq.nlargest(blocks, kept, key=lambda entry: entry.used)
        nodes = {}
        for entry in memory:
            nbytes = entry.nbytes + (entry.snapshot.nbytes if entry.snapshot is not None else 0)
            nodes[entry.key] = Node(entry.key, entry.parent, nbytes, 0, entry.at, entry.hits, entry.pinned)
        records = self._ssd.recent(blocks) if self._ssd is not None else []
        on_ssd = 0
        for key, record in records:
            if record.is_snapshot:
                assert record.parent is not None
                key, parent = record.parent, None
            else:
                parent = record.parent
                on_ssd += 1
            node = nodes.setdefault(key, Node(key, parent))
            node.parent = node.parent or parent
            node.ssd += record.size
            node.used = max(node.used, record.used / 1e6)
        found = chains(nodes, most)
        shown = sum(chain.tokens for chain in found) // BLOCK_SIZE
        return PrefixTree(found, len(kept), len(memory), self.stats().ssd.blocks, on_ssd, shown < len(nodes))

    def _find(self, key: bytes) -> Entry[B] | None:
        return self._pool.get(key) or self._writing.get(key) or self._loose.get(key)

    def _take_in(self, entry: Entry[B]) -> bool:
        kept, gone = self._pool.put(entry)
        self._leave(gone)
        if kept:
            self._loose.pop(entry.key, None)
            if self._watcher is not None and not entry.is_snapshot:
                self._watcher.stored(entry.key, entry.parent, entry.ids, entry.adapter)
        return kept

    def _leave(self, gone: Sequence[Entry[B]]) -> None:
        """Blocks left the pool: those not yet queued for the SSD are queued now, or lost when there is no room."""
        self._evicted_blocks += len(gone)
        if self._watcher is not None and (keys := [entry.key for entry in gone if not entry.is_snapshot]):
            self._watcher.removed(keys)
        for entry in gone:
            for urgent, backlog in zip((True, False), self._backlog, strict=True):
                if backlog.pop(entry.key, None) is not None and not self._queue(entry, urgent):
                    self._unwritten_blocks += 1

    def _queue(self, entry: Entry[B], urgent: bool) -> bool:
        assert self._ssd is not None
        if not self._ssd.has_room(entry.nbytes):
            return False
        block = entry.payload
        write = Write(entry.key, entry.parent, entry.ids, entry.is_snapshot, block.layout, list(block.tensors()))
        self._ssd.write(write, urgent)
        self._writing[entry.key] = entry
        return True

    def _work_off(self) -> None:
        left = WRITES_PER_POLL
        for urgent, backlog in zip((True, False), self._backlog, strict=True):
            while backlog and left:
                key, entry = next(iter(backlog.items()))
                if not self._queue(entry, urgent):
                    return
                del backlog[key]
                left -= 1

    def _unwritten_bytes(self) -> int:
        waiting = [entry for backlog in self._backlog for entry in backlog.values()]
        return sum(entry.nbytes for entry in (*waiting, *self._writing.values()))
