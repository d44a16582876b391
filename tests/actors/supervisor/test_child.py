"""Child processes: their log is passed on, their end explained, and they never outlive their parent."""

import json
import os
import subprocess
import sys
import time

from actors.child import Child, describe_exit

SURVIVOR = """
import os, sys, time
from protocol.control import hold_lifeline
hold_lifeline(int(sys.argv[-1]))
print(os.getpid(), flush=True)
while True: sum(range(1000))
"""
PARENT = """
import os, sys, time
from actors.child import Child
child = Child([sys.executable, "-c", sys.argv[1]], dict(os.environ))
time.sleep(600)
"""


def gone(pid, seconds=5.0):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


def test_a_busy_child_ends_with_a_parent_killed_by_sigkill():
    parent = subprocess.Popen([sys.executable, "-c", PARENT, SURVIVOR], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    assert gone(child)


def test_the_last_words_of_a_crash_are_kept(capfdbinary):
    code = "import os, sys; print('{\"event\": \"x\"}', 'native abort', sep='\\n', file=sys.stderr); os.abort()"
    child = Child([sys.executable, "-c", code], dict(os.environ), actor="engine", epoch=7)
    until = time.monotonic() + 10
    while child.exit_code() is None and time.monotonic() < until:
        time.sleep(0.01)
    assert describe_exit(child.exit_code()) == "was ended by SIGABRT"
    assert child.last_words() == "native abort"
    child.close()
    ours, native = capfdbinary.readouterr().err.splitlines()
    assert ours == b'{"event": "x"}'
    line = json.loads(native)
    assert (line["event"], line["actor"], line["pid"], line["epoch"]) == ("native abort", "engine", child.pid, 7)


def test_what_a_child_left_behind_does_not_hold_us_up():
    code = "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, file=sys.stderr)"
    child = Child([sys.executable, "-c", code], dict(os.environ))
    until = time.monotonic() + 10
    while child.exit_code() is None and time.monotonic() < until:
        time.sleep(0.01)
    left = int(child.last_words())
    child.close()
    os.kill(left, 9)  # it was still there
    child._pump.join(10)


def test_exits_are_described_for_people():
    assert describe_exit(3) == "exited with code 3"
    assert "lack of memory" in describe_exit(-9)
