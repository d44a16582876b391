"""Ranges of the sampling options: the one place that checks them, for HTTP and raw clients alike."""

import math

from protocol.messages import SamplingParams

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_SEED = 2**63 - 1
MIN_SEED = -(2**63)


class InvalidParam(ValueError):
    """An option is out of range. `param` names it as the OpenAI API does."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def _in_range(name: str, value: float | None, low: float, high: float, *, open_low: bool = False) -> None:
    if value is None:
        return
    if math.isnan(value) or value > high or value < low or (open_low and value == low):
        bound = "greater than" if open_low else "at least"
        raise InvalidParam(name, f"{name} must be {bound} {low:g} and at most {high:g}, not {value}")


def check_params(params: SamplingParams) -> None:
    """Check every option of a request.

    Raises InvalidParam naming the first option that is out of range.
    """
    _in_range("temperature", params.temperature, 0.0, 2.0)
    _in_range("top_p", params.top_p, 0.0, 1.0, open_low=True)
    if params.max_tokens is not None and params.max_tokens < 1:
        raise InvalidParam("max_tokens", f"max_tokens must be at least 1, not {params.max_tokens}")
    if params.seed is not None and not MIN_SEED <= params.seed <= MAX_SEED:
        raise InvalidParam("seed", "seed must fit in 64 bits, signed")
    if len(params.stop) > MAX_STOP_STRINGS:
        raise InvalidParam("stop", f"at most {MAX_STOP_STRINGS} stop strings, not {len(params.stop)}")
    for text in params.stop:
        if not text:
            raise InvalidParam("stop", "a stop string must not be empty")
        if len(text) > MAX_STOP_CHARS:
            raise InvalidParam("stop", f"a stop string has at most {MAX_STOP_CHARS} characters")
