"""`callboard cache` as a command."""

from pathlib import Path

import pytest

from bench.plain_blocks import plain_chain
from cache_store.directory import CacheDirectory
from cache_store.ssd import SsdStore
from cache_store.store import PrefixStore
from server.cli import main
from server.cli_cache import age, default_directory, size


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A directory with four blocks of a model called tiny."""
    ssd = SsdStore(tmp_path / "prefix")
    store = PrefixStore(memory_bytes=1 << 20, ssd=ssd)
    store.set_model(b"\x44" * 32, "tiny")
    for key, parent, ids, block in plain_chain(1, 4, 10_000):
        store.put(key, parent, ids, block)
    while not ssd.ready:
        store.poll()
    assert store.flush(20)
    store.close()
    return tmp_path / "prefix"


def run(cache: Path, *arguments: str) -> int:
    command, *rest = arguments
    return main(["cache", command, "--ssd-cache-dir", str(cache), *rest])


def test_stats(cache: Path, capsys: pytest.CaptureFixture[str]):
    assert run(cache, "stats") == 0
    out = capsys.readouterr().out
    assert "65.5 kB of" in out
    (line,) = (line for line in out.splitlines() if line.startswith("tiny"))
    assert line.split()[:5] == ["tiny", "444444444444", "4", "0", "65.5"]


def test_ls(cache: Path, capsys: pytest.CaptureFixture[str]):
    assert run(cache, "ls", "--lines", "3") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert "1 more" in lines[-1]
    assert run(cache, "ls", "--model", "nobody") == 0
    assert capsys.readouterr().out == ""


def test_verify_says_what_it_mended(cache: Path, capsys: pytest.CaptureFixture[str]):
    assert run(cache, "verify") == 0
    path = next(path for _, _, path in CacheDirectory(cache).block_files())
    path.write_bytes(b"junk")
    assert run(cache, "verify") == 1
    assert path.name in capsys.readouterr().out
    assert run(cache, "verify") == 0
    assert run(cache, "stats") == 0
    assert "in quarantine: 1 damaged" in capsys.readouterr().out


def test_prune_and_clear(cache: Path, capsys: pytest.CaptureFixture[str]):
    assert run(cache, "prune") == 2
    assert run(cache, "prune", "--unused", "1d") == 0
    assert "Removed 0 blocks" in capsys.readouterr().out
    assert run(cache, "clear", "--model", "nobody") == 1
    assert "nobody" in capsys.readouterr().err
    assert run(cache, "clear", "--model", "444444") == 0
    assert "Removed 4 blocks, 65.5 kB" in capsys.readouterr().out
    assert run(cache, "prune", "--max-gb", "0") == 0


def test_no_cache_and_one_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run(tmp_path / "nothing", "stats") == 0
    assert "no cache" in capsys.readouterr().out
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "index").write_text("a file")
    assert run(tmp_path, "stats") == 1
    assert "can't be used" in capsys.readouterr().err


def test_bad_ages_are_refused(cache: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        run(cache, "prune", "--unused", "soon")
    assert "90m, 12h or 30d" in capsys.readouterr().err


def test_where_it_is_by_default(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CALLBOARD_SSD_CACHE_DIR", raising=False)
    monkeypatch.setenv("CALLBOARD_CACHE_DIR", "/somewhere")
    assert default_directory() == Path("/somewhere/prefix")
    monkeypatch.setenv("CALLBOARD_SSD_CACHE_DIR", "/elsewhere")
    assert default_directory() == Path("/elsewhere")


def test_figures_for_people():
    assert [size(n) for n in (999, 1000, 1_500_000, 2_000_000_000)] == ["999 B", "1.0 kB", "1.5 MB", "2.0 GB"]
    assert [age(s) for s in (-1, 59, 60, 7200, 200_000)] == ["0s", "59s", "1m", "2h", "2d"]
