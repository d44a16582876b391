"""`Outcome`: how one request of a load run went. Written by the load client that ran it, on its event loop."""

import time

import msgspec

from bench.load.manners import READS


class Outcome(msgspec.Struct):
    """Times are in seconds on the monotonic clock. `error` is empty for a request that completed, and for one whose
    client `left` as planned; `cut` is one that was given up when the run's time was over, which is a failure.

    `gaps` holds the time between each two arrivals of new tokens: the inter-token latency a reader sees. `late` is how
    much later than planned the request left. `prompt`, and the answer as `ids` or as `text`, are kept when the plan
    says so.
    """

    index: int
    manner: str = READS
    began: float = 0.0
    first: float = 0.0
    last: float = 0.0
    ended: float = 0.0
    gaps: list[float] = []
    arrivals: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str = ""
    left: bool = False
    cut: bool = False
    late: float = 0.0
    prompt: list[int] = []
    ids: list[int] = []
    text: str = ""

    def begin(self) -> None:
        """The request leaves now."""
        self.began = time.monotonic()

    def token(self) -> None:
        """New tokens have arrived now."""
        now = time.monotonic()
        if self.arrivals:
            self.gaps.append(now - self.last)
        else:
            self.first = now
        self.last = now
        self.arrivals += 1

    def end(self, error: str = "") -> None:
        """The request is over now; `error` says why it failed."""
        self.ended = time.monotonic()
        self.error = error

    def leave(self) -> None:
        """The client leaves now, as planned."""
        self.left = True
        self.end()

    @property
    def tokens(self) -> int:
        """Tokens that it brought: as counted by the server, or by arrivals when it didn't come to its end."""
        if self.left or self.cut:
            return self.arrivals
        return 0 if self.error else self.completion_tokens

    @property
    def ttft(self) -> float:
        """Time to first token in seconds; 0 when none came."""
        return self.first - self.began if self.arrivals else 0.0

    def check_lengths(self, prompt_tokens: int, max_tokens: int) -> None:
        """Turn a completed request whose token counts are not what was asked into a failed one."""
        if self.error or self.left:
            return
        if self.completion_tokens != max_tokens:
            self.error = f"usage says {self.completion_tokens} completion tokens, asked for {max_tokens}"
        elif self.prompt_tokens != prompt_tokens:
            self.error = f"usage says {self.prompt_tokens} prompt tokens, sent {prompt_tokens}"
