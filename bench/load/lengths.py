"""How long prompts and answers of a load run are: a number, or a distribution to draw from. Pure."""

import math
import random
from functools import lru_cache

FORMS = "N, uniform:LOW:HIGH, normal:MEAN:DEVIATION, lognormal:MEDIAN:SIGMA[:MOST], or choice:N[xWEIGHT],…"


def draw_length(lengths: str, key: object) -> int:
    """A length of at least 1, the same for the same key.

    `lognormal:200:0.8:4000` has its median at 200, spreads by factors of e^0.8 and is cut at 4000, as the lengths of
    real prompts do; `choice:16x3,4000` is 16 three times out of four. Raises ValueError for anything else.
    """
    kind, numbers, weights = _parsed(lengths)
    draw = random.Random(f"length {key}")
    if kind == "uniform":
        return draw.randint(int(numbers[0]), int(numbers[1]))
    if kind == "normal":
        return max(1, round(draw.gauss(numbers[0], numbers[1])))
    if kind == "lognormal":
        length = round(draw.lognormvariate(math.log(numbers[0]), numbers[1]))
        return max(1, min(length, int(numbers[2])) if len(numbers) > 2 else length)
    return int(draw.choices(numbers, weights)[0])


def check_lengths(lengths: str) -> None:
    """Raises ValueError when there is no such distribution."""
    _parsed(lengths)


@lru_cache
def _parsed(lengths: str) -> tuple[str, list[float], list[float]]:
    kind, _, rest = lengths.partition(":")
    try:
        if not rest:
            kind, numbers, weights = "choice", [float(int(kind))], [1.0]
        elif kind == "choice":
            pairs = [part.partition("x") for part in rest.split(",")]
            numbers = [float(int(number)) for number, _, _ in pairs]
            weights = [float(weight or 1) for _, _, weight in pairs]
        else:
            numbers, weights = [float(part) for part in rest.split(":")], []
        if not _holds(kind, numbers, weights):
            raise ValueError
    except ValueError:
        raise ValueError(f"lengths {lengths!r} are none of {FORMS}") from None
    return kind, numbers, weights


def _holds(kind: str, numbers: list[float], weights: list[float]) -> bool:
    if not all(math.isfinite(number) for number in numbers):
        return False
    if kind == "choice":
        return min(numbers) >= 1 and min(weights) >= 0 and sum(weights) > 0
    if kind == "uniform":
        return len(numbers) == 2 and 1 <= numbers[0] <= numbers[1] and all(n == int(n) for n in numbers)
    if kind == "normal":
        return len(numbers) == 2 and numbers[0] >= 1 and numbers[1] >= 0
    return kind == "lognormal" and len(numbers) in (2, 3) and numbers[0] >= 1 and all(n > 0 for n in numbers[1:])
