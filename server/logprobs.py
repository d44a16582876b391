"""Log-probabilities as the OpenAI API words them: in a chat one object per token, in a completion columns.

Used by `server.chat` and `server.completions`, on the event loop.
"""

from protocol.messages import TokenLogprobs
from server.schemas import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob

LEAST = -9999.0  # stands for minus infinity, which JSON has no number for


def chat_logprobs(tokens: list[TokenLogprobs] | None) -> ChatLogprobs | None:
    """`logprobs` of a chat choice; None when the request did not ask for them."""
    return None if tokens is None else ChatLogprobs([_chat_token(token) for token in tokens])


def _chat_token(token: TokenLogprobs) -> TokenLogprob:
    top = [TopLogprob(_text(data), _number(logprob), list(data)) for _, logprob, data in token.top]
    return TokenLogprob(_text(token.token), _number(token.logprob), list(token.token), top)


def completion_logprobs(tokens: list[TokenLogprobs] | None) -> CompletionLogprobs | None:
    """`logprobs` of a completion; None when the request did not ask for them.

    `top_logprobs` has the generated token in any case, so up to one more than was asked for, as OpenAI and vLLM do.
    """
    if tokens is None:
        return None
    return CompletionLogprobs(
        tokens=[_label(token.token) for token in tokens],
        token_logprobs=[_number(token.logprob) for token in tokens],
        top_logprobs=[_completion_top(token) for token in tokens],
        text_offset=[token.offset for token in tokens],
    )


def _completion_top(token: TokenLogprobs) -> dict[str, float]:
    top: dict[str, float] = {}
    for _, logprob, data in token.top:
        top.setdefault(_label(data), _number(logprob))  # of two tokens spelled alike the more probable one
    top.setdefault(_label(token.token), _number(token.logprob))
    return top


def _text(data: bytes) -> str:
    """A token as text; the bytes of one that is no whole text are escaped, as OpenAI does."""
    return data.decode("utf-8", "backslashreplace")


def _label(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _number(logprob: float) -> float:
    return max(logprob, LEAST)
