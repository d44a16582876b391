"""`CacheDirectory`: the folder of the SSD tier, shared by all engines and the CLI. Paths, the lock, and who is alive.

    ROOT/v1/                     one folder per layout version; lower ones are removed
        <fingerprint>/<hh>/      block files, `<key>.safetensors`; hh are the first two digits of the key
        index/                   the LMDB index
        tmp/                     files being written, `<owner>-<n>`
        quarantine/              files that could not be read
        owners/<owner>           one file per process that uses the directory, locked as long as it lives
        lock                     locked around each write transaction of the index
        limit                    the byte budget, should the index get lost
        clean                    there after an orderly end: size and time of the index then

An owner is `<pid>-<start time>`. Its lock, not its pid, says whether it lives: pids return, and another container's
mean nothing here. Used on the store's thread.
"""

import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from cache_store.keys import LAYOUT_VERSION

NETWORK = {
    "nfs",
    "nfs4",
    "cifs",
    "smb",
    "smb2",
    "smb3",
    "smbfs",
    "afpfs",
    "webdav",
    "9p",
    "ceph",
    "glusterfs",
    "lustre",
}
NETWORK |= {"afs", "beegfs", "gpfs", "ncpfs", "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.s3fs", "fuse.rclone"}


class Refused(Exception):
    """The directory can't be used for a reason that stays, such as a network file system."""


class LockTimeout(OSError):
    """Another process held the lock for too long."""


def filesystem_of(path: Path) -> str:
    """Name of the file system that holds `path`, or the nearest folder above it that exists; "" if unknown."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    path = path.resolve()
    best = ("", "")
    for partition in psutil.disk_partitions(all=True):
        mount = Path(partition.mountpoint)
        if (path == mount or mount in path.parents) and len(partition.mountpoint) >= len(best[0]):
            best = (partition.mountpoint, partition.fstype)
    return best[1]


def charged(size: int) -> int:
    """Bytes a file of `size` is charged for: whole pages, as file systems store it."""
    return -(-size // 4096) * 4096


class CacheDirectory:
    """Paths and locks. `enter` makes this process an owner, `leave` ends that."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.path = root / f"v{LAYOUT_VERSION}"
        self.index = self.path / "index"
        self.temporary = self.path / "tmp"
        self.quarantine = self.path / "quarantine"
        self.owners = self.path / "owners"
        self.clean_mark = self.path / "clean"
        self.limit_file = self.path / "limit"
        self.owner = ""
        self._owner_file: int | None = None
        self._temporaries = 0

    def make(self) -> None:
        """Make what isn't there. Raises Refused for a network file system, and OSError."""
        kind = filesystem_of(self.root)
        if kind.lower() in NETWORK:
            raise Refused(
                f"{self.root} is on a network file system ({kind}), where locks and memory maps can't be trusted"
            )
        for folder in (self.index, self.temporary, self.quarantine, self.owners):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def block_path(self, fingerprint: bytes, key: bytes) -> Path:
        """Where a block's file belongs."""
        name = key.hex()
        return self.path / fingerprint.hex() / name[:2] / f"{name}.safetensors"

    def temporary_path(self) -> Path:
        """A new name for a file being written."""
        self._temporaries += 1
        return self.temporary / f"{self.owner}-{self._temporaries}"

    def block_files(self) -> Iterator[tuple[bytes, bytes | None, Path]]:
        """Fingerprint, key and path of all files where blocks lie; no key for a name that isn't a block's."""
        for model in sorted(self.path.iterdir()):
            if not re.fullmatch("[0-9a-f]{64}", model.name):
                continue
            fingerprint = bytes.fromhex(model.name)
            for folder, _, names in os.walk(model):
                for name in names:
                    match = re.fullmatch(r"([0-9a-f]{64})\.safetensors", name)
                    path = Path(folder) / name
                    key = bytes.fromhex(match[1]) if match else None
                    in_place = key is not None and path == self.block_path(fingerprint, key)
                    yield fingerprint, key if in_place else None, path

    @contextmanager
    def locked(self, seconds: float) -> Iterator[bool]:
        """Hold the lock that all processes share; whether its last holder died holding it.

        Raises LockTimeout, and OSError when the folder is gone.
        """
        file = self._take(time.monotonic() + seconds)
        try:
            died = os.fstat(file).st_size > 0
            os.pwrite(file, b"held", 0)
            try:
                yield died
            finally:
                os.ftruncate(file, 0)
        finally:
            os.close(file)

    def _take(self, until: float) -> int:
        path = self.path / "lock"
        wait = 0.001
        while True:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # A folder removed and made again has another lock file.
                if os.stat(path).st_ino == os.fstat(file).st_ino:
                    return file
            except BlockingIOError:
                pass
            except BaseException:
                os.close(file)
                raise
            os.close(file)
            if time.monotonic() > until:
                raise LockTimeout(f"{path} is held by another process")
            time.sleep(wait)
            wait = min(2 * wait, 0.02)

    def enter(self) -> None:
        """Register this process, as somebody new each time. Call it holding the lock."""
        self.leave()
        self.owner = f"{os.getpid()}-{time.time_ns():x}{secrets.token_hex(2)}"
        file = os.open(self.owners / self.owner, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)
        self._owner_file = file

    def leave(self) -> None:
        """End the registration."""
        if self._owner_file is not None:
            try:
                (self.owners / self.owner).unlink(missing_ok=True)
            finally:
                os.close(self._owner_file)
                self._owner_file = None

    def others(self) -> tuple[list[str], list[str]]:
        """Other owners that live, and those that don't. Call it holding the lock."""
        live: list[str] = []
        dead: list[str] = []
        for name in os.listdir(self.owners):
            if name != self.owner:
                (live if self._lives(name) else dead).append(name)
        return live, dead

    def _lives(self, owner: str) -> bool:
        try:
            file = os.open(self.owners / owner, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(file)
        return False

    def bury(self, dead: list[str]) -> None:
        """Remove the temporary files and registrations of dead owners. Call it holding the lock."""
        for name in os.listdir(self.temporary):
            if name.rpartition("-")[0] in dead:
                (self.temporary / name).unlink(missing_ok=True)
        for owner in dead:
            (self.owners / owner).unlink(missing_ok=True)

    def sweep_temporary(self, live: list[str]) -> None:
        """Remove all temporary files but those of live owners and our own. Call it holding the lock."""
        for name in os.listdir(self.temporary):
            if name.rpartition("-")[0] not in (*live, self.owner):
                (self.temporary / name).unlink(missing_ok=True)

    def remove_old_versions(self) -> list[str]:
        """Remove the folders of lower layout versions nobody uses; their names."""
        removed = []
        for folder in self.root.iterdir():
            match = re.fullmatch(r"v(\d+)", folder.name)
            if match is None or int(match[1]) >= LAYOUT_VERSION:
                continue
            old = CacheDirectory(self.root)
            old.owners = folder / "owners"
            if not old.owners.is_dir() or not old.others()[0]:
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder.name)
        return removed

    def index_state(self) -> str:
        """Size and time of the index, by which a change from outside is noticed; "" when there is none."""
        try:
            found = (self.index / "data.mdb").stat()
        except OSError:
            return ""
        return f"{found.st_size} {found.st_mtime_ns}"

    def free_bytes(self) -> int:
        """Free bytes of the file system for ordinary users."""
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize
