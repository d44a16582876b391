"""The C library's allocator as the engine process has it: freed memory is used again."""

import os
import subprocess
import sys

import pytest

from actors import allocator
from actors.allocator import malloc_environment

# Arrays of a size that no other has, filled and freed one after the other, on a thread as MLX's.
FILL = """
import ctypes, resource, threading
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
def fill(count):
    for size in range(count):
        at = libc.malloc(ctypes.c_size_t((36 << 20) + (size << 16)))
        libc.memset(ctypes.c_void_p(at), 1, ctypes.c_size_t(36 << 20))
        libc.free(ctypes.c_void_p(at))
def run():
    fill(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    fill(6)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
thread = threading.Thread(target=run)
thread.start()
thread.join()
"""


def faults(environment: dict[str, str]) -> int:
    """Page faults of filling six arrays."""
    plain = {key: value for key, value in os.environ.items() if key != "GLIBC_TUNABLES"}
    done = subprocess.run(
        [sys.executable, "-c", FILL], env=plain | environment, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(not malloc_environment(), reason="only for CPUs under glibc")
def test_freed_memory_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert faults(malloc_environment()) < faults({}) / 10


def test_what_the_user_sets_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(allocator.platform, "libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr(allocator, "has_cuda_backend", lambda: False)
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.mmap_max=7:glibc.malloc.check=3")
    (tunables,) = malloc_environment().values()
    assert tunables.startswith("glibc.malloc.mmap_max=7:glibc.malloc.check=3:")
    assert tunables.count("mmap_max") == 1
    assert "arena_max=1" in tunables


@pytest.mark.parametrize(
    ("system", "library", "cuda"), [("darwin", "", False), ("linux", "", False), ("linux", "glibc", True)]
)
def test_elsewhere_nothing_is_set(monkeypatch: pytest.MonkeyPatch, system: str, library: str, cuda: bool) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(allocator.platform, "libc_ver", lambda: (library, ""))
    monkeypatch.setattr(allocator, "has_cuda_backend", lambda: cuda)
    assert malloc_environment() == {}
