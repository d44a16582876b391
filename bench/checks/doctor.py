"""Check of `callboard doctor`: things broken on purpose are named, with their remedy."""

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.checks.report import Report
from bench.harness import clean_environment

TIME = 120.0  # seconds
FILES = 256


def run_doctor(
    *arguments: str, environment: dict[str, str], files: int | None = None
) -> tuple[int, dict[str, dict[str, str]]]:
    """Exit code and the worst finding about each thing. `files` limits how many may be open."""

    def limit() -> None:
        if files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    command = [sys.executable, "-P", "-m", "server.cli", "doctor", "--json", *arguments]
    done = subprocess.run(
        command, env=clean_environment() | environment, capture_output=True, text=True, timeout=TIME, preexec_fn=limit
    )
    order = ("ok", "warning", "error")
    found: dict[str, dict[str, str]] = {}
    for line in done.stdout.splitlines():
        finding = json.loads(line)
        before = found.get(finding["what"])
        if before is None or order.index(finding["level"]) > order.index(before["level"]):
            found[finding["what"]] = finding
    return done.returncode, found


def broken_model(folder: Path, model: Path) -> Path:
    """A copy of a model whose weights end too early, as a download that broke off leaves them."""
    shutil.copytree(model, folder)
    weights = min(folder.glob("model*.safetensors"))
    os.truncate(weights, weights.stat().st_size - 1000)
    return folder


def doctor(report: Report, model: Path) -> None:
    """A sound machine is called sound; one with six things broken hears of all six, each with a remedy."""
    with tempfile.TemporaryDirectory(prefix="cb-", dir="/tmp") as name:
        root = Path(name)
        sound = {"CALLBOARD_HOME": f"{root}/home", "HF_HUB_OFFLINE": "1"}
        port = ["--port", str(_free_port())]
        code, found = run_doctor(str(model), *port, "--ssd-cache-dir", f"{root}/ssd", environment=sound)
        errors = {what: one for what, one in found.items() if one["level"] == "error"}
        report.expect(code == 0 and not errors, "a sound machine is called sound", errors)
        report.expect(found.get("model", {}).get("level") == "ok", "whole weights are called whole", found.get("model"))

        (root / "file").write_text("a file, not a folder")
        damaged = broken_model(root / "damaged", model)
        broken = {"CALLBOARD_HOME": f"{root}/{'long' * 30}", "HF_ENDPOINT": "http://127.0.0.1:9"}
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = ["--port", str(taken.getsockname()[1])]
            arguments = [str(damaged), *port, "--ssd-cache-dir", f"{root}/file"]
            code, found = run_doctor(*arguments, environment=broken, files=FILES)
        wanted = {
            "open files": ("256", "ulimit"),
            "home": ("longer than", "CALLBOARD_HOME"),
            "SSD cache": ("can't be written", "--ssd-cache-dir"),
            "port": ("can't be taken", "--port"),
            "model": ("damaged", "fetch it again"),
            "hub": ("can't be reached", "network"),
        }
        report.expect(code == 1, "a broken machine gives exit code 1", code)
        for what, (problem, remedy) in wanted.items():
            one = found.get(what, {})
            ok = one.get("level") in ("error", "warning") and problem in one["found"] and remedy in one["remedy"]
            report.expect(ok, f"{what}: named, with the remedy", one)
        report.measured("broken_things_named", len(wanted))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port
