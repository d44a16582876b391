"""`callboard stop` waits as long as the server was given."""

import argparse
import os
import signal

import psutil
import pytest

from protocol.endpoints import ServerRecord
from server import cli_servers


@pytest.mark.parametrize("models", ["", "ipc:///house"])
def test_stop_waits_as_long_as_the_server_may_take(monkeypatch: pytest.MonkeyPatch, models: str):
    record = ServerRecord("a", os.getpid(), "ipc:///x", "http://x", 1, "/nowhere", models=models, stop_time=900.0)
    sent: list[int] = []
    waited: list[float | None] = []
    monkeypatch.setattr(cli_servers, "find_server", lambda _: record)
    monkeypatch.setattr(os, "kill", lambda _pid, number: sent.append(number))
    monkeypatch.setattr(psutil.Process, "wait", lambda _self, timeout=None: waited.append(timeout))
    assert cli_servers.stop(argparse.Namespace(all=False, names=["a"], now=False)) == 0
    assert sent == [signal.SIGTERM]
    assert waited == [900.0 + cli_servers.LEAVE_TIME]
