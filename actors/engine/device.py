"""Dispatching work to the device so that caches are written in place.

MLX carries out a write into an array in place only when nobody else holds its buffer, and a graph in flight holds all
buffers that it reads. So a step that is dispatched while the one before runs copies every cache it writes to
(measured: 17 instead of 3 ms per step for 134 MB). Building a graph is what takes time on the host, and that can go on
while the device works: build the next, wait for the one before, dispatch.

On a CPU `async_eval` itself comes back only when about ten operations are left. Those of a step are behind all caches:
the logits and the draw. So there the next step can be dispatched early, without waiting for them: MLX looks through
its graph meanwhile, which takes a lone row of a 30-layer model 7 % of its step.
"""

import time
from typing import Any

import mlx.core as mx


class Lane:
    """The engine's one way to the device: a dispatch waits until what was dispatched before has ended, unless early."""

    def __init__(self) -> None:
        self._running: Any = None
        self._before = False  # whether what was dispatched before it may run still
        self._cpu = mx.default_device().type == mx.DeviceType.cpu
        self.began = 0.0  # when the last dispatch found the device free, by `time.perf_counter`
        self.waited = 0.0  # seconds spent on the device's account
        self.begun = 0  # dispatches so far

    def dispatch(self, arrays: Any, *, early: bool = False) -> None:
        """Have these arrays (a tree of them) computed, without waiting for it.

        `early`: what runs has nothing left to do with the caches, so on a CPU it need not end first.
        """
        if early and self._cpu:
            self._before = self._running is not None
        else:
            self.wait()
        self.begun += 1
        self.began = time.perf_counter()
        mx.async_eval(arrays)  # type: ignore[no-untyped-call]  # MLX's stub leaves it bare
        # On a CPU it comes back only when little is left to do, so this is the model's time, too.
        self.waited += time.perf_counter() - self.began
        self._running = arrays

    @property
    def ended(self) -> int:
        """Dispatches that are known to have ended: all up to this number."""
        return self.begun - (self._running is not None) - self._before

    def follow(self, arrays: Any) -> None:
        """Have these arrays computed behind what runs, without waiting for that to end. For graphs that write into
        nothing in place, such as the draw from logits that are being computed."""
        began = time.perf_counter()
        mx.async_eval(arrays)  # type: ignore[no-untyped-call]  # MLX's stub leaves it bare
        self.waited += time.perf_counter() - began
        self._running = [self._running, arrays]

    def wait(self) -> None:
        """Wait for what was dispatched last, and hold it no longer. Raises what went wrong in the computation."""
        running, self._running, self._before = self._running, None, False
        if running is not None:
            began = time.perf_counter()
            mx.eval(running)
            self.waited += time.perf_counter() - began
