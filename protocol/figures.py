"""What the streamer counts and tells of itself: parts of `protocol.messages.Figures`, for monitoring and dashboards.

Filled by the streamer (`actors/streamer/meter.py`), read by HTTP workers and the command line.
"""

from msgspec import Struct


class Histogram(Struct, frozen=True, array_like=True):
    """`counts[i]` values were at most `bounds[i]` and more than the bound before; the last count is of those above
    all bounds. `total` is the sum of all values."""

    bounds: list[float] = []
    counts: list[int] = []
    total: float = 0.0

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self.counts)


class LiveStream(Struct, frozen=True, array_like=True):
    """One open stream. `phase` is tokenizing, waiting, prefilling or running; `seconds` since it was asked for.

    `speed` is in tokens per second since the first one, 0 before there are two. `ttft` is -1 until the first token.
    """

    rid: int
    label: str
    client: str
    phase: str
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    budget: int = 0
    seconds: float = 0.0
    ttft: float = -1.0
    speed: float = 0.0


class Sample(Struct, frozen=True, array_like=True):
    """How things stood at one moment. `at` is in Unix seconds.

    Sums since the start: tokens generated, prompt tokens, those of them that were found and not computed, requests
    ended. Of the time since the sample before: means in seconds of the first tokens and of the gaps between tokens,
    and the gap that 95 % stayed below; 0 when there were none. `memory` is what MLX holds, in bytes.
    """

    at: float
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ended: int = 0
    running: int = 0
    prefilling: int = 0
    waiting: int = 0
    ttft: float = 0.0
    itl: float = 0.0
    itl_p95: float = 0.0
    memory: int = 0


class PrefixChain(Struct, frozen=True, array_like=True):
    """Prefix blocks that follow one another, with nothing else behind any but the last.

    `name` is the beginning of the last one's key, `parent` the place of the chain that they go on from, -1 for none.
    `depth` is how many tokens come before them, -1 when that isn't known, as what came before is gone; `tokens` how
    many they hold. Blocks and bytes in each tier; a block may be in both. `used` is in Unix seconds. `hits` counts how
    often the most used of them was found in memory since it came there.
    """

    name: str
    parent: int
    depth: int
    tokens: int
    memory_blocks: int = 0
    memory_bytes: int = 0
    ssd_blocks: int = 0
    ssd_bytes: int = 0
    used: float = 0.0
    hits: int = 0
    pinned: bool = False


class PrefixTree(Struct, frozen=True, array_like=True):
    """The prefix blocks used last, parents before their children. `memory_blocks` and `ssd_blocks` are how many there
    are, of all models on the SSD; `memory_looked` and `ssd_looked` how many of them were looked at, snapshots aside.
    Chains are left out when there are too many: `left_out` says whether some are."""

    chains: list[PrefixChain] = []
    memory_blocks: int = 0
    memory_looked: int = 0
    ssd_blocks: int = 0
    ssd_looked: int = 0
    left_out: bool = False


class Counts(Struct, frozen=True, array_like=True):
    """Sums since the streamer started.

    `requests` counts streams that ended or were refused, by `OUTCOME REASON`: the finish reason of a finished one,
    the error code of others. `generated` counts tokens as they come; the other tokens are of streams that have ended.
    Times are in seconds. `ttft` and `duration` begin when a request came to an HTTP worker, or to the streamer from
    other clients; `received` is what an HTTP request took to come to the streamer. `pooled` counts texts that were
    embedded or ranked, `malformed` messages that were none.
    """

    requests: dict[str, int] = {}
    generated: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    pooled: int = 0
    malformed: int = 0
    unreachable: int = 0
    tokenize: Histogram = Histogram()
    queue: Histogram = Histogram()
    prefill: Histogram = Histogram()
    ttft: Histogram = Histogram()
    itl: Histogram = Histogram()
    duration: Histogram = Histogram()
    prompt_lengths: Histogram = Histogram()
    answer_lengths: Histogram = Histogram()
    received: Histogram = Histogram()
