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
# Under these the thread feeds the device or waits for it, and mlx-lm builds the model's graph: what the engine's own
# figures count as in the model.
MODEL = {
    "actors/engine/device.py": ("Lane.dispatch", "Lane.wait", "Lane.follow"),
    "actors/engine/model.py": ("Model.forward",),
}
OUTSIDE = "the loop around turns"
FRAMES = {  # of a stack with none of those, the innermost of these names where it is
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
    parts = [frame.partition(" (") for frame in frames]
    for function, _, file in parts:
        if any(_is_of(file, name) and function in functions for name, functions in MODEL.items()):
            return "model"
    for _, _, file in reversed(parts):
        for name, place in FRAMES.items():
            if _is_of(file, name):
                return place
    return OUTSIDE


def _is_of(file: str, name: str) -> bool:
    return file.startswith(name) or f"/{name}" in file
