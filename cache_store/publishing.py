"""Making a block file visible: whole or not at all, and the first of several writers wins."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

from cache_store.block_file import BadBlock, Header, read_header, write_block
from cache_store.directory import CacheDirectory
from cache_store.write_queue import Write

# What file systems without hard links answer.
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}

# Given a directory, a fingerprint, a write and its header: what lies under the block's name afterwards.
Publish = Callable[[CacheDirectory, bytes, Write, bytes], Header]


def publish(directory: CacheDirectory, fingerprint: bytes, write: Write, header: bytes) -> Header:
    """Write a block to a temporary file and give it its name, unless a good file has that name already.

    Returns the header of the file that has it now, ours or another's, whose data may differ in bits. Raises OSError.
    """
    path = directory.block_path(fingerprint, write.key)
    temporary = directory.temporary_path()
    write_block(temporary, header, write.tensors)
    try:
        while not _name(directory, temporary, path):
            try:
                return read_header(path)
            except FileNotFoundError:
                continue
            except BadBlock:
                path.unlink(missing_ok=True)
        return read_header(path)
    except BadBlock as error:
        raise OSError(errno.EIO, f"a file that was just written can't be read: {error}", str(path)) from None
    finally:
        temporary.unlink(missing_ok=True)


def _name(directory: CacheDirectory, temporary: Path, path: Path) -> bool:
    for attempt in range(3):
        try:
            _link(directory, temporary, path)
        except FileExistsError:
            return False
        except FileNotFoundError:
            # `clear` removes empty folders, perhaps the one just made.
            if attempt == 2:
                raise
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        else:
            break
    return True


def _link(directory: CacheDirectory, temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        with directory.locked(10.0):
            if path.exists():
                raise FileExistsError(path) from None
            temporary.rename(path)
