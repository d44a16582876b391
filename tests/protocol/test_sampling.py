"""Ranges of the sampling options."""

import math

import pytest

from protocol.messages import SamplingParams
from protocol.sampling import InvalidParam, check_params

GOOD = [
    {},
    {"temperature": 0.0},
    {"temperature": 2.0, "top_p": 1.0, "max_tokens": 1, "seed": -1},
    {"top_p": 0.001, "seed": 2**63 - 1, "stop": ["x"] * 16},
]
BAD = [
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("top_p", 0.0),
    ("top_p", 1.5),
    ("top_p", math.nan),
    ("max_tokens", 0),
    ("max_tokens", -5),
    ("seed", 2**63),
    ("stop", [""]),
    ("stop", ["x"] * 17),
    ("stop", ["x" * 2000]),
]


@pytest.mark.parametrize("options", GOOD)
def test_good_options_pass(options):
    check_params(SamplingParams(**options))


@pytest.mark.parametrize(("name", "value"), BAD)
def test_bad_options_are_named(name, value):
    with pytest.raises(InvalidParam, match=name.replace("stop", "stop string")) as caught:
        check_params(SamplingParams(**{name: value}))
    assert caught.value.param == name
