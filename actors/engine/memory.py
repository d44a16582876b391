"""Memory of the engine process: MLX's limits, what is free before a model loads, and its pool of free buffers.

Used on the engine's one thread.
"""

import contextlib
import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil

CLEAR_EVERY = 1024  # turns
FULL_POOL_REST = 16  # turns between two clearings of a full pool …
FULL_POOL_REST_PREFILLING = 64  # … and while prefill fills it again at once
FULL = 0.9
LOOK_EVERY = 4  # turns between two looks at what the C library keeps …
HEAP_REST = 16  # … and between two times that it is given back
KEPT = 1.5  # times the pool's limit that it and the C library may keep together
IDLE_REST_S = 30.0  # seconds without work after which an idle engine clears the pool


def pool_limit(rows: int, vocab_size: int) -> int:
    """Bytes that MLX's free pool may hold for batches of `rows`.

    Less than a few sets of logits, and every step returns them to the system and faults them in again.
    """
    return max(512 << 20, 12 * rows * vocab_size * 4)


def set_limits(rows: int, vocab_size: int) -> None:
    """Set MLX's limits for batches of `rows`. On Metal the weights stay wired."""
    mx.set_cache_limit(pool_limit(rows, vocab_size))
    working_set = _device_info().get("max_recommended_working_set_size")
    if working_set:
        mx.set_wired_limit(int(working_set))


def in_use() -> int:
    """Bytes that MLX holds, its free pool included."""
    return mx.get_active_memory() + mx.get_cache_memory()


def available_for_weights() -> int:
    """Bytes that a model may take on the device that runs it, as far as the system tells."""
    info = _device_info()
    if mx.default_device() == mx.gpu:
        free = info.get("free_memory") or info.get("max_recommended_working_set_size") or info.get("memory_size")
        if free:
            return int(free)
    return min(int(psutil.virtual_memory().available), _cgroup_headroom())


def cache_budget(limit: int | None, rows: int, vocab_size: int) -> int:
    """Bytes that all rows' caches may take together, once the model is loaded.

    `limit` bounds the whole process; by default it is what the device recommends (Metal), 90 % of its memory (CUDA),
    or 80 % of the machine's.
    """
    if limit is None:
        limit = default_limit()
    working = min(pool_limit(rows, vocab_size), limit // 4)
    return max(limit - mx.get_active_memory() - working, 0)


def default_limit() -> int:
    """Bytes that the whole process may take when nothing was said, as `cache_budget` has it."""
    if mx.default_device() == mx.gpu:
        info = _device_info()
        if recommended := info.get("max_recommended_working_set_size"):
            return int(recommended)
        if total := info.get("memory_size") or info.get("total_memory"):
            return int(total) * 9 // 10
    total = int(psutil.virtual_memory().total)
    return min(total * 8 // 10, mx.get_active_memory() + _cgroup_headroom())


def trim() -> None:
    """Have the C library give free memory back to the system, where it keeps some (glibc)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class Outside:
    """Bytes of this process beyond what MLX holds, where that is the machine's own memory."""

    def __init__(self) -> None:
        self._process = psutil.Process()

    def __call__(self) -> int:
        return int(self._process.memory_info().rss) - in_use()


class Heap:
    """What the C library keeps of freed memory (`actors.allocator`): given back when it and MLX's free pool are more
    than `limit` bytes together. So a pool that is cleared, and filled again from the heap, counts once.

    `outside` tells the process's bytes beyond MLX's, `trim` gives back.
    """

    def __init__(self, limit: int, outside: Callable[[], int] | None = None, trim: Callable[[], None] = trim) -> None:
        self._limit = limit
        self._outside = outside or Outside()
        self._trim = trim
        self._age = 0  # turns since all was given back
        self._used = self._outside()

    def after_turn(self, pooled: int) -> None:
        """Give back what is too much beside a pool of `pooled` bytes."""
        self._age += 1
        if self._age < HEAP_REST or self._age % LOOK_EVERY:
            return
        if self._outside() - self._used + pooled > self._limit:
            self.give_back()

    def give_back(self) -> None:
        """Give back all that is free; what is left then is in use."""
        self._trim()
        self._used = self._outside()
        self._age = 0


class Pool:
    """When MLX's free pool is given back to the system: now and then, and when it is full.

    A full pool is stuck: MLX keeps what it has, mostly of sizes that only prefill needed, and returns each newer
    buffer to the system. Never eagerly, though, nor after each chunk: on macOS that has panicked the kernel.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # A GPU's buffers come from elsewhere.
        self._heap = None if mx.default_device() == mx.gpu else Heap(int(KEPT * limit))
        self._age = 0  # turns since it was cleared
        self._used = False
        self._wanted = False

    @property
    def used(self) -> bool:
        """Whether there was a turn since all was given back."""
        return self._used

    def want_back(self) -> None:
        """Memory is short: give all back as soon as a pool that is full would be cleared."""
        self._wanted = True

    def after_turn(self, *, prefilled: bool) -> None:
        """Clear it if that is due."""
        self._age += 1
        self._used = True
        held = self._limit if self._wanted else mx.get_cache_memory()
        if clearing_due(self._age, held, self._limit, prefilled=prefilled and not self._wanted):
            if self._wanted:
                self.rest()
            else:
                self._clear()
        if self._heap is not None:
            self._heap.after_turn(mx.get_cache_memory())

    def rest(self) -> None:
        """Give all of it back, and what the C library keeps."""
        self._clear()
        self._used = self._wanted = False
        if self._heap is not None:
            self._heap.give_back()

    def _clear(self) -> None:
        """Give it back to the C library, which keeps it for the next large arrays."""
        mx.clear_cache()
        self._age = 0


def clearing_due(age: int, held: int, limit: int, *, prefilled: bool) -> bool:
    """Whether a pool of `held` bytes that was cleared `age` turns ago is to be cleared after this turn."""
    rest = FULL_POOL_REST_PREFILLING if prefilled else FULL_POOL_REST
    return age >= CLEAR_EVERY or (age >= rest and held >= FULL * limit)


def _device_info() -> dict[str, Any]:
    return dict(mx.device_info())


def _cgroup_headroom() -> int:
    """Bytes until the memory limit of a container; a huge number without one."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit = int((folder / "memory.max").read_text())
        used = int((folder / "memory.current").read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(limit - used + int(stat["inactive_file"]), 0)
    except (OSError, ValueError, KeyError):  # no such file, or "max"
        return 1 << 62
