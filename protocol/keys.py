"""CURVE keys for ZeroMQ over tcp: who the server is, and which clients it lets in.

`callboard keys` makes the files: the server's, with its secret key and the public keys of its clients, and one for
each client, with that client's secret key and the server's public one. They are JSON; keys are in Z85, 40 characters.
Read by clients when they connect, and by the streamer.
"""

import os
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq

DOMAIN = b"callboard"  # of ZAP: tells our listener's requests
KEYS_VARIABLE = "CALLBOARD_KEYS"


T = TypeVar("T", "ClientKeys", "ServerKeys")


class KeysError(ValueError):
    """A key file can't be used. The text says which and why."""


class ClientKeys(msgspec.Struct, frozen=True):
    """What a client needs: its own pair of keys, and the public key of the server that it means to talk to."""

    public: str
    secret: str
    server: str


class ServerKeys(msgspec.Struct, frozen=True):
    """The server's pair of keys, and the public keys of the clients that it lets in, by name."""

    public: str
    secret: str
    clients: dict[str, str] = {}

    def lets_in(self, public: bytes) -> bool:
        """Whether a client has one of the keys; `public` is its key in Z85."""
        return public.decode(errors="replace") in self.clients.values()


def new_pair() -> tuple[str, str]:
    """A fresh public and secret key, in Z85."""
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def read_client_keys(path: Path) -> ClientKeys:
    """Raises KeysError when the file can't be read or holds no client's keys."""
    return _read(path, ClientKeys, "a client's")


def read_server_keys(path: Path) -> ServerKeys:
    """Raises KeysError when the file can't be read, is open to others, or holds no server's keys."""
    return _read(path, ServerKeys, "a server's")


def write_keys(path: Path, keys: ClientKeys | ServerKeys) -> None:
    """Write a file that only its owner can read (0600), in the place of an older one. Raises OSError."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(file, "wb") as out:
            out.write(msgspec.json.format(msgspec.json.encode(keys)) + b"\n")
        beside.rename(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def client_keys_for(endpoint: str, keys: "ClientKeys | str | Path | None") -> ClientKeys | None:
    """The keys for an endpoint: those given, by themselves or as a file; else those in the file `$CALLBOARD_KEYS` when
    the endpoint is one of tcp. Raises KeysError."""
    if isinstance(keys, ClientKeys):
        return keys
    if keys is None and endpoint.startswith("tcp://"):
        keys = os.environ.get(KEYS_VARIABLE) or None
    return None if keys is None else read_client_keys(Path(keys))


def _read(path: Path, kind: type[T], whose: str) -> T:
    try:
        if path.stat().st_mode & 0o077:
            raise KeysError(f"{path} can be read by others than its owner; `chmod 600` it")
        keys = msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise KeysError(f"the key file {path} can't be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise KeysError(f"{path} does not hold {whose} keys: {error}") from None
    for name in ("public", "secret", "server"):
        if len(getattr(keys, name, "0" * 40)) != 40:
            raise KeysError(f"{path}: `{name}` is no key in Z85")
    return keys
