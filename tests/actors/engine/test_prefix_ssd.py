"""Prefixes from the SSD in the engine: after a restart, beside memory, bad files, and every kind of cache."""

import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from actors.engine.block_cuts import PackedBlock
from actors.engine.model import Model
from actors.engine.prefix import worth_loading
from actors.engine.row_memory import row_bytes
from actors.engine.scheduler import Limits
from cache_store.ssd import SsdStore
from cache_store.store import PrefixStore

Store = PrefixStore[PackedBlock]


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Callable[..., Store]]:
    """Opens a store on the test's directory, as an engine that starts does; the one before is closed, all written."""
    opened: list[Store] = []

    def open_(memory_bytes: int = 64 << 20) -> Store:
        if opened:
            end(opened[-1])
        ssd = SsdStore(tmp_path / "prefix", write_bytes_per_second=1e12)
        store: Store = PrefixStore(memory_bytes=memory_bytes, ssd=ssd)
        store.set_model(b"m" * 32, "model")
        opened.append(store)
        until = time.monotonic() + 20
        while not ssd.ready:
            assert time.monotonic() < until
            time.sleep(0.005)
        return store

    yield open_
    if opened:
        end(opened[-1])


@pytest.fixture(autouse=True)
def loading_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine's disk is at the moment."""
    monkeypatch.setattr("actors.engine.prefix.worth_loading", lambda *_: True)


def end(store: Store) -> None:
    assert store.flush(20.0)
    store.close()


def prompt(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(10, 512) for _ in range(length)]


KINDS = [("plain", None), ("sliding", None), ("plain", 300), ("recurrent", None), ("list", None), ("hybrid", None)]
KINDS += [("quantized", None), ("chunked", None)]


@pytest.mark.parametrize(("kind", "window"), KINDS)
def test_after_a_restart_the_tokens_are_those_of_a_cold_run(
    kind: str, window: int | None, kind_model, make_request, start_run, open_store
) -> None:
    model = kind_model(kind, window)
    requests = [
        make_request(rid, prompt(length), 6, temperature=0.8 * (rid % 2)) for rid, length in enumerate((1100, 513))
    ]
    cold = start_run(model).all(requests)
    start_run(model, store=open_store()).all(requests)
    store = open_store()
    warm = start_run(model, store=store)
    assert warm.all(requests[:1])[0] == cold[0]
    assert warm.cached[0] == 1024
    stats = warm.engine.stats.prefix
    assert (stats.ssd_tokens, stats.memory_tokens, stats.faults) == (1024, 0, 0)
    again = start_run(model, store=store).all(requests)
    assert again == cold


def test_memory_and_ssd_make_one_hit(model: Model, make_request, start_run, open_store) -> None:
    ids = prompt(1500)
    cold = start_run(model, store=open_store()).all([make_request(0, ids, 4)])
    store = open_store()
    run = start_run(model, store=store)
    run.all([make_request(1, ids[:600], 4)])
    run.all([make_request(0, ids, 4)])
    assert run.cached == {1: 512, 0: 1280}
    assert run.tokens[0] == cold[0]
    stats = run.engine.stats.prefix
    assert (stats.ssd_tokens, stats.memory_tokens) == (512 + 768, 512)


def test_many_that_want_one_prefix_from_the_ssd_read_it_once(model: Model, make_request, start_run, open_store) -> None:
    requests = [make_request(rid, prompt(1100) + prompt(9, rid), 4) for rid in range(6)]
    cold = start_run(model, store=open_store()).all(requests)
    run = start_run(model, store=open_store())
    assert run.all(requests) == cold
    assert run.cached == dict.fromkeys(range(6), 1024)
    assert run.engine.stats.prefix.ssd_tokens == 1024


def test_a_bad_file_is_computed_again(model: Model, make_request, start_run, open_store, tmp_path: Path) -> None:
    ids = prompt(1100)
    cold = start_run(model, store=open_store()).all([make_request(0, ids, 4)])
    store = open_store()
    for path in (tmp_path / "prefix").rglob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-100] ^= 1
        path.write_bytes(data)
    run = start_run(model, store=store)
    assert run.all([make_request(0, ids, 4)]) == cold
    assert run.cached == {}
    assert run.engine.stats.prefix.faults > 0


def test_rows_that_leave_while_they_are_loaded_leave_nothing_behind(
    model: Model, make_request, start_run, open_store
) -> None:
    ids = prompt(4000)
    start_run(model, store=open_store()).all([make_request(0, ids, 2)])
    store = open_store()
    run = start_run(model, store=store)
    for rid in range(3):
        run.engine.submit(make_request(rid, ids, 2))
        run.turn()
        run.engine.abort([rid])
        run.turn()
    run.engine.submit(make_request(9, ids, 2))
    run.turn()
    run.engine.reset()
    run.all([make_request(10, ids, 2)])
    assert run.cached[10] == 3840
    assert not run.engine._prefix._restoring
    assert all(entry.refs == 0 for entry in store._pool._entries.values())


def test_a_load_that_never_ends_is_not_waited_for(
    model: Model, make_request, start_run, open_store, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = prompt(1100)
    cold = start_run(model, store=open_store()).all([make_request(0, ids, 4)])
    monkeypatch.setattr("actors.engine.prefix.PATIENCE_S", 0.0)
    monkeypatch.setattr("cache_store.readers.Readers.start", lambda *_: None)
    run = start_run(model, store=open_store())
    run.engine._prefix._speed = lambda: 1e9
    assert run.all([make_request(0, ids, 4)]) == cold
    assert run.cached == {}
    assert run.all([make_request(1, ids, 4)])[1] == cold[0]
    assert run.cached == {1: 1024}


def test_a_slow_disk_is_tried_again_now_and_then(
    model: Model, make_request, start_run, open_store, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [make_request(rid, prompt(600, rid), 2) for rid in range(4)]
    start_run(model, store=open_store()).all(requests)
    monkeypatch.setattr("actors.engine.prefix.worth_loading", lambda *_: False)
    run = start_run(model, store=open_store())
    now = 1000.0
    run.engine._prefix._clock = lambda: now
    for each in requests[:3]:
        run.all([each])
    now += 30.0
    run.all([requests[3], make_request(4, prompt(600, 1), 2)])
    # The first, the one after half a minute, and what was computed because reading did not pay.
    assert run.cached == {0: 512, 3: 512, 4: 512}


def test_parked_rows_go_on_from_their_blocks(model: Model, make_request, start_run, open_store) -> None:
    requests = [make_request(rid, prompt(300, rid), 230) for rid in range(4)]
    free = start_run(model).all(requests)
    size = partial(row_bytes, model.row_memory)
    # Nothing is left in memory when a row is parked.
    tight = start_run(model, Limits(cache_bytes=size(2400), row_bytes=size), store=open_store())
    assert tight.all(requests) == free
    stats = tight.engine.stats
    assert stats.parked > 0
    assert stats.prefilled < 4 * 300 + stats.parked * 300
    assert stats.prefix.ssd_tokens + stats.prefix.memory_tokens > 0


def test_loading_has_to_pay() -> None:
    assert worth_loading(12_000_000, 0.0, 1e9)
    assert worth_loading(12_000_000, 1e9, 300)
    assert not worth_loading(12_000_000, 1e6, 300)
