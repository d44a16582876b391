"""`Child`: one process the supervisor started — its handle, its lifeline and its log.

The child's stderr goes through a thread that passes it on and keeps the last lines, so that the end of a process
that can't speak any more (a crash in native code) can still be explained. Lines that are no log lines of ours are
passed on with the actor, pid and epoch they come from.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import IO

TAIL_LINES = 20


class Child:
    """A running child process."""

    def __init__(
        self,
        command: list[str],
        environment: dict[str, str],
        pass_fds: tuple[int, ...] = (),
        *,
        actor: str = "",
        epoch: int = 0,
        keep: Callable[[bytes], None] = lambda _: None,
    ) -> None:
        """Start `command` with `--lifeline FD` appended; `actor` and `epoch` are for the log, whose lines go to stderr
        and to `keep`. Raises OSError."""
        self._keep = keep
        self._as_text = environment.get("CALLBOARD_LOG_FORMAT") == "text"
        read_end, self._lifeline = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*command, "--lifeline", str(read_end)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(read_end, *pass_fds),
            )
        except OSError:
            os.close(self._lifeline)
            raise
        finally:
            os.close(read_end)
        self.pid = self._process.pid
        self._origin = {"actor": actor, "pid": self.pid, "epoch": epoch}
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._pump = threading.Thread(target=self._pass_on_log, name=f"log of {self.pid}", daemon=True)
        self._pump.start()

    def _pass_on_log(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            self._pass_on(lines)

    def _pass_on(self, lines: IO[bytes]) -> None:
        for line in lines:
            self._tail.append(line.decode(errors="replace").rstrip())
            named = self._named(line)
            self._keep(named)
            try:
                sys.stderr.buffer.write(named)
                sys.stderr.buffer.flush()
            except (OSError, ValueError):
                continue  # nobody reads our log; the child must still be able to write

    def _named(self, line: bytes) -> bytes:
        if self._as_text or line.startswith(b"{") or not line.strip():
            return line
        text = line.decode(errors="replace").rstrip()
        return json.dumps({"event": text, "level": "stderr", **self._origin}, ensure_ascii=False).encode() + b"\n"

    def exit_code(self) -> int | None:
        """Exit code (negative: the signal that killed it), None while it runs."""
        return self._process.poll()

    def last_words(self) -> str:
        """The last line it wrote to stderr that is no log line of ours."""
        self._pump.join(timeout=0.2)
        lines = [line for line in self._tail if line and not line.startswith("{")]
        return lines[-1] if lines else ""

    def signal(self, number: int) -> None:
        """Send it a signal. Nothing happens when it has ended."""
        self._process.send_signal(number)

    def end(self) -> None:
        """End it by force without waiting for it; `exit_code` reaps it."""
        self._process.kill()

    def kill(self) -> None:
        """End it at once; it is reaped."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Give back the handles of a process that has ended."""
        os.close(self._lifeline)
        self._pump.join(timeout=1.0)  # longer where a process that it left behind has our pipe: not waited for


def describe_exit(code: int) -> str:
    """What an exit code means, for people."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (killed from outside, or by the system for lack of memory)" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"
