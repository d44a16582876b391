"""Where things are: Callboard's home folder, run directories, socket paths, and how a client finds a server.

Everything lies under `~/.callboard` (or `$CALLBOARD_HOME`). Each running instance has
`run/<8 hex>/` for its sockets and `run/<name>.json`, which says where it can be reached. Locks are held
by `actors.rundir`; this module only reads and names.
"""

import json
import os
import re
from pathlib import Path

import msgspec

from protocol.errors import ServerNotFound

HOUSE_SOCKET = "models"  # name of the socket of a house of several models
MAX_IPC_PATH = 100  # bytes; macOS takes 103, Linux 107
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class ServerRecord(msgspec.Struct, frozen=True):
    """Content of `run/<name>.json`: how to reach one running instance.

    `models` is where the house of several models takes a `ModelOrder`; "" where one model is served. `endpoint` and
    `model` are those of the first model, `endpoint` "" while that is not loaded. `stop_time` is how many seconds an
    orderly stop may take for what runs and for what is written then.
    """

    name: str
    pid: int
    endpoint: str
    http: str
    protocol: int
    run_dir: str
    model: str = ""
    models: str = ""
    stop_time: float = 50.0


def home() -> Path:
    """Callboard's own folder, `$CALLBOARD_HOME` or `~/.callboard`."""
    return Path(os.environ.get("CALLBOARD_HOME") or Path.home() / ".callboard")


def run_root() -> Path:
    """Folder of all run directories and server records."""
    return home() / "run"


def check_name(name: str) -> str:
    """Return `name`, or raise ValueError when it can't name a server."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} can't name a server: use letters, digits, '.', '_' and '-', at most 64, "
            "beginning with a letter or digit"
        )
    return name


def record_path(name: str) -> Path:
    """Path of the record of the server called `name`."""
    return run_root() / f"{check_name(name)}.json"


def ipc_endpoint(run_dir: Path, what: str) -> str:
    """ZeroMQ endpoint of socket `what` in `run_dir`.

    Raises ValueError when the path is longer than ipc sockets allow on every system.
    """
    path = run_dir / what
    if len(os.fsencode(path)) > MAX_IPC_PATH:
        raise ValueError(
            f"the socket path {path} is longer than {MAX_IPC_PATH} bytes; "
            "set CALLBOARD_HOME to a folder with a shorter path"
        )
    return f"ipc://{path}"


def is_alive(pid: int) -> bool:
    """Whether there is a process `pid`."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def running_servers(root: Path | None = None) -> list[ServerRecord]:
    """Records of all servers of this user whose process lives, by name: those in `root`, our own `run_root` if None."""
    found = []
    for path in sorted((root or run_root()).glob("*.json")):
        try:
            record = msgspec.convert(json.loads(path.read_bytes()), ServerRecord)
        except (OSError, ValueError, msgspec.ValidationError):
            continue
        if is_alive(record.pid):
            found.append(record)
    return found


def find_server(name: str | None = None) -> ServerRecord:
    """The running server called `name`, or the only one when no name is given.

    Raises ServerNotFound, naming the servers that do run.
    """
    servers = running_servers()
    names = ", ".join(record.name for record in servers)
    if name is not None:
        for record in servers:
            if record.name == name:
                return record
        have = f"running: {names}" if names else "none is running"
        raise ServerNotFound("server_not_found", f"no server called {name!r} ({have})")
    if len(servers) == 1:
        return servers[0]
    if not servers:
        raise ServerNotFound("server_not_found", "no server is running; start one with `callboard serve MODEL`")
    raise ServerNotFound("server_not_found", f"several servers run, name one of them: {names}")


def find_endpoint(name: str | None = None, endpoint: str | None = None) -> str:
    """The client endpoint to connect to: `endpoint`, else `$CALLBOARD_ENDPOINT` (unless a name is given),
    else the record of the server `name`.

    Raises ServerNotFound.
    """
    if endpoint:
        return endpoint
    from_environment = os.environ.get("CALLBOARD_ENDPOINT")
    if from_environment and name is None:
        return from_environment
    return find_server(name).endpoint


def find_successor(endpoint: str, name: str | None = None) -> str:
    """Where the server that was at `endpoint` can be reached now: its streamer gets a new endpoint when it is replaced.

    Its record lies beside its run directory, which may be under another CALLBOARD_HOME than ours. A server called
    `name` may also have been started anew. Raises ServerNotFound.
    """
    path = endpoint.removeprefix("ipc://")
    if path == endpoint:
        return endpoint
    run_dir = os.path.dirname(path)
    for root in (None, Path(run_dir).parent):
        for record in running_servers(root):
            if record.run_dir == run_dir:
                return record.endpoint
    if name is not None:
        return find_server(name).endpoint
    raise ServerNotFound("server_not_found", f"the server at {endpoint} is gone")
