"""Opening the SSD tier's directory: is the index sound, does it agree with the files, who died and left what.

On the store's thread of each engine, and in the CLI.
"""

import os
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import lmdb
import structlog

from cache_store.block_file import BadBlock, Header, read_header
from cache_store.directory import CacheDirectory, charged
from cache_store.index import LOCK_SECONDS, LOCKS_RECOVER, Index, Transaction
from cache_store.index_check import is_sound
from cache_store.records import Model, Record

QUARANTINE_FILES = 16  # kept for a look at them

Report = Callable[[str], None]
_log = structlog.get_logger()


def now_us() -> int:
    """Time of day in µs since 1970, as the index keeps it."""
    return time.time_ns() // 1000


def default_limit(free: int, held: int) -> int:
    """The budget of a new directory: a tenth of the free disk, what the cache holds included, at most 100 GB."""
    return int(min(0.1 * free + held, 100e9))


def _silent(_: str) -> None:
    pass


def open_index(directory: CacheDirectory, max_bytes: int | None = None, report: Report = _silent) -> Index:
    """Make the directory ready, register this process and open the index, made anew if need be.

    `report` gets what was wrong and was mended. `max_bytes` changes the budget for everyone. Raises Refused, OSError
    (also LockTimeout) and lmdb.Error.
    """
    directory.make()
    with directory.locked(LOCK_SECONDS) as died:
        directory.enter()
        try:
            return _open(directory, max_bytes, died, report)
        except BaseException:
            directory.leave()
            raise


def _open(directory: CacheDirectory, max_bytes: int | None, died: bool, report: Report) -> Index:
    live, _ = directory.others()
    if not live:
        directory.sweep_temporary([])
        for version in directory.remove_old_versions():
            _log.info("removed prefix blocks of an older layout", version=version)
    state = directory.index_state()
    orderly = bool(live) or _orderly_end(directory) == state
    directory.clean_mark.unlink(missing_ok=True)
    index = None
    if state and (LOCKS_RECOVER or not died):
        index = _open_sound(directory, orderly)
    if index is None:
        if state:
            _log.warning("the index of the prefix blocks was damaged and is made anew", directory=str(directory.root))
            report("the index was damaged and is made anew")
        elif any(True for _ in directory.block_files()):
            report("the index was missing and is made anew")
        index = rebuild(directory)
        orderly = True
    try:
        with index.write_locked() as transaction:
            if not bury_dead(directory, transaction, report) and not orderly:
                reconcile(directory, transaction, report)
            set_limit(directory, transaction, max_bytes)
    except BaseException:
        index.close()
        raise
    return index


def _open_sound(directory: CacheDirectory, orderly: bool) -> Index | None:
    if not orderly and not is_sound(directory.index):
        return None
    try:
        return Index(directory)
    except lmdb.Error:
        return None


def _orderly_end(directory: CacheDirectory) -> str:
    try:
        return directory.clean_mark.read_text()
    except OSError:
        return ""


def close_index(directory: CacheDirectory, index: Index) -> None:
    """Close in order: the last process to leave notes that the index can be trusted."""
    try:
        index.sync()
        with directory.locked(LOCK_SECONDS):
            intact = index.intact()
            index.close()
            directory.leave()
            if intact and not directory.others()[0]:
                directory.clean_mark.write_text(directory.index_state())
    except (OSError, lmdb.Error):
        pass
    finally:
        index.close()


def set_limit(directory: CacheDirectory, transaction: Transaction, max_bytes: int | None) -> None:
    """See to it that there is a budget and that it holds."""
    limit = transaction.limit
    wanted = max_bytes or limit or _noted_limit(directory)
    if not wanted:
        wanted = default_limit(directory.free_bytes(), transaction.used)
    if wanted != limit:
        if limit:
            _log.info(
                "changed the limit of the prefix blocks for all servers that use this directory",
                directory=str(directory.root),
                was_gb=round(limit / 1e9, 3),
                is_gb=round(wanted / 1e9, 3),
            )
        transaction.limit = wanted
        directory.limit_file.write_text(f"{wanted}\n")
    transaction.make_room(0)


def _noted_limit(directory: CacheDirectory) -> int:
    try:
        return int(directory.limit_file.read_text())
    except (OSError, ValueError):
        return 0


def rebuild(directory: CacheDirectory) -> Index:
    """Make a new index from the files and put it in place of the one that is there. Call it holding the lock."""
    fresh = directory.path / f"index-{secrets.token_hex(4)}"
    for left in directory.path.glob("index-*"):
        shutil.rmtree(left, ignore_errors=True)
    fresh.mkdir(mode=0o700)
    index = Index(directory, fresh)
    try:
        with index.write_locked() as transaction:
            for file in os.listdir(directory.quarantine):
                transaction.enter_quarantine(file, charged((directory.quarantine / file).stat().st_size))
            reconcile(directory, transaction, _silent)
        index.sync()
    finally:
        index.close()
    if directory.index.exists():
        old = directory.path / f"index-{secrets.token_hex(4)}"
        directory.index.rename(old)
        shutil.rmtree(old, ignore_errors=True)
    fresh.rename(directory.index)
    return Index(directory)


def reconcile(directory: CacheDirectory, transaction: Transaction, report: Report) -> None:
    """Make index and files agree: enter good files, quarantine others, forget what has no file."""
    there: set[bytes] = set()
    for fingerprint, key, path in directory.block_files():
        name = fingerprint + (key or b"")
        record = transaction.get(name) if key is not None else None
        try:
            if key is None:
                raise BadBlock("it is no block")
            if record is None:
                report(f"{path.name} was not in the index")
                adopt(transaction, name, path)
            elif charged(path.stat().st_size) != record.size:
                raise BadBlock(f"its size is not {record.size} bytes")
        except FileNotFoundError:
            continue
        except (BadBlock, OSError) as error:
            report(f"{path.name} is quarantined: {error}")
            try:
                quarantine(directory, transaction, path, name if key is not None else None)
            except OSError:
                continue  # it stays where it is, without an entry
        else:
            there.add(name)
    for name in [name for name, _ in transaction.records() if name not in there]:
        report(f"{name[32:].hex()}.safetensors is in the index but not there")
        transaction.remove(name)
    known = transaction.quarantined()
    for file in os.listdir(directory.quarantine):
        if file not in known:
            transaction.enter_quarantine(file, charged((directory.quarantine / file).stat().st_size))


def adopt(transaction: Transaction, name: bytes, path: Path) -> Header:
    """Enter a file that is there without an entry. Raises BadBlock, and OSError."""
    header = read_header(path)
    if header.fingerprint + header.key != name:
        raise BadBlock("it holds another block than its name says")
    found = path.stat()
    enter(transaction, header, found.st_mtime_ns // 1000)
    return header


def enter(transaction: Transaction, header: Header, used: int) -> bool:
    """Enter a block by what its file says; False when it is there."""
    record = Record(charged(header.size), header.checksum, used, used, header.is_snapshot, header.parent)
    if transaction.model(header.fingerprint) is None:
        transaction.set_model(header.fingerprint, Model(header.model, used))
    return transaction.add(header.fingerprint + header.key, record)


def quarantine(directory: CacheDirectory, transaction: Transaction, path: Path, name: bytes | None) -> bool:
    """Take a bad file out of use, and the block `name` with it; whether there was one. Raises OSError.

    Some are kept for a look at them while there is room.
    """
    target = directory.quarantine / f"{now_us():016x}-{secrets.token_hex(2)}-{path.stem[:32]}"
    there = True
    try:
        size = charged(path.stat().st_size)
        path.rename(target)
    except FileNotFoundError:
        there = False
    if name is not None:
        transaction.remove(name)
    if there:
        transaction.enter_quarantine(target.name, size)
        transaction.drop_quarantine(0, keep=QUARANTINE_FILES)
    return there


def bury_dead(directory: CacheDirectory, transaction: Transaction, report: Report = _silent) -> bool:
    """Clear up after processes that died: their temporary files, what they reserved, what they were about to enter or
    to remove; whether there were any. Call it holding the lock."""
    live, dead = directory.others()
    directory.bury(dead)
    for reservation, owner in transaction.reservations():
        if owner not in live and owner != directory.owner:
            transaction.release(reservation)
    if dead:
        reconcile(directory, transaction, report)
    return bool(dead)
