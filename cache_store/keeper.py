"""`Keeper`: the store's thread, which writes blocks, keeps index and budget, and deals with faults of the disk.

It alone writes to the index. Whatever the disk does, it raises nothing: writing stops, the log says so once, and
after a while it tries again.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import lmdb
import structlog

from cache_store.block_file import Header, build_header
from cache_store.directory import CacheDirectory, Refused, charged
from cache_store.index import Index, IndexReplaced, Transaction
from cache_store.opening import bury_dead, close_index, enter, now_us, open_index, quarantine
from cache_store.publishing import Publish
from cache_store.readers import Fault
from cache_store.records import Model
from cache_store.write_queue import Throttle, Write, WriteQueue

BATCH_BLOCKS = 16
BATCH_BYTES = 64 << 20
TICK = 1.0  # seconds
NOTE_SECONDS = 5.0  # between writing down uses and hits
SWEEP_SECONDS = 30.0  # between looks for what dead processes left

_log = structlog.get_logger()


class _Hits(NamedTuple):
    hit_tokens: int
    missed_tokens: int


class Keeper:
    """Runs in its own thread from `start` to `close`.

    `index` is None until the directory is open and while it can't be used. `written` gets the key of each block
    taken from the queue, and whether it is on the SSD now.
    """

    def __init__(
        self,
        directory: CacheDirectory,
        max_bytes: int | None,
        writes: WriteQueue,
        bytes_per_second: float,
        publish: Publish,
        retry_seconds: float,
    ) -> None:
        self.index: Index | None = None
        self.writing = False
        self.written: deque[tuple[bytes, bool]] = deque()
        self.progress = threading.Event()  # set whenever `written` has grown or `writing` changed
        self.bad: set[bytes] = set()  # keys that must not be read, until the index forgets them
        self.faults = 0
        self.written_blocks = 0
        self.written_bytes = 0
        self.used = 0
        self.limit = 0
        self.blocks = 0
        self._directory = directory
        self._max_bytes = max_bytes
        self._writes = writes
        self._throttle = Throttle(bytes_per_second, time.monotonic)
        self._publish = publish
        self._retry_seconds = retry_seconds
        self._retry_at = 0.0
        self._trouble = ""
        self._refused = False
        self._hurry = threading.Event()
        self._stopping = False
        self._model: tuple[bytes, str] | None = None
        self._model_noted = False
        self._touched: deque[tuple[int, Sequence[bytes]]] = deque(maxlen=4096)
        self._hits: deque[_Hits] = deque(maxlen=4096)
        self._found_bad: deque[Fault] = deque()
        self._owed: list[bytes] = []  # reservations to give back
        self._published: list[Header] = []  # files to enter in the index
        self._note_at = 0.0
        self._sweep_at = 0.0
        self._unsynced = False
        self._thread = threading.Thread(target=self._run, name="block-keeper", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self, seconds: float) -> None:
        """Write no more, close the directory in order."""
        self._stopping = True
        self._hurry.set()
        self._writes.set_at_work(False)
        self._writes.call()
        self._thread.join(seconds)

    def hurry(self) -> None:
        """From now on write as fast as the drive can; after trouble, try again now."""
        self._retry_at = 0.0
        self._hurry.set()
        self._writes.set_at_work(False)
        self._writes.call()

    @property
    def in_trouble(self) -> bool:
        """Whether nothing is written, and won't be for a while."""
        return not self.writing and (self._refused or time.monotonic() < self._retry_at)

    @property
    def model(self) -> tuple[bytes, str] | None:
        """Fingerprint and name, once they are known."""
        return self._model

    def set_model(self, fingerprint: bytes, name: str) -> None:
        """Say whose blocks these are."""
        self._model = (fingerprint, name)
        self._writes.call()

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note that blocks are in use now."""
        self._touched.append((now_us(), keys))

    def count(self, hit_tokens: int, missed_tokens: int) -> None:
        """Note what an admission found."""
        self._hits.append(_Hits(hit_tokens, missed_tokens))

    def fault(self, fault: Fault) -> None:
        """A reader could not read a block: it is not to be found any more."""
        self.bad.add(fault.key)
        self.faults += not fault.missing
        self._found_bad.append(fault)
        self._writes.call()

    def _run(self) -> None:
        while not self._stopping:
            if not self.writing and not self._refused and time.monotonic() >= self._retry_at:
                if self.index is None:
                    self._attempt(self._open)
                else:
                    self._set_writing(True)
            batch = self._writes.take(BATCH_BLOCKS, BATCH_BYTES, TICK)
            # First what was found bad: a block to write may be meant to replace it.
            if self.writing:
                self._attempt(self._keep_house)
            if batch:
                self._work_off(batch)
        self._work_off(self._writes.take(1 << 30, 1 << 62, 0.0))
        if self.writing:
            self._note_at = 0.0
            self._attempt(self._keep_house)
        index, self.index = self.index, None
        if index is not None:
            close_index(self._directory, index)

    def _attempt(self, work: Callable[[], None]) -> None:
        """Do something with the disk; whatever goes wrong is noted, and the index given up if it isn't ours."""
        try:
            work()
        except Refused as error:
            self._refused = True
            self._stop_writing(str(error))
        except IndexReplaced:
            self._give_up_index()
        except (OSError, lmdb.Error) as error:
            self._stop_writing(f"{type(error).__name__}: {error}")
        except Exception as error:
            _log.exception("the store of prefix blocks failed")
            self._stop_writing(f"{type(error).__name__}: {error}")

    def _open(self) -> None:
        # Given once, as another server may change it later; but a directory made anew gets it again.
        given = None if self.limit and self._directory.limit_file.exists() else self._max_bytes
        index = open_index(self._directory, given)
        self._owed.clear()
        self._model_noted = False
        with index.read() as transaction:
            self._look(transaction)
        self.index = index
        self._set_writing(True)

    def _give_up_index(self) -> None:
        index, self.index = self.index, None
        if index is not None:
            index.close()
        self._set_writing(False)
        self._retry_at = 0.0

    def _set_writing(self, writing: bool) -> None:
        self.writing = writing
        self.progress.set()

    def _stop_writing(self, reason: str) -> None:
        self._set_writing(False)
        self._retry_at = time.monotonic() + self._retry_seconds
        if not self._trouble:
            _log.warning("prefix blocks are not written to the SSD for now", why=reason)
        self._trouble = reason
        # Without its folder, what is open belongs to nobody.
        if self.index is not None and not self.index.intact():
            index, self.index = self.index, None
            index.close()

    def _work_off(self, batch: list[Write]) -> None:
        """Write a batch, and report each of its blocks whatever happens."""
        good: set[bytes] = set()
        if self.writing and not self._stopping:
            self._attempt(lambda: self._write(batch, good))
            if self.index is None and not self._trouble:
                self._attempt(self._open)
                if self.index is not None:
                    self._attempt(lambda: self._write(batch, good))
        for write in batch:
            nbytes = write.nbytes
            write.drop()
            self._writes.done(nbytes)
            self.written.append((write.key, write.key in good))
        self.progress.set()

    def _write(self, batch: list[Write], good: set[bytes]) -> None:
        assert self.index is not None
        assert self._model is not None
        fingerprint, model = self._model
        headers = [
            build_header(
                fingerprint=fingerprint,
                model=model,
                key=write.key,
                parent=write.parent,
                ids=write.ids,
                is_snapshot=write.is_snapshot,
                layout=write.layout,
                tensors=write.tensors,
            )[0]
            for write in batch
        ]
        sizes = [len(header) + write.nbytes for header, write in zip(headers, batch, strict=True)]
        # A chain that fills the whole budget must not eat its own tail.
        spare = {fingerprint + write.parent for write in batch if write.parent is not None}
        with self.index.write() as transaction:
            reservation, room = transaction.reserve([charged(size) for size in sizes], spare)
        # What didn't fit beside what is in use is done with, too: trying again soon would not help.
        good.update(write.key for write in batch[room:])
        self._owed.append(reservation)
        try:
            for write, header, size in list(zip(batch, headers, sizes, strict=True))[:room]:
                self._hurry.wait(self._throttle.delay(size))
                if self._stopping:
                    break
                self._published.append(self._publish(self._directory, fingerprint, write, header))
        finally:
            entered = self._settle()
            good.update(header.key for header in entered)
        if entered and self._trouble:
            self._trouble = ""
            _log.info("prefix blocks are written to the SSD again")

    def _settle(self) -> list[Header]:
        """Enter what was published and give back what was reserved. Both stay due when that fails."""
        assert self.index is not None
        with self.index.write() as transaction:
            for reservation in self._owed:
                transaction.release(reservation)
            for header in self._published:
                if self._directory.block_path(header.fingerprint, header.key).exists():
                    enter(transaction, header, now_us())
            self._look(transaction)
        entered, self._published = self._published, []
        self._owed.clear()
        self._unsynced = True
        self.written_blocks += len(entered)
        self.written_bytes += sum(header.size for header in entered)
        return entered

    def _look(self, transaction: Transaction) -> None:
        self.used = transaction.used
        self.limit = transaction.limit
        self.blocks = transaction.count()

    def _keep_house(self) -> None:
        assert self.index is not None
        now = time.monotonic()
        sweep = now >= self._sweep_at
        note = now >= self._note_at and (self._touched or self._hits)
        new_model = self._model is not None and not self._model_noted
        if not (sweep or note or new_model or self._found_bad):
            return
        with self.index.write() as transaction:
            self._bury_bad(transaction)
            self._note(transaction)
            if sweep:
                bury_dead(self._directory, transaction)
                transaction.make_room(0)
            self._look(transaction)
        self._note_at = now + NOTE_SECONDS
        if sweep:
            self.index.env.reader_check()
            if self._unsynced:
                self.index.sync()
            self._unsynced = False
            self._sweep_at = now + SWEEP_SECONDS

    def _bury_bad(self, transaction: Transaction) -> None:
        while self._found_bad:
            fault = self._found_bad[0]
            path = self._directory.block_path(fault.fingerprint, fault.key)
            name = fault.fingerprint + fault.key
            if fault.missing:
                if not path.exists():
                    transaction.remove(name)
            else:
                quarantine(self._directory, transaction, path, name)
            self._found_bad.popleft()
            self.bad.discard(fault.key)

    def _note(self, transaction: Transaction) -> None:
        if self._model is None:
            return
        fingerprint, name = self._model
        while self._touched:
            used, keys = self._touched.popleft()
            for key in keys:
                transaction.touch(fingerprint + key, used)
        model = transaction.model(fingerprint) or Model(name, now_us())
        model.name = name
        while self._hits:
            hits = self._hits.popleft()
            model.hit_tokens += hits.hit_tokens
            model.missed_tokens += hits.missed_tokens
        transaction.set_model(fingerprint, model)
        self._model_noted = True
