"""Least-squares fits of how cost grows. Pure."""

from collections.abc import Sequence

import numpy as np


def fit(xs: Sequence[float], ys: Sequence[float], powers: Sequence[int]) -> list[float]:
    """Coefficients of a sum of powers of x, none of them below 0, with the smallest relative error at the points.

    Relative, since the points spread over orders of magnitude. A term whose best coefficient is negative is left out
    (it is 0), the one that would be the most negative first. Raises ValueError with fewer points than powers.
    """
    if len(xs) != len(ys) or len(xs) < len(powers):
        raise ValueError("too few points for so many powers")
    x, y = np.asarray(xs, float), np.asarray(ys, float)
    kept = list(range(len(powers)))
    found = np.zeros(len(powers))
    while kept:
        terms = np.stack([x ** powers[i] / y for i in kept], axis=1)
        scale = np.abs(terms).max(axis=0)
        solved = np.linalg.lstsq(terms / scale, np.ones(len(x)), rcond=None)[0]
        if (solved >= 0).all():
            found[kept] = solved / scale
            break
        kept.pop(int(solved.argmin()))
    return [float(value) for value in found]


def error(xs: Sequence[float], ys: Sequence[float], powers: Sequence[int], found: Sequence[float]) -> float:
    """The largest relative error of a fit at its points."""
    return max(abs(value(x, powers, found) / y - 1) for x, y in zip(xs, ys, strict=True))


def value(x: float, powers: Sequence[int], found: Sequence[float]) -> float:
    """What a fit says at `x`."""
    return sum(c * x**p for c, p in zip(found, powers, strict=True))
