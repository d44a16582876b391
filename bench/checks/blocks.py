"""Checks of the SSD store without an engine: kills while writing, and damaged files."""

import random
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog.testing

from bench.block_writer import FINGERPRINT
from bench.checks.report import Report
from bench.harness import ROOT, wait_until
from bench.plain_blocks import PlainBlock, content, fill, plain_chain
from cache_store import maintenance
from cache_store.block import Read
from cache_store.block_file import BadBlock, check_block
from cache_store.directory import CacheDirectory
from cache_store.ssd import SsdStore
from cache_store.store import PrefixStore

SIZE = 32_000  # bytes of a block's data

DAMAGE = [
    "flipped length",
    "flipped header checksum",
    "flipped metadata",
    "flipped padding",
    "flipped data",
    "flipped last byte",
    "cut in the length",
    "cut in the header",
    "cut before the data",
    "cut in the data",
    "cut by one byte",
    "emptied",
    "longer by one byte",
    "zeroed page",
]

Store = PrefixStore[PlainBlock]


def damaged(whole: bytes, kind: str) -> Iterator[bytes]:
    """The file with one kind of damage, at each place of that kind that is worth trying."""
    start = 8 + int.from_bytes(whole[:8], "little")
    text = whole[:start].rstrip(b" ")
    places: dict[str, Sequence[int]] = {
        "flipped length": range(8),
        "flipped header checksum": range(len('{"__metadata__":{"header_xxh3":"') + 8, 72),
        "flipped metadata": [*range(8, 40), *range(72, len(text))],
        "flipped padding": range(len(text), start, 97),
        "flipped data": range(start, len(whole) - 1, max(1, (len(whole) - start) // 50)),
        "flipped last byte": [len(whole) - 1],
    }
    for place in places.get(kind, ()):
        for bit in (1, 0x80):
            yield whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :]
    cuts: dict[str, Sequence[int]] = {
        "cut in the length": range(1, 8),
        "cut in the header": [9, 100, len(text), start - 1],
        "cut before the data": [start],
        "cut in the data": [start + 1, (start + len(whole)) // 2],
        "cut by one byte": [len(whole) - 1],
        "emptied": [0],
    }
    for cut in cuts.get(kind, ()):
        yield whole[:cut]
    if kind == "longer by one byte":
        yield whole + b"\0"
    if kind == "zeroed page":
        for place in range(0, len(whole), 4096):
            zeroed = whole[:place] + bytes(len(whole[place : place + 4096])) + whole[place + 4096 :]
            if zeroed != whole:
                yield zeroed


@contextmanager
def folder() -> Iterator[Path]:
    """A folder that is removed at the end."""
    path = Path(tempfile.mkdtemp(prefix="callboard-blocks-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def opened(directory: Path, *, memory_bytes: int = 64 << 20, ready: bool = True, **options: Any) -> Iterator[Store]:
    """A store that is ready (unless told not to wait for that), and closed at the end.

    What doesn't fit its memory is only written.
    """
    options = {"write_bytes_per_second": 1e12, "retry_seconds": 0.2, **options}
    ssd = SsdStore(directory, **options)
    store: Store = PrefixStore(memory_bytes=memory_bytes, ssd=ssd)
    store.set_model(FINGERPRINT, "plain")
    try:
        if ready:
            wait_until(lambda: ssd.ready, 60, "the store is open")
        yield store
    finally:
        store.close()


def put_chain(store: Store, seed: int, blocks: int) -> list[bytes]:
    """Put a chain in; its keys."""
    keys = []
    for key, parent, ids, block in plain_chain(seed, blocks, SIZE):
        store.put(key, parent, ids, block)
        keys.append(key)
    return keys


def served(store: Store, keys: Sequence[bytes]) -> tuple[int, int]:
    """How many blocks the SSD serves, each asked for alone, and how many of those are wrong."""
    memory = {key: bytearray(SIZE) for key in keys}
    tickets = {key: store.load([Read(key, PlainBlock.layout, fill(data))]) for key, data in memory.items()}
    wait_until(lambda: all(ticket.finished for ticket in tickets.values()), 120, "all blocks are read")
    good = [key for key in keys if tickets[key].done]
    return len(good), sum(bytes(memory[key]) != content(key, SIZE) for key in good)


def disk_bytes(directory: Path) -> int:
    """Bytes of all files below a directory, which may come and go meanwhile."""
    total = 0
    for path in directory.rglob("*"):
        try:
            found = path.lstat()
        except FileNotFoundError:
            continue
        total += found.st_size if stat.S_ISREG(found.st_mode) else 0
    return total


def disagreements(directory: Path) -> list[str]:
    """Where index and files differ in a directory nobody uses; looking mends nothing."""
    found = []
    place = CacheDirectory(directory)
    entered = {(row.key, row.nbytes) for row in maintenance.listing(directory)}
    there = {(key.hex(), -(-path.stat().st_size // 4096) * 4096) for _, key, path in place.block_files() if key}
    found += [f"only in the index: {row}" for row in entered - there]
    found += [f"only on the disk: {row}" for row in there - entered]
    found += [f"left over: {path.name}" for path in place.temporary.iterdir()]
    usage = maintenance.usage(directory)
    total = sum(nbytes for _, nbytes in entered) + usage.quarantined_bytes
    if usage.used_bytes != total:
        found.append(f"{usage.used_bytes} bytes are counted, {total} are there")
    return found


def spawn_writer(directory: Path, limit: int, seed: int) -> "subprocess.Popen[bytes]":
    """A process that writes blocks once it gets a line, until it is killed."""
    arguments = [str(directory), str(limit), str(SIZE), str(seed)]
    return subprocess.Popen(
        [sys.executable, str(ROOT / "bench" / "block_writer.py"), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


class _Writers:
    """Two writer processes that are killed at random moments; the next two get ready meanwhile."""

    def __init__(self, directory: Path, limit: int) -> None:
        self._directory = directory
        self._limit = limit
        self._seeds = iter(range(1, 1 << 30, 7))
        self._next = self._spawn()

    def _spawn(self) -> list["subprocess.Popen[bytes]"]:
        return [spawn_writer(self._directory, self._limit, next(self._seeds)) for _ in range(2)]

    def run(self, delays: Sequence[float]) -> bool:
        """Let two write and kill each after its delay; whether both still ran."""
        now = self._next
        for process in now:
            assert process.stdout is not None
            process.stdout.readline()
        for process in now:
            assert process.stdin is not None
            process.stdin.write(b"\n")
            process.stdin.flush()
        began = time.monotonic()
        ran = True
        for delay, process in sorted(zip(delays, now, strict=True), key=lambda pair: pair[0]):
            time.sleep(max(0.0, began + delay - time.monotonic()))
            ran = ran and process.poll() is None
            process.kill()
        self._next = self._spawn()
        self._end(now)
        return ran

    @staticmethod
    def _end(processes: list["subprocess.Popen[bytes]"]) -> None:
        for process in processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def close(self) -> None:
        """End those that wait."""
        self._end(self._next)


def kills(report: Report, rounds: int, seed: int = 0) -> None:
    """Two processes write to one directory and are killed at random moments, again and again."""
    limit = 12 << 20
    rng = random.Random(seed)
    blocks, wrong, over = [], 0, 0
    unlike: list[str] = []
    ran = True
    wrote = cut_short = 0
    with folder() as directory:
        writers = _Writers(directory, limit)
        try:
            for _ in range(rounds):
                before = set(directory.rglob("*.safetensors"))
                ran = writers.run([rng.uniform(0.0, 0.4) for _ in range(2)]) and ran
                wrote += set(directory.rglob("*.safetensors")) != before
                cut_short += any(CacheDirectory(directory).temporary.glob("*"))
                over = max(over, disk_bytes(directory) - limit)
                with opened(directory) as store:
                    keys = [key for _, key, _ in CacheDirectory(directory).block_files() if key]
                    good, bad = served(store, keys)
                    unlike += [f"{len(keys) - good} blocks could not be read"] if good != len(keys) else []
                blocks.append(good)
                wrong += bad
                unlike += disagreements(directory)
                over = max(over, disk_bytes(directory) - limit)
        finally:
            writers.close()
    report.measured("rounds", rounds)
    report.measured("blocks_served_per_round_min_median_max", [min(blocks), sorted(blocks)[rounds // 2], max(blocks)])
    report.measured("rounds_in_which_blocks_came_or_went", wrote)
    report.measured("rounds_that_left_half_a_file", cut_short)
    report.expect(wrote >= rounds / 4, "in many rounds the kills came while writing", wrote)
    report.expect(ran, "no writer ended by itself")
    report.expect(max(blocks) > 0, "blocks were served")
    report.expect(wrong == 0, "every served block was right", wrong)
    report.expect(not unlike, "the index agreed with the files after each restart", unlike[:5])
    report.expect(over <= 0, "all files together stayed within the limit", over)


def damage(report: Report) -> None:
    """Flip and cut every kind of byte of a block file: never served, quarantined, written again."""
    tried = 0
    served_bad: list[str] = []
    not_quarantined: list[str] = []
    not_replaced: list[str] = []
    with folder() as directory, opened(directory, memory_bytes=0) as store, structlog.testing.capture_logs():
        ((key, parent, ids, block),) = plain_chain(1, 1, SIZE)
        store.put(key, parent, ids, block)
        store.flush(30)
        place = CacheDirectory(directory)
        path = place.block_path(FINGERPRINT, key)
        whole = path.read_bytes()
        for kind in DAMAGE:
            variants = list(damaged(whole, kind))
            tried += len(variants)
            served_bad += [kind for changed in variants if not _refused(directory / "variant", changed)]
            for changed in (variants[0], variants[len(variants) // 2], variants[-1]):
                path.write_bytes(changed)
                known = set(place.quarantine.iterdir())
                if served(store, [key])[0] or store.lookup([key]).ssd:
                    served_bad.append(kind)
                wait_until(lambda: not path.exists(), 10, "the file is out of use")
                new = set(place.quarantine.iterdir()) - known
                if [file.read_bytes() for file in new] != [changed]:
                    not_quarantined.append(kind)
                store.put(key, parent, ids, block)
                if not store.flush(10) or served(store, [key]) != (1, 0):
                    not_replaced.append(kind)
    report.measured("kinds_of_damage", len(DAMAGE))
    report.measured("damaged_files_tried", tried)
    report.expect(not served_bad, "no damaged file was served", served_bad)
    report.expect(not not_quarantined, "each was quarantined", not_quarantined)
    report.expect(not not_replaced, "the block could be written again at once", not_replaced)


def _refused(path: Path, data: bytes) -> bool:
    path.write_bytes(data)
    try:
        check_block(path)
    except BadBlock:
        return True
    return False
