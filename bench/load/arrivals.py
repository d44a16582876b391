"""When the requests of a load run leave: all a fixed number at once, or on a clock of their own. Pure.

Closed loop: a fixed number is in flight, and the next leaves when one is over; a slow server is asked less. Open loop:
requests leave at drawn times whatever the server does, as those of many people do.
"""

import math
import random
from collections.abc import Callable

CLOSED = "closed"
FORMS = "closed, poisson:RATE, ramp:FROM:TO:SECONDS, or bursts:COUNT:SECONDS"


def arrival_times(arrivals: str, count: int, seed: int = 0) -> list[float] | None:
    """Seconds from the start at which each of `count` requests leaves, ascending; None for a closed loop.

    `poisson:20` is 20 a second on average, with exponential gaps; `ramp:1:50:30` goes from 1 to 50 a second in 30 s and
    stays there; `bursts:64:5` is 64 at once every 5 s. Raises ValueError for anything else.
    """
    kind, *numbers = arrivals.split(":")
    if kind == CLOSED and not numbers:
        return None
    make = _KINDS.get(kind)
    try:
        values = [float(number) for number in numbers]
        if make is None or not all(math.isfinite(value) and value >= 0 for value in values):
            raise ValueError
        return make(count, random.Random(f"arrivals {seed}"), *values)
    except (ValueError, TypeError, ZeroDivisionError):
        raise ValueError(f"arrivals {arrivals!r} are none of {FORMS}") from None


def _poisson(count: int, draw: random.Random, rate: float) -> list[float]:
    times, now = [], 0.0
    for _ in range(count):
        now += draw.expovariate(rate)
        times.append(now)
    return times


def _ramp(count: int, draw: random.Random, first: float, last: float, seconds: float) -> list[float]:
    # A Poisson process of changing rate: unit gaps, mapped through the inverse of the expected number of arrivals.
    if not seconds or not last:
        raise ValueError
    slope = (last - first) / seconds
    whole = (first + last) / 2 * seconds

    def inverse(number: float) -> float:
        if number >= whole:
            return seconds + (number - whole) / last
        if not slope:
            return number / first
        return (math.sqrt(max(first * first + 2 * slope * number, 0.0)) - first) / slope

    return [inverse(number) for number in _poisson(count, draw, 1.0)]


def _bursts(count: int, _: random.Random, size: float, seconds: float) -> list[float]:
    if size < 1:
        raise ValueError
    return [index // int(size) * seconds for index in range(count)]


_KINDS: dict[str, Callable[..., list[float]]] = {"poisson": _poisson, "ramp": _ramp, "bursts": _bursts}
