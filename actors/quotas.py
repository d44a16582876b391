"""`Quotas`: what each API key has used of its rate limits and token budgets, for all HTTP workers together.

Pure: the clock is passed in. Owned by the one thread of the streamer, with several models by that of the house; what
was used is forgotten with the process.
"""

import math

from protocol.errors import INVALID_REQUEST, RATE_LIMITED
from protocol.messages import CallFailed, Charge, Done, Quota


class Bucket:
    """What is left of one quota. It fills evenly, and may be in debt: tokens are only known afterwards."""

    def __init__(self, quota: Quota, now: float) -> None:
        self._quota = quota
        self._left = float(quota.amount)
        self._at = now

    def fill(self, now: float) -> None:
        """Add what has become free since the last look."""
        per_second = self._quota.amount / self._quota.seconds
        self._left = min(float(self._quota.amount), self._left + (now - self._at) * per_second)
        self._at = now

    def wait(self, wanted: float) -> float:
        """Seconds until so much is left; 0 when it is."""
        lacking = wanted - self._left
        return max(0.0, lacking * self._quota.seconds / self._quota.amount)

    def take(self, amount: float) -> None:
        """Use some of it."""
        self._left -= amount


class Quotas:
    """The buckets of all keys. A quota that changes begins anew."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[str, Quota], Bucket] = {}

    def charge(self, charge: Charge, now: float) -> Done | CallFailed:
        """Account for a charge, or refuse the request it is for. With any tokens left a request may begin."""
        for quota in charge.quotas:
            if fault := _fault_of(quota):
                return CallFailed(charge.ref, INVALID_REQUEST, fault, "quotas")
        wanted = {"requests": float(charge.requests), "tokens": 1.0 if charge.requests else 0.0}
        buckets = [(quota, self._bucket(charge.name, quota, now)) for quota in charge.quotas]
        if charge.requests:
            for quota, bucket in buckets:
                wait = bucket.wait(wanted[quota.kind])
                if wait > 0:
                    text = (
                        f"the API key {charge.name!r} may have {quota.amount} {quota.kind} in {_span(quota.seconds)}; "
                        f"try again in {wait:.0f} s"
                    )
                    return CallFailed(charge.ref, RATE_LIMITED, text, retry_after=max(1.0, wait))
        for quota, bucket in buckets:
            bucket.take(charge.requests if quota.kind == "requests" else charge.tokens)
        return Done(charge.ref, 1)

    def _bucket(self, name: str, quota: Quota, now: float) -> Bucket:
        bucket = self._buckets.get((name, quota))
        if bucket is None:
            bucket = self._buckets[name, quota] = Bucket(quota, now)
        bucket.fill(now)
        return bucket


def _fault_of(quota: Quota) -> str:
    """What is wrong with a quota, "" when nothing is."""
    if quota.kind not in ("requests", "tokens"):
        return f"a quota is of requests or tokens, not of {quota.kind!r}"
    if quota.amount < 1:
        return f"the amount of a quota must be at least 1, not {quota.amount}"
    if not 0 < quota.seconds < math.inf:
        return f"the seconds of a quota must be greater than 0 and finite, not {quota.seconds}"
    return ""


def _span(seconds: float) -> str:
    return {60.0: "a minute", 3600.0: "an hour", 86400.0: "a day"}.get(seconds, f"{seconds:g} s")
