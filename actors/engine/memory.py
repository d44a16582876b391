"""Memory of the engine process: MLX's limits, what is free before a model loads, and when the pool is cleared.

Used on the engine's one thread.
"""

from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil

CLEAR_EVERY_STEPS = 1024
CLEAR_AFTER_IDLE_S = 1.0


def set_limits(rows: int, vocab_size: int) -> None:
    """Set MLX's limits for batches of `rows`.

    Its free pool must hold a few sets of logits, or every step returns them to the system and faults them in
    again. On Metal the weights stay wired.
    """
    mx.set_cache_limit(max(512 << 20, 4 * rows * vocab_size * 4))
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


def clear_pool() -> None:
    """Give the memory of MLX's free pool back to the system."""
    mx.clear_cache()


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
