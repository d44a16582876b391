"""From the settings to a store whose blocks have a name: off, memory alone, and with a model that changes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import structlog.testing

from actors.config import CastConfig
from actors.engine.actor import flush
from actors.engine.model import Model
from actors.engine.prefix_store import StoreOpening
from cache_store.store import PrefixStore


def config(model: Path, **settings: object) -> CastConfig:
    return CastConfig(str(model), "tiny", "/run", **settings)


def named(opening: StoreOpening, monkeypatch: pytest.MonkeyPatch, model: Model) -> bytes:
    """The fingerprint that the store is given."""
    names: list[bytes] = []
    monkeypatch.setattr(PrefixStore, "set_model", lambda self, fingerprint, name: names.append(fingerprint))
    opening.set_memory(5 << 20)
    store = opening.open(model.block_layout, model.cache_kinds)
    assert store is not None
    opening.wait(30.0)
    assert not opening.pending
    store.close()
    (name,) = names
    return name


def test_off_means_no_store(model: Model, tiny_model: Path) -> None:
    opening = StoreOpening(config(tiny_model, prefix_cache=False, ssd_cache_dir="/nowhere"))
    opening.set_memory(1000)
    assert opening.memory_bytes == opening.queue_bytes == 0
    assert opening.open(model.block_layout, []) is None
    assert not opening.pending


def test_unknown_caches_mean_no_store(tiny_model: Path, tmp_path: Path) -> None:
    opening = StoreOpening(config(tiny_model, ssd_cache_dir=str(tmp_path / "prefix")))
    with structlog.testing.capture_logs() as logs:
        assert opening.open(None, ["OtherCache"]) is None
        opening.wait(0.1)
        opening.poll()
    assert not opening.pending
    (line,) = logs
    assert (line["log_level"], line["caches"]) == ("warning", ["OtherCache"])
    assert line["event"] == "no prefix is reused: this kind of cache can't be cut into blocks"
    assert not (tmp_path / "prefix").exists()


@pytest.mark.parametrize(
    ("settings", "free", "bytes_"),
    [
        ({"ssd_cache": False}, 1000, 200),
        ({"cache_memory_percent": 0.5}, 1000, 500),
        ({"cache_memory_mb": 3}, 1 << 30, 3 << 20),
        ({"cache_memory_mb": 3}, 1 << 20, 1 << 20),
    ],
)
def test_memory_is_a_part_or_a_number(tiny_model: Path, settings: dict, free: int, bytes_: int) -> None:
    opening = StoreOpening(config(tiny_model, **settings))
    opening.set_memory(free)
    assert (opening.memory_bytes, opening.queue_bytes) == (bytes_, 0)


def test_what_waits_for_the_ssd_is_a_small_part_of_memory(tiny_model: Path, tmp_path: Path) -> None:
    opening = StoreOpening(config(tiny_model, ssd_cache_dir=str(tmp_path / "prefix")))
    opening.set_memory(1600)
    assert (opening.memory_bytes, opening.queue_bytes) == (300, 100)
    opening.set_memory(1 << 40)
    assert opening.queue_bytes == 256 << 20


def test_the_name_follows_what_is_in_the_folder_and_the_options(
    model: Model, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    base = config(folder, ssd_cache_dir=str(tmp_path / "prefix"))

    def name(settings: CastConfig) -> bytes:
        return named(StoreOpening(settings), monkeypatch, model)

    first = name(base)
    assert name(base) == first
    assert name(config(tiny_model, ssd_cache_dir=str(tmp_path / "prefix"))) == first
    assert name(msgspec.structs.replace(base, kv_bits=8)) != first
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"rope_theta": 5.0}))
    assert name(base) != first


class SlowDisk(PrefixStore):
    """Its flush reports bytes left half a second apart, on a clock of its own."""

    def __init__(self, clock: list[float], *, ends: bool) -> None:
        super().__init__(memory_bytes=1000)
        self._clock = clock
        self._ends = ends

    def flush(self, seconds: float, progress: Callable[[int], None] | None = None) -> bool:
        assert progress is not None
        for left in range(9, -1, -1):
            self._clock[0] += 0.5
            progress(left << 20)
        return self._ends


@pytest.mark.parametrize(
    ("ends", "last"),
    [
        (True, {"event": "prefixes are on the SSD", "seconds": 5.0, "log_level": "info"}),
        (False, {"event": "prefixes were left unwritten", "at_most_seconds": 5.0, "log_level": "warning"}),
    ],
)
def test_a_long_flush_tells_how_much_is_left(ends: bool, last: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("actors.engine.actor.time", SimpleNamespace(monotonic=lambda: clock[0]))
    with structlog.testing.capture_logs() as logs:
        flush(SlowDisk(clock, ends=ends), 5.0)
    assert logs == [
        {"event": "writing prefixes to the SSD", "left_mb": 6, "log_level": "info"},
        {"event": "writing prefixes to the SSD", "left_mb": 2, "log_level": "info"},
        last,
    ]


def test_a_flush_without_a_disk_is_done_at_once() -> None:
    flush(PrefixStore(memory_bytes=1000), 0.0)
