"""`callboard-client`, built from this checkout and installed where nothing of Callboard is, talks to a server.

pyzmq and msgspec come from the environment of the tests by a `.pth` file, as in `tests/packaging`.
"""

import json
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from bench import client_wheel
from bench.harness import ROOT, RunningServer, clean_environment

SCRIPT = """
import json, sys
before = set(sys.modules)
from protocol import Client
with Client(endpoint=sys.argv[1]) as client:
    stream = client.generate(ids=[700, 800], max_tokens=5, temperature=0, ignore_eos=True, return_ids=True)
    result = stream.result()
    many = client.generate_many([[700, 800], "hello"], max_tokens=5, temperature=0, ignore_eos=True, return_ids=True)
import protocol
print(json.dumps({
    "file": protocol.__file__,
    "ids": [result.ids, *(one.ids for one in many)],
    "imported": sorted({name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names),
}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return client_wheel.build(tmp_path_factory.mktemp("client-wheel"))


def test_it_holds_the_protocol_alone_in_our_version(wheel: Path):
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    theirs = tomllib.loads((ROOT / "packaging" / "client" / "pyproject.toml").read_text())["project"]
    assert theirs["version"] == ours["version"]
    assert set(theirs["dependencies"]) < set(ours["dependencies"])
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    there = {path.relative_to(ROOT).as_posix() for path in (ROOT / "protocol").rglob("*.py")} | {"protocol/py.typed"}
    assert {name for name in names if ".dist-info/" not in name} == there


def test_it_talks_to_a_server_with_pyzmq_and_msgspec_alone(server: RunningServer, wheel: Path, tmp_path: Path):
    folder = tmp_path / "clean"
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / version / "site-packages"
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", "--ignore-installed", str(wheel)], check=True, cwd=tmp_path)
    environment = {name: value for name, value in clean_environment().items() if name != "PYTHONPATH"}
    command = [python, "-P", "-c", SCRIPT, server.endpoint]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert Path(said["file"]).is_relative_to(folder)
    imported = {name for name in said["imported"] if "cython" not in name}
    # msgspec uses typing_extensions where it happens to be.
    assert imported - {"typing_extensions"} == {"msgspec", "protocol", "zmq"}
    first, again, text = said["ids"]
    assert first == again
    assert len(first) == len(text) == 5
