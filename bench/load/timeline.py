"""`Timeline`: what processes, engine and load did over the time of a run, in samples.

Sampled from the load's event loop; `GET /health` is asked on a side thread. A peak shorter than the interval can be
missed. `late` says how far behind the loop itself was, so a load process that is the bottleneck shows.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import msgspec
import psutil

from bench.ask import get

INTERVAL = 0.25  # seconds
CLIENT = "client"  # the load process's own name


class Sample(msgspec.Struct):
    """One look. `at` is in seconds since the start; `memory` (bytes, resident) and `processor` (seconds so far) go by
    process. `arrivals` counts arrivals of tokens so far, `open` requests in flight. `engine` is what `/health` said
    last of the engine, empty when nobody was asked."""

    at: float
    memory: dict[str, int]
    processor: dict[str, float]
    arrivals: int = 0
    open: int = 0
    late: float = 0.0
    engine: dict[str, Any] = {}


class Timeline:
    """`samples` of the processes `pids`, and of the load process as `client`.

    `counts` gives arrivals and requests in flight; with `url` the server's `/health` is looked at, too.
    """

    def __init__(
        self, pids: Mapping[str, int], url: str = "", counts: Callable[[], tuple[int, int]] = lambda: (0, 0)
    ) -> None:
        self.samples: list[Sample] = []
        self._url = url
        self._counts = counts
        self._engine: dict[str, Any] = {}
        self._processes: dict[str, psutil.Process] = {CLIENT: psutil.Process()}
        self._began = time.monotonic()
        for name, pid in pids.items():
            with contextlib.suppress(psutil.Error):
                self._processes[name] = psutil.Process(pid)

    @property
    def peaks(self) -> dict[str, int]:
        """The largest resident size of each process but the load's own, in bytes."""
        peaks: dict[str, int] = {}
        for sample in self.samples:
            for name, size in sample.memory.items():
                if name != CLIENT:
                    peaks[name] = max(peaks.get(name, 0), size)
        return peaks

    def sample(self, late: float = 0.0) -> None:
        """Look once; processes that are gone are left out."""
        memory, processor = {}, {}
        for name, process in self._processes.items():
            with contextlib.suppress(psutil.Error), process.oneshot():
                memory[name] = process.memory_info().rss
                times = process.cpu_times()
                processor[name] = times.user + times.system
        arrivals, running = self._counts()
        at = time.monotonic() - self._began
        self.samples.append(Sample(at, memory, processor, arrivals, running, late, self._engine))

    @contextlib.asynccontextmanager
    async def watch(self) -> AsyncIterator["Timeline"]:
        """Sample in the background while the block runs."""
        tasks = [asyncio.create_task(self._sample_for_ever())]
        if self._url:
            tasks.append(asyncio.create_task(self._ask_for_ever()))
        try:
            yield self
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            self.sample()

    async def _sample_for_ever(self) -> None:
        late = 0.0
        while True:
            self.sample(late)
            due = time.monotonic() + INTERVAL
            await asyncio.sleep(INTERVAL)
            late = time.monotonic() - due

    async def _ask_for_ever(self) -> None:
        while True:
            with contextlib.suppress(OSError, TypeError, KeyError):
                self._engine = (await asyncio.to_thread(get, f"{self._url}/health", timeout=5)).body["engine"]
            await asyncio.sleep(INTERVAL)
