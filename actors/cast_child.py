"""`CastChild`: a cast process as the house sees it: its handle, whether it answers, and whether it and its actors are
gone. Used by the house's loop."""

import contextlib
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil

from actors.child import Child, describe_exit
from actors.config import CastConfig, write_config
from actors.footprint import footprint
from actors.link import ROLE
from actors.supervision import SILENCE_LIMIT
from protocol.messages import ActorState

GREETING_LIMIT = 30.0  # seconds a new process may take until its first word
LEAVE_LIMIT = 5.0  # seconds that the actors of a cast that died may outlive it


class CastChild:
    """One running cast, `identity` on the control channel."""

    def __init__(
        self,
        config: CastConfig,
        folder: Path,
        claim: int,
        index: int,
        epoch: int,
        environment: dict[str, str],
        keep_log: Callable[[bytes], None],
        now: float,
    ) -> None:
        """Start it in `folder`, which is made. Raises OSError."""
        self.folder = folder
        self.name = f"{ROLE}{index}"
        self.identity = f"{ROLE}-{index}-{epoch}".encode()
        self.cause = ""  # what it said of its end
        self.left = False  # the process has ended
        self._index, self._epoch = index, epoch
        self._started = now
        self._asked = 0.0
        self._silent = True
        self._killed = ""
        self._exit_text = ""
        self._left_at = 0.0
        self._actors: dict[int, float] = {}  # creation times of its actors' processes, by pid
        folder.mkdir(mode=0o700)
        try:
            write_config(msgspec.structs.replace(config, run_dir=str(folder), memory_limit=claim, house=True))
            command = [sys.executable, "-P", "-m", "actors", ROLE, "--run", str(folder), "--house", str(folder.parent)]
            command += ["--index", str(index), "--epoch", str(epoch)]
            self._child = Child(command, environment, actor=self.name, epoch=epoch, keep=keep_log)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self.pid = self._child.pid

    @property
    def silent(self) -> bool:
        """Whether it has not said a word yet."""
        return self._silent

    def probed(self, now: float) -> None:
        """It is being asked whether it lives."""
        if not self._silent:
            self._asked = self._asked or now

    def heard(self) -> None:
        """It said something."""
        self._asked, self._silent = 0.0, False

    def excuse(self) -> None:
        """The house itself stood still: what it has not answered doesn't count."""
        self._asked = 0.0

    def learn(self, actors: list[ActorState]) -> None:
        """Note which processes it has."""
        for actor in actors:
            if actor.pid and actor.pid not in self._actors:
                with contextlib.suppress(psutil.Error):
                    self._actors[actor.pid] = psutil.Process(actor.pid).create_time()

    def hangs(self, now: float) -> str:
        """Why it has to be killed; "" when it needn't."""
        if self._killed or self.left:
            return ""
        if self._silent:
            return f"was not there after {GREETING_LIMIT:g} s" if now - self._started > GREETING_LIMIT else ""
        late = now - self._asked if self._asked else 0.0
        return f"hangs: it has not answered for {late:.1f} s" if late > SILENCE_LIMIT else ""

    def end(self, why: str) -> None:
        """End it by force; its actors end with it."""
        self._killed = why
        self._child.end()

    def replace_engine(self) -> None:
        """Have it replace its engine. Only for one that is ready."""
        if not self.left and not self._silent:
            self._child.signal(signal.SIGUSR1)

    def ended(self, now: float) -> str | None:
        """How it ended, once all its processes are gone; None while one is left."""
        if not self.left:
            code = self._child.exit_code()
            if code is None:
                return None
            self.left, self._left_at = True, now
            self._exit_text = describe_exit(code)
            if not self.cause and (words := self._child.last_words()):
                self._exit_text += f": {words}"
        alive = [process for pid, created in self._actors.items() if (process := _living(pid, created)) is not None]
        if alive:
            if now - self._left_at > LEAVE_LIMIT:
                for process in alive:
                    with contextlib.suppress(psutil.Error):
                        process.kill()
            return None
        self._child.close()
        return self.cause or self._killed or f"its process (pid {self.pid}) {self._exit_text}"

    def kill(self) -> None:
        """End it at once, whatever it does."""
        self._child.kill()
        self._child.close()

    def actor_state(self, state: str) -> ActorState:
        """The process as others see it, for a model in `state`."""
        shown = {"loading": "starting", "unloading": "stopping"}.get(state, state)
        shown = "dead" if self.left else shown
        return ActorState(self.name, ROLE, self._index, self.pid, shown, self._epoch, "", *footprint(self.pid))


def _living(pid: int, created: float) -> psutil.Process | None:
    """The process `pid` of that time, unless it is gone or waits to be reaped."""
    try:
        process = psutil.Process(pid)
        if process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE:
            return process
    except psutil.Error:
        pass
    return None
