"""`StepWatch`: whether the engine hangs, judged by its step counter and its answers to probes.

Pure: times are seconds of the clock that the supervisor passes in. A hang is work pending and the counter still, or a
probe unanswered (the engine answers between two turns), past a deadline that fits what it is doing.
"""

from protocol.messages import EngineStats

LEAST = 10.0  # seconds without a step that are never a hang
TIMES = 20.0  # times the slowest step of the same phase so far
FIRST_STEP = 60.0  # seconds the first step may take: kernels are compiled in it

IDLE, PREFILL, DECODE = "idle", "prefill", "decode"


def phase_of(stats: EngineStats) -> str:
    """What an engine with this load does next."""
    if stats.prefilling or stats.waiting:
        return PREFILL
    return DECODE if stats.running else IDLE


class StepWatch:
    """One engine slot; what was learned of step times outlives an incarnation. `timeout` replaces the deadlines."""

    def __init__(self, timeout: float | None = None) -> None:
        self._timeout = timeout
        self._slowest: dict[str, float] = {}
        self._stats = EngineStats()
        self._since = 0.0

    def begin(self, now: float) -> None:
        """A new incarnation is ready."""
        self._stats = EngineStats()
        self._since = now

    def answered(self, stats: EngineStats, asked: float, now: float) -> None:
        """The engine answered a probe of the time `asked` (0 when none was open) with its load."""
        # An engine that took longer than its deadline would have been ended: then it was we who stood still.
        took = now - asked if asked else 0.0
        if 0 < took <= self.deadline and stats.step != self._stats.step and self._stats.step:
            for phase in {phase_of(self._stats), phase_of(stats)}:
                self._slowest[phase] = max(self._slowest.get(phase, 0.0), took)
        if stats.step != self._stats.step or phase_of(stats) == IDLE or phase_of(self._stats) == IDLE:
            self._since = now
        self._stats = stats

    def excuse(self, seconds: float) -> None:
        """So much time was nobody's fault."""
        self._since += seconds

    @property
    def deadline(self) -> float:
        """Seconds without progress after which it hangs."""
        if self._timeout is not None:
            return self._timeout
        least = LEAST if self._stats.step else FIRST_STEP
        phase = phase_of(self._stats)
        # An idle engine that doesn't answer has begun something since, and we don't know what.
        slowest = max(self._slowest.values(), default=0.0) if phase == IDLE else self._slowest.get(phase, 0.0)
        return max(least, TIMES * slowest)

    def hangs(self, asked: float, now: float) -> str | None:
        """In what way it hangs; None while it doesn't. `asked` is when the oldest open probe was sent, 0 for none."""
        deadline = self.deadline
        phase = phase_of(self._stats)
        if phase != IDLE and now - self._since > deadline:
            return f"hangs in {phase}: no step for {now - self._since:.1f} s"
        if asked and now - asked > deadline:
            return f"hangs: it has not answered for {now - asked:.1f} s"
        return None
