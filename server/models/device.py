"""Which backend of MLX is installed. Called by the CLI's process, which must not load MLX to find out."""

import sys
from importlib import metadata

_BACKENDS = {"mlx-metal": "metal", "mlx-cuda-13": "cuda", "mlx-cuda-12": "cuda", "mlx-cpu": "cpu"}


def installed_device() -> str | None:
    """`metal`, `cuda` or `cpu`, whichever backend this environment holds; None when it holds none.

    A GPU backend goes before `cpu`. Judged by the installed packages alone.
    """
    for package, device in _BACKENDS.items():
        try:
            metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        return device
    return None


def missing_backend_hint() -> str:
    """What to install where MLX has no backend."""
    if sys.platform == "darwin":
        return "MLX has no Metal backend here: install callboard again on a Mac with Apple silicon"
    return (
        "MLX has no backend here: install one of callboard's extras, "
        "`pip install 'callboard[cpu]'` or `pip install 'callboard[cuda]'`, never both"
    )
