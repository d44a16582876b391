"""Look whether an index can be read, in a process of its own: `python -m cache_store.index_check FOLDER`.

Reading a damaged LMDB file can kill the reader with a signal. Exit code 0 means that all of it was read and agrees.
"""

import os
import subprocess
import sys
from pathlib import Path

from cache_store.directory import CacheDirectory
from cache_store.index import Index

LIMIT = 120.0  # seconds


def is_sound(folder: Path) -> bool:
    """Whether the index in `folder` can be read and agrees with itself. Takes the start of a process."""
    command = [sys.executable, "-P", "-m", "cache_store.index_check", str(folder)]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def main(folder: Path) -> int:
    """Read everything; 0 when it agrees."""
    index = Index(CacheDirectory(folder.parent), folder)
    found: list[str] = []
    with index.read() as transaction:
        transaction.contradictions(found.append)
        transaction.models()
    index.close()
    for line in found[:20]:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    import resource

    # A crash here is an answer, not something to keep a core file of.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(5)
    sys.exit(main(Path(sys.argv[1])))
