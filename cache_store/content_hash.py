"""Hash of the content of files, such as weights: a part of the fingerprint of prefix blocks.

Called once per start on a thread beside loading. Each file is read once and its hash remembered, so only the first
start with a model reads it; files from the hub bring their own hash in the name they link to.
"""

import contextlib
import hashlib
import os
import re
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import xxhash

_CHUNK = 8 << 20
_SETTLED = 2.0  # seconds; a file changed later than that may change again without another time stamp
_REMEMBERED = 4096  # files


def content_hash(files: Sequence[Path], memo: Path) -> str:
    """A hash of the names and contents of files, in hex. `memo` is a JSON file that remembers. Raises OSError.

    Where the memo can't be read or written, all files are read each time.
    """
    known = _load(memo)
    before = len(known)
    parts = []
    for path in sorted(files):
        digest = _hub_digest(path)
        if digest is None:
            stamp = _stamp(path)
            digest = known.get(stamp)
            if digest is None:
                digest = _read(path)
                settled = time.time() - path.stat().st_mtime > _SETTLED
                if settled and _stamp(path) == stamp:
                    known[stamp] = digest
        parts.append(f"{path.name}:{digest}")
    if len(known) != before:
        _save(memo, known)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _hub_digest(path: Path) -> str | None:
    """The sha256 in the name of a blob of the hub's cache. Small files have a git hash there: they are read."""
    target = path.resolve()
    if path.is_symlink() and target.parent.name == "blobs" and re.fullmatch("[0-9a-f]{64}", target.name):
        return f"sha256-{target.name}"
    return None


def _stamp(path: Path) -> str:
    found = path.stat()
    return f"{found.st_dev}:{found.st_ino}:{found.st_size}:{found.st_mtime_ns}:{found.st_ctime_ns}"


def _read(path: Path) -> str:
    state = xxhash.xxh3_128()
    buffer = bytearray(_CHUNK)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            state.update(memoryview(buffer)[:count])
    return f"xxh3-{state.hexdigest()}"


def _load(memo: Path) -> dict[str, str]:
    try:
        return msgspec.json.decode(memo.read_bytes(), type=dict[str, str])
    except (OSError, msgspec.MsgspecError):
        return {}


def _save(memo: Path, known: dict[str, str]) -> None:
    latest = dict(list(known.items())[-_REMEMBERED:])
    temporary = memo.with_name(f"{memo.name}-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        memo.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(msgspec.json.encode(latest))
        temporary.rename(memo)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
