"""What the clients make of a program's options, and of the server's deltas."""

from typing import Any

import pytest

from protocol.client.requests import Delta, build_generate, split_deltas
from protocol.codec import CodecError
from protocol.messages import Deltas, End, Generate, SamplingParams, TokenLogprobs


def build(**options: Any) -> Generate:
    return build_generate(1, prompt="x", messages=None, ids=None, options=options)


def test_sampling_options_go_by_their_names():
    options: dict[str, Any] = {"top_k": 5, "logit_bias": {7: -1}, "logprobs": 0, "stop_token_ids": (3, 4)}
    request = build(**options, stop="end", label="me", timeout=3.0)
    assert request.params == SamplingParams(
        stop=["end"], top_k=5, logit_bias={7: -1.0}, logprobs=0, stop_token_ids=[3, 4]
    )
    assert (request.label, request.timeout) == ("me", 3.0)


def test_none_leaves_an_option_open():
    assert build(**dict.fromkeys(SamplingParams.__struct_fields__)).params == SamplingParams()


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("temperature", "hot", "got `str` - at `temperature`"),
        ("logit_bias", {"5": 1.0}, "got `str` - at `key` in `logit_bias`"),
        ("stop", ["a", 5], r"at `stop\[1\]`"),
        ("stop_token_ids", [1.5], r"at `stop_token_ids\[0\]`"),
        ("priority", "low", "at `priority`"),
    ],
)
def test_a_sampling_option_of_a_wrong_type_is_named(option: str, value: Any, says: str):
    with pytest.raises(CodecError, match=says):
        build(**{option: value})


def test_unknown_options_are_named():
    with pytest.raises(TypeError, match="unknown option best, wurst"):
        build(wurst=1, best=2)


def test_deltas_are_split_with_and_without_log_probabilities():
    end = End(1, "finished", "stop")
    plain = Deltas([1, 2], ["a", ""], [b"", b"\5\0\0\0"], [1, 1], [end])
    assert list(split_deltas(plain)) == [(1, Delta("a", [], 1)), (2, Delta("", [5], 1)), (1, end)]
    token = TokenLogprobs(5, -0.5)
    asked = Deltas([1, 2], ["a", "b"], [b"", b""], [1, 1], logprobs=[[], [token]])
    assert [delta.logprobs for _, delta in split_deltas(asked)] == [[], [token]]
