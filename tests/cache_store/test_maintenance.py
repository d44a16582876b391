"""What `callboard cache` does: usage, verify and mend, prune, clear; also beside a server that uses the directory."""

import os
import shutil
import time
from pathlib import Path

import pytest
from stores import FINGERPRINT, Open, load, put_chain, until

from bench.plain_blocks import plain_chain
from cache_store import maintenance
from cache_store.directory import CacheDirectory
from cache_store.opening import open_index

SIZE = 100_000
ON_DISK = 106_496  # such a block with its header, in pages


@pytest.fixture
def cache(open_store: Open, tmp_path: Path) -> Path:
    """A directory with 10 blocks of one model, and 5 of another."""
    store = open_store()
    put_chain(store, 1, 10)
    store.count(hit_tokens=300, missed_tokens=100)
    assert store.flush(10)
    store.close()
    other = open_store()
    other.set_model(b"\x33" * 32, "other")
    put_chain(other, 2, 5)
    assert other.flush(10)
    other.close()
    return tmp_path / "cache"


def files(cache: Path) -> list[Path]:
    return sorted(path for _, _, path in CacheDirectory(cache).block_files())


def test_usage_by_model(cache: Path):
    usage = maintenance.usage(cache)
    assert [(each.name, each.blocks, each.nbytes) for each in usage.models] == [
        ("model", 10, 10 * ON_DISK),
        ("other", 5, 5 * ON_DISK),
    ]
    assert usage.used_bytes == 15 * ON_DISK
    first = usage.models[0]
    assert time.time() - 100 < first.oldest <= first.last_used <= time.time()
    assert first.fingerprint == FINGERPRINT.hex()
    assert first.hit_rate == 0.75
    assert usage.models[1].hit_rate is None


def test_listing(cache: Path):
    rows = maintenance.listing(cache)
    assert len(rows) == 15
    assert [row.last_used for row in rows] == sorted((row.last_used for row in rows), reverse=True)
    mine = maintenance.listing(cache, "model")
    assert len(mine) == 10
    assert sum(row.parent == "" for row in mine) == 1
    assert len(maintenance.listing(cache, (b"\x33" * 32).hex()[:8])) == 5
    assert maintenance.listing(cache, "nobody") == []


def test_a_sound_cache_is_left_alone(cache: Path):
    before = files(cache)
    assert maintenance.verify(cache) == []
    assert files(cache) == before


def damage(cache: Path, kind: str) -> None:
    """Do one kind of harm to a directory nobody uses."""
    directory = CacheDirectory(cache)
    first, second = files(cache)[:2]
    index = directory.index / "data.mdb"
    if kind == "data flipped":
        data = bytearray(first.read_bytes())
        data[-7] ^= 1
        first.write_bytes(data)
    elif kind == "file cut":
        os.truncate(first, 5000)
    elif kind == "file gone":
        first.unlink()
    elif kind == "file under another's name":
        shutil.copy(second, first)
    elif kind == "foreign file":
        (first.parent / "notes.txt").write_text("hello")
    elif kind == "in the wrong folder":
        (first.parent.parent / "zz").mkdir()
        first.rename(first.parent.parent / "zz" / first.name)
    elif kind == "index gone":
        shutil.rmtree(directory.index)
    elif kind == "index damaged":
        index.write_bytes(os.urandom(index.stat().st_size))
    elif kind == "entry lost":
        opened = open_index(directory)
        with opened.write() as transaction:
            transaction.remove(next(name for name, _ in transaction.records()))
        opened.close()
        directory.leave()
    elif kind == "counter wrong":
        opened = open_index(directory)
        meta = opened.env.open_db(b"meta", create=False)
        with opened.env.begin(write=True) as raw:
            raw.put(b"used", bytes(8), db=meta)
        opened.close()
        directory.leave()
        directory.clean_mark.write_text(directory.index_state())


@pytest.mark.parametrize(
    ("kind", "blocks"),
    [
        ("data flipped", 14),
        ("file cut", 14),
        ("file gone", 14),
        ("file under another's name", 14),
        ("foreign file", 15),
        ("in the wrong folder", 14),
        ("index gone", 15),
        ("index damaged", 15),
        ("entry lost", 15),
        ("counter wrong", 15),
    ],
)
def test_verify_finds_and_mends(cache: Path, open_store: Open, kind: str, blocks: int):
    damage(cache, kind)
    assert maintenance.verify(cache)
    assert maintenance.verify(cache) == []
    usage = maintenance.usage(cache)
    assert sum(each.blocks for each in usage.models) == blocks
    assert usage.used_bytes == blocks * ON_DISK + usage.quarantined_bytes
    store = open_store()
    put_chain(store, 1, 10)
    assert store.flush(10)
    store.close()
    assert maintenance.usage(cache).models[0].blocks == 10
    assert maintenance.verify(cache) == []


def test_prune_to_a_size_takes_the_oldest_tails(cache: Path, open_store: Open):
    overhead = maintenance.usage(cache).index_bytes
    assert maintenance.prune(cache, max_bytes=overhead + 8 * ON_DISK) == (7, 7 * ON_DISK)
    assert {each.name: each.blocks for each in maintenance.usage(cache).models} == {"model": 3, "other": 5}
    store = open_store()
    assert store.lookup([key for key, *_ in plain_chain(1, 10, 1)]).ssd == 3


def test_prune_by_age(cache: Path):
    assert maintenance.prune(cache, unused_seconds=3600) == (0, 0)
    assert maintenance.prune(cache, unused_seconds=0) == (15, 15 * ON_DISK)
    assert files(cache) == []


def test_clear_one_model_and_all(cache: Path):
    with pytest.raises(KeyError):
        maintenance.clear(cache, "nobody")
    assert maintenance.clear(cache, "other") == (5, 5 * ON_DISK)
    assert [each.name for each in maintenance.usage(cache).models] == ["model"]
    assert maintenance.clear(cache) == (10, 10 * ON_DISK)
    assert maintenance.usage(cache).used_bytes == 0
    assert files(cache) == []


def test_a_server_notices_what_was_cleared_beside_it(tmp_path: Path, open_store: Open):
    # The same process can't open the index twice, so the files go by hand, as `clear` removes them.
    store = open_store(memory_bytes=0)
    keys = put_chain(store, 1, 5)
    assert store.flush(10)
    for path in files(tmp_path / "cache"):
        path.unlink()
    assert load(store, keys)[0] == 0
    until(lambda: store.lookup(keys).ssd == 0)
    put_chain(store, 1, 5)
    assert store.flush(10)
    assert load(store, keys)[0] == 5
