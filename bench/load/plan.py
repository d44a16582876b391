"""`Plan`: what a load run asks for, and the prompts that follow from it. Pure; used by every load client."""

import random

import msgspec

FIRST_PLAIN_ID = 100  # below lie the special tokens of the models we test with


class Plan(msgspec.Struct, frozen=True):
    """`requests` requests over at most `streams` at once; lengths are in tokens and exact."""

    via: str
    streams: int
    requests: int
    prompt_tokens: int
    max_tokens: int
    shared_prefix: int = 0
    seed: int = 0
    vocab_size: int = 10_000
    temperature: float = 0.0
    top_p: float = 1.0
    model: str = ""

    def __post_init__(self) -> None:
        if min(self.streams, self.requests, self.prompt_tokens, self.max_tokens) < 1:
            raise ValueError("streams, requests, prompt_tokens and max_tokens must be at least 1")
        if not 0 <= self.shared_prefix <= self.prompt_tokens:
            raise ValueError("shared_prefix must lie between 0 and prompt_tokens")
        if self.vocab_size <= FIRST_PLAIN_ID:
            raise ValueError(f"vocab_size must be above {FIRST_PLAIN_ID}")


def prompt_ids(plan: Plan, index: int) -> list[int]:
    """The prompt of request `index`: the prefix all share, then ids that are this request's own."""
    plain = range(FIRST_PLAIN_ID, plan.vocab_size)
    shared = random.Random(f"prefix {plan.seed}").choices(plain, k=plan.shared_prefix)
    own = random.Random(f"prompt {plan.seed} {index}").choices(plain, k=plan.prompt_tokens - plan.shared_prefix)
    return shared + own
