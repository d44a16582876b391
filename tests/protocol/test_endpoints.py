"""Finding servers and naming sockets."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from protocol import Client
from protocol.endpoints import (
    ServerRecord,
    check_name,
    find_endpoint,
    find_server,
    ipc_endpoint,
    record_path,
    run_root,
)
from protocol.errors import ServerLost, ServerNotFound


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("CALLBOARD_HOME", str(tmp_path))
    monkeypatch.delenv("CALLBOARD_ENDPOINT", raising=False)
    run_root().mkdir()


def publish(name: str, pid: int) -> None:
    record = ServerRecord(name, pid, f"ipc:///{name}", "http://127.0.0.1:1", 1, "/x")
    record_path(name).write_bytes(msgspec.json.encode(record))


def dead_pid() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_the_only_running_server_needs_no_name():
    publish("one", os.getpid())
    publish("gone", dead_pid())
    assert find_server().name == "one"
    assert find_endpoint() == "ipc:///one"


def test_several_servers_are_listed():
    publish("one", os.getpid())
    publish("two", os.getpid())
    assert find_server("two").name == "two"
    with pytest.raises(ServerNotFound, match="one, two"):
        find_server()
    with pytest.raises(ServerNotFound, match=r"three.*one, two"):
        find_server("three")


def test_no_server_says_how_to_start_one():
    with pytest.raises(ServerNotFound, match="callboard serve"):
        find_server()


def test_a_broken_record_is_passed_over():
    publish("one", os.getpid())
    record_path("broken").write_bytes(b"{")
    assert find_server().name == "one"


def test_the_environment_names_an_endpoint_unless_a_name_is_given(monkeypatch):
    publish("one", os.getpid())
    monkeypatch.setenv("CALLBOARD_ENDPOINT", "ipc:///env")
    assert find_endpoint() == "ipc:///env"
    assert find_endpoint("one") == "ipc:///one"
    assert find_endpoint("one", "ipc:///explicit") == "ipc:///explicit"


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".x", "x" * 65, "a b"])
def test_names_that_can_be_no_file_are_refused(name):
    with pytest.raises(ValueError, match="can't name a server"):
        check_name(name)


def test_a_long_socket_path_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match="CALLBOARD_HOME"):
        ipc_endpoint(Path("/" + "x" * 120), "control")


def test_an_endpoint_that_is_none_fails_at_once():
    with pytest.raises(ServerLost, match="nonsense"):
        Client(endpoint="nonsense")
