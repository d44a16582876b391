"""Callboard's cache folder, and folders in it that are built once and then only read.

Called by the CLI's process (and by tests) on its main thread. Several processes may ask for the same
folder at once: one builds it, the others wait for its lock.
"""

import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_root() -> Path:
    """`$CALLBOARD_CACHE_DIR`, else `callboard` in the user's cache folder."""
    override = os.environ.get("CALLBOARD_CACHE_DIR")
    if override:
        return Path(override).expanduser().absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "callboard"
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative paths ignored.
    return (Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache") / "callboard"


def built_once(name: str, build: Callable[[Path], None], *, waiting: Callable[[], None]) -> Path:
    """The folder `models/<name>` of the cache, made by `build(folder)` when it isn't there yet.

    `build` fills a temporary folder that is renamed when it is complete, so the folder is either whole or
    absent, also after a kill. `waiting` is called once when another process is building it.
    Raises OSError when the cache can't be written, and whatever `build` raises.
    """
    models = cache_root() / "models"
    folder = models / name
    if folder.is_dir():
        return folder
    models.mkdir(parents=True, exist_ok=True)
    with _locked(models / f".{name}.lock", waiting):
        if folder.is_dir():
            return folder
        # Only the lock's holder builds: what lies there was left by one that was killed. A name of its own
        # for each build keeps that one's children, which may still write, out of ours.
        for left_over in models.glob(f".{name}.*.partial"):
            shutil.rmtree(left_over, ignore_errors=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{name}.", suffix=".partial", dir=models))
        try:
            build(partial)
            _sync(partial)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


@contextmanager
def _locked(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    # The lock file stays: removing it would let two processes lock different files of one name.
    with open(path, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sync(folder: Path) -> None:
    """Bring the files to the disk: after a power loss a renamed folder must not hold empty ones."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
