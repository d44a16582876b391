"""Ranges of the sampling options: the one place that checks them, for HTTP and raw clients alike."""

from protocol.messages import Grammar, SamplingParams

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024  # entries
MAX_LOGPROBS = 20
MAX_SEED = 2**63 - 1
MIN_SEED = -(2**63)
MAX_PRIORITY = 2**31 - 1
MAX_TOP_K = 2**31 - 1
MAX_TOKENS = 2**31 - 1  # that a request can name
MAX_ID = 2**32 - 1
GRAMMARS = ("json_object", "json", "json_line", "regex", "choice", "grammar")
MAX_GRAMMAR_CHARS = 256 << 10
MAX_CHOICES = 64  # of one prompt
MAX_TOOLS = 128


class InvalidParam(ValueError):
    """An option is out of range. `param` names it as the OpenAI API does."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def _in_range(name: str, value: float | None, low: float, high: float, *, open_low: bool = False) -> None:
    # Written so that NaN, which compares false, is out of every range.
    if value is not None and not (low < value <= high or (value == low and not open_low)):
        bound = "greater than" if open_low else "at least"
        raise InvalidParam(name, f"{name} must be {bound} {low:.12g} and at most {high:.12g}, not {value}")


def _are_ids(name: str, ids: list[int], vocab_size: int) -> None:
    limit = vocab_size or MAX_ID + 1
    for token_id in ids:
        if not 0 <= token_id < limit:
            raise InvalidParam(name, f"{name}: {token_id} is outside the vocabulary of {limit} token ids")


def check_params(params: SamplingParams, vocab_size: int = 0) -> None:
    """Check every option of a request. `vocab_size` bounds the token ids in it; 0 when it isn't known.

    Raises InvalidParam naming the first option that is out of range.
    """
    _in_range("temperature", params.temperature, 0.0, 2.0)
    _in_range("top_p", params.top_p, 0.0, 1.0, open_low=True)
    _in_range("top_k", params.top_k, -1, MAX_TOP_K)
    _in_range("min_p", params.min_p, 0.0, 1.0)
    _in_range("xtc_probability", params.xtc_probability, 0.0, 1.0)
    _in_range("xtc_threshold", params.xtc_threshold, 0.0, 0.5)
    _in_range("repetition_penalty", params.repetition_penalty, 0.0, 100.0, open_low=True)
    _in_range("presence_penalty", params.presence_penalty, -2.0, 2.0)
    _in_range("frequency_penalty", params.frequency_penalty, -2.0, 2.0)
    _in_range("logprobs", params.logprobs, 0, MAX_LOGPROBS)
    _in_range("priority", params.priority, -MAX_PRIORITY, MAX_PRIORITY)
    if params.seed is not None and not MIN_SEED <= params.seed <= MAX_SEED:
        raise InvalidParam("seed", "seed must fit in 64 bits, signed")
    _in_range("thinking_budget", params.thinking_budget, 0, MAX_TOKENS)
    _check_length(params)
    _check_grammar(params.grammar)
    _check_stops(params, vocab_size)
    _check_bias(params.logit_bias, vocab_size)


def _check_length(params: SamplingParams) -> None:
    if params.max_tokens is not None and params.max_tokens < 1:
        raise InvalidParam("max_tokens", f"max_tokens must be at least 1, not {params.max_tokens}")
    if params.max_tokens is not None and params.max_tokens > MAX_SEED:
        raise InvalidParam("max_tokens", "max_tokens must fit in 64 bits, signed")
    _in_range("min_tokens", params.min_tokens, 0, MAX_TOKENS)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        text = f"min_tokens must be at most the number of tokens asked for, {params.max_tokens}"
        raise InvalidParam("min_tokens", f"{text}, not {params.min_tokens}")


def _check_grammar(grammar: Grammar | None) -> None:
    if grammar is None:
        return
    if grammar.kind not in GRAMMARS:
        raise InvalidParam(grammar.field, f"{grammar.field}: the kind must be one of {', '.join(GRAMMARS)}")
    if len(grammar.text) > MAX_GRAMMAR_CHARS:
        text = f"{grammar.field} has {len(grammar.text)} characters, and may have {MAX_GRAMMAR_CHARS}"
        raise InvalidParam(grammar.field, text)


def _check_stops(params: SamplingParams, vocab_size: int) -> None:
    if len(params.stop) > MAX_STOP_STRINGS:
        raise InvalidParam("stop", f"at most {MAX_STOP_STRINGS} stop strings, not {len(params.stop)}")
    for text in params.stop:
        if not text:
            raise InvalidParam("stop", "a stop string must not be empty")
        if len(text) > MAX_STOP_CHARS:
            raise InvalidParam("stop", f"a stop string has at most {MAX_STOP_CHARS} characters")
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        text = f"stop_token_ids may hold {MAX_STOP_TOKEN_IDS} ids, not {len(params.stop_token_ids)}"
        raise InvalidParam("stop_token_ids", text)
    _are_ids("stop_token_ids", params.stop_token_ids, vocab_size)


def _check_bias(bias: dict[int, float], vocab_size: int) -> None:
    if len(bias) > MAX_LOGIT_BIAS:
        raise InvalidParam("logit_bias", f"logit_bias may have {MAX_LOGIT_BIAS} entries, not {len(bias)}")
    _are_ids("logit_bias", list(bias), vocab_size)
    for token_id, value in bias.items():
        if not -100 <= value <= 100:
            text = f"logit_bias of {token_id} must be at least -100 and at most 100, not {value}"
            raise InvalidParam("logit_bias", text)
