import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from server.models.cache import built_once, cache_root


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CALLBOARD_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def never() -> None:
    raise AssertionError("nobody else builds")


def names(folder: Path) -> list[str]:
    """What lies in the cache besides lock files."""
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has a cache folder of its own")
def test_root_follows_xdg_unless_it_is_relative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CALLBOARD_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", "/somebody")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_root() == Path("/elsewhere/callboard")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_root() == Path("/somebody/.cache/callboard")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path("/somebody/.cache/callboard")


def test_root_of_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CALLBOARD_CACHE_DIR", raising=False)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setenv("HOME", "/Users/somebody")
    assert cache_root() == Path("/Users/somebody/Library/Caches/callboard")


def test_override_goes_before_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    monkeypatch.setenv("CALLBOARD_CACHE_DIR", "/mine")
    assert cache_root() == Path("/mine")


def test_builds_once(cache: Path) -> None:
    builds = []

    def build(folder: Path) -> None:
        builds.append(folder)
        (folder / "file").write_text("whole")

    first = built_once("thing", build, waiting=never)
    assert built_once("thing", build, waiting=never) == first == cache / "thing"
    assert (first / "file").read_text() == "whole"
    assert len(builds) == 1
    assert names(cache) == ["thing"]


def test_a_failed_build_leaves_nothing(cache: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "file").write_text("half")
        raise ValueError("broken off")

    with pytest.raises(ValueError, match="broken off"):
        built_once("thing", build, waiting=never)
    assert names(cache) == []


BUILDER = """
import sys
from server.models.cache import built_once

def build(folder):
    (folder / "file").write_text("half")
    print("building", flush=True)
    sys.stdin.readline()
    (folder / "file").write_text("whole")

built_once("thing", build, waiting=lambda: print("waiting", flush=True))
print("done", (built_once("thing", None, waiting=None) / "file").read_text(), flush=True)
"""


def start_builder() -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-P", "-c", BUILDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_two_processes_build_once(cache: Path) -> None:
    with start_builder() as first:
        assert first.stdout is not None
        assert first.stdin is not None
        assert first.stdout.readline() == "building\n"
        with start_builder() as second:
            assert second.stdout is not None
            assert second.stdout.readline() == "waiting\n"
            assert names(cache) != ["thing"]
            first.stdin.write("\n")
            first.stdin.flush()
            assert first.stdout.readline() == "done whole\n"
            assert second.stdout.readline() == "done whole\n"
    assert names(cache) == ["thing"]


def test_what_a_killed_builder_left_is_swept(cache: Path) -> None:
    with start_builder() as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == "building\n"
        os.kill(killed.pid, signal.SIGKILL)
    assert len(names(cache)) == 1
    assert not (cache / "thing").exists()
    built_once("thing", lambda folder: (folder / "file").touch(), waiting=never)
    assert names(cache) == ["thing"]
