"""`Claims`: which row is computing which block, so that others with the same prefix wait for it.

Owned by `actors.engine.prefix`. Pure: keys and row numbers, no blocks, no clock.

    claimed by a row --cut--> in flight --put--> gone (the block can be found)
        |                                 ^
        +--- the row left, gave up -------+   (whoever waited computes it)
"""

from collections.abc import Iterable


class Claims:
    """Each key has one claimant at most, the first; a block in flight is coming, whatever happens to its row."""

    def __init__(self) -> None:
        self.changes = 0  # grows whenever waiting may have an end
        self._claimant: dict[bytes, int] = {}
        self._keys: dict[int, set[bytes]] = {}
        self._in_flight: set[bytes] = set()

    def claim(self, rid: int, keys: Iterable[bytes]) -> None:
        """Row `rid` is going to compute these blocks, unless somebody is on it already."""
        mine = self._keys.setdefault(rid, set())
        for key in keys:
            if key not in self._claimant and key not in self._in_flight:
                self._claimant[key] = rid
                mine.add(key)

    def take_over(self, rid: int, keys: Iterable[bytes]) -> None:
        """Row `rid` computes these blocks itself, whoever had claimed them."""
        keys = list(keys)
        for key in keys:
            self._forget(key)
        self.claim(rid, keys)

    def launch(self, key: bytes) -> None:
        """The block was cut and is on its way, with or without its claimant."""
        self._forget(key)
        self._in_flight.add(key)

    def settle(self, key: bytes) -> None:
        """The block can be found, or never will be."""
        self._forget(key)
        self._in_flight.discard(key)
        self.changes += 1

    def drop(self, rid: int) -> None:
        """Row `rid` computes nothing any more; unknown ones are normal."""
        for key in self._keys.pop(rid, ()):
            del self._claimant[key]
            self.changes += 1

    def clear(self) -> None:
        """Nobody computes anything."""
        self._claimant.clear()
        self._keys.clear()
        self._in_flight.clear()
        self.changes += 1

    def claimant(self, key: bytes) -> int | None:
        """The row that computes this block."""
        return self._claimant.get(key)

    def coming(self, key: bytes, rid: int) -> bool:
        """Whether somebody other than `rid` brings this block."""
        return key in self._in_flight or self._claimant.get(key, rid) != rid

    def _forget(self, key: bytes) -> None:
        rid = self._claimant.pop(key, None)
        if rid is not None:
            self._keys[rid].discard(key)
