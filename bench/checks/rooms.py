"""Checks of the rooms: who may import whom, and that MLX is loaded in the engine process alone."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from bench.checks.report import Report
from bench.harness import ROOT, RunningServer

OURS = ("protocol", "cache_store", "actors", "server")
MLX = ("mlx", "mlx_lm")
CONVERTER = ("server", "models", "convert_gguf.py")  # runs in a short-lived child of its own

# What a room may import of our own rooms; `server.cli` and its commands may import more.
ALLOWED = {
    "protocol": {"protocol"},
    "cache_store": {"cache_store", "protocol"},
    "actors": {"actors", "cache_store", "protocol"},
    "server": {"server", "protocol"},
}
CLI_ALSO = {"actors", "cache_store"}
PROTOCOL_LIBRARIES = {"zmq", "msgspec"}


def imports(source: str) -> Iterator[str]:
    """Every module that a source text imports anywhere in it, by its full name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def is_cli(path: Path) -> bool:
    """Whether a file belongs to the command line."""
    return path.parts[0] == "server" and path.parts[1].startswith("cli")


def broken_imports(path: Path, source: str) -> list[str]:
    """What a file (its path from the repository's root) imports although its room may not."""
    return [f"{path}: {module}" for module in imports(source) if not _may_import(path, module.partition(".")[0])]


def _may_import(path: Path, top: str) -> bool:
    room = path.parts[0]
    if top in OURS:
        return top in ALLOWED[room] or (is_cli(path) and top in CLI_ALSO)
    if top in MLX:
        return path.parts[:2] == ("actors", "engine") or path.parts == CONVERTER
    return room != "protocol" or top in PROTOCOL_LIBRARIES or top in sys.stdlib_module_names


def has_mlx(pid: int) -> bool:
    """Whether a process has MLX's library mapped. Raises OSError when the process is gone."""
    maps = Path(f"/proc/{pid}/maps")
    if maps.exists():
        mapped = maps.read_text()
    else:
        mapped = subprocess.run(["lsof", "-p", str(pid)], capture_output=True, text=True).stdout
    return "libmlx" in mapped or "mlx/core" in mapped


def rooms(report: Report, server: RunningServer) -> None:
    """Every import keeps to its room, and only the engine process has MLX loaded."""
    files = sorted(path for room in OURS for path in (ROOT / room).rglob("*.py"))
    broken = [line for path in files for line in broken_imports(path.relative_to(ROOT), path.read_text())]
    report.measured("files", len(files))
    report.expect(not broken, "every import keeps to its room", broken)
    with_mlx = {name for name, pid in server.pids().items() if has_mlx(pid)}
    report.measured("processes", sorted(server.pids()))
    report.measured("with_mlx", sorted(with_mlx))
    report.expect(with_mlx == {"engine"}, "only the engine has MLX loaded", sorted(with_mlx))
