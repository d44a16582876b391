"""Checks of the project as a newcomer meets it: a fresh clone that serves, its tests, and `make check`."""

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench.ask import chat, post
from bench.checks.answers import QUESTION, by_curl
from bench.checks.report import Report
from bench.harness import ROOT, RunningServer, clean_environment

TAIL = 2000  # characters of a failed command's output that are shown
MAKE_TEST_LIMIT = 600  # seconds, after installing


@contextlib.contextmanager
def clone() -> Iterator[Path]:
    """A clone of the repository's HEAD in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="clone-", dir="/tmp") as folder:
        target = Path(folder, "callboard")
        subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(target)], check=True)
        yield target


def _make(report: Report, folder: Path, *targets: str) -> float:
    began = time.monotonic()
    run = subprocess.run(
        ["make", "-C", str(folder), *targets],
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    seconds = time.monotonic() - began
    what = f"make {' '.join(targets)}"
    report.measured(f"{what.replace(' ', '_')}_seconds", round(seconds, 1))
    report.expect(run.returncode == 0, f"{what} succeeds", (run.stdout + run.stderr)[-TAIL:])
    return seconds


def fresh_clone(report: Report) -> None:
    """`make serve` in a fresh clone, with an empty model cache, answers with Paris."""
    with clone() as folder, tempfile.TemporaryDirectory() as cache:

        def make_serve(options: list[str]) -> list[str]:
            return ["make", "-C", str(folder), "serve", f"ARGS={' '.join(options)}"]

        began = time.monotonic()
        with RunningServer(
            "demo", wrap=make_serve, ready_seconds=540, environment={"CALLBOARD_CACHE_DIR": cache}
        ) as server:
            report.measured("seconds_from_clone_to_ready", round(time.monotonic() - began, 1))
            text = by_curl(server)
            report.measured("answer", text)
            report.expect("Paris" in text, "the answer contains Paris", text)
            answer = post(f"{server.url}/v1/chat/completions", chat(QUESTION, max_tokens=64))
            report.expect(answer.body["choices"][0]["message"]["content"] == text, "asked again, it says the same")
        report.expect(not server.leftover(), "it leaves no process behind", server.leftover())


def fresh_test(report: Report) -> None:
    """`make test` is green in a fresh clone within ten minutes after installing."""
    with clone() as folder:
        _make(report, folder, "setup")
        seconds = _make(report, folder, "test")
        report.expect(seconds <= MAKE_TEST_LIMIT, f"make test takes at most {MAKE_TEST_LIMIT} s", seconds)


def make_check(report: Report) -> None:
    """`make check` is clean."""
    _make(report, ROOT, "check")


def text_properties(report: Report) -> None:
    """Stop strings and pieces of unicode hold for random texts, tokenizations and cuts: others in each run."""
    environment = clean_environment() | {"HYPOTHESIS_PROFILE": "random"}
    for name in ("test_stop_strings", "test_detokenizer", "test_stream", "test_reply"):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/actors/streamer/{name}.py"]
        run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        report.expect(run.returncode == 0, f"{name} holds", run.stdout[-TAIL:])
