"""The facade with a real directory: hits by tier, restarts, eviction while writes are under way."""

import shutil
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import FINGERPRINT, Open, Store, load, put_chain, until

from bench.plain_blocks import PlainBlock, content, fill, plain_chain
from cache_store.block import Read
from cache_store.block_file import Header
from cache_store.directory import CacheDirectory
from cache_store.keys import snapshot_key
from cache_store.publishing import publish
from cache_store.ssd import SsdStore
from cache_store.store import Hit, PrefixStore, Tier
from cache_store.write_queue import Write

SIZE = 100_000


class Gate:
    """Writes block files only while it is open."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.order: list[bytes] = []

    def __call__(self, directory: CacheDirectory, fingerprint: bytes, write: Write, header: bytes) -> Header:
        assert self.open.wait(10)
        self.order.append(write.key)
        return publish(directory, fingerprint, write, header)


def flush(store: Store) -> None:
    assert store.flush(10)


def test_a_block_is_found_at_once_and_after_a_restart(open_store: Open):
    store = open_store()
    keys = put_chain(store, 1, 5)
    assert store.lookup(keys) == Hit(5, 0)
    flush(store)
    store.close()
    again = open_store()
    assert again.lookup(keys) == Hit(0, 5)
    assert again.where(keys[3]) is Tier.SSD
    done, data = load(again, keys)
    assert done == 5
    assert data == [content(key, SIZE) for key in keys]


def test_memory_only(open_store: Open):
    store: Store = PrefixStore(memory_bytes=1 << 20)
    keys = put_chain(store, 1, 3)
    store.set_model(FINGERPRINT, "m")
    store.poll()
    assert store.lookup([*keys, bytes(32)]) == Hit(3, 0)
    ticket = store.load([Read(keys[0], "plain", [memoryview(bytearray(SIZE))])])
    assert ticket.finished
    assert ticket.failed
    assert store.flush(0)
    assert store.stats().memory_blocks == 3
    store.close()


def test_what_is_put_before_the_model_is_known_is_written_later(tmp_path: Path):
    ssd = SsdStore(tmp_path, write_bytes_per_second=1e12)
    store: Store = PrefixStore(memory_bytes=64 << 20, ssd=ssd)
    keys = put_chain(store, 1, 20)
    until(lambda: ssd.ready)
    store.poll()
    assert store.stats().ssd.queued_blocks == 0
    store.set_model(FINGERPRINT, "m")
    flush(store)
    assert store.stats().ssd.blocks == 20
    assert store.lookup(keys) == Hit(20, 0)
    store.close()


def test_a_block_evicted_while_it_waits_is_readable_from_memory(open_store: Open):
    gate = Gate()
    store = open_store(memory_bytes=3 * SIZE, publish=gate)
    keys = put_chain(store, 1, 3)
    others = put_chain(store, 2, 3)
    assert store.lookup(keys) == Hit(3, 0)
    assert store.lookup(others) == Hit(3, 0)
    assert [block.data for block in store.acquire(keys)] == [content(key, SIZE) for key in keys]
    gate.open.set()
    flush(store)
    assert store.lookup(keys) == Hit(3, 0), "what is in use stays"
    assert store.lookup(others) == Hit(0, 3)
    assert [block.data for block in store.acquire(keys)] == [content(key, SIZE) for key in keys]
    assert store.acquired == 6
    store.release(keys)
    assert store.acquired == 3
    store.release(keys)
    assert store.acquired == 0
    with pytest.raises((KeyError, ValueError)):
        store.release(keys)
    stats = store.stats()
    assert stats.memory_bytes <= 3 * SIZE
    assert (stats.unwritten_blocks, stats.ssd.written_blocks) == (0, 6)


def test_a_block_in_use_that_has_no_room_stays_until_it_is_released(open_store: Open):
    gate = Gate()
    store = open_store(memory_bytes=SIZE, publish=gate)
    ours = put_chain(store, 1, 2)
    assert store.lookup(ours) == Hit(2, 0)
    store.acquire(ours)
    gate.open.set()
    flush(store)
    assert store.lookup(ours) == Hit(2, 0)
    assert store.stats().memory_blocks == 1
    store.release(ours)
    assert store.lookup(ours) == Hit(1, 1)


def test_a_full_queue_leaves_blocks_in_memory_and_counts_what_is_lost(open_store: Open):
    gate = Gate()
    store = open_store(memory_bytes=4 * SIZE, queue_bytes=2 * SIZE, publish=gate)
    keys = put_chain(store, 1, 4)
    assert store.stats().ssd.queued_blocks == 2
    put_chain(store, 2, 1)
    assert store.stats().unwritten_blocks == 1
    assert store.lookup(keys).memory == 3
    gate.open.set()
    flush(store)
    assert store.stats().ssd.written_blocks == 4


def test_urgent_blocks_are_written_first(open_store: Open):
    gate = Gate()
    store = open_store(publish=gate)
    later = put_chain(store, 2, 20)
    urgent = []
    for key, parent, ids, block in plain_chain(3, 2, SIZE):
        store.put(key, parent, ids, block, urgent=True)
        urgent.append(key)
    gate.open.set()
    flush(store)
    # A batch of others may have been taken already.
    assert gate.order.index(urgent[0]) < gate.order.index(later[-1])
    assert gate.order.index(urgent[1]) == gate.order.index(urgent[0]) + 1


def test_what_is_on_the_ssd_is_not_written_again(open_store: Open):
    store = open_store()
    put_chain(store, 1, 3)
    flush(store)
    store.close()
    again = open_store()
    keys = put_chain(again, 1, 3)
    flush(again)
    assert again.lookup(keys) == Hit(3, 0)
    assert again.stats().ssd.written_blocks == 0
    assert not again.put(keys[0], None, b"", PlainBlock(b"other"))
    assert again.acquire(keys[:1])[0].data == content(keys[0], SIZE)


def test_a_snapshot_is_stored_beside_its_block(open_store: Open):
    store = open_store()
    keys = put_chain(store, 1, 2)
    snapshot = snapshot_key(keys[1])
    store.put(snapshot, keys[1], b"", PlainBlock(b"state"), snapshot=True)
    assert store.where(snapshot) is Tier.MEMORY
    flush(store)
    store.close()
    again = open_store()
    assert again.where(snapshot) is Tier.SSD
    assert load(again, [snapshot], size=5) == (1, [b"state"])


def test_a_damaged_block_keeps_the_good_ones_before_it(open_store: Open, tmp_path: Path):
    store = open_store()
    keys = put_chain(store, 1, 6)
    flush(store)
    store.close()
    path = CacheDirectory(tmp_path / "cache").block_path(FINGERPRINT, keys[3])
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    store = open_store()
    done, loaded = load(store, keys)
    assert done == 3
    assert loaded == [content(key, SIZE) for key in keys[:3]]
    until(lambda: store.lookup(keys) == Hit(0, 3))
    assert store.stats().ssd.faults == 1
    put_chain(store, 1, 6)
    flush(store)
    store.close()
    assert open_store().lookup(keys) == Hit(0, 6)


def test_a_block_whose_file_is_gone_is_forgotten(open_store: Open, tmp_path: Path):
    store = open_store(memory_bytes=0)
    keys = put_chain(store, 1, 2)
    flush(store)
    CacheDirectory(tmp_path / "cache").block_path(FINGERPRINT, keys[0]).unlink()
    assert load(store, keys)[0] == 0
    until(lambda: store.lookup(keys) == Hit(0, 0))
    until(lambda: store.stats().ssd.blocks == 1)
    assert store.stats().ssd.faults == 0


def test_a_load_of_another_layout_is_a_miss(open_store: Open):
    store = open_store(memory_bytes=0)
    keys = put_chain(store, 1, 1)
    flush(store)
    ticket = store.load([Read(keys[0], "another", [memoryview(bytearray(SIZE))])])
    until(lambda: ticket.finished)
    assert (ticket.done, ticket.failed) == (0, True)


def test_a_cancelled_load_ends(open_store: Open):
    store = open_store(memory_bytes=0, readers=1)
    keys = put_chain(store, 1, 40)
    flush(store)
    woken: list[int] = []
    memory = [bytearray(SIZE) for _ in keys]
    reads = [Read(key, "plain", fill(data)) for key, data in zip(keys, memory, strict=True)]
    ticket = store.load(reads, wake=lambda: woken.append(1))
    ticket.cancel()
    until(lambda: ticket.finished)
    assert ticket.done < 40
    assert len(woken) == 40


def test_the_budget_of_the_directory_holds_and_tails_go_first(open_store: Open, tmp_path: Path):
    limit = 6 << 20
    store = open_store(memory_bytes=0, max_bytes=limit)
    old = put_chain(store, 1, 20)
    flush(store)
    new = put_chain(store, 2, 30)
    flush(store)
    assert store.lookup(new).ssd == 30
    assert 0 < store.lookup(old).ssd < 20
    assert store.stats().ssd.blocks == store.lookup(old).ssd + 30
    files = [path.stat().st_size for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert sum(files) <= limit


def test_hits_are_counted_for_the_model(open_store: Open):
    store = open_store()
    store.count(hit_tokens=512, missed_tokens=100, ssd_tokens=256)
    stats = store.stats()
    assert (stats.memory_hit_tokens, stats.ssd_hit_tokens, stats.missed_tokens) == (512, 256, 100)


def test_memory_is_given_back_and_may_grow_again(open_store: Open):
    store = open_store(memory_bytes=10 * SIZE)
    keys = put_chain(store, 1, 10)
    store.acquire(keys[:2])
    assert store.keep_within(7 * SIZE) == 3 * SIZE
    flush(store)
    assert store.lookup(keys) == Hit(7, 3)
    assert store.keep_within(-5) == 5 * SIZE
    assert store.lookup(keys) == Hit(2, 8)
    assert store.keep_within(100 * SIZE) == 0
    assert store.stats().memory_limit_bytes == 10 * SIZE
    put_chain(store, 2, 10)
    assert store.nbytes == 10 * SIZE


def test_flush_says_what_is_left_and_gives_up_in_time(open_store: Open):
    gate = Gate()
    store = open_store(publish=gate)
    put_chain(store, 1, 3)
    left: list[int] = []
    assert not store.flush(0.05, left.append)
    assert left == [3 * SIZE]
    gate.open.set()
    assert store.flush(10, left.append)
    assert left[-1] == 0


def test_flush_tries_once_more_and_does_not_wait_for_a_directory_in_trouble(open_store: Open, tmp_path: Path):
    directory = tmp_path / "cache"
    store = open_store(directory=directory)
    put_chain(store, 1, 2)
    flush(store)
    shutil.rmtree(directory)
    directory.write_bytes(b"no folder")
    put_chain(store, 2, 2)
    until(lambda: (store.poll(), not store.stats().ssd.writing)[1])
    put_chain(store, 3, 2)
    assert not store.flush(3600)
    directory.unlink()
    flush(store)
    assert directory.is_dir()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6), st.sampled_from(["put", "use", "poll"])), max_size=40))
def test_nothing_is_ever_lost_or_wrong(tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int, str]]):
    ssd = SsdStore(tmp_path_factory.mktemp("store"), write_bytes_per_second=1e12, max_bytes=1 << 30)
    store: Store = PrefixStore(memory_bytes=5000, ssd=ssd)
    store.set_model(FINGERPRINT, "m")
    until(lambda: ssd.ready and store.stats().ssd.writing)
    put: dict[bytes, None] = {}
    for seed, blocks, step in steps:
        chain = [key for key, *_ in plain_chain(seed, blocks, 1)]
        if step == "put":
            put |= dict.fromkeys(put_chain(store, seed, blocks, size=1000))
        elif step == "use":
            keys = chain[: store.lookup(chain).memory]
            assert [block.data for block in store.acquire(keys)] == [content(key, 1000) for key in keys]
            store.release(keys)
        else:
            store.poll()
        assert all(store.where(key) for key in put)
        assert store.stats().memory_bytes <= 5000
    assert store.flush(10)
    done, data = load(store, list(put), size=1000)
    assert done == len(put)
    assert data == [content(key, 1000) for key in put]
    store.close()


def test_to_make_room_for_one_block_of_a_chain_puts_no_other_of_it_out(open_store: Open):
    first, second = plain_chain(1, 2, SIZE)
    keys = [first[0], second[0]]
    gate = Gate()
    gate.open.set()
    store = open_store(memory_bytes=SIZE, publish=gate)
    store.put(*second)
    (other,) = put_chain(store, 2, 1)
    flush(store)
    gate.open.clear()
    store.acquire([other])
    store.put(*first)
    store.release([other])
    store.put(*second)
    # Now the first is being written, and not in the pool, where the second is, which is on the SSD already.
    assert [block.data for block in store.acquire(keys)] == [content(key, SIZE) for key in keys]
    assert store.lookup(keys) == Hit(2, 0)
    gate.open.set()
    flush(store)
    assert store.lookup(keys) == Hit(2, 0)
    store.release(keys)
    assert store.acquired == 0
    assert store.lookup(keys).memory < 2
