"""How the C library's allocator is set in the engine process, where MLX computes on a CPU under glibc.

Used by the supervisor when it starts the engine, and by benches for their own MLX processes. MLX's free pool reuses
a buffer only for an array of nearly its size. While rows join and leave, every step has other sizes, and glibc would
map each large array anew, so that the kernel hands out zeroed pages, and unmap it afterwards: 190,000 page faults and a
tenth of the engine's processor time in a crowd of 256 streams that came and went. Kept in one heap, the pages are
reused; `actors.engine.memory` gives back what is too much of it.
"""

import os
import platform
import sys

from actors.blas import has_cuda_backend

_SETTINGS = {
    "glibc.malloc.arena_max": 1,  # MLX's thread would have an arena of small heaps, which are unmapped when free
    "glibc.malloc.mmap_max": 0,
    "glibc.malloc.trim_threshold": 1 << 30,
}


def malloc_environment() -> dict[str, str]:
    """Environment variables for a process that computes with MLX. {} where that isn't on a CPU under glibc.

    What the user's own GLIBC_TUNABLES sets stays in force.
    """
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc" or has_cuda_backend():
        return {}
    theirs = os.environ.get("GLIBC_TUNABLES", "")
    names = {each.partition("=")[0] for each in theirs.split(":")}
    ours = [f"{name}={value}" for name, value in _SETTINGS.items() if name not in names]
    return {"GLIBC_TUNABLES": ":".join([theirs, *ours] if theirs else ours)}
