"""`callboard keys`: makes the key files for ZeroMQ over tcp (`protocol.keys`). The streamer and clients read them."""

import argparse
import re
import sys
from pathlib import Path

import msgspec

from protocol.endpoints import home
from protocol.keys import ClientKeys, KeysError, ServerKeys, new_pair, read_server_keys, write_keys

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def add_keys_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("folder", metavar="FOLDER", nargs="?", type=Path, help="where the files go (~/.callboard/keys)")
    parser.add_argument("--client", metavar="NAME", default="client", help="name of the client to make a key for")


def make_keys(args: argparse.Namespace) -> int:
    """Make `server.key`, if it is not there, and `NAME.key` for one more client. 0, or 1 with the cause on stderr."""
    folder: Path = args.folder or home() / "keys"
    name: str = args.client
    server_file, client_file = folder / "server.key", folder / f"{name}.key"
    try:
        if not _NAME.fullmatch(name) or name == "server":
            raise KeysError(f"{name!r} can't name a client: use letters, digits, '.', '_' and '-', and not 'server'")
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        server = read_server_keys(server_file) if server_file.exists() else ServerKeys(*new_pair())
        if name in server.clients or client_file.exists():
            raise KeysError(f"there is a client {name!r} already; make one of another name with --client")
        public, secret = new_pair()
        write_keys(client_file, ClientKeys(public, secret, server.public))
        write_keys(server_file, msgspec.structs.replace(server, clients=server.clients | {name: public}))
    except (KeysError, OSError) as error:
        print(f"callboard: {error}", file=sys.stderr)
        return 1
    print(f"{server_file}   for callboard serve --zmq-tcp HOST:PORT --zmq-keys {server_file}")
    print(f"{client_file}   for Client(endpoint='tcp://HOST:PORT', keys='{client_file}')")
    return 0
