"""Where a process's main thread is, by a sampling profiler (py-spy): parts of the samples, by what they show.

py-spy stops the process for each sample and needs the right to trace it: root, or on Linux a parent process.
"""

import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

RATE = 200  # samples per second
# Of actors/engine/device.py: the thread waits for the device there, or feeds it.
MODEL = ("Lane.dispatch", "Lane.wait", "Lane.follow")
OUTSIDE = "the loop around turns"
FRAMES = {  # the innermost of these that a stack shows names where it is
    "actors/engine/device.py": "model",
    "actors/engine/engine.py": "turn",
    "actors/engine/actor.py": "sockets and messages",
    "actors/base.py": OUTSIDE,
}


def record(pid: int, seconds: int, rate: int = RATE) -> list[str]:
    """Stacks of a process, as lines `outer;…;inner count`. Raises CalledProcessError with py-spy's own words."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "stacks")
        command = [str(Path(sys.executable).with_name("py-spy")), "record", "--format", "raw", "--idle", "--threads"]
        command += ["--rate", str(rate), "--duration", str(seconds), "--output", str(out), "--pid", str(pid)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=seconds + 60)
        return out.read_text().splitlines()


def parts(stacks: Iterable[str]) -> dict[str, float]:
    """Parts of 1 of the engine's main loop: in the model, in the rest of a turn, in sockets, around turns.

    Stacks that don't show the loop are other threads'. Empty when none does.
    """
    found: Counter[str] = Counter()
    for line in stacks:
        stack, _, count = line.rpartition(" ")
        place = _place(stack.split(";"))
        if place:
            found[place] += int(count)
    whole = found.total()
    return {name: round(number / whole, 4) for name, number in found.most_common()} if whole else {}


def outside(stacks: Iterable[str], most: int = 12) -> dict[str, float]:
    """Where the main loop is when it is not in the model: innermost frames, in parts of the loop."""
    found: Counter[str] = Counter()
    whole = 0
    for line in stacks:
        stack, _, count = line.rpartition(" ")
        frames = stack.split(";")
        place = _place(frames)
        whole += int(count) if place else 0
        if place not in ("", "model"):
            found[frames[-1].rpartition(":")[0].replace(" (", " in ")] += int(count)
    return {name: round(number / whole, 4) for name, number in found.most_common(most)}


def _place(frames: list[str]) -> str:
    if not any("actors/base.py" in frame for frame in frames):
        return ""
    for frame in reversed(frames):
        function, _, file = frame.partition(" (")
        for name, place in FRAMES.items():
            if file.startswith(name) or f"/{name}" in file:
                if place == "model" and function not in MODEL:
                    continue
                return place
    return OUTSIDE
