"""Which OpenBLAS is taken, with how many threads, and that it takes effect in the process that is given it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from actors import blas

PTHREAD = Path("/usr/lib/x86_64-linux-gnu/openblas-pthread/libopenblas.so.0")
OPENMP = Path("/usr/lib/x86_64-linux-gnu/openblas-openmp/libopenblas.so.0")
PLAIN = Path("/usr/lib/x86_64-linux-gnu/libopenblas.so.0")
FEDORA = Path("/usr/lib64/libopenblasp.so.0")

linux_cpu = pytest.mark.skipif(
    sys.platform != "linux" or blas.has_cuda_backend(), reason="only the Linux CPU backend takes a BLAS"
)


@pytest.mark.parametrize(
    ("candidates", "chosen"),
    [
        ([], None),
        ([PLAIN, OPENMP, PTHREAD], PTHREAD),
        ([OPENMP, PLAIN], PLAIN),
        ([OPENMP], OPENMP),
        ([PLAIN, FEDORA], FEDORA),
        ([Path("/usr/lib64/libopenblas64.so.0"), Path("/usr/lib64/libopenblasp64_.so.0")], None),
        (
            [Path("/usr/lib64/libopenblasp64.so"), Path("/usr/lib64/libopenblaso-r0.3.21.so")],
            Path("/usr/lib64/libopenblaso-r0.3.21.so"),
        ),
    ],
)
def test_the_pthread_build_is_preferred_and_64_bit_integers_are_not_taken(
    candidates: list[Path], chosen: Path | None
) -> None:
    assert blas.choose(candidates) == chosen


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (3, 1), (4, 2), (16, 8)])
def test_threads_leave_cores_to_the_other_processes(cores: int, threads: int) -> None:
    assert blas.default_threads(cores) == threads


@linux_cpu
def test_what_is_preloaded_already_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "find_openblas", lambda: PTHREAD)
    monkeypatch.setenv("LD_PRELOAD", "/lib/libjemalloc.so")
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    made = blas.blas_environment(3)
    assert made == {"LD_PRELOAD": f"/lib/libjemalloc.so:{PTHREAD}", "OPENBLAS_NUM_THREADS": "3"}
    monkeypatch.setenv("LD_PRELOAD", "/opt/libopenblas.so")
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "5")
    assert blas.blas_environment() == {"LD_PRELOAD": "/opt/libopenblas.so", "OPENBLAS_NUM_THREADS": "5"}


def test_nothing_is_preloaded_where_mlx_computes_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "has_cuda_backend", lambda: True)
    assert blas.blas_environment(2) == {}


@linux_cpu
@pytest.mark.skipif(blas.find_openblas() is None, reason="no OpenBLAS on this machine")
def test_the_preloaded_library_does_the_work_and_is_faster() -> None:
    script = """if True:
        import time, mlx.core as mx
        a = mx.random.normal((256, 512)); b = mx.random.normal((512, 2048)); mx.eval(a, b)
        best = 1e9
        for _ in range(4):
            start = time.perf_counter(); mx.eval(a @ b); best = min(best, time.perf_counter() - start)
        print(best, "libopenblas" in open("/proc/self/maps").read())
    """

    def run(extra: dict[str, str]) -> tuple[float, str]:
        clean = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
        shown = subprocess.run(
            [sys.executable, "-c", script],
            env=clean | extra,
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        seconds, loaded = shown.stdout.split()
        return float(seconds), loaded

    slow, loaded_without = run({})
    fast, loaded_with = run(blas.blas_environment())
    assert (loaded_without, loaded_with) == ("False", "True")
    assert fast < slow / 2
