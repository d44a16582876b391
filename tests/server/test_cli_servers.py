"""`callboard stop` waits as long as the server was given, and says so when that was not enough."""

import argparse
import os
import signal
import subprocess
import sys

import psutil
import pytest

from protocol.endpoints import ServerRecord
from server import cli_servers

NOW = argparse.Namespace(all=False, names=["a"], now=False)


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> ServerRecord:
    """A server that is this process, which gets no signals."""
    found = ServerRecord("a", os.getpid(), "ipc:///x", "http://x", 1, "/nowhere", models="ipc:///h", stop_time=900.0)
    monkeypatch.setattr(cli_servers, "find_server", lambda _: found)
    return found


def test_stop_waits_as_long_as_the_server_may_take(record: ServerRecord, monkeypatch: pytest.MonkeyPatch):
    sent: list[int] = []
    waited: list[float] = []

    def wait(_: psutil.Process, seconds: float) -> str:
        waited.append(seconds)
        return ""

    monkeypatch.setattr(os, "kill", lambda _pid, number: sent.append(number))
    monkeypatch.setattr(cli_servers, "_wait_gone", wait)
    assert cli_servers.stop(NOW) == 0
    assert sent == [signal.SIGTERM]
    assert waited == [900.0 + cli_servers.LEAVE_TIME]


@pytest.mark.usefixtures("record")
def test_a_server_that_stays_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(os, "kill", lambda *_: None)
    monkeypatch.setattr(cli_servers, "LEAVE_TIME", -900.0)
    assert cli_servers.stop(NOW) == 1
    assert capsys.readouterr().err == f"callboard: a (pid {os.getpid()}) did not stop: it still runs after 0 s\n"


def test_one_that_nobody_has_reaped_has_stopped():
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as child:
        process = psutil.Process(child.pid)
        assert cli_servers._wait_gone(process, 0.0)
        assert child.stdin is not None
        child.stdin.close()
        assert cli_servers._wait_gone(process, 30.0) == ""
        assert process.status() == psutil.STATUS_ZOMBIE
