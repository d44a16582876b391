"""`Index`: the LMDB index of the block files, and the byte budget it keeps.

One process has at most one, opened after its start. Write transactions run on the store's thread under the
directory's lock, so one process writes at a time and a killed one can't leave LMDB's own lock behind unnoticed.
`leading` and `recent` alone are called by the engine's thread: reads of microseconds, and of a few milliseconds when
somebody looks on.

Databases, where a block's name is fingerprint ‖ key:

- blocks: name → size, checksum, times, kind, parent
- children: fingerprint ‖ parent → keys of the blocks that follow
- leaves: last use ‖ name, of the blocks that nothing follows: the order of eviction, tails before heads
- reserved: owner ‖ number → bytes that a process is about to write
- quarantine: file name → size
- models: fingerprint → name, hits
- meta: `used`, the bytes of all these together; `limit`
"""

import os
import secrets
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import lmdb
import msgspec

from cache_store.directory import CacheDirectory, charged
from cache_store.records import Model, Record

MAP_SIZE = 8 << 30  # of address space; room for more than ten million blocks
SLACK = 2 << 20  # bytes of the budget kept free for the index to grow, and small files
LOCK_SECONDS = 20.0
# Whether LMDB's lock is free again after its holder was killed. macOS has semaphores, which aren't.
LOCKS_RECOVER = sys.platform != "darwin"
_NAMES = ("blocks", "children", "leaves", "reserved", "quarantine", "models", "meta")


class IndexReplaced(Exception):
    """The index on the disk is another one by now, or gone: open it again."""


class Index:
    """The open index. Raises lmdb.Error and OSError from every method unless it says otherwise."""

    def __init__(self, directory: CacheDirectory, folder: Path | None = None) -> None:
        self.directory = directory
        self._folder = folder or directory.index
        self._file = self._folder / "data.mdb"
        self._guard = threading.Lock()  # a reader must not meet a closed environment
        self._reservations = 0
        self.env = lmdb.open(
            str(self._folder),
            map_size=MAP_SIZE,
            max_dbs=len(_NAMES),
            max_readers=512,
            sync=False,
            metasync=False,
            readahead=False,
            mode=0o600,
        )
        try:
            self._dbs = {name: self.env.open_db(name.encode(), dupsort=name == "children") for name in _NAMES}
            found = os.stat(self._file)
        except BaseException:
            self.env.close()
            raise
        self._identity = (found.st_dev, found.st_ino)
        self._size = found.st_size
        self._closed = False
        self.env.reader_check()

    def intact(self) -> bool:
        """Whether what we have open is what lies on the disk, in full length. Reading a shortened map is deadly."""
        try:
            found = os.stat(self._file)
        except OSError:
            return False
        # LMDB never shortens its file.
        whole = (found.st_dev, found.st_ino) == self._identity and found.st_size >= self._size
        self._size = max(self._size, found.st_size)
        return whole

    def leading(self, fingerprint: bytes, keys: Sequence[bytes], without: Collection[bytes] = ()) -> int:
        """How many of these keys, from the first on, are there. Never raises, never waits."""
        if not self._guard.acquire(blocking=False):
            return 0
        try:
            if self._closed or not self.intact():
                return 0
            found = 0
            with self.env.begin(db=self._dbs["blocks"], buffers=True) as transaction:
                for key in keys:
                    if key in without or transaction.get(fingerprint + key) is None:
                        break
                    found += 1
            return found
        except lmdb.Error:
            return 0
        finally:
            self._guard.release()

    def recent(self, fingerprint: bytes, most: int) -> list[tuple[bytes, Record]]:
        """Keys of the blocks that were used last: whole chains, each from its end, until there are `most` blocks, or
        ten times as many ends of any model's chains were looked at. Never raises, never waits."""
        if not self._guard.acquire(blocking=False):
            return []
        try:
            if self._closed or not self.intact():
                return []
            found: dict[bytes, Record] = {}
            with self.env.begin() as transaction:
                cursor, blocks = transaction.cursor(db=self._dbs["leaves"]), self._dbs["blocks"]
                for leaf in islice(cursor.iterprev(values=False), 10 * most):
                    name = leaf[8:]
                    key: bytes | None = name[32:] if name.startswith(fingerprint) else None
                    while key is not None and key not in found and len(found) < 2 * most:
                        data = transaction.get(fingerprint + key, db=blocks)
                        if data is None:
                            break
                        found[key] = Record.unpack(data)
                        key = found[key].parent
                    if len(found) >= most:
                        break
            return list(found.items())
        except lmdb.Error:
            return []
        finally:
            self._guard.release()

    @contextmanager
    def read(self) -> Iterator["Transaction"]:
        """A consistent view, for the store's thread and the CLI. Raises IndexReplaced."""
        if self._closed or not self.intact():
            raise IndexReplaced
        with self.env.begin() as transaction:
            yield Transaction(self, transaction, self._dbs)

    @contextmanager
    def write(self, seconds: float = LOCK_SECONDS) -> Iterator["Transaction"]:
        """A write transaction under the directory's lock. Raises IndexReplaced and LockTimeout too."""
        with self.directory.locked(seconds) as died:
            if died and not LOCKS_RECOVER:
                # LMDB's own lock may be held for ever: everyone moves on to a new index.
                self.directory.index.rename(self.directory.path / f"index-{secrets.token_hex(4)}")
            with self.write_locked() as transaction:
                yield transaction

    @contextmanager
    def write_locked(self) -> Iterator["Transaction"]:
        """The same for one who holds the lock."""
        if self._closed or not self.intact():
            raise IndexReplaced
        with self.env.begin(write=True) as transaction:
            writer = Transaction(self, transaction, self._dbs)
            yield writer
            writer.finish()

    def next_reservation(self) -> bytes:
        """A name for a reservation of ours."""
        self._reservations += 1
        return f"{self.directory.owner}/{self._reservations}".encode()

    def overhead(self) -> int:
        """Bytes of the budget that the index itself takes."""
        return charged(os.stat(self._file).st_size) + SLACK

    def sync(self) -> None:
        """Bring the index to the disk."""
        self.env.sync(True)

    def close(self) -> None:
        """Close it; readers find nothing from then on."""
        with self._guard:
            if not self._closed:
                self._closed = True
                self.env.close()


class Transaction:
    """Reading and changing the index. Only in the block of the `with` that gave it."""

    def __init__(self, index: Index, transaction: lmdb.Transaction, dbs: dict[str, lmdb._Database]) -> None:
        self._index = index
        self._txn = transaction
        self._dbs = dbs
        self._used = self._number(b"used")
        self._stuck: set[bytes] = set()  # names whose files can't be removed

    def _number(self, name: bytes) -> int:
        return int.from_bytes(self._txn.get(name, b"", db=self._dbs["meta"]), "little")

    def _set_number(self, name: bytes, value: int) -> None:
        self._txn.put(name, value.to_bytes(8, "little"), db=self._dbs["meta"])

    def finish(self) -> None:
        """Note what the changes add up to."""
        self._set_number(b"used", self._used)

    @property
    def used(self) -> int:
        """Bytes of blocks, reservations and quarantined files."""
        return self._used

    @property
    def limit(self) -> int:
        """The budget of the whole directory in bytes; 0 before it is set."""
        return self._number(b"limit")

    @limit.setter
    def limit(self, nbytes: int) -> None:
        self._set_number(b"limit", nbytes)

    def count(self) -> int:
        """Blocks of all models."""
        return int(self._txn.stat(self._dbs["blocks"])["entries"])

    def get(self, name: bytes) -> Record | None:
        """What is known of a block."""
        data = self._txn.get(name, db=self._dbs["blocks"])
        return Record.unpack(bytes(data)) if data is not None else None

    def records(self, prefix: bytes = b"") -> Iterator[tuple[bytes, Record]]:
        """All blocks whose name begins so."""
        cursor = self._txn.cursor(db=self._dbs["blocks"])
        going = cursor.set_range(prefix) if prefix else cursor.first()
        while going and bytes(cursor.key()).startswith(prefix):
            yield bytes(cursor.key()), Record.unpack(bytes(cursor.value()))
            going = cursor.next()

    def add(self, name: bytes, record: Record) -> bool:
        """Enter a block; False, and nothing changes, when it is there."""
        if not self._txn.put(name, record.pack(), overwrite=False, db=self._dbs["blocks"]):
            return False
        self._used += record.size
        if record.parent is not None:
            parent = name[:32] + record.parent
            self._txn.put(parent, name[32:], db=self._dbs["children"])
            above = self.get(parent)
            if above is not None:
                self._txn.delete(_leaf(parent, above), db=self._dbs["leaves"])
        if not self._has_children(name):
            self._txn.put(_leaf(name, record), b"", db=self._dbs["leaves"])
        return True

    def remove(self, name: bytes) -> bool:
        """Take a block out; False when it isn't there."""
        record = self.get(name)
        if record is None:
            return False
        self._txn.delete(name, db=self._dbs["blocks"])
        self._txn.delete(_leaf(name, record), db=self._dbs["leaves"])
        self._used -= record.size
        if record.parent is not None:
            parent = name[:32] + record.parent
            self._txn.delete(parent, name[32:], db=self._dbs["children"])
            above = self.get(parent)
            if above is not None and not self._has_children(parent):
                self._txn.put(_leaf(parent, above), b"", db=self._dbs["leaves"])
        return True

    def touch(self, name: bytes, used: int) -> None:
        """Note a later use of a block."""
        record = self.get(name)
        if record is None or record.used >= used:
            return
        later = record._replace(used=used)
        self._txn.put(name, later.pack(), db=self._dbs["blocks"])
        if self._txn.delete(_leaf(name, record), db=self._dbs["leaves"]):
            self._txn.put(_leaf(name, later), b"", db=self._dbs["leaves"])

    def _has_children(self, name: bytes) -> bool:
        return self._txn.get(name, db=self._dbs["children"]) is not None

    def leaves(self) -> Iterator[bytes]:
        """Names of the blocks that may be evicted, least recently used first."""
        cursor = self._txn.cursor(db=self._dbs["leaves"])
        for key in cursor.iternext(values=False):
            yield bytes(key[8:])

    def make_room(self, nbytes: int, spare: Collection[bytes] = ()) -> bool:
        """Evict until `nbytes` more fit the budget; whether they do. Blocks of `spare` stay."""
        budget = self.limit - self._index.overhead() - nbytes
        if self._used > budget:
            self.drop_quarantine(self._used - budget)
        self.evict(lambda _, used: used > budget, spare=spare)
        return self._used <= budget

    def evict(
        self,
        wanted: Callable[[Record, int], bool],
        most: int | None = None,
        spare: Collection[bytes] = (),
    ) -> int:
        """Remove blocks, least recently used first, tails before heads, as long as `wanted` says so of the next one
        and the bytes in use, and at most so many; how many went.

        A file that can't be removed stays, and others go instead.
        """
        evicted = 0
        while most is None or evicted < most:
            name = next((name for name in self.leaves() if name not in self._stuck and name not in spare), None)
            record = self.get(name) if name is not None else None
            if name is None or record is None or not wanted(record, self._used):
                break
            evicted += self.discard(name)
        return evicted

    def discard(self, name: bytes) -> bool:
        """Remove a block and its file; False when the file can't be removed, and both stay."""
        try:
            self._index.directory.block_path(name[:32], name[32:]).unlink(missing_ok=True)
        except OSError:
            self._stuck.add(name)
            return False
        return self.remove(name)

    def reserve(self, sizes: Sequence[int], spare: Collection[bytes]) -> tuple[bytes, int]:
        """Set bytes aside for blocks of these sizes, evicting others.

        Returns the reservation's name, and how many of the blocks fit, from the first on.
        """
        name = self._index.next_reservation()
        room = nbytes = 0
        for size in sizes:
            if not self.make_room(size, spare):
                break
            self._used += size
            nbytes += size
            room += 1
        self._txn.put(name, nbytes.to_bytes(8, "little"), db=self._dbs["reserved"])
        return name, room

    def release(self, name: bytes) -> None:
        """Give a reservation back. One that isn't there, in an index made anew, is nothing."""
        data = self._txn.pop(name, db=self._dbs["reserved"])
        if data is not None:
            self._used -= int.from_bytes(data, "little")

    def reservations(self) -> list[tuple[bytes, str]]:
        """Names of all reservations and their owners."""
        cursor = self._txn.cursor(db=self._dbs["reserved"])
        return [(bytes(key), bytes(key).partition(b"/")[0].decode()) for key in cursor.iternext(values=False)]

    def enter_quarantine(self, file: str, size: int) -> None:
        """Note a quarantined file."""
        if self._txn.put(file.encode(), size.to_bytes(8, "little"), overwrite=False, db=self._dbs["quarantine"]):
            self._used += size

    def quarantined(self) -> dict[str, int]:
        """Quarantined files and their sizes."""
        cursor = self._txn.cursor(db=self._dbs["quarantine"])
        return {bytes(key).decode(): int.from_bytes(size, "little") for key, size in cursor.iternext()}

    def drop_quarantine(self, nbytes: int, keep: int | None = None) -> None:
        """Remove quarantined files, oldest first, for at least `nbytes`, and so many that at most `keep` stay."""
        files = self.quarantined()
        for number, (file, size) in enumerate(files.items()):
            if nbytes <= 0 and (keep is None or len(files) - number <= keep):
                break
            try:
                (self._index.directory.quarantine / file).unlink(missing_ok=True)
            except OSError:
                continue
            self._txn.delete(file.encode(), db=self._dbs["quarantine"])
            self._used -= size
            nbytes -= size

    def model(self, fingerprint: bytes) -> Model | None:
        """What is known of a model."""
        data = self._txn.get(fingerprint, db=self._dbs["models"])
        return msgspec.msgpack.decode(data, type=Model) if data is not None else None

    def set_model(self, fingerprint: bytes, model: Model) -> None:
        """Enter a model, or what is new about it."""
        self._txn.put(fingerprint, msgspec.msgpack.encode(model), db=self._dbs["models"])

    def remove_model(self, fingerprint: bytes) -> None:
        """Forget a model."""
        self._txn.delete(fingerprint, db=self._dbs["models"])

    def models(self) -> dict[bytes, Model]:
        """All models by fingerprint."""
        cursor = self._txn.cursor(db=self._dbs["models"])
        return {bytes(key): msgspec.msgpack.decode(data, type=Model) for key, data in cursor.iternext()}

    def total(self) -> int:
        """What `used` has to be, added up anew."""
        cursor = self._txn.cursor(db=self._dbs["reserved"])
        reserved = sum(int.from_bytes(data, "little") for _, data in cursor.iternext())
        return reserved + sum(self.quarantined().values()) + sum(record.size for _, record in self.records())

    def contradictions(self, report: Callable[[str], None]) -> None:
        """Look through all databases and report what doesn't agree."""
        if self.total() != self.used:
            report(f"the counter says {self.used} bytes, the entries add up to {self.total()}")
        leaves = set(self.leaves())
        for name, record in self.records():
            if (name in leaves) == self._has_children(name):
                report(f"block {name[32:].hex()} is in the wrong place of the order of eviction")
            leaves.discard(name)
            if record.parent is not None:
                cursor = self._txn.cursor(db=self._dbs["children"])
                if not cursor.set_key_dup(name[:32] + record.parent, name[32:]):
                    report(f"block {name[32:].hex()} is missing among its parent's children")
        for name in leaves:
            report(f"block {name[32:].hex()} is up for eviction but isn't there")
        for key, child in self._txn.cursor(db=self._dbs["children"]):
            if self.get(bytes(key[:32]) + bytes(child)) is None:
                report(f"child {bytes(child).hex()} isn't there")


def _leaf(name: bytes, record: Record) -> bytes:
    return record.used.to_bytes(8, "big") + name
