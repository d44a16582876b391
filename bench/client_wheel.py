"""Build the distribution `callboard-client`: python bench/client_wheel.py [FOLDER]

`protocol/` alone, with pyzmq and msgspec, for programs that talk to a server and need no server of their own.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]


def build(out: Path) -> Path:
    """Build the wheel into `out`; returns it. From a copy, since setuptools takes what earlier builds left beside it.

    Raises CalledProcessError.
    """
    with TemporaryDirectory() as folder:
        source = Path(folder)
        shutil.copytree(ROOT / "protocol", source / "protocol", ignore=shutil.ignore_patterns("__pycache__"))
        for path in (ROOT / "LICENSE", *(ROOT / "packaging" / "client").iterdir()):
            shutil.copy(path, source / path.name)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps", "--quiet"]
        command = [*pip, "--no-build-isolation", "--wheel-dir", str(source / "dist"), str(source)]
        subprocess.run(command, cwd=source, check=True, stdin=subprocess.DEVNULL, capture_output=True)
        (built,) = (source / "dist").glob("*.whl")
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(built, out))


if __name__ == "__main__":
    print(build(Path(sys.argv[1] if len(sys.argv) > 1 else "dist")))
