"""When memory counts as flat from flood to flood."""

import pytest

from bench.checks.floods import SLACK, _even

MIB = 1 << 20


@pytest.mark.parametrize(
    ("sizes", "even"),
    [
        ([90, 100, 100, 100, 100], True),
        ([90, 780, 700, 820, 800, 850, 790, 830], True),  # where a pool is cleared now and then
        ([90, 100, 100, 100, 100, 100, 100, 900], False),
        ([90, 100, 100, 900, 100, 100, 100, 100], False),  # even if it is given back
        ([600, 650, 700, 750, 800, 850, 900, 950], False),
        ([90, 100, 900], False),
        ([900, 100, 100], True),  # the first one warms up
    ],
)
def test_even(sizes: list[int], even: bool) -> None:
    assert _even([size * MIB for size in sizes], SLACK) is even
