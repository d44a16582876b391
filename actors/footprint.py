"""What a process takes of the machine, read by the supervisor now and then."""

from typing import NamedTuple

import psutil


class Footprint(NamedTuple):
    """Resident memory in bytes, and CPU time in seconds."""

    memory: int
    cpu: float


def footprint(pid: int) -> Footprint:
    """That of a process; zeros when it is gone."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times = process.cpu_times()
            return Footprint(int(process.memory_info().rss), round(times.user + times.system, 2))
    except psutil.Error:
        return Footprint(0, 0.0)
