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
    {"top_k": -1, "min_p": 0.0, "repetition_penalty": 0.01, "presence_penalty": -2.0, "frequency_penalty": 2.0},
    {"top_k": 0, "min_p": 1.0, "repetition_penalty": 2.0, "presence_penalty": 2.0, "frequency_penalty": -2.0},
    {"top_k": 1000, "xtc_probability": 1.0, "xtc_threshold": 0.5, "logprobs": 20, "priority": -(2**31) + 1},
    {"logit_bias": dict.fromkeys(range(1024), 100.0), "logprobs": 0, "priority": 2**31 - 1},
    {"min_tokens": 7, "max_tokens": 7, "stop_token_ids": [2**32 - 1] * 64},
    {"min_tokens": 10**9, "logit_bias": {2**32 - 1: -100.0}},
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
    ("top_k", -2),
    ("top_k", 2**31),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("min_p", math.nan),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("repetition_penalty", math.inf),
    ("presence_penalty", -2.1),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("frequency_penalty", math.nan),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {2**32: 1.0}),
    ("logit_bias", {5: 100.5}),
    ("logit_bias", {5: math.nan}),
    ("logit_bias", dict.fromkeys(range(1025), 1.0)),
    ("min_tokens", -1),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [2**32]),
    ("stop_token_ids", [1] * 65),
    ("xtc_probability", 1.5),
    ("xtc_threshold", 0.6),
    ("logprobs", -1),
    ("logprobs", 21),
    ("priority", 2**31),
]


@pytest.mark.parametrize("options", GOOD)
def test_good_options_pass(options):
    check_params(SamplingParams(**options))


@pytest.mark.parametrize(("name", "value"), BAD)
def test_bad_options_are_named(name, value):
    with pytest.raises(InvalidParam, match="stop string" if name == "stop" else name) as caught:
        check_params(SamplingParams(**{name: value}))
    assert caught.value.param == name


def test_min_tokens_are_at_most_max_tokens():
    with pytest.raises(InvalidParam, match="at most the number of tokens asked for, 4, not 5") as caught:
        check_params(SamplingParams(min_tokens=5, max_tokens=4))
    assert caught.value.param == "min_tokens"


@pytest.mark.parametrize("options", [{"logit_bias": {100: 1.0}}, {"stop_token_ids": [100]}])
def test_ids_lie_inside_the_vocabulary(options):
    check_params(SamplingParams(**options), vocab_size=101)
    with pytest.raises(InvalidParam, match="100 is outside the vocabulary of 100 token ids"):
        check_params(SamplingParams(**options), vocab_size=100)
