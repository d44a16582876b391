"""`RunningServer`: a real `callboard serve` as a child process, for checks, tests and the stress harness.

It has a Callboard home and a log file of its own, directly under /tmp because socket paths must be short. Used from
one thread; everything waits with a deadline, and leaving the block leaves no process behind.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import psutil

from bench.ask import get
from protocol.endpoints import ServerRecord

ROOT = Path(__file__).resolve().parents[1]
POLL = 0.02  # seconds between two looks at something that is not an event for us
LOG_TAIL = 4000  # characters of the log shown when a start fails


class StartFailed(Exception):
    """The server exited, or was not ready in time. `code` is its exit code, None when it still ran."""

    def __init__(self, message: str, code: int | None, log: str) -> None:
        super().__init__(f"{message}\n{log[-LOG_TAIL:]}")
        self.code = code
        self.log = log


def wait_until(condition: Callable[[], bool], seconds: float, what: str = "") -> float:
    """Look until `condition` holds; returns after how many seconds it did. Raises TimeoutError."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            raise TimeoutError(f"not within {seconds:g} s: {what or condition.__name__}")
        time.sleep(POLL)
    return time.monotonic() - began


def callboard() -> Path:
    """The `callboard` command of the environment that runs this."""
    return Path(sys.executable).with_name("callboard")


def clean_environment() -> dict[str, str]:
    """Our environment without settings of Callboard, save where it keeps its models."""
    return {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("CALLBOARD_") or key == "CALLBOARD_CACHE_DIR"
    }


def is_running(pid: int) -> bool:
    """Whether `pid` runs; one that has exited and waits to be reaped does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def processes_of(home: Path) -> list[psutil.Process]:
    """Processes started with `home` as their Callboard home, this one aside."""
    found = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            if process.environ().get("CALLBOARD_HOME") == str(home) and is_running(process.pid):
                found.append(process)
        except psutil.Error:
            continue
    return found


def exit_on_sigterm() -> None:
    """Let SIGTERM end this process by SystemExit, so that `RunningServer` blocks clean up. Main thread only."""

    def leave(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, leave)


_open_servers: "weakref.WeakSet[RunningServer]" = weakref.WeakSet()


def kill_all() -> None:
    """Kill every process of every server that this process has started and not closed."""
    for server in list(_open_servers):
        for process in server.leftover():
            with contextlib.suppress(psutil.Error):
                process.kill()


class RunningServer:
    """`with RunningServer(model, "--http-workers", "2") as server: …`

    `home`, which holds its prefix cache too, is made and removed when not given.
    `wrap` turns the options of `serve` into another command than our own
    `callboard serve`. Raises StartFailed from the block's start, with the end of the log.
    """

    def __init__(
        self,
        model: str | Path,
        *arguments: str,
        name: str = "bench",
        home: Path | None = None,
        port: int = 0,
        ready_seconds: float = 120.0,
        environment: Mapping[str, str] | None = None,
        wrap: Callable[[list[str]], list[str]] | None = None,
    ) -> None:
        self.name = name
        self.wanted_port = port
        self._owns_home = home is None
        self.home = home if home is not None else Path(tempfile.mkdtemp(prefix="cb-", dir="/tmp"))
        descriptor, log_path = tempfile.mkstemp(prefix=f"{name}-", suffix=".log", dir=self.home)
        os.close(descriptor)
        self.log_path = Path(log_path)
        options = ["--name", name, "--host", "127.0.0.1", "--port", str(port), *arguments]
        self.command = wrap(options) if wrap else [str(callboard()), "serve", str(model), *options]
        self.process: subprocess.Popen[bytes] | None = None
        self.record: ServerRecord | None = None
        self._ready_seconds = ready_seconds
        own = {"CALLBOARD_HOME": str(self.home), "CALLBOARD_SSD_CACHE_DIR": str(self.home / "prefix")}
        self._environment = clean_environment() | own | dict(environment or {})
        self._known: dict[int, float] = {}

    def __enter__(self) -> "RunningServer":
        try:
            self.launch()
            self.wait_ready(self._ready_seconds)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Start.

    def launch(self) -> None:
        """Start the process without waiting for it to serve."""
        _open_servers.add(self)
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                cwd=self.home,
                start_new_session=True,
            )

    def wait_ready(self, seconds: float) -> None:
        """Wait until `GET /ready` says 200. Raises StartFailed when the process exits, or after `seconds`."""

        def ready_or_over() -> bool:
            return self.exit_code() is not None or self._is_ready()

        try:
            wait_until(ready_or_over, seconds)
        except TimeoutError:
            raise StartFailed(f"not ready within {seconds:g} s", None, self.log()) from None
        if self.exit_code() is not None:
            raise StartFailed(f"serve exited with {self.exit_code()}", self.exit_code(), self.log())
        self.pids()

    def _is_ready(self) -> bool:
        try:
            path = self.home / "run" / f"{self.name}.json"
            self.record = msgspec.json.decode(path.read_bytes(), type=ServerRecord)
        except (OSError, msgspec.DecodeError):
            return False
        try:
            return self._is_ours(self.record.pid) and get(f"{self.url}/ready", timeout=5).status == 200
        except OSError:
            return False

    def _is_ours(self, pid: int) -> bool:
        # A record of the same name may be another server's, and `wrap` puts processes in between.
        assert self.process is not None
        try:
            return self.process.pid in (pid, *(parent.pid for parent in psutil.Process(pid).parents()))
        except psutil.NoSuchProcess:
            return False

    # What it is.

    @property
    def url(self) -> str:
        """Where it listens for HTTP, without a slash at the end."""
        assert self.record is not None
        return self.record.http.rstrip("/")

    @property
    def port(self) -> int:
        """The port of `url`."""
        return int(self.url.rpartition(":")[2])

    @property
    def endpoint(self) -> str:
        """The ZeroMQ endpoint for clients."""
        assert self.record is not None
        return self.record.endpoint

    def log(self) -> str:
        """All that the server has printed so far."""
        return self.log_path.read_text(errors="replace")

    def health(self) -> dict[str, Any]:
        """The body of `GET /health`, whatever its status."""
        body = get(f"{self.url}/health", timeout=5).body
        assert isinstance(body, dict)
        return body

    def load(self) -> dict[str, Any]:
        """What the engine says of itself: step, running, prefilling, waiting, and sums since its start."""
        engine: dict[str, Any] = self.health()["engine"]
        return engine

    def is_idle(self) -> bool:
        """Whether no stream runs, prefills or waits."""
        load = self.load()
        return not any(load[name] for name in ("running", "prefilling", "waiting"))

    def wait_idle(self, seconds: float = 10.0) -> None:
        """Wait until `is_idle`. Raises TimeoutError."""
        wait_until(self.is_idle, seconds, "the engine is idle")

    def pids(self) -> dict[str, int]:
        """Process ids by actor name, the supervisor's as `supervisor`."""
        assert self.record is not None
        pids = {actor["name"]: int(actor["pid"]) for actor in self.health()["actors"]}
        pids["supervisor"] = self.record.pid
        for pid in pids.values():
            with contextlib.suppress(psutil.Error):
                self._known[pid] = psutil.Process(pid).create_time()
        return pids

    def kill(self, actor: str) -> None:
        """SIGKILL one of the server's processes."""
        os.kill(self.pids()[actor], signal.SIGKILL)

    # End.

    def exit_code(self) -> int | None:
        """Exit code of `serve`, None while it runs."""
        return self.process.poll() if self.process is not None else None

    def terminate(self) -> None:
        """Ask it to end, as `kill PID` does."""
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)

    def wait(self, seconds: float) -> int:
        """Wait for `serve` to exit; returns its code. Raises subprocess.TimeoutExpired."""
        assert self.process is not None
        return self.process.wait(seconds)

    def leftover(self) -> list[psutil.Process]:
        """Processes of this server that still run."""
        found = {process.pid: process for process in processes_of(self.home)} if self._owns_home else {}
        for pid, created in self._known.items():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if process.create_time() == created and is_running(pid):
                    found[pid] = process
        if self.process is not None and self.exit_code() is None:
            found.setdefault(self.process.pid, psutil.Process(self.process.pid))
        return list(found.values())

    def close(self) -> None:
        """End the server, first by asking; remove the home when it is ours. Idempotent."""
        if self.process is not None and self.exit_code() is None:
            self.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.wait(10.0)
        for process in self.leftover():
            with contextlib.suppress(psutil.Error):
                process.kill()
        if self.process is not None:
            self.process.wait(10.0)
        _open_servers.discard(self)
        if self._owns_home:
            shutil.rmtree(self.home, ignore_errors=True)
