"""Checks of two servers of one user: side by side under two names, and refused under one."""

import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from bench.ask import post
from bench.checks.report import Report
from bench.harness import RunningServer, StartFailed, clean_environment
from protocol import Client

CONNECT = "from protocol import Client; Client()"


def two_servers(report: Report, model: Path) -> None:
    """Two names don't disturb each other, one name twice is refused, and `Client()` asks which one."""
    home = Path(tempfile.mkdtemp(prefix="cb-", dir="/tmp"))
    try:
        with RunningServer(model, name="left", home=home) as left:
            with RunningServer(model, name="right", home=home) as right:
                _side_by_side(report, left, right)
                _asks_for_a_name(report, home)
            _same_name(report, model, home, left)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _generate(server: RunningServer, max_tokens: int = 300) -> str:
    with Client(endpoint=server.endpoint) as client:
        return client.generate(ids=range(500, 520), max_tokens=max_tokens, temperature=0, ignore_eos=True).text()


def _side_by_side(report: Report, left: RunningServer, right: RunningServer) -> None:
    report.expect(left.url != right.url, "they listen on two ports", left.url)
    report.expect(not set(left.pids().values()) & set(right.pids().values()), "they share no process")
    alone = _generate(left)
    texts: list[str] = []
    thread = threading.Thread(target=lambda: texts.append(_generate(left)))
    thread.start()
    beside = _generate(right)
    right.close()
    thread.join(60)
    report.expect(texts == [alone], "a stream on one is undisturbed by the other's work and end", len(texts))
    report.expect(beside == alone, "both give the same text")
    report.expect(not right.leftover(), "the one that ended left nothing", right.leftover())
    right.launch()
    right.wait_ready(60)
    report.expect(_generate(right) == alone, "it can be started again under its name")


def _asks_for_a_name(report: Report, home: Path) -> None:
    environment = clean_environment() | {"CALLBOARD_HOME": str(home)}
    run = subprocess.run(
        [sys.executable, "-c", CONNECT], env=environment, cwd=home, capture_output=True, text=True, timeout=30
    )
    last = run.stderr.strip().splitlines()[-1:]
    report.measured("client_without_a_name_says", last)
    report.expect(run.returncode != 0, "Client() fails when two run", run.returncode)
    report.expect("left" in last[0] and "right" in last[0], "it lists both names", last)


def _same_name(report: Report, model: Path, home: Path, left: RunningServer) -> None:
    try:
        with RunningServer(model, name="left", home=home, ready_seconds=60):
            report.expect(False, "the same name twice is refused", "it started")
    except StartFailed as refusal:
        said = refusal.log.strip()
        report.measured("same_name_exit_code", refusal.code)
        report.measured("same_name_says", said[-300:])
        report.expect(refusal.code not in (None, 0), "the same name twice exits non-zero", refusal.code)
        report.expect("left" in said and "already" in said, "it says that the name is taken", said[-300:])
        report.expect("Traceback" not in said, "it says so without a traceback", said[-300:])
    status = post(f"{left.url}/v1/completions", {"prompt": "a", "max_tokens": 1}).status
    report.expect(status == 200, "the first one serves on", status)
