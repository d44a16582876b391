"""`Prefill`: rows whose prompts are being computed, until they join the decode batch.

Used by `actors.engine.engine` on the engine's one thread. Launches work on the device and waits for none of it.

Short prompts that fit one turn whole are run together, padded on the right and sorted by length so that little
is padding. Longer ones run alone, chunk by chunk, in forwards of about `forward_tokens` that end on block borders:
batching gains nothing there. Prefix blocks are cut on these borders (`Cutter`). No logits are computed: they are lazy
and nobody asks for them, and the last token of each prompt is left to the row's first decode step. But where one row
alone is to decode, a step of its own would read all weights once more for one token: its last short forward takes that
token in, too, and its logits are the first step's.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import numpy.typing as npt

from actors.engine.cutter import Cutter
from actors.engine.device import Lane
from actors.engine.model import Cache, Model, plain_cache
from actors.engine.sampler import RowOptions
from actors.engine.scheduler import BLOCK, Chunk

Ids = npt.NDArray[np.uint32]

GROUP_ROWS = 32
GROUP_TOKENS = 512  # a longer prompt runs alone
GROUP_WASTE = 1.25  # padded tokens per real one, at most
ONE_FORWARD = 64  # tokens that a row alone computes in one forward, in a group or not
FULL_FORWARDS = 8  # a group's forward covers as many tokens as this many forwards of a row alone


class Row(msgspec.Struct, frozen=True):
    """One request as the batch sees it: all ids to compute, and what its sampler needs.

    The first `prompt_tokens` of `ids` are the prompt, the others were generated before (a resume).
    """

    rid: int
    ids: Ids
    prompt_tokens: int
    options: RowOptions

    @property
    def prompt(self) -> Ids:
        """The prompt's ids."""
        return self.ids[: self.prompt_tokens]

    @property
    def generated(self) -> Ids:
        """Ids generated before."""
        return self.ids[self.prompt_tokens :]


class Joining(msgspec.Struct, frozen=True):
    """Rows ready to decode; `caches` hold all of their ids but the last.

    `caches` is one list for each row, or, of rows that were prefilled together, one list of batched caches. Batches
    of plain caches are padded on the right (`right_padded`), so that neighbours can be copied in one piece.

    `logits`, (1, vocabulary), are of one row whose caches hold its last id, too: those of its first step.
    """

    rows: list[Row]
    caches: list[Any]
    batched: bool
    right_padded: bool
    logits: mx.array | None = None

    def row_caches(self, place: int) -> list[Cache]:
        """Unbatched caches of one row."""
        if not self.batched:
            row: list[Cache] = self.caches[place]
            return row
        if not self.right_padded:
            return [cache.extract(place) for cache in self.caches]
        return [right_padded_row(cache, place, len(self.rows[place].ids) - 1) for cache in self.caches]


class Prefill:
    """Caches of the rows that are prefilling."""

    def __init__(self, model: Model, lane: Lane, forward_tokens: int, cutter: Cutter | None = None) -> None:
        self._model = model
        self._lane = lane
        self._cutter = cutter
        self._forward_tokens = forward_tokens
        self._rows: dict[int, Row] = {}
        self._caches: dict[int, list[Cache]] = {}
        self._grouped: list[Joining] = []
        self._logits: mx.array | None = None  # of the row that `run` took to its end

    def add(self, row: Row) -> None:
        """A row that will come up in chunks."""
        self._rows[row.rid] = row

    def begin_with(self, rid: int, caches: list[Cache]) -> None:
        """The first tokens of this row are in `caches`; its chunks begin behind them."""
        self._caches[rid] = caches

    def remove(self, rids: Iterable[int]) -> None:
        """Forget these rows; unknown ones are normal."""
        for rid in rids:
            self._rows.pop(rid, None)
            self._caches.pop(rid, None)

    def clear(self) -> None:
        """Forget every row."""
        self._rows.clear()
        self._caches.clear()
        self._grouped.clear()
        self._logits = None
        self._lane.wait()

    def run(self, chunks: list[Chunk], alone: int | None = None) -> Iterator[None]:
        """Dispatch the chunks of one turn; yields after each forward. Those that are `whole` must be joined in the
        same turn. `alone` is the one row that is to decode in this turn."""
        self._logits = None
        short = [chunk for chunk in chunks if self._grouped_with_others(chunk)]
        short.sort(key=lambda chunk: chunk.tokens)
        for group in group_by_length([chunk.tokens for chunk in short]):
            if len(group) == 1 and short[group.start].tokens <= ONE_FORWARD:  # the same without a batch of one
                yield from self._run_alone(short[group.start], alone)
            else:
                yield from self._run_group([short[i].rid for i in group])
        for chunk in chunks:
            if not self._grouped_with_others(chunk):
                yield from self._run_alone(chunk, alone)

    def _grouped_with_others(self, chunk: Chunk) -> bool:
        # Only plain caches can be cut when the whole group is computed.
        longest = GROUP_TOKENS if self._cutter is None or self._model.plain_caches else BLOCK - 1
        return self._model.batches_prefill and chunk.whole and chunk.tokens <= longest

    def join(self, rids: list[int]) -> list[Joining]:
        """Hand over these rows, whose prompts are launched but for their last tokens."""
        joining, self._grouped = self._grouped, []
        grouped = {row.rid for group in joining for row in group.rows}
        alone = [rid for rid in rids if rid not in grouped]
        if alone:
            rows = [self._rows.pop(rid) for rid in alone]
            caches = [self._caches.pop(rid) if rid in self._caches else self._model.new_caches() for rid in alone]
            logits, self._logits = self._logits, None
            joining.append(Joining(rows, caches, batched=False, right_padded=False, logits=logits))
        return joining

    def _run_group(self, rids: list[int]) -> Iterator[None]:
        rows = [self._rows.pop(rid) for rid in rids]
        lengths = [len(row.ids) - 1 for row in rows]
        longest = max(lengths)
        ids = np.zeros((len(rows), longest), np.uint32)
        for place, row in enumerate(rows):
            ids[place, : lengths[place]] = row.ids[:-1]
        caches = _merge([self._model.new_caches() for _ in rows])
        # A causal mask is all that rows padded on the right need, as long as nobody asks for what lies behind them.
        plain = self._model.plain_caches
        padding = [longest - length for length in lengths]
        if not plain:
            for cache in caches:
                cache.finalize()  # an empty recurrent cache comes out of a merge with padding of none to mask
                if any(padding):
                    cache.prepare(lengths=lengths, right_padding=padding)
        yield from self._forward(ids, caches, [row.rid for row in rows])
        cuts = []
        if not plain:
            for cache in caches:
                cache.finalize()
        elif self._cutter is not None:
            for place, row in enumerate(rows):
                cuts += self._cutter.of_padded(row.rid, caches, place, lengths[place])
        if cuts or not plain:
            self._lane.dispatch([cuts, [cache.state for cache in caches]])
            yield
        self._grouped.append(Joining(rows, caches, batched=True, right_padded=plain))

    def _run_alone(self, chunk: Chunk, alone: int | None) -> Iterator[None]:
        caches = self._caches.get(chunk.rid)
        if caches is None:
            caches = self._caches[chunk.rid] = self._model.new_caches()
        ids = self._rows[chunk.rid].ids
        stops = self._cutter.stops(len(ids)) if self._cutter is not None else []
        start, last = chunk.start, chunk.start + chunk.tokens
        while start < last:
            end = forward_end(start, last, self._forward_tokens, stops)
            if chunk.rid == alone and self._model.splits_head and takes_last(start, end, len(ids)):
                self._logits = self._model.next_logits(mx.array(ids[None, start:]), caches, [chunk.rid])
                self._lane.dispatch([self._logits, [cache.state for cache in caches]])
                yield
                return
            self._model.forward(mx.array(ids[None, start:end]), caches, [chunk.rid])
            cuts = self._cutter.of_row(chunk.rid, caches, start, end) if self._cutter is not None else []
            start = end
            # Each forward is launched by itself: as one graph all of them would hold their memory together.
            self._lane.dispatch([cuts, [cache.state for cache in caches]])
            yield

    def _forward(self, ids: Ids, caches: list[Cache], rids: list[int]) -> Iterator[None]:
        # Several rows fill the device with fewer tokens of each, and what lies between the layers stays in cache.
        rows, total = ids.shape
        tokens = total  # what is padded is masked rightly in the first forward alone, of states that are recurrent
        if self._model.plain_caches:
            tokens = min(max(self._forward_tokens * FULL_FORWARDS // rows, 32), self._forward_tokens * 3 // 8)
            tokens = -(-total // -(-total // tokens))  # forwards of one size
        start = 0
        while start < total:
            # Not one token of several rows at the end: mlx-lm's batched windows take that for a decode step.
            end = total if rows > 1 and total - start == tokens + 1 else start + tokens
            self._model.forward(mx.array(ids[:, start:end]), caches, rids)
            start = end
            self._lane.dispatch([cache.state for cache in caches])
            yield


def forward_end(start: int, last: int, tokens: int, stops: list[int]) -> int:
    """Where a forward from `start` on ends: after about `tokens`, on a block's border, at a stop or at `last`."""
    end = start + tokens
    end = max(end // BLOCK * BLOCK, start + min(tokens, BLOCK - start % BLOCK))
    return min([end, last, *(stop for stop in stops if stop > start)])


def takes_last(start: int, end: int, length: int) -> bool:
    """Whether a forward of a row of `length` ids takes in its last one, too. It is short, as all of the last layer then
    has to be computed, not only its keys and values; and no block ends in it, whose cut would hold a token too many."""
    return end == length - 1 and length - start <= ONE_FORWARD and start // BLOCK == end // BLOCK


def group_by_length(lengths: list[int]) -> list[range]:
    """Cut rows, sorted by length, into runs of places to batch together.

    A run has at most GROUP_ROWS rows, and padding them to the longest costs at most GROUP_WASTE times their tokens.
    """
    groups: list[range] = []
    start, tokens = 0, 0
    for place, length in enumerate(lengths):
        rows = place - start + 1
        if rows > 1 and (rows > GROUP_ROWS or rows * length > GROUP_WASTE * (tokens + length)):
            groups.append(range(start, place))
            start, tokens = place, 0
        tokens += length
    if lengths:
        groups.append(range(start, len(lengths)))
    return groups


def right_padded_row(cache: Cache, place: int, length: int) -> Cache:
    """Row `place` of a batched plain cache that was padded on the right, as a cache of its own."""
    rows = slice(place, place + 1)
    return plain_cache(cache.keys[rows, :, :length], cache.values[rows, :, :length]) if length else plain_cache()


def _merge(rows: list[list[Cache]]) -> list[Cache]:
    return [type(layer[0]).merge(layer) for layer in zip(*rows, strict=True)]
