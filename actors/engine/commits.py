"""`Commits`: blocks and snapshots on their way from the caches into the store.

Owned by `actors.engine.prefix`, on the engine's one thread. A block is cut in the same dispatch as the forward that
ends at its border, and put into the store once that dispatch has ended: nothing ever waits for it.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import structlog

from actors.engine.block_cuts import CantCut, PackedBlock, cut_padded, cut_row, cut_slot, snap_row, snap_slot
from actors.engine.block_layout import BlockLayout
from actors.engine.claims import Claims
from actors.engine.device import Lane
from actors.engine.request import Request
from actors.engine.scheduler import BLOCK
from cache_store.keys import snapshot_key
from cache_store.store import PrefixStore, Tier

log = structlog.get_logger()


class _Cut(NamedTuple):
    due: int  # number of the dispatch that computes it
    request: Request
    end: int  # the block's end in tokens
    block: PackedBlock
    snapshot: bool
    prompt: bool


class Commits:
    """What was cut and is not in the store yet. `interval` is how many tokens lie between two snapshots."""

    def __init__(
        self,
        layout: BlockLayout,
        store: PrefixStore[PackedBlock],
        lane: Lane,
        claims: Claims,
        interval: int,
    ) -> None:
        self._layout = layout
        self._store = store
        self._lane = lane
        self._claims = claims
        self._interval = interval
        self._cuts: deque[_Cut] = deque()
        self._failed = False
        self._unpinned = False

    def __len__(self) -> int:
        return len(self._cuts)

    def snapshot_ends(self, length: int) -> list[int]:
        """Where a row of `length` ids, that starts to be computed, is to leave snapshots: its last block ends there."""
        if not self._layout.has_snapshots:
            return []
        last = (length - 1) // BLOCK * BLOCK
        ends = list(range(self._interval, last + 1, self._interval))
        return [*ends, last] if last and last % self._interval else ends

    def of_row(
        self, request: Request, caches: Sequence[Any], start: int, end: int, *, again: bool = False
    ) -> list[mx.array]:
        """Cut what a row's forward from `start` to `end` has made; returns what is to be dispatched with it.

        `again`: the blocks were loaded, they are in the store already but not in memory.
        """
        arrays: list[mx.array] = []
        for border in range(start // BLOCK * BLOCK + BLOCK, end + 1, BLOCK):
            arrays += self._cut(request, border, lambda at: cut_row(self._layout, caches, at), again=again)
        if end % BLOCK == 0 and end in self.snapshot_ends(len(request.ids) + len(request.generated)):
            arrays += self._snap(request, end, lambda: snap_row(self._layout, caches), again=again)
        return arrays

    def of_padded(self, request: Request, caches: Sequence[Any], place: int, length: int) -> list[mx.array]:
        """The same of a row of `length` computed tokens in a group of plain caches that is padded on the right."""
        arrays: list[mx.array] = []
        for border in range(BLOCK, length + 1, BLOCK):
            arrays += self._cut(request, border, lambda at: cut_padded(self._layout, caches, place, at))
        return arrays

    def of_slot(self, request: Request, caches: Sequence[Any], slot: int, end: int) -> list[mx.array]:
        """Cut the block of a row in the batch whose length is `end`, a border, after the step just built."""
        arrays = self._cut(request, end, lambda at: cut_slot(self._layout, caches, slot, at), prompt=False)
        if self._layout.has_snapshots and end % self._interval == 0:
            arrays += self._snap(request, end, lambda: snap_slot(self._layout, caches, slot), prompt=False)
        return arrays

    def of_solo(self, request: Request, caches: Sequence[Any], end: int) -> list[mx.array]:
        """The same of a row that decodes alone, on its own caches."""
        arrays = self._cut(request, end, lambda at: cut_row(self._layout, caches, at), prompt=False)
        if self._layout.has_snapshots and end % self._interval == 0:
            arrays += self._snap(request, end, lambda: snap_row(self._layout, caches), prompt=False)
        return arrays

    def settle(self) -> None:
        """Put what has been computed into the store."""
        while self._cuts and self._cuts[0].due <= self._lane.ended:
            self._put(self._cuts.popleft())

    def clear(self) -> None:
        """Forget what is on its way."""
        self._cuts.clear()

    def _cut(
        self,
        request: Request,
        end: int,
        cut: Callable[[int], PackedBlock],
        *,
        prompt: bool = True,
        again: bool = False,
    ) -> list[mx.array]:
        if not self._layout.has_blocks:
            return []
        if prompt and not again and self._in_memory(request.keys(end // BLOCK)[-1]):
            return []
        return self._launch(request, end, lambda: cut(end), snapshot=False, prompt=prompt, again=again)

    def _snap(
        self,
        request: Request,
        end: int,
        snap: Callable[[], PackedBlock],
        *,
        prompt: bool = True,
        again: bool = False,
    ) -> list[mx.array]:
        if prompt and not again and self._in_memory(snapshot_key(request.keys(end // BLOCK)[-1])):
            return []
        return self._launch(request, end, snap, snapshot=True, prompt=prompt, again=again)

    def _in_memory(self, key: bytes) -> bool:
        # What is on the SSD alone is computed when reading it doesn't pay, and goes to memory like any other.
        return self._store.where(key) is Tier.MEMORY

    def _launch(
        self,
        request: Request,
        end: int,
        make: Callable[[], PackedBlock],
        *,
        snapshot: bool,
        prompt: bool,
        again: bool,
    ) -> list[mx.array]:
        key = None
        if prompt:
            key = request.keys(end // BLOCK)[-1]
            key = snapshot_key(key) if snapshot else key
        try:
            block = make()
        except CantCut as error:
            if key is not None:
                self._claims.settle(key)
            if not again and not self._failed:  # of a restored row, windows hold the last blocks alone
                log.warning("a block of the prefix cache could not be cut", error=str(error))
                self._failed = True
            return []
        if key is not None:
            self._claims.launch(key)
        self._cuts.append(_Cut(self._lane.begun + 1, request, end, block, snapshot, prompt))
        return block.arrays

    def _put(self, cut: _Cut) -> None:
        blocks, adapter = cut.end // BLOCK, cut.request.adapter
        keys = cut.request.keys(blocks)
        ids = cut.request.all_ids().astype("<u4")
        key, parent = keys[-1], keys[-2] if blocks > 1 else None
        if cut.snapshot and not self._layout.has_blocks:
            # Snapshots hang on their blocks, which hold nothing where every layer is recurrent.
            empty = PackedBlock([], self._layout.block, self._layout.description)
            for number, each in enumerate(keys):
                span = ids[number * BLOCK : (number + 1) * BLOCK]
                above = keys[number - 1] if number else None
                self._store.put(each, above, span.tobytes(), empty, adapter=adapter)
        if cut.snapshot:
            parent, key = key, snapshot_key(key)
        span = ids[cut.end - BLOCK : cut.end]
        self._store.put(
            *(key, parent, span.tobytes(), cut.block), urgent=cut.prompt, snapshot=cut.snapshot, adapter=adapter
        )
        if cut.request.pin and not self._store.pin([key]) and not self._unpinned:
            self._unpinned = True
            log.warning("warm prompts take more memory than there is for prefixes", at_token=cut.end)
        self._claims.settle(key)
