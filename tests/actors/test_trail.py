"""The engine's trail: which rows a dead engine was at."""

import os
import signal
import subprocess
import sys

from actors.trail import Trail, read_trail, trail_path


def test_new_rows_are_on_it_until_two_turns_have_passed(tmp_path):
    trail = Trail(tmp_path, 7)
    trail.took(1)
    trail.took(2)
    assert _copy(tmp_path) == {1, 2}
    trail.turn([1])
    assert _copy(tmp_path) == {1, 2}
    trail.took(3)
    assert _copy(tmp_path) == {1, 2, 3}
    trail.turn([2])
    assert _copy(tmp_path) == {1, 2, 3}
    trail.turn([])
    assert _copy(tmp_path) == {1, 2}
    trail.turn([])
    assert _copy(tmp_path) == {2}
    trail.turn([])
    assert _copy(tmp_path) == set()


def _copy(folder):
    """What the trail says, without forgetting it."""
    data = trail_path(folder, 7).read_bytes()
    other = folder / "copy"
    other.mkdir(exist_ok=True)
    trail_path(other, 7).write_bytes(data)
    return read_trail(other, 7)


def test_it_outlives_a_kill(tmp_path):
    code = (
        "import os, signal, sys; from pathlib import Path; from actors.trail import Trail\n"
        "trail = Trail(Path(sys.argv[1]), 7); trail.took(5); trail.took(2**40); os.kill(os.getpid(), signal.SIGKILL)"
    )
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=dict(os.environ))
    assert run.returncode == -signal.SIGKILL
    assert read_trail(tmp_path, 7) == {5, 2**40}
    assert read_trail(tmp_path, 7) is None  # it is read once


def test_a_missing_or_broken_one_tells_nothing(tmp_path):
    assert read_trail(tmp_path, 7) is None
    for data in (b"", b"abc", b"\x05" + bytes(7)):
        trail_path(tmp_path, 7).write_bytes(data)
        assert read_trail(tmp_path, 7) is None
