"""Key files, and the command that makes them."""

import pytest

from protocol.keys import (
    ClientKeys,
    KeysError,
    ServerKeys,
    client_keys_for,
    new_pair,
    read_client_keys,
    read_server_keys,
    write_keys,
)
from server.cli import main


def test_the_command_makes_a_server_and_clients_that_it_lets_in(tmp_path, capsys):
    folder = tmp_path / "keys"
    assert main(["keys", str(folder)]) == 0
    assert main(["keys", str(folder), "--client", "other"]) == 0
    server = read_server_keys(folder / "server.key")
    assert server.clients.keys() == {"client", "other"}
    for name, public in server.clients.items():
        client = read_client_keys(folder / f"{name}.key")
        assert (client.public, client.server) == (public, server.public)
        assert server.lets_in(client.public.encode())
    assert not server.lets_in(server.public.encode())
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert len(list(folder.iterdir())) == 3
    said = capsys.readouterr()
    assert not any(read_client_keys(folder / f"{name}.key").secret in said.out for name in server.clients)


@pytest.mark.parametrize("name", ["client", "server", "../x", ""])
def test_names_that_are_taken_or_none_are_refused(tmp_path, capsys, name):
    assert main(["keys", str(tmp_path)]) == 0
    before = (tmp_path / "server.key").read_bytes()
    assert main(["keys", str(tmp_path), "--client", name]) == 1
    assert "client" in capsys.readouterr().err
    assert (tmp_path / "server.key").read_bytes() == before


def test_files_that_are_no_keys_are_named(tmp_path):
    path = tmp_path / "x.key"
    with pytest.raises(KeysError, match="can't be read"):
        read_client_keys(path)
    write_keys(path, ServerKeys(*new_pair()))
    with pytest.raises(KeysError, match="a client's keys"):
        read_client_keys(path)
    write_keys(path, ClientKeys(*new_pair(), "short"))
    with pytest.raises(KeysError, match="`server` is no key"):
        read_client_keys(path)
    path.chmod(0o640)
    with pytest.raises(KeysError, match="chmod 600"):
        read_client_keys(path)


def test_keys_come_by_themselves_by_file_or_by_environment(tmp_path, monkeypatch):
    keys = ClientKeys(*new_pair(), new_pair()[0])
    path = tmp_path / "x.key"
    write_keys(path, keys)
    monkeypatch.delenv("CALLBOARD_KEYS", raising=False)
    assert client_keys_for("tcp://h:1", None) is None
    assert client_keys_for("tcp://h:1", keys) is keys
    assert client_keys_for("tcp://h:1", path) == client_keys_for("tcp://h:1", str(path)) == keys
    monkeypatch.setenv("CALLBOARD_KEYS", str(path))
    assert client_keys_for("tcp://h:1", None) == keys
    assert client_keys_for("ipc:///x", None) is None
