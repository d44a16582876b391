"""`Pace`: how many prompt tokens fit the time that a turn may take, learned from the turns before.

Pure arithmetic, fed by `actors.engine.engine` with what it measured; no clock of its own.
"""

from collections import deque

# Seconds of prefill in a turn when nothing runs: a bound on how long commands and the supervisor's probes wait.
LONE_TARGET = 1.0
SLOW_STEP = 0.1  # seconds of a decode step, beyond which prompts are not made to wait for the stall target …
MOST_TARGETS = 2.0  # … but get so many times LONE_TARGET at most
MAX_TOKENS = 1 << 30  # of a turn without a target: other bounds hold
FIRST_GUESS = 1024.0  # tokens per second, before anything was measured
_LAST_STEPS = 3  # whose median counts: one that was slow by chance says nothing of the model
_WEIGHT_DOWN = 0.9
_WEIGHT = 0.5  # of the newest measurement, less for one of few tokens, where fixed costs hide the speed
_FULL_WEIGHT_TOKENS = 256
_FULL_WEIGHT_SECONDS = 0.05


class Pace:
    """Speed of prefill, a moving average, and length of a decode step, the median of the last ones."""

    def __init__(self, stall_target: float) -> None:
        self._stall_target = stall_target
        self.prefill_speed = FIRST_GUESS  # tokens per second
        self._last_steps: deque[float] = deque(maxlen=_LAST_STEPS)
        self._measured = 0.0  # prompt tokens

    @property
    def step_seconds(self) -> float:
        """Length of a decode step. Of two the shorter, as the first one may warm up; 0 before any."""
        steps = sorted(self._last_steps)
        return steps[(len(steps) - 1) // 2] if steps else 0.0

    def seconds(self, running: int, waiting: int = 0) -> float:
        """What a turn beside `running` rows may spend on prompts, while `waiting` rows are yet to run.

        While rows decode, a turn is to take no longer than the stall target. A step that takes more than half of that
        leaves prefill as much again, so that neither starves. One that takes longer by itself, on a slow model, can't
        meet the target whatever is done, and small forwards then cost nearly as much as large ones: so prompts get
        what they get when nothing runs, and more when more rows wait than run.
        """
        step, target = self.step_seconds, self._stall_target
        if not running:
            return LONE_TARGET
        if step > max(target, SLOW_STEP):
            return max(step, LONE_TARGET * min(max(waiting / running, 1.0), MOST_TARGETS))
        return max(target - step, step)

    def tokens(self, running: int, waiting: int = 0, spent: float = 0.0) -> int:
        """Prompt tokens for one turn beside `running` rows, of whose time `spent` seconds are gone."""
        seconds = max(self.seconds(running, waiting) - spent, 0.0)
        return int(min(self.prefill_speed * seconds, MAX_TOKENS))

    def observe_step(self, seconds: float) -> None:
        """Learn from one decode step."""
        self._last_steps.append(seconds)

    def observe_prefill(self, tokens: float, seconds: float) -> None:
        """Learn from `tokens` prompt tokens that took `seconds`; few of them say little, yet more than a guess.

        Tokens are those at the start of a prompt, here as above; a deeper one counts as more.
        """
        full = min(_FULL_WEIGHT_TOKENS, _FULL_WEIGHT_SECONDS * self.prefill_speed)
        speed = tokens / max(seconds, 1e-6)
        # Slower than thought is believed sooner: that is when others wait.
        weight = _WEIGHT if speed > self.prefill_speed else _WEIGHT_DOWN
        if speed > self.prefill_speed or self._measured >= _FULL_WEIGHT_TOKENS:
            weight *= min(1.0, tokens / full)
        self._measured += tokens
        self.prefill_speed += weight * (speed - self.prefill_speed)
