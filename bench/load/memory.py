"""`PeakMemory`: the largest resident size of each server process while a load runs.

Sampled by psutil from the load's event loop; a peak shorter than the interval can be missed.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping

import psutil

INTERVAL = 0.25  # seconds


class PeakMemory:
    """`peaks` maps the name of a process to its largest resident size so far, in bytes."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self.peaks: dict[str, int] = {}
        self._processes: dict[str, psutil.Process] = {}
        for name, pid in pids.items():
            with contextlib.suppress(psutil.Error):
                self._processes[name] = psutil.Process(pid)

    def sample(self) -> None:
        """Look once; processes that are gone keep their last peak."""
        for name, process in self._processes.items():
            with contextlib.suppress(psutil.Error):
                self.peaks[name] = max(self.peaks.get(name, 0), process.memory_info().rss)

    @contextlib.asynccontextmanager
    async def watch(self) -> AsyncIterator["PeakMemory"]:
        """Sample in the background while the block runs."""

        async def sample_for_ever() -> None:
            while True:
                self.sample()
                await asyncio.sleep(INTERVAL)

        task = asyncio.create_task(sample_for_ever())
        try:
            yield self
        finally:
            task.cancel()
            self.sample()
