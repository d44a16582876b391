"""Which BLAS the engine process gets on Linux CPUs, where MLX's wheel brings the slow reference one.

Used by the supervisor when it starts the engine; loads neither MLX nor a BLAS.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

import structlog

log = structlog.get_logger()

# Not the builds with 64-bit integers (libopenblas64, libopenblas64_): MLX calls the 32-bit interface.
_NAME = re.compile(r"libopenblas([po]?)(-r[0-9.]+)?\.so(\.\d+)?$")
_LDCONFIG_LINE = re.compile(r"\s*libopenblas\S* \([^)]*64[^)]*\) => (\S+)")  # 64-bit ones: x86-64, AArch64


def blas_environment(threads: int | None = None) -> dict[str, str]:
    """Environment variables for the engine process: an OpenBLAS preloaded, with `threads` threads.

    What the user's own environment sets of these stays in force. {} where MLX brings a good BLAS (macOS), computes
    elsewhere (CUDA), or there is no OpenBLAS on this machine.
    """
    if sys.platform != "linux" or has_cuda_backend():
        return {}
    library = find_openblas()
    if library is None:
        log.warning("no OpenBLAS found; the model will run several times slower on this CPU. Install libopenblas0")
        return {}
    preloaded = os.environ.get("LD_PRELOAD", "")
    if "openblas" not in preloaded:
        preloaded = f"{preloaded}:{library}" if preloaded else str(library)
    chosen = threads or os.environ.get("OPENBLAS_NUM_THREADS") or default_threads(usable_cores())
    return {"LD_PRELOAD": preloaded, "OPENBLAS_NUM_THREADS": str(chosen)}


def find_openblas() -> Path | None:
    """An OpenBLAS of this machine's architecture, the build with threads of its own where there are several."""
    if sys.platform != "linux":
        return None
    return choose([*_in_library_folders(), *_in_linker_cache(), *_in_environments()])


def choose(candidates: Iterable[Path]) -> Path | None:
    """The first of the best kind: pthread, then unnamed, then OpenMP and serial builds."""
    ranked = [path for path in candidates if _NAME.fullmatch(path.name)]
    return min(ranked, key=_rank, default=None)


def default_threads(cores: int) -> int:
    """BLAS threads for a machine with `cores`: the other processes and MLX's own thread need theirs.

    On 2 cores one thread measured better than two as soon as anything else was running.
    """
    return max(1, cores // 2)


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def has_cuda_backend() -> bool:
    """Whether MLX is installed with its CUDA backend."""
    return any((d.metadata["Name"] or "").lower().startswith("mlx-cuda") for d in distributions())


def _rank(path: Path) -> int:
    build = _NAME.fullmatch(path.name)
    kind = build[1] if build else ""
    place = path.parent.name
    if kind == "p" or place == "openblas-pthread":
        return 0
    if kind == "o" or place in ("openblas-openmp", "openblas-serial"):
        return 2
    return 1


def _in_library_folders() -> Iterator[Path]:
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    for folder in (
        f"/usr/lib/{multiarch}",
        f"/usr/local/lib/{multiarch}",
        "/usr/lib64",
        "/usr/local/lib",
        "/usr/lib",
    ):
        for pattern in ("openblas-*/libopenblas*.so*", "openblas/libopenblas*.so*", "libopenblas*.so*"):
            yield from sorted(Path(folder).glob(pattern))


def _in_linker_cache() -> Iterator[Path]:
    ldconfig = shutil.which("ldconfig") or "/sbin/ldconfig"
    try:
        listing = subprocess.run([ldconfig, "-p"], capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return
    for line in listing.splitlines():
        if found := _LDCONFIG_LINE.match(line):
            yield Path(found[1])


def _in_environments() -> Iterator[Path]:
    for prefix in {os.environ.get("CONDA_PREFIX"), sys.prefix} - {None}:
        yield from sorted(Path(str(prefix), "lib").glob("libopenblas*.so*"))
