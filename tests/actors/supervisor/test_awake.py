"""A Mac stays awake while streams are open."""

import subprocess
import sys

from actors.awake import Awake


def test_it_is_held_while_there_is_work_and_let_go_after():
    started: list[subprocess.Popen[bytes]] = []

    def start() -> "subprocess.Popen[bytes]":
        started.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        return started[-1]

    awake = Awake(start)
    awake.update(False)
    assert started == []
    awake.update(True)
    awake.update(True)
    assert len(started) == 1
    assert started[0].poll() is None
    awake.update(False)
    assert started[0].poll() is not None
    assert started[0].stdin is not None
    started[0].stdin.close()
    awake.update(False)


def test_without_caffeinate_nothing_happens():
    awake = Awake(lambda: None)
    awake.update(True)
    awake.update(False)
