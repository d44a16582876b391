"""The wheel, built from this checkout and installed into an environment that has never seen it.

The dependencies come from the environment of the tests, to spare a download of gigabytes: a `.pth` file of
the clean environment names its package folder. Python does not read the `.pth` files of a folder that was
added this way, so the editable install there stays out of sight; `test_runs_what_was_installed` checks it.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ROOMS = ("actors", "cache_store", "protocol", "server")


def run(command: Sequence[str | Path], cwd: Path) -> str:
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=own, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools would take what an earlier build left beside the sources."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for room in ROOMS:
        shutil.copytree(ROOT / room, source / room, ignore=shutil.ignore_patterns("__pycache__"))
    for other in ("tests", "bench"):
        shutil.copytree(ROOT / other, source / other, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps"]
    run([*pip, "--no-build-isolation", "--wheel-dir", str(out), str(source)], cwd=source)
    [built] = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of an environment with the wheel installed."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    packages = Path(run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], cwd=folder))
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    # Through the .pth pip sees the editable install's metadata too, and would uninstall that one first.
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python), "install"]
    run([*pip, "--no-deps", "--no-index", "--ignore-installed", str(wheel)], cwd=folder)
    return folder / "bin"


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder of somebody whose own modules are called like ours."""
    for room in ROOMS:
        (tmp_path / f"{room}.py").write_text("raise SystemExit('a module of the current folder was imported')\n")
    return tmp_path


def test_the_wheel_holds_the_four_rooms_and_no_more(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
    info = f"callboard-{PROJECT['project']['version']}.dist-info"
    assert {name.partition("/")[0] for name in names} == {*ROOMS, info}
    assert f"{info}/licenses/LICENSE" in names
    there = {path.relative_to(ROOT).as_posix() for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == there
    page = {path.relative_to(ROOT).as_posix() for path in (ROOT / "server" / "dashboard").iterdir()}
    assert page
    assert {name for name in names if name.startswith("server/dashboard/")} == page


def test_the_version_from_a_folder_with_a_server_of_its_own(clean: Path, elsewhere: Path) -> None:
    said = run([clean / "callboard", "--version"], cwd=elsewhere)
    assert said.split()[-1] == PROJECT["project"]["version"]


def test_actors_start_from_there_too(clean: Path, elsewhere: Path) -> None:
    assert "usage" in run([clean / "python", "-P", "-m", "actors", "--help"], cwd=elsewhere).lower()


def test_runs_what_was_installed(clean: Path, elsewhere: Path) -> None:
    script = f"import json, {', '.join(ROOMS)}; print(json.dumps([m.__file__ for m in ({', '.join(ROOMS)})]))"
    files = json.loads(run([clean / "python", "-P", "-c", script], cwd=elsewhere))
    assert all(Path(file).is_relative_to(clean.parent) for file in files), files
