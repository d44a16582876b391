"""What `callboard cache` does with the SSD tier's directory: look, verify and mend, prune, clear.

Each call opens the directory like any server does and may run beside servers that use it. All raise Refused, OSError
and lmdb.Error.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import msgspec

from cache_store.block_file import BadBlock, check_block
from cache_store.directory import CacheDirectory
from cache_store.index import LOCK_SECONDS, Index
from cache_store.opening import Report, close_index, open_index, quarantine, rebuild, reconcile, set_limit
from cache_store.records import Record

_BATCH = 256  # blocks removed per transaction, so that servers need not wait long


class ModelUsage(msgspec.Struct):
    """What one model has in the cache. Times are seconds since 1970, 0 without blocks."""

    name: str
    fingerprint: str
    blocks: int = 0
    snapshots: int = 0
    nbytes: int = 0
    hit_tokens: int = 0
    missed_tokens: int = 0
    oldest: float = 0.0
    last_used: float = 0.0

    @property
    def hit_rate(self) -> float | None:
        """Share of prompt tokens that were found; None before the first prompt."""
        tokens = self.hit_tokens + self.missed_tokens
        return self.hit_tokens / tokens if tokens else None


class Usage(msgspec.Struct):
    """The whole directory. `used_bytes` includes what processes have reserved and quarantined files."""

    limit_bytes: int
    used_bytes: int
    index_bytes: int
    quarantined_files: int
    quarantined_bytes: int
    models: list[ModelUsage]


class BlockRow(msgspec.Struct):
    """One block of a listing."""

    model: str
    key: str
    parent: str
    is_snapshot: bool
    nbytes: int
    created: float
    last_used: float


def exists(root: Path) -> bool:
    """Whether there is a cache at all."""
    return CacheDirectory(root).path.is_dir()


@contextmanager
def _opened(root: Path, report: Report = lambda _: None) -> Iterator[tuple[CacheDirectory, Index]]:
    directory = CacheDirectory(root)
    index = open_index(directory, report=report)
    try:
        yield directory, index
    finally:
        close_index(directory, index)


def usage(root: Path) -> Usage:
    """Sizes, hits and ages, per model and altogether."""
    with _opened(root) as (_, index), index.read() as view:
        models = {
            fingerprint: ModelUsage(
                model.name, fingerprint.hex(), hit_tokens=model.hit_tokens, missed_tokens=model.missed_tokens
            )
            for fingerprint, model in view.models().items()
        }
        for name, record in view.records():
            model = models.setdefault(name[:32], ModelUsage("?", name[:32].hex()))
            model.snapshots += record.is_snapshot
            model.blocks += not record.is_snapshot
            model.nbytes += record.size
            created = record.created / 1e6
            model.oldest = min(model.oldest or created, created)
            model.last_used = max(model.last_used, record.used / 1e6)
        quarantined = view.quarantined()
        return Usage(
            limit_bytes=view.limit,
            used_bytes=view.used,
            index_bytes=index.overhead(),
            quarantined_files=len(quarantined),
            quarantined_bytes=sum(quarantined.values()),
            models=sorted(models.values(), key=lambda model: -model.nbytes),
        )


def listing(root: Path, model: str | None = None) -> list[BlockRow]:
    """All blocks, or those of a model, most recently used first."""
    with _opened(root) as (_, index), index.read() as view:
        names = {fingerprint: known.name for fingerprint, known in view.models().items()}
        rows = [
            BlockRow(
                model=names.get(name[:32], "?"),
                key=name[32:].hex(),
                parent=record.parent.hex() if record.parent else "",
                is_snapshot=record.is_snapshot,
                nbytes=record.size,
                created=record.created / 1e6,
                last_used=record.used / 1e6,
            )
            for name, record in view.records()
            if model is None or _is_model(name[:32], names.get(name[:32], "?"), model)
        ]
    return sorted(rows, key=lambda row: -row.last_used)


def verify(root: Path) -> list[str]:
    """Read everything, mend what is wrong; what was."""
    found: list[str] = []
    with _opened(root, found.append) as (directory, index):
        with index.read() as view:
            records = list(view.records())
        bad = [(name, why) for name, record in records if (why := _fault(directory, name, record))]
        with index.write() as transaction:
            for name, why in bad:
                # It may have been evicted or replaced meanwhile.
                record = transaction.get(name)
                if record is None or not (why := _fault(directory, name, record)):
                    continue
                path = directory.block_path(name[:32], name[32:])
                found.append(f"{path.name} is quarantined: {why}")
                quarantine(directory, transaction, path, name)
            reconcile(directory, transaction, found.append)
            contradictions: list[str] = []
            transaction.contradictions(contradictions.append)
    found += contradictions
    if contradictions:
        found.append("the index is made anew")
        with directory.locked(LOCK_SECONDS):
            fresh = rebuild(directory)
            with fresh.write_locked() as transaction:
                set_limit(directory, transaction, None)
            fresh.close()
    return found


def prune(root: Path, *, max_bytes: int | None = None, unused_seconds: float | None = None) -> tuple[int, int]:
    """Remove the blocks used longest ago, until at most `max_bytes` are there, and all that were not used for
    `unused_seconds`. Blocks and bytes removed. The limit stays as it is."""
    blocks = nbytes = 0
    cutoff = (time.time() - unused_seconds) * 1e6 if unused_seconds is not None else 0.0
    with _opened(root) as (_, index):
        while True:
            with index.write() as transaction:
                before = transaction.used
                gone = transaction.evict(
                    lambda record, used: (
                        record.used < cutoff or (max_bytes is not None and used + index.overhead() > max_bytes)
                    ),
                    _BATCH,
                )
                blocks += gone
                nbytes += before - transaction.used
            if gone < _BATCH:
                return blocks, nbytes


def clear(root: Path, model: str | None = None) -> tuple[int, int]:
    """Remove all blocks, or those of one model (name or beginning of the fingerprint). Blocks and bytes removed.

    Raises KeyError for a model that isn't there.
    """
    blocks = nbytes = 0
    with _opened(root) as (directory, index):
        with index.read() as view:
            models = view.models()
        if model is not None and not any(_is_model(key, known.name, model) for key, known in models.items()):
            raise KeyError(model)
        wanted = [key for key, known in models.items() if model is None or _is_model(key, known.name, model)]
        for fingerprint in wanted:
            gone = _BATCH
            while gone:
                with index.write() as transaction:
                    before = transaction.used
                    names = [name for name, _ in islice(transaction.records(fingerprint), _BATCH)]
                    gone = sum(transaction.discard(name) for name in names)
                    blocks += gone
                    nbytes += before - transaction.used
                    if not names:
                        transaction.remove_model(fingerprint)
            _remove_folders(directory.path / fingerprint.hex())
        if model is None:
            with index.write() as transaction:
                transaction.drop_quarantine(0, keep=0)
    return blocks, nbytes


def _is_model(fingerprint: bytes, name: str, wanted: str) -> bool:
    return name == wanted or (len(wanted) >= 6 and fingerprint.hex().startswith(wanted))


def _fault(directory: CacheDirectory, name: bytes, record: Record) -> str:
    """What is wrong with a block's file; "" for nothing, also when it isn't there."""
    try:
        header = check_block(directory.block_path(name[:32], name[32:]))
    except FileNotFoundError:
        return ""
    except (BadBlock, OSError) as error:
        return str(error)
    if header.fingerprint + header.key != name:
        return "it holds another block than its name says"
    return "" if header.checksum == record.checksum else "it is not the file that was entered"


def _remove_folders(folder: Path) -> None:
    for path in (*folder.glob("*"), folder):
        try:
            path.rmdir()
        except OSError:
            continue
