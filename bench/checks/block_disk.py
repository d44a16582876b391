"""Checks of the SSD store without an engine: a disk that refuses, an index that vanishes, company, and a crowd."""

import contextlib
import errno
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import structlog.testing
from structlog.typing import EventDict

from bench.checks.blocks import SIZE, Store, disk_bytes, folder, opened, put_chain, served, spawn_writer
from bench.checks.report import Report
from bench.harness import wait_until
from cache_store import maintenance
from cache_store.block_file import Header
from cache_store.directory import CacheDirectory
from cache_store.publishing import publish
from cache_store.write_queue import Write

PATIENCE = 15.0  # seconds for something to come about


class Refusing:
    """Writes block files until it is told to fail with an error of the operating system."""

    def __init__(self) -> None:
        self.error: int | None = None

    def __call__(self, directory: CacheDirectory, fingerprint: bytes, write: Write, header: bytes) -> Header:
        """As `publish`."""
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))
        return publish(directory, fingerprint, write, header)


def disk(report: Report, blocks: int) -> None:
    """All of them; `blocks` is the crowd's size."""
    for name, error in (("full", errno.ENOSPC), ("read_only", errno.EROFS), ("broken", errno.EIO)):
        refused(report, name, error)
    really_full(report)
    really_read_only(report)
    removed(report)
    index_deleted(report)
    index_broken(report)
    company(report)
    crowd(report, blocks)


def complaints(logs: list[EventDict]) -> int:
    """How often the log says that writing stopped."""
    return sum("not written" in str(line["event"]) for line in logs)


def complained(store: Store, logs: list[EventDict]) -> int:
    """How often the log has said it, a while after the first time. Polls meanwhile."""

    def told() -> bool:
        store.poll()
        return complaints(logs) > 0

    with contextlib.suppress(TimeoutError):
        wait_until(told, PATIENCE)
    insist(store, 1.0)
    return complaints(logs)


def insist(store: Store, seconds: float) -> None:
    """Poll like an engine does, for a while."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        store.poll()
        time.sleep(0.005)


def written(store: Store, blocks: int) -> bool:
    """Whether so many blocks get written, polling."""

    def there() -> bool:
        store.poll()
        return store.stats().ssd.written_blocks >= blocks

    try:
        wait_until(there, PATIENCE, "the blocks are written")
    except TimeoutError:
        return False
    return True


def refused(report: Report, name: str, error: int) -> None:
    """Every write fails for a while: what is there is still read, the log says it once, and then it goes on."""
    refusing = Refusing()
    with folder() as directory, structlog.testing.capture_logs() as logs:
        with opened(directory, publish=refusing) as store:
            before = put_chain(store, 1, 5)
            report.expect(written(store, 5), f"{name}: blocks are written at first")
            refusing.error = error
            after = put_chain(store, 2, 5)
            report.expect((told := complained(store, logs)) == 1, f"{name}: the log says it once", told)
            report.expect(store.lookup(after).memory == 5, f"{name}: new blocks are kept in memory")
            report.expect(served(store, before) == (5, 0), f"{name}: what was written is served")
            refusing.error = None
            report.expect(written(store, 10), f"{name}: later they are written after all")
            report.expect(served(store, after) == (5, 0), f"{name}: and served")
        report.expect(maintenance.verify(directory) == [], f"{name}: nothing is wrong afterwards")


@contextmanager
def mounted(size: str) -> Iterator[Path | None]:
    """A small file system in memory; None where we may not mount one."""
    with folder() as place:
        if (
            os.geteuid() != 0
            or subprocess.run(
                ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(place)], capture_output=True, check=False
            ).returncode
        ):
            yield None
            return
        try:
            yield place
        finally:
            # On a busy machine the store's threads may still be letting go of it.
            umount = ["umount", str(place)]
            wait_until(lambda: subprocess.run(umount, capture_output=True, check=False).returncode == 0, PATIENCE)


def really_full(report: Report) -> None:
    """A file system smaller than the budget."""
    with mounted("8m") as place, structlog.testing.capture_logs() as logs:
        if place is None:
            report.measured("small_file_system", "not tried: mounting needs root")
            return
        with opened(place / "cache", max_bytes=100 << 20) as store:
            keys = put_chain(store, 1, 400)
            told = complained(store, logs)
            there = store.stats().ssd.written_blocks
            report.expect(0 < there < 400, "full file system: it is written until nothing fits", there)
            report.expect(told == 1, "full file system: the log says it once", told)
            report.expect(store.lookup(keys).memory == 400, "full file system: memory goes on")
            good, wrong = served(store, keys[: there // 2])
            report.expect((good, wrong) == (there // 2, 0), "full file system: what is there is served", [good, wrong])


def really_read_only(report: Report) -> None:
    """A start on a file system that is read-only, with a cache on it. (It can't turn so while files are open.)"""
    with mounted("64m") as place, structlog.testing.capture_logs() as logs:
        if place is None:
            report.measured("read_only_mount", "not tried: mounting needs root")
            return
        with opened(place / "cache") as store:
            before = put_chain(store, 1, 5)
            written(store, 5)
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        with opened(place / "cache", ready=False) as store:
            after = put_chain(store, 2, 5)
            report.expect((told := complained(store, logs)) == 1, "read-only: the log says it once", told)
            report.expect(store.lookup(after).memory == 5, "read-only: memory goes on")
            report.expect(served(store, before)[1] == 0, "read-only: nothing wrong is served")
            subprocess.run(["mount", "-o", "remount,rw", str(place)], check=True)
            report.expect(written(store, 5), "read-only: they are written when it is writable again")
            report.expect(served(store, before + after) == (10, 0), "read-only: and all is served")


def removed(report: Report) -> None:
    """The directory is removed while in use: everything misses, and a new one is filled."""
    with folder() as directory, structlog.testing.capture_logs() as logs:
        with opened(directory / "cache") as store:
            before = put_chain(store, 1, 5)
            written(store, 5)
            shutil.rmtree(directory / "cache")
            report.expect(store.where(b"\0" * 32) is None, "removed: looking does no harm")
            report.expect(served(store, before) == (0, 0), "removed: reading is a miss")
            after = put_chain(store, 2, 5)
            report.expect(written(store, 10), "removed: a new directory is made and written to")
            report.expect(served(store, after) == (5, 0), "removed: and served")
            report.expect(complaints(logs) <= 1, "removed: the log says it at most once", complaints(logs))
        found = maintenance.verify(directory / "cache")
        report.expect(found == [], "removed: nothing is wrong afterwards", found)


def index_deleted(report: Report) -> None:
    """The index is deleted while in use and while not: it is made anew from the files."""
    with folder() as directory, structlog.testing.capture_logs():
        with opened(directory) as store:
            before = put_chain(store, 1, 5)
            written(store, 5)
            shutil.rmtree(CacheDirectory(directory).index)
            after = put_chain(store, 2, 5)
            report.expect(written(store, 10), "index deleted in use: writing goes on")
            report.expect(served(store, before + after) == (10, 0), "index deleted in use: all is served")
        limit = maintenance.usage(directory).limit_bytes
        shutil.rmtree(CacheDirectory(directory).index)
        found = maintenance.verify(directory)
        report.expect(bool(found), "index deleted: verify says so")
        report.expect(maintenance.verify(directory) == [], "index deleted: and has mended it")
        usage = maintenance.usage(directory)
        report.expect(usage.models[0].blocks == 10, "index deleted: it has all blocks again")
        report.expect(usage.limit_bytes == limit, "index deleted: and the limit")


def index_broken(report: Report) -> None:
    """An index cut short, overwritten or zeroed between two starts neither kills nor loses anything."""
    with folder() as directory, structlog.testing.capture_logs():
        with opened(directory) as store:
            keys = put_chain(store, 1, 50)
            written(store, 50)
        file = CacheDirectory(directory).index / "data.mdb"
        whole = file.read_bytes()
        half = len(whole) // 2
        broken = {
            "cut short": whole[:half],
            "zeroed in the middle": whole[: 4 * 4096] + bytes(half) + whole[4 * 4096 + half :],
            "overwritten": os.urandom(len(whole)),
            "emptied": b"",
            "one meta page lost": bytes(4096) + whole[4096:],
        }
        for name, data in broken.items():
            file.write_bytes(data)
            with opened(directory) as store:
                report.expect(served(store, keys) == (50, 0), f"index {name}: all is served")
                report.expect(store.lookup(keys).ssd == 50, f"index {name}: and found")
            report.expect(maintenance.verify(directory) == [], f"index {name}: nothing is wrong afterwards")


def company(report: Report) -> None:
    """A second process on the same directory: each finds what the other wrote, and the budget holds for both."""
    limit = 12 << 20
    with folder() as directory, structlog.testing.capture_logs():
        with opened(directory, max_bytes=limit, memory_bytes=0) as store, _writer(directory, limit) as other:
            wait_until(lambda: store.stats().ssd.writing, PATIENCE)
            number, over, good, wrong = 0, 0, 0, 0
            began, there = time.monotonic(), 0
            while (took := time.monotonic() - began) < 4.0 or (there <= 100 and took < 4 * PATIENCE):
                number += 1
                keys = put_chain(store, 1_000_000 + number, 4)
                store.flush(PATIENCE)
                now = served(store, keys)
                good, wrong = good + now[0], wrong + now[1]
                over = max(over, disk_bytes(directory) - limit)
                there = sum(1 for _ in CacheDirectory(directory).block_files())
            # LMDB refuses a second environment in one process; the files' names tell the same.
            read = bad = 0
            for _ in range(20):  # the other one goes on, and evicts what was listed a moment ago
                everyones = [key for _, key, _ in CacheDirectory(directory).block_files() if key is not None]
                now = served(store, everyones)
                read, bad = max(read, now[0]), bad + now[1]
                if read > 50:
                    break
            report.expect(other.poll() is None, "two on one directory: both went on")
        report.measured("two_on_one_directory_own_blocks_served", f"{good} of {4 * number}")
        report.measured("two_on_one_directory_blocks_read", read)
        report.expect(wrong + bad == 0, "two on one directory: nothing wrong is served", wrong + bad)
        report.expect(read > 50, "two on one directory: blocks of both are read", read)
        report.expect(over <= 0, "two on one directory: the budget holds", over)
        maintenance.verify(directory)
        report.expect(maintenance.verify(directory) == [], "two on one directory: nothing is wrong afterwards")


@contextmanager
def _writer(directory: Path, limit: int) -> Iterator["subprocess.Popen[bytes]"]:
    process = spawn_writer(directory, limit, 3)
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        process.stdin.write(b"\n")
        process.stdin.flush()
        yield process
    finally:
        process.kill()
        process.communicate()


def crowd(report: Report, blocks: int) -> None:
    """Many blocks: how long it takes to open, to look, and to make the index anew, and what it weighs."""
    with folder() as directory, structlog.testing.capture_logs():
        own = psutil.Process()
        with opened(directory, memory_bytes=0) as store:
            began = time.monotonic()
            keys: list[bytes] = []
            for seed in range(blocks // 100):
                keys += put_chain(store, seed, 100)
                while store.stats().ssd.queued_bytes > 100 * SIZE:
                    store.poll()
                    time.sleep(0.001)
            report.expect(store.flush(300), f"{blocks} blocks: all are written")
            report.measured("seconds_to_write", round(time.monotonic() - began, 1))
        before = own.memory_info().rss
        began = time.monotonic()
        with opened(directory) as store:
            report.measured("seconds_to_open", round(time.monotonic() - began, 3))
            began = time.thread_time()  # whatever else runs on the machine
            rounds = 200
            for _ in range(rounds):
                hit = store.lookup(keys[:64])
            microseconds = (time.thread_time() - began) / rounds * 1e6
            report.measured("microseconds_to_look_up_64_blocks", round(microseconds, 1))
            report.expect(hit.ssd == 64 and microseconds < 2000, f"{blocks} blocks: looking is quick", microseconds)
            began = time.perf_counter()
            for _ in range(1000):
                store.poll()
            report.measured("microseconds_to_poll", round((time.perf_counter() - began) * 1e3, 2))
            report.measured("mebibytes_grown", round((own.memory_info().rss - before) / 2**20, 1))
            good, wrong = served(store, keys[:: max(1, blocks // 500)])
            report.expect(wrong == 0 and good == len(keys[:: max(1, blocks // 500)]), f"{blocks} blocks: served right")
        report.measured("index_mebibytes", round(maintenance.usage(directory).index_bytes / 2**20, 1))
        shutil.rmtree(CacheDirectory(directory).index)
        began = time.monotonic()
        maintenance.usage(directory)
        report.measured("seconds_to_make_the_index_anew", round(time.monotonic() - began, 2))
        began = time.monotonic()
        report.expect(maintenance.verify(directory) == [], f"{blocks} blocks: verify finds nothing wrong")
        report.measured("seconds_to_verify", round(time.monotonic() - began, 2))
        removed_blocks, _ = maintenance.clear(directory)
        report.expect(removed_blocks == blocks, f"{blocks} blocks: clear removes all", removed_blocks)
