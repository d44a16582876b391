"""What `callboard doctor` looks at. Each look yields findings; nothing here changes anything but files of its own."""

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil

from actors.blas import blas_environment, find_openblas
from protocol.endpoints import home, ipc_endpoint, run_root, running_servers
from server.cli_cache import size
from server.cli_http import health
from server.models.device import installed_device, missing_backend_hint

OPEN_FILES = 8192  # for hundreds of streams
FREE_DISK = 2 << 30  # bytes below which the SSD cache is of little use
SLOW_DISK = 100.0  # MB per second below which reading blocks is hardly faster than computing them
PROBE = 32 << 20  # bytes written to measure the disk
HUB_TIME = 4.0  # seconds


class Finding(msgspec.Struct, frozen=True):
    """One thing that was looked at. `level` is ok, warning or error; `remedy` says what to do."""

    level: str
    what: str
    found: str
    remedy: str = ""


def device() -> Iterator[Finding]:
    """MLX and its backend."""
    name = installed_device()
    if name is None:
        yield Finding("error", "device", "MLX has no backend here", missing_backend_hint())
        return
    script = "import mlx.core as mx; mx.eval(mx.ones(4) @ mx.ones(4)); print(mx.default_device())"
    command = [sys.executable, "-P", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["it died without a word"]
        yield Finding(
            "error", "device", f"MLX ({name}) can't compute: {last[0]}", "install callboard again in a new environment"
        )
    else:
        yield Finding("ok", "device", f"MLX computes on {name} ({done.stdout.strip()})")


def blas() -> Iterator[Finding]:
    """The BLAS of Linux CPUs."""
    if sys.platform != "linux" or installed_device() != "cpu":
        return
    library = find_openblas()
    if library is None:
        yield Finding(
            "warning",
            "BLAS",
            "no OpenBLAS was found, so the model will run many times slower",
            "install it: apt-get install libopenblas0-pthread, or dnf install openblas-threads",
        )
    else:
        threads = blas_environment().get("OPENBLAS_NUM_THREADS", "?")
        yield Finding("ok", "BLAS", f"{library}, {threads} threads")


def memory() -> Iterator[Finding]:
    """Free memory."""
    free = psutil.virtual_memory().available
    text = f"{size(free)} of {size(psutil.virtual_memory().total)} are free"
    if free < 1 << 30:
        yield Finding("warning", "memory", text, "close other programs, or serve a smaller model")
    else:
        yield Finding("ok", "memory", text)


def files() -> Iterator[Finding]:
    """How many files may be open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < OPEN_FILES:
        yield Finding(
            "error",
            "open files",
            f"only {hard} files may be open at once; each stream takes one",
            f"raise the limit: `ulimit -n {OPEN_FILES}`, LimitNOFILE={OPEN_FILES} for systemd, "
            "or the hard limit in /etc/security/limits.conf",
        )
    else:
        most = "any number of" if hard == resource.RLIM_INFINITY else str(hard)
        yield Finding("ok", "open files", f"{most} files may be open (now {soft}; serve raises it itself)")


def home_folder() -> Iterator[Finding]:
    """Callboard's own folder: sockets, records, locks."""
    folder = run_root()
    try:
        ipc_endpoint(folder / "00000000", "tokenizer63-99999999")
    except ValueError as error:
        yield Finding("error", "home", str(error), "export CALLBOARD_HOME=/tmp/callboard, or another short path")
        return
    problem = _cant_write(folder)
    if problem:
        yield Finding(
            "error", "home", f"{folder} can't be written: {problem}", f"make {home()} yours, or set CALLBOARD_HOME"
        )
        return
    if folder.stat().st_mode & 0o022:
        yield Finding("warning", "home", f"others may write to {folder}", f"chmod -R go-w {home()}")
    else:
        yield Finding("ok", "home", str(home()))


def _cant_write(folder: Path) -> str:
    """Why nothing can be written to a folder, empty when it can; the folder is made."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-"):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def disk(folder: Path) -> Iterator[Finding]:
    """Where prefixes are kept: permission, room and speed."""
    problem = _cant_write(folder)
    if problem:
        yield Finding(
            "error",
            "SSD cache",
            f"{folder} can't be written: {problem}",
            "give another folder with --ssd-cache-dir, or serve with --no-ssd-cache",
        )
        return
    free = shutil.disk_usage(folder).free
    if free < FREE_DISK:
        yield Finding(
            "warning", "SSD cache", f"only {size(free)} are free in {folder}", "make room, or choose --ssd-cache-dir"
        )
    written, read = _speeds(folder)
    text = f"{folder} writes {written:.0f} MB/s and reads {read:.0f} MB/s, {size(free)} free"
    if min(written, read) < SLOW_DISK:
        yield Finding("warning", "SSD cache", text, "use a local SSD (--ssd-cache-dir), not a network or USB disk")
    else:
        yield Finding("ok", "SSD cache", text)


def _speeds(folder: Path) -> tuple[float, float]:
    data = os.urandom(1 << 20)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
        began = time.perf_counter()
        for _ in range(PROBE >> 20):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
        written = time.perf_counter() - began
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        began = time.perf_counter()
        while file.read(1 << 20):
            pass
        return PROBE / 1e6 / written, PROBE / 1e6 / (time.perf_counter() - began)


def port_is_free(port: int) -> Iterator[Finding]:
    """Whether `serve` could listen."""
    owner = next((server for server in running_servers() if server.http.endswith(f":{port}")), None)
    if owner is not None:
        yield Finding("ok", "port", f"{port} is that of the running server {owner.name}")
        return
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        remedy = f"end what uses it (`lsof -i :{port}`), or serve with another --port"
        yield Finding("error", "port", f"{port} can't be taken: {error.strerror}", remedy)
    else:
        yield Finding("ok", "port", f"{port} is free")


def servers() -> Iterator[Finding]:
    """Whether the running servers answer."""
    for server in running_servers():
        try:
            status = health(server.http, timeout=5.0)["status"]
        except (OSError, ValueError, KeyError) as error:
            status = f"no answer ({error})"
        if status == "ok":
            yield Finding("ok", "server", f"{server.name} serves {server.model} at {server.http}")
        else:
            remedy = f"look at its log, or start it again: callboard stop {server.name}"
            yield Finding("warning", "server", f"{server.name} (pid {server.pid}): {status}", remedy)


def hub() -> Iterator[Finding]:
    """Whether models can be fetched."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        yield Finding("ok", "hub", "HF_HUB_OFFLINE is set: only models that are here can be served")
        return
    try:
        request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
        urllib.request.urlopen(request, timeout=HUB_TIME).close()
    except urllib.error.HTTPError:
        yield Finding("ok", "hub", "it answers")
    except (OSError, ValueError) as error:
        yield Finding(
            "warning",
            "hub",
            f"the hub can't be reached: {getattr(error, 'reason', error)}",
            "check the network and HTTPS_PROXY; models that are here already, and folders, can still be served",
        )
    else:
        yield Finding("ok", "hub", "it answers")


def model_files(folder: Path, name: str) -> Iterator[Finding]:
    """Whether a model's weight files are whole, by what their headers say."""
    total = 0
    for path in sorted(folder.glob("model*.safetensors")):
        problem = _truncated(path)
        if problem:
            remedy = "it was copied or downloaded in part: fetch it again"
            yield Finding("error", "model", f"{path.name} of {name} is damaged: {problem}", remedy)
            return
        total += path.stat().st_size
    free = psutil.virtual_memory().available
    if total > free:
        remedy = "serve a model with fewer bits, or close other programs"
        yield Finding("warning", "model", f"its weights take {size(total)}, but only {size(free)} are free", remedy)
    else:
        yield Finding("ok", "model", f"{name}: {size(total)} of weights")


def _truncated(path: Path) -> str:
    nbytes = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= nbytes - 8:
            return "it has no header"
        try:
            header = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError):
            return "its header can't be read"
    wanted = 8 + length + max(ends, default=0)
    return "" if nbytes >= wanted else f"it has {nbytes} bytes of {wanted}"
