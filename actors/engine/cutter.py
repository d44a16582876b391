"""`Cutter`: who takes prefix blocks from the caches of rows that are computed. Its one kind is `prefix.PrefixCache`.

Called by `actors.engine.prefill` and `actors.engine.row_group` when a forward is built, before it is dispatched.
"""

from typing import Any, Protocol

import mlx.core as mx

from actors.engine.slots import SlotCache


class Cutter(Protocol):
    """Each `of_` method returns what is to be dispatched together with the forward just built."""

    def stops(self, length: int) -> list[int]:
        """Where forwards of a row of `length` ids have to end, in ascending order."""

    def of_row(self, rid: int, caches: list[Any], start: int, end: int) -> list[mx.array]:
        """From a row's own caches, after its forward from token `start` to `end`."""

    def of_padded(self, rid: int, caches: list[Any], place: int, length: int) -> list[mx.array]:
        """From row `place` of plain caches padded on the right, with `length` tokens of it."""

    def of_slot(self, rid: int, caches: list[SlotCache], slot: int, end: int) -> list[mx.array]:
        """The block that ends at `end`, the length of the decoding row in `slot`."""

    def of_solo(self, rid: int, caches: list[Any], end: int) -> list[mx.array]:
        """The same of a decoding row on its own caches."""
