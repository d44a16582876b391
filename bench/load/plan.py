"""`Plan`: what a load run asks for, and the requests that follow from it. Pure; used by every load client."""

import random
from collections.abc import Sequence

import msgspec

from bench.load.arrivals import CLOSED, arrival_times
from bench.load.lengths import check_lengths, draw_length
from bench.load.manners import LEAVING, leaves_after, manner

FIRST_PLAIN_ID = 100  # below lie the special tokens of the models we test with


class Plan(msgspec.Struct, frozen=True):
    """`requests` requests over at most `streams` at once; lengths are in tokens and exact.

    `prompt_lengths` and `output_lengths` (see `lengths.py`) take the place of `prompt_tokens` and `max_tokens`;
    `arrivals` other than closed (see `arrivals.py`) that of `streams`. With `turns` every so many requests in a row are
    one chat: each prompt is the one before, the answer, and new tokens. `aborts`, `vanish` and `slow` are the shares of
    clients that behave so (`manners.py`). With `record` the outcomes keep prompts and answers. Only requests with the
    same `cache_salt` share prefixes. With `connected` the clock of a request over HTTP begins when its connection
    stands, as for clients that keep theirs; otherwise connecting counts.
    """

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
    prompt_lengths: str = ""
    output_lengths: str = ""
    arrivals: str = CLOSED
    turns: int = 1
    aborts: float = 0.0
    vanish: float = 0.0
    slow: float = 0.0
    record: bool = False
    cache_salt: str = ""
    connected: bool = False

    def __post_init__(self) -> None:
        if min(self.streams, self.requests, self.prompt_tokens, self.max_tokens, self.turns) < 1:
            raise ValueError("streams, requests, prompt_tokens, max_tokens and turns must be at least 1")
        if not 0 <= self.shared_prefix <= (self.prompt_tokens if not self.prompt_lengths else self.shared_prefix):
            raise ValueError("shared_prefix must lie between 0 and prompt_tokens")
        if self.vocab_size <= FIRST_PLAIN_ID:
            raise ValueError(f"vocab_size must be above {FIRST_PLAIN_ID}")
        for lengths in filter(None, (self.prompt_lengths, self.output_lengths)):
            check_lengths(lengths)
        arrival_times(self.arrivals, 1)
        shares = (self.aborts, self.vanish, self.slow)
        if min(shares) < 0 or sum(shares) > 1:
            raise ValueError("aborts, vanish and slow must be shares that add up to at most 1")

    @property
    def closed(self) -> bool:
        """Whether the next request waits for one to be over."""
        return self.arrivals == CLOSED


class Ask(msgspec.Struct, frozen=True):
    """One request of a plan: its prompt's ids, how many tokens it wants, and how its client behaves.

    A client that leaves does so at its `leaves`-th arrival of tokens; 0 for one that stays.
    """

    index: int
    ids: list[int]
    max_tokens: int
    manner: str
    leaves: int


def make_ask(plan: Plan, index: int, history: Sequence[int] = ()) -> Ask:
    """Request `index`; `history` is what its chat has so far, prompt and answer."""
    tokens = max_tokens(plan, index)
    key = f"{plan.seed} {index}"
    how = manner(key, aborts=plan.aborts, vanish=plan.vanish, slow=plan.slow)
    leaves = leaves_after(key, tokens) if how in LEAVING else 0
    return Ask(index, [*history, *prompt_ids(plan, index, first=not history)], tokens, how, leaves)


def prompt_ids(plan: Plan, index: int, first: bool = True) -> list[int]:
    """The prompt of request `index`: the prefix all share, then ids that are this request's own.

    What follows in a chat (not `first`) has no shared prefix.
    """
    plain = range(FIRST_PLAIN_ID, plan.vocab_size)
    length = plan.prompt_tokens
    if plan.prompt_lengths:
        length = draw_length(plan.prompt_lengths, f"prompt {plan.seed} {index}")
    prefix = min(plan.shared_prefix, length) if first else 0
    shared = random.Random(f"prefix {plan.seed}").choices(plain, k=prefix)
    own = random.Random(f"prompt {plan.seed} {index}").choices(plain, k=length - prefix)
    return shared + own


def max_tokens(plan: Plan, index: int) -> int:
    """How many tokens request `index` asks for."""
    if plan.output_lengths:
        return draw_length(plan.output_lengths, f"output {plan.seed} {index}")
    return plan.max_tokens


def made_up_answer(plan: Plan, index: int) -> list[int]:
    """Ids in the place of an answer whose ids nobody knows, as over HTTP, for the next turn of a chat."""
    plain = range(FIRST_PLAIN_ID, plan.vocab_size)
    return random.Random(f"answer {plan.seed} {index}").choices(plain, k=max_tokens(plan, index))
