"""`MlxChild`: a process that runs MLX by itself, beside a server it is compared with, or without one.

`MlxChild("bench.bare_limit", folder)` runs `python -m bench.bare_limit --child folder` with the engine's BLAS
preloaded, as the engine process has it. It computes only when asked, one JSON line for each `ask`, so that its
runs and the server's can alternate. Used from one thread. The module calls `answer_for_ever`.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from actors.allocator import malloc_environment
from actors.blas import blas_environment
from bench.harness import ROOT, clean_environment

CHILD = "--child"


class ChildFailed(Exception):
    """The child ended, or took too long, before it answered."""


class MlxChild:
    """`with MlxChild(module, *arguments) as child: child.ask({...})`. Raises ChildFailed."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._command = [sys.executable, "-m", module, CHILD, *arguments]
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "MlxChild":
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=clean_environment() | blas_environment() | malloc_environment() | {"HF_HUB_OFFLINE": "1"},
        )
        return self

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None
        return self._process.pid

    def ask(self, request: Any = None, seconds: float = 300.0) -> Any:
        """Send one request and wait for its answer."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        late = threading.Timer(seconds, process.kill)
        late.start()
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            late.cancel()
        if not line:
            raise ChildFailed(f"{' '.join(self._command[2:])} ended with {process.wait()}")
        return json.loads(line)

    def __exit__(self, *_: object) -> None:
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        process.kill()  # it owns nothing
        process.wait()
        process.stdin.close()
        process.stdout.close()


def answer_for_ever(answer: Callable[[Any], Any]) -> None:
    """Answer each line of stdin on stdout until stdin ends; whatever else prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(answer(json.loads(line))) + "\n")
        answers.flush()
