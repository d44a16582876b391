"""`SsdStore`: the SSD tier as the facade sees it, on the engine's thread. Nothing here waits for the disk or raises."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from cache_store.block import Read
from cache_store.directory import CacheDirectory
from cache_store.keeper import Keeper
from cache_store.publishing import Publish, publish
from cache_store.readers import Readers
from cache_store.records import Record
from cache_store.stats import SsdStats
from cache_store.ticket import Ticket
from cache_store.write_queue import Write, WriteQueue

CLOSE_SECONDS = 10.0


class SsdStore:
    """Blocks of all models in one directory, which several processes may share.

    `max_bytes` is the directory's budget, for everybody who uses it; None leaves it as it is. Blocks are written at
    most at `write_bytes_per_second`, from a queue of `queue_bytes`. While the disk refuses, nothing is written and
    what can't be read is a miss; every `retry_seconds` it is tried again. `publish` writes one block file.
    """

    def __init__(
        self,
        directory: Path,
        *,
        max_bytes: int | None = None,
        write_bytes_per_second: float = 200e6,
        queue_bytes: int = 256 << 20,
        readers: int = 2,
        retry_seconds: float = 30.0,
        publish: Publish = publish,
    ) -> None:
        self._directory = CacheDirectory(directory)
        self._writes = WriteQueue(queue_bytes)
        self._keeper = Keeper(self._directory, max_bytes, self._writes, write_bytes_per_second, publish, retry_seconds)
        self._readers = Readers(readers, self._keeper.fault)
        self._keeper.start()

    @property
    def written(self) -> "deque[tuple[bytes, bool]]":
        """Keys of blocks that left the queue, and whether they need not be written any more."""
        return self._keeper.written

    @property
    def ready(self) -> bool:
        """Whether the directory is open."""
        return self._keeper.index is not None

    def set_model(self, fingerprint: bytes, name: str) -> None:
        """Say whose blocks these are; before that nothing is found or written."""
        self._keeper.set_model(fingerprint, name)

    def leading(self, keys: Sequence[bytes]) -> int:
        """How many of these blocks, from the first on, can be read."""
        index, model = self._keeper.index, self._keeper.model
        if index is None or model is None or not keys:
            return 0
        return index.leading(model[0], keys, self._keeper.bad)

    def recent(self, most: int) -> list[tuple[bytes, Record]]:
        """About `most` of our model's blocks on the SSD, those used last, each behind what goes on from it."""
        index, model = self._keeper.index, self._keeper.model
        return index.recent(model[0], most) if index is not None and model is not None else []

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note that blocks are in use now."""
        self._keeper.touch(keys)

    def count(self, hit_tokens: int, missed_tokens: int) -> None:
        """Note what an admission found."""
        self._keeper.count(hit_tokens, missed_tokens)

    def has_room(self, nbytes: int) -> bool:
        """Whether a block of so many bytes can be queued now."""
        return self._keeper.writing and self._keeper.model is not None and self._writes.has_room(nbytes)

    def write(self, write: Write, urgent: bool) -> None:
        """Queue a block for which there is room."""
        self._writes.put(write, urgent)

    def set_at_work(self, at_work: bool) -> None:
        """Say whether the model works: blocks that aren't urgent then wait a while."""
        self._writes.set_at_work(at_work)

    def load(self, reads: Sequence[Read], wake: Callable[[], None] | None = None) -> Ticket:
        """Start reading blocks into the caller's memory."""
        ticket = Ticket(len(reads), wake)
        model = self._keeper.model
        for number, read in enumerate(reads):
            if model is None or read.key in self._keeper.bad:
                ticket.report(number, False)
            else:
                path = self._directory.block_path(model[0], read.key)
                self._readers.start(ticket, number, model[0], path, read)
        self._keeper.touch([read.key for read in reads])
        return ticket

    def flush(
        self,
        seconds: float,
        poll: Callable[[], None],
        left: Callable[[], int],
        progress: Callable[[int], None] | None,
    ) -> bool:
        """Have everything written at full speed; whether that was done in time.

        `poll` takes in what was written and queues more, `left` says how many bytes there still are.
        """
        self._keeper.hurry()
        until = time.monotonic() + seconds
        before = -1
        while True:
            self._keeper.progress.clear()
            poll()
            nbytes = left()
            if progress is not None and nbytes != before:
                progress(nbytes)
            before = nbytes
            if nbytes == 0:
                return True
            rest = until - time.monotonic()
            if rest <= 0 or self._keeper.model is None or self._keeper.in_trouble:
                return False
            self._keeper.progress.wait(rest)

    def close(self) -> None:
        """End the threads. What is still queued is lost."""
        self._readers.close(CLOSE_SECONDS)
        self._keeper.close(CLOSE_SECONDS)

    def stats(self) -> SsdStats:
        """Figures since the start."""
        keeper = self._keeper
        return SsdStats(
            used_bytes=keeper.used,
            limit_bytes=keeper.limit,
            blocks=keeper.blocks,
            written_blocks=keeper.written_blocks,
            written_bytes=keeper.written_bytes,
            read_blocks=self._readers.blocks,
            read_bytes=self._readers.nbytes,
            queued_blocks=self._writes.blocks,
            queued_bytes=self._writes.nbytes,
            faults=keeper.faults,
            read_bytes_per_second=self._readers.bytes_per_second,
            writing=keeper.writing,
        )
