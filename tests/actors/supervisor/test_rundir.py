"""Run directories: names are taken once, and what dead instances left is swept."""

import subprocess
import sys
import tempfile

import pytest

from actors.rundir import NameTaken, RunDirectory
from protocol.endpoints import ServerRecord, find_server, record_path, run_root

HOLD = "import sys; from actors.rundir import RunDirectory; d = RunDirectory.create(sys.argv[1]); \
print(d.path, flush=True); sys.stdin.read()"


@pytest.fixture(autouse=True)
def _home(monkeypatch):
    # Directly below the temporary folder: socket paths must be short.
    with tempfile.TemporaryDirectory(prefix="cb-") as home:
        monkeypatch.setenv("CALLBOARD_HOME", home)
        yield


def hold(name):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    return process, process.stdout.readline().strip()


def end(process):
    process.kill()
    process.communicate()


def test_a_name_is_taken_once_and_free_again_after_a_clean_end():
    first = RunDirectory.create("a")
    assert first.path.stat().st_mode & 0o777 == 0o700
    with pytest.raises(NameTaken, match=r"'a'.*--name"):
        RunDirectory.create("a")
    other = RunDirectory.create("b")
    assert other.path != first.path
    first.remove()
    assert not first.path.exists()
    RunDirectory.create("a").remove()
    other.remove()
    assert list(run_root().iterdir()) == []


def test_what_a_killed_instance_left_is_swept_and_its_name_is_free():
    process, _ = hold("a")
    record_path("a").write_bytes(b"{}")
    with pytest.raises(NameTaken):
        RunDirectory.create("a")
    end(process)
    again = RunDirectory.create("a")
    names = {entry.name for entry in run_root().iterdir()}
    assert names == {again.path.name, "a.lock"}
    again.remove()


def test_a_living_instance_is_left_alone():
    process, path = hold("a")
    RunDirectory.create("b").remove()
    names = {entry.name for entry in run_root().iterdir()}
    assert names == {path.rsplit("/", 1)[1], "a.lock"}
    end(process)


def test_clients_find_a_published_record():
    import os

    directory = RunDirectory.create("a")
    directory.publish(ServerRecord("a", os.getpid(), "ipc:///x", "http://x", 1, str(directory.path)))
    assert find_server("a").endpoint == "ipc:///x"
    directory.remove()
    assert not record_path("a").exists()


def test_a_home_with_a_long_path_is_refused_at_once(monkeypatch, tmp_path):
    monkeypatch.setenv("CALLBOARD_HOME", str(tmp_path / ("x" * 100)))
    with pytest.raises(ValueError, match="shorter path"):
        RunDirectory.create("a")


def test_a_record_that_cant_be_written_can_be_tried_again():
    held = RunDirectory.create("a")
    record = ServerRecord("a", 1, "ipc:///x", "http://x", 1, str(held.path))
    (held.path / "record").mkdir()  # stands for a full disk
    assert not held.publish(record)
    (held.path / "record").rmdir()
    assert held.publish(record)
    assert record_path("a").exists()
    held.remove()
