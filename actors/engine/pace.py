"""`Pace`: how many prompt tokens fit the time that a turn may take, learned from the turns before.

Pure arithmetic, fed by `actors.engine.engine` with what it measured; no clock of its own.
"""

# Seconds that prefill may add to a turn: a bound on how long running rows stall, and on how long commands and
# the supervisor's probes wait when nothing runs.
STALL_TARGET = 0.25
LONE_TARGET = 1.0
FIRST_GUESS = 1024.0  # tokens per second, before anything was measured
_WEIGHT = 0.5  # of the newest measurement, less for one of few tokens, where fixed costs hide the speed
_FULL_WEIGHT_TOKENS = 256


class Pace:
    """Speed of prefill and length of a decode step, each as a moving average."""

    def __init__(self) -> None:
        self.prefill_speed = FIRST_GUESS  # tokens per second
        self.step_seconds = 0.0

    def tokens(self, running: int) -> int:
        """Prompt tokens for one turn beside `running` rows.

        While rows decode, prefill gets at least as much time as their step takes, so that neither starves.
        """
        seconds = max(STALL_TARGET, self.step_seconds) if running else LONE_TARGET
        return int(self.prefill_speed * seconds)

    def observe(self, prefill_tokens: int, seconds: float) -> None:
        """Learn from work that took `seconds`: a decode step, `prefill_tokens` prompt tokens, or both."""
        if not prefill_tokens:
            self.step_seconds += _WEIGHT * (seconds - self.step_seconds)
            return
        # A turn shorter than its step alone used to be says only that the step has become faster.
        own = max(seconds - self.step_seconds, seconds / 2, 1e-6)
        weight = _WEIGHT * min(1.0, prefill_tokens / _FULL_WEIGHT_TOKENS)
        self.prefill_speed += weight * (prefill_tokens / own - self.prefill_speed)
