"""Which room may import what, read from the source; and that what isn't the engine doesn't load MLX."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = {"protocol", "actors", "server", "cache_store"}
ALLOWED = {
    "protocol": {"protocol"},
    "cache_store": {"cache_store", "protocol"},
    "actors": {"actors", "cache_store", "protocol"},
    "server": {"server", "protocol"},
    "server/cli": {"server", "protocol", "actors", "cache_store"},
}
MLX = {"mlx", "mlx_lm"}


def sources(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and top-level name of each absolute import in a file, wherever it stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            assert node.module is not None
            yield node.lineno, node.module.partition(".")[0]


def rules(path: Path) -> str:
    """Key in ALLOWED of the rules that hold for a file."""
    room, *rest = path.relative_to(ROOT).parts
    return "server/cli" if room == "server" and rest[0].startswith("cli") else room


def may_load_mlx(path: Path) -> bool:
    inside = path.relative_to(ROOT).as_posix()
    return inside.startswith("actors/engine/") or inside == "server/models/convert_gguf.py"


def breaches(path: Path, forbidden: set[str]) -> list[str]:
    inside = path.relative_to(ROOT)
    return [f"{inside}:{line} imports {name}" for line, name in imports(path) if name in forbidden]


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_rooms_import_only_what_they_may(room: str) -> None:
    assert sources(room)
    ours = ROOMS | {"bench", "tests"}
    assert [b for path in sources(room) for b in breaches(path, ours - ALLOWED[rules(path)])] == []


def test_protocol_needs_only_pyzmq_and_msgspec() -> None:
    known = sys.stdlib_module_names | {"zmq", "msgspec", "protocol"}
    foreign = {name for path in sources("protocol") for _, name in imports(path)} - known
    assert foreign == set()


def test_only_the_engine_and_the_converter_import_mlx() -> None:
    paths = [path for room in ROOMS for path in sources(room) if not may_load_mlx(path)]
    assert [b for path in paths for b in breaches(path, MLX)] == []


def test_no_other_module_loads_mlx_by_a_detour() -> None:
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for room in sorted(ROOMS)
        for path in sources(room)
        if not may_load_mlx(path) and path.name != "__main__.py"
    ]
    script = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    assert 'mlx.core' not in sys.modules, name\n"
    )
    command = [sys.executable, "-P", "-c", script, *modules]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_package_is_listed_for_the_wheel() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    there = {".".join(path.parent.relative_to(ROOT).parts) for room in ROOMS for path in sources(room)}
    assert sorted(listed) == sorted(there)
    for package in there:
        assert (ROOT / package.replace(".", "/") / "__init__.py").is_file(), package


def test_test_folders_are_no_packages() -> None:
    assert sorted((ROOT / "tests").rglob("__init__.py")) == []
