"""`Awake`: keeps a Mac from idle sleep while streams are open. Used by the supervisor; does nothing elsewhere."""

import os
import subprocess
import sys
from collections.abc import Callable

COMMAND = ["caffeinate", "-i", "-w"]  # ends by itself with the process whose id follows


def start_caffeinate() -> "subprocess.Popen[bytes] | None":
    """Start it for this process; None where there is none."""
    if sys.platform != "darwin":
        return None
    quiet = subprocess.DEVNULL
    try:
        return subprocess.Popen([*COMMAND, str(os.getpid())], stdin=quiet, stdout=quiet, stderr=quiet)
    except OSError:
        return None


class Awake:
    """Holds a `caffeinate` while there is work."""

    def __init__(self, start: "Callable[[], subprocess.Popen[bytes] | None]" = start_caffeinate) -> None:
        self._start = start
        self._process: subprocess.Popen[bytes] | None = None

    def update(self, working: bool) -> None:
        """Whether streams are open now."""
        if working and self._process is None:
            self._process = self._start()
        elif not working and self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None
