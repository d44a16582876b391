"""`Siblings`: choices of one prompt that wait for the first of them to compute it.

Pure. Owned by the engine, on its one thread. A choice waits as long as the first one is on its way to its first step;
then they start together from its caches. When the first one goes before that, the next takes its place.
"""


class Siblings:
    """Rids of waiting choices, by the rid they wait for."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[int]] = {}
        self._first: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._first)

    def __contains__(self, rid: int) -> bool:
        return rid in self._first

    def wait(self, rid: int, first: int) -> None:
        """Let `rid` wait for `first`."""
        self._waiting.setdefault(first, []).append(rid)
        self._first[rid] = first

    def take(self, first: int) -> list[int]:
        """Those that waited for `first`, in their order; they wait no more."""
        rids = self._waiting.pop(first, [])
        for rid in rids:
            del self._first[rid]
        return rids

    def of(self, first: int) -> list[int]:
        """Those that wait for `first`."""
        return self._waiting.get(first, [])

    def drop(self, rid: int) -> None:
        """Forget one that waits; others are normal."""
        first = self._first.pop(rid, None)
        if first is not None:
            self._waiting[first].remove(rid)

    def clear(self) -> None:
        """Forget all."""
        self._waiting.clear()
        self._first.clear()
