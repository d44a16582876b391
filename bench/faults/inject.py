"""`Faults`: what is to go wrong in the server of a check, and its switches. `injected/sitecustomize.py` does it."""

import os
import struct
from collections.abc import Sequence
from pathlib import Path

import msgspec

INJECTED = Path(__file__).parent / "injected"
ROUTES = ("engine streamer", "streamer engine", "tokenizer streamer", "streamer tokenizer")  # as in sitecustomize.py


class RowFault(msgspec.Struct, frozen=True):
    """The engine crashes or hangs (`how`) at a request whose ids begin with `ids`: at its `prompt`, while it has
    decoded `tokens` tokens ("decode"), while its `grammar` is built, or when `siblings` join it. `once` names a file
    that is made when it happens, so that it happens once."""

    how: str
    ids: Sequence[int]
    place: str = "prompt"
    tokens: int = 0
    once: str = ""


class Faults:
    """The faults of one server. `folder`, which is there, gets the switches. Actors other than the engine hang after
    `silence` seconds without an answer."""

    def __init__(self, folder: Path, *rows: RowFault, silence: float | None = None) -> None:
        self.folder = folder
        self._rows = rows
        self._silence = silence
        self._disk = folder / "disk.json"
        self._clock = folder / "clock"
        self._frames = folder / "frames"
        self._frames.write_bytes(bytes(len(ROUTES)))
        self._clock.write_bytes(bytes(8))
        self.disk()

    def environment(self) -> dict[str, str]:
        """For `RunningServer`."""
        paths = [str(INJECTED), *filter(None, [os.environ.get("PYTHONPATH")])]
        files = {"disk": str(self._disk), "clock": str(self._clock), "frames": str(self._frames)}
        wanted = {"rows": self._rows, "silence": self._silence, **files}
        return {"PYTHONPATH": os.pathsep.join(paths), "BENCH_FAULTS": msgspec.json.encode(wanted).decode()}

    def disk(self, *, full: bool = False, slow: float = 0.0) -> None:
        """From now on the disk takes no block, or `slow` seconds more for each."""
        new = self._disk.with_suffix(".new")
        new.write_bytes(msgspec.json.encode({"full": full, "slow": slow}))
        new.rename(self._disk)

    def cut(self, route: str) -> None:
        """Cut the next frame on this way (one of `ROUTES`) in half."""
        with open(self._frames, "r+b") as file:
            file.seek(ROUTES.index(route))
            file.write(b"\1")

    def was_cut(self) -> bool:
        """Whether all frames that were to be cut have been."""
        return not any(self._frames.read_bytes())

    def clock_jump(self, seconds: float) -> None:
        """Have the clock of all processes jump ahead. It never goes back, as a monotonic clock doesn't."""
        (ahead,) = struct.unpack("<d", self._clock.read_bytes())
        with open(self._clock, "r+b") as file:
            file.write(struct.pack("<d", ahead + seconds))
