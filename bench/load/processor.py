"""`ProcessorTime`: what each process spends while a block runs, and what the rest of the machine does beside it.

A comparison in wall time means little while others compute on the same cores; these figures tell.
"""

import time
from collections.abc import Mapping

import psutil


class ProcessorTime:
    """`with ProcessorTime(pids) as spent: …`; afterwards `seconds` by name, and `others` in cores on average.

    `others` is what neither these processes nor the one that measures has used; with `children` what it has started
    and waited for counts as its own.
    """

    def __init__(self, pids: Mapping[str, int], children: bool = False) -> None:
        self._children = children
        self._processes = {name: psutil.Process(pid) for name, pid in pids.items()} | {"client": psutil.Process()}
        self.seconds: dict[str, float] = {}
        self.others = 0.0

    def __enter__(self) -> "ProcessorTime":
        self._before = self._look()
        self._busy = _busy()
        self._began = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        wall = time.monotonic() - self._began
        after = self._look()
        self.seconds = {name: round(after[name] - before, 2) for name, before in self._before.items()}
        self.others = round(max(_busy() - self._busy - sum(self.seconds.values()), 0.0) / wall, 2)

    def _look(self) -> dict[str, float]:
        looked = {}
        for name, process in self._processes.items():
            times = process.cpu_times()
            looked[name] = times.user + times.system
            if self._children:
                looked[name] += times.children_user + times.children_system
        return looked


def _busy() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + getattr(times, "irq", 0.0) + getattr(times, "softirq", 0.0))
