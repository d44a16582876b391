"""The directory: who is alive, what is swept, what is refused, and what an unclean end leads to."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
import structlog.testing
from stores import FINGERPRINT, Open, put_chain

from cache_store import directory as module
from cache_store import index as index_module
from cache_store import maintenance, opening
from cache_store.directory import CacheDirectory, LockTimeout, Refused, charged, filesystem_of
from cache_store.index import Index
from cache_store.opening import close_index, default_limit, open_index
from cache_store.ssd import SsdStore


def opened(root: Path, limit: int | None = None) -> tuple[CacheDirectory, Index]:
    directory = CacheDirectory(root)
    return directory, open_index(directory, limit)


def test_default_limit():
    assert default_limit(free=500 * 10**9, held=0) == 50 * 10**9
    assert default_limit(free=400 * 10**9, held=30 * 10**9) == 70 * 10**9
    assert default_limit(free=4 * 10**12, held=0) == 100 * 10**9


def test_sizes_are_charged_in_pages():
    assert [charged(size) for size in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]


def test_network_file_systems_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert filesystem_of(tmp_path / "not" / "there")
    monkeypatch.setattr(module, "filesystem_of", lambda path: "nfs4")
    with pytest.raises(Refused, match="network"):
        CacheDirectory(tmp_path / "cache").make()
    with structlog.testing.capture_logs() as logs:
        ssd = SsdStore(tmp_path / "cache", retry_seconds=0.0)
        ssd.close()
    assert [line["log_level"] for line in logs] == ["warning"]
    assert not ssd.ready


def test_the_limit_is_kept_and_a_change_is_logged(tmp_path: Path):
    directory, index = opened(tmp_path)
    with index.read() as view:
        assert view.limit == default_limit(directory.free_bytes(), 0) or view.limit > 0
        first = view.limit
    close_index(directory, index)
    with structlog.testing.capture_logs() as logs:
        directory, index = opened(tmp_path, 10**9)
        close_index(directory, index)
    assert ["limit" in line["event"] for line in logs] == [True]
    directory, index = opened(tmp_path)
    with index.read() as view:
        assert view.limit == 10**9 != first
    close_index(directory, index)


def test_a_lower_limit_is_kept_at_once(tmp_path: Path, open_store: Open):
    store = open_store(max_bytes=1 << 30)
    put_chain(store, 1, 50)
    assert store.flush(10)
    store.close()
    store = open_store(max_bytes=5 << 20)
    ssd = store.stats().ssd
    assert ssd.limit_bytes == 5 << 20
    assert 0 < ssd.blocks < 50
    assert sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*")) < 5 << 20


def test_owners_live_as_long_as_their_process(tmp_path: Path):
    directory, index = opened(tmp_path)
    script = (
        "import sys, os; from pathlib import Path; from cache_store.directory import CacheDirectory\n"
        "d = CacheDirectory(Path(sys.argv[1]))\n"
        "with d.locked(5): d.enter()\n"
        "d.temporary_path().write_bytes(b'half')\n"
        "print(d.owner, flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    owner = child.stdout.readline().strip()
    with directory.locked(5):
        assert directory.others() == ([owner], [])
    child.kill()
    child.communicate()
    with directory.locked(5):
        assert directory.others() == ([], [owner])
        assert len(list(directory.temporary.iterdir())) == 1
    with index.write() as transaction:
        assert opening.bury_dead(directory, transaction)
    assert list(directory.temporary.iterdir()) == []
    assert directory.others() == ([], [])
    close_index(directory, index)


def test_what_a_dead_process_reserved_and_published_is_settled(tmp_path: Path, open_store: Open):
    store = open_store()
    (key,) = put_chain(store, 1, 1)
    assert store.flush(10)
    store.close()
    directory, index = opened(tmp_path / "cache")
    # As if a process had died between publishing and entering: no entry, but a reservation.
    with index.write() as transaction:
        transaction.remove(FINGERPRINT + key)
        before = transaction.used
        transaction.reserve([8192], ())
        assert transaction.used == before + 8192
    directory.leave()
    index.close()
    directory, index = opened(tmp_path / "cache")
    with index.read() as view:
        record = view.get(FINGERPRINT + key)
        assert record is not None
        assert view.used == before + record.size
    close_index(directory, index)


def test_the_lock_has_a_time_limit(tmp_path: Path):
    directory = CacheDirectory(tmp_path)
    directory.make()
    holder = os.open(directory.path / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(holder, fcntl.LOCK_EX)
    with pytest.raises(LockTimeout), directory.locked(0.02):
        pass
    os.close(holder)
    with directory.locked(0.02) as died:
        assert not died


def test_lower_layout_versions_are_removed_others_stay(tmp_path: Path):
    for folder in ("v0", "v999", "other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "file").write_bytes(b"x")
    directory, index = opened(tmp_path)
    close_index(directory, index)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "v1", "v999"]


def test_the_index_is_checked_in_a_child_only_after_an_unclean_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    checked: list[Path] = []

    def is_sound(folder: Path) -> bool:
        checked.append(folder)
        return True

    monkeypatch.setattr(opening, "is_sound", is_sound)
    directory, index = opened(tmp_path)
    close_index(directory, index)
    directory, index = opened(tmp_path)
    assert checked == []
    index.close()  # no orderly end
    directory.leave()
    directory, index = opened(tmp_path)
    assert checked == [directory.index]
    close_index(directory, index)
    (directory.index / "data.mdb").touch()
    directory, index = opened(tmp_path)
    assert len(checked) == 2
    close_index(directory, index)


def test_where_locks_do_not_recover_a_death_inside_the_lock_leads_to_a_new_index(
    tmp_path: Path, open_store: Open, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(index_module, "LOCKS_RECOVER", False)
    monkeypatch.setattr(opening, "LOCKS_RECOVER", False)
    store = open_store()
    put_chain(store, 1, 3)
    assert store.flush(10)
    directory = CacheDirectory(tmp_path / "cache")
    made: list[str] = []
    rebuild = opening.rebuild
    monkeypatch.setattr(opening, "rebuild", lambda directory: made.append("anew") or rebuild(directory))
    (directory.path / "lock").write_bytes(b"held")
    put_chain(store, 2, 3)
    assert store.flush(10)
    assert made == ["anew"]
    assert store.stats().ssd.blocks == 6
    store.close()
    (directory.path / "lock").write_bytes(b"held")
    usage = maintenance.usage(tmp_path / "cache")
    assert usage.models[0].blocks == 6
    assert made == ["anew", "anew"]
    assert (directory.path / "lock").stat().st_size == 0
