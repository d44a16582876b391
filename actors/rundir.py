"""Run directories and server records: made, locked and swept by the supervisor.

An instance holds two locks for life, so that nothing depends on a clean end: `run/<8 hex>/lock` says that the
directory is in use, `run/<name>.lock` that the name is. Whoever can take a lock of another instance knows that it
is dead and may remove what it left.
"""

import fcntl
import os
import secrets
import shutil
from pathlib import Path
from typing import IO

import msgspec
import structlog

from protocol.endpoints import ServerRecord, check_name, ipc_endpoint, record_path, run_root

log = structlog.get_logger()


class NameTaken(Exception):
    """Another running server has this name. The text says what to do."""


def _try_lock(path: Path) -> IO[bytes] | None:
    """Take the lock file at `path`; None when another process holds it."""
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    # It may have been removed by a sweep between opening and locking.
    if not path.exists() or os.fstat(file.fileno()).st_ino != path.stat().st_ino:
        file.close()
        return _try_lock(path)
    return file


class RunDirectory:
    """The folder of one running instance, and its name. Made by `create`, given back by `remove`."""

    def __init__(self, path: Path, name: str, locks: list[IO[bytes]]) -> None:
        self.path = path
        self.name = name
        self._locks = locks
        self._warned = False

    @classmethod
    def create(cls, name: str) -> "RunDirectory":
        """Take the name and make a fresh directory (0700).

        Raises NameTaken, ValueError for a name or path that can't be used, and OSError.
        """
        check_name(name)
        root = run_root()
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        ipc_endpoint(root / "01234567", "tokenizer99-99999999")
        # One at a time: a sweep must not take what another is about to lock.
        making = os.open(root, os.O_RDONLY)
        try:
            fcntl.flock(making, fcntl.LOCK_EX)
            return cls._create(root, name)
        finally:
            os.close(making)

    @classmethod
    def _create(cls, root: Path, name: str) -> "RunDirectory":
        sweep(root)
        name_lock = _try_lock(root / f"{name}.lock")
        if name_lock is None:
            raise NameTaken(f"a server called {name!r} is running already; stop it, or give this one another --name")
        path = root / secrets.token_hex(4)
        path.mkdir(mode=0o700)
        lock = _try_lock(path / "lock")
        assert lock is not None
        return cls(path, name, [name_lock, lock])

    def publish(self, record: ServerRecord) -> bool:
        """Write the record by which clients find this instance; whether that could be done."""
        path = record_path(self.name)
        temporary = self.path / "record"
        try:
            temporary.write_bytes(msgspec.json.format(msgspec.json.encode(record)))
            temporary.rename(path)
        except OSError as error:  # a full disk is no reason to end what runs
            if not self._warned:
                log.error("clients can't find the server by its name: its record can't be written", error=str(error))
            self._warned = True
            return False
        self._warned = False
        return True

    def remove(self) -> None:
        """Remove record, directory and locks."""
        record_path(self.name).unlink(missing_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)
        (run_root() / f"{self.name}.lock").unlink(missing_ok=True)
        for lock in self._locks:
            lock.close()


class PartDirectory(RunDirectory):
    """A folder in another instance's run directory, without name or locks of its own: where a cast of a house is."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "", [])

    def publish(self, record: ServerRecord) -> bool:
        """Nothing: the house is what clients find."""
        return True

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)


def sweep(root: Path) -> None:
    """Remove what dead instances left: directories, records and name locks whose lock is free."""
    for path in root.iterdir():
        if path.is_dir():
            # Without a lock file it is being made right now, or its maker died at once: leave that to later.
            lock = _try_lock(path / "lock") if (path / "lock").exists() else None
            if lock is not None:
                shutil.rmtree(path, ignore_errors=True)
                lock.close()
        elif path.suffix == ".lock":
            lock = _try_lock(path)
            if lock is not None:
                path.with_suffix(".json").unlink(missing_ok=True)
                path.unlink(missing_ok=True)
                lock.close()
