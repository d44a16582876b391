"""`Meter`: what the streamer counts of its streams, for `/metrics`, the dashboard and `callboard top`.

Owned by the streamer's one thread. Sums and histograms go on for as long as the process lives. A step costs a look
into a dictionary per row and one numpy call for all gaps between tokens, whatever the number of rows.
"""

import time
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from protocol import figures
from protocol.figures import Counts, Sample
from protocol.messages import End, EngineStats, Timing

SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0),
    *(7.5, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0, 480.0, 960.0),
)
LENGTHS = tuple(float(1 << power) for power in range(21))  # tokens
SAMPLE_INTERVAL = 1.0  # seconds
SAMPLES = 900  # kept
MAX_TOLD = 1e5  # seconds, of what clients tell


class Histogram:
    """Counts of values up to each of `bounds`, and their sum."""

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self._bounds = [*bounds]
        self._array = np.array(bounds)
        self.counts = np.zeros(len(bounds) + 1, np.int64)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def add_all(self, values: "array[float]") -> None:
        """Count many values at once."""
        found = np.frombuffer(values)
        self.counts += np.bincount(self._array.searchsorted(found), minlength=len(self.counts))
        self.total += float(found.sum())

    def figures(self) -> figures.Histogram:
        """As it is sent."""
        return figures.Histogram(self._bounds, self.counts.tolist(), self.total)


class Change:
    """What came to a histogram since the last look at it."""

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._counts = histogram.counts.copy()
        self._total = histogram.total

    def look(self, part: float) -> tuple[float, float]:
        """Mean, and the bound that `part` of the values stayed below, interpolated; zeros when there were none."""
        histogram = self._histogram
        new = histogram.counts - self._counts
        mean_of = histogram.total - self._total
        self._counts, self._total = histogram.counts.copy(), histogram.total
        count = int(new.sum())
        if not count:
            return 0.0, 0.0
        below = np.cumsum(new)
        i = int(np.searchsorted(below, part * count))
        edges = [0.0, *histogram._bounds, histogram._bounds[-1]]
        inside = (part * count - (below[i] - new[i])) / max(int(new[i]), 1)
        return mean_of / count, float(edges[i] + (edges[i + 1] - edges[i]) * inside)


class Meter:
    """See the module's text. `wall` gives Unix seconds; all other times are of the clock the actor passes in."""

    def __init__(self, now: float, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._requests: dict[str, int] = {}
        self._generated = self._prompt_tokens = self._cached_tokens = self._reasoning_tokens = self._pooled = 0
        self._ended = 0
        self._tokenize = Histogram()
        self._queue = Histogram()
        self._prefill = Histogram()
        self._ttft = Histogram()
        self._itl = Histogram()
        self._duration = Histogram()
        self._received = Histogram()
        self._prompt_lengths = Histogram(LENGTHS)
        self._answer_lengths = Histogram(LENGTHS)
        self._last_token: dict[int, float] = {}  # when each open stream's last token came
        self._new_ttft = Change(self._ttft)
        self._new_itl = Change(self._itl)
        self._next_sample = now + SAMPLE_INTERVAL
        self._samples: deque[Sample] = deque(maxlen=SAMPLES)
        self.engine = EngineStats()

    def step(self, rids: Iterable[int], now: float) -> set[int]:
        """These streams got a token each. Returns those for which it is the first."""
        last = self._last_token
        gaps = array("d")
        first: set[int] = set()
        tokens = 0
        for rid in rids:
            tokens += 1
            before = last.get(rid)
            if before is None:
                first.add(rid)
            else:
                gaps.append(now - before)
            last[rid] = now
        self._generated += tokens
        if gaps:
            self._itl.add_all(gaps)
        return first

    def begun(self, timing: Timing, lead: float | None = None) -> None:
        """A stream has its first token. Its client had the request for `lead` seconds before we did, and will tell the
        time to first token itself; None for a client that is the first to have it."""
        for histogram, seconds in (
            (self._tokenize, timing.tokenize),
            (self._queue, timing.queue),
            (self._prefill, timing.prefill),
            (self._ttft, timing.ttft if lead is None else -1.0),
            (self._received, -1.0 if lead is None else lead),
        ):
            if seconds >= 0:
                histogram.add(seconds)

    def told(self, ttfts: Iterable[float]) -> None:
        """Times to first token that clients have measured. What can't be one is left out."""
        for seconds in ttfts:
            if 0 <= seconds <= MAX_TOLD:
                self._ttft.add(seconds)

    def ended(self, rid: int, end: End, lead: float = 0.0) -> None:
        """A stream has ended; `lead` as in `begun`."""
        self._last_token.pop(rid, None)
        self._count(end)
        usage = end.usage
        self._ended += 1
        self._prompt_tokens += usage.prompt_tokens
        self._cached_tokens += usage.cached_tokens
        self._reasoning_tokens += usage.reasoning_tokens
        self._duration.add(end.timing.total + lead)
        if usage.prompt_tokens:
            self._prompt_lengths.add(usage.prompt_tokens)
        if end.outcome == "finished":
            self._answer_lengths.add(usage.completion_tokens)

    @property
    def over(self) -> int:
        """Streams that have ended, and texts that were embedded or ranked."""
        return self._ended + self._pooled

    def refused(self, end: End) -> None:
        """A request was refused at once."""
        self._count(end)

    def pooled(self, texts: int) -> None:
        """So many texts were embedded or ranked."""
        self._pooled += texts

    def _count(self, end: End) -> None:
        key = f"{end.outcome} {end.reason or end.code}"
        self._requests[key] = self._requests.get(key, 0) + 1

    def tick(self, now: float) -> None:
        """Take a sample when it is time."""
        if now < self._next_sample:
            return
        self._next_sample = now + SAMPLE_INTERVAL
        engine = self.engine
        ttft, _ = self._new_ttft.look(0.5)
        itl, itl_p95 = self._new_itl.look(0.95)
        self._samples.append(
            Sample(
                round(self._wall(), 3),
                self._generated,
                engine.prefilled,
                engine.prefix.memory_tokens + engine.prefix.ssd_tokens,
                self._ended,
                engine.running,
                engine.prefilling,
                engine.waiting,
                round(ttft, 6),
                round(itl, 6),
                round(itl_p95, 6),
                engine.memory,
            )
        )

    def samples(self, since: float) -> list[Sample]:
        """The samples that were taken after `since` (Unix seconds), oldest first."""
        return [sample for sample in self._samples if sample.at > since]

    def counts(self, malformed: int, unreachable: int) -> Counts:
        """All sums, as they are sent."""
        return Counts(
            self._requests,
            self._generated,
            self._prompt_tokens,
            self._cached_tokens,
            self._reasoning_tokens,
            self._pooled,
            malformed,
            unreachable,
            self._tokenize.figures(),
            self._queue.figures(),
            self._prefill.figures(),
            self._ttft.figures(),
            self._itl.figures(),
            self._duration.figures(),
            self._prompt_lengths.figures(),
            self._answer_lengths.figures(),
            self._received.figures(),
        )
