"""`Scheduler`: which rows are dropped, admitted, prefilled and decoded in each turn of the engine.

Pure policy: no MLX, no socket, no clock. `actors.engine.engine` calls it on the engine's one thread: `add` and
`abort` as commands arrive, `plan` once a turn, `take` with the tokens of the step that has come back.

    waiting --admit--> prefilling --join--> running --stop / length / abort--> gone

Steps are double-buffered: when the tokens of one step are read, the next is on the device already. So a row
that stops is dropped by the plan after, and what the device computed for it meanwhile is not passed on. A row
whose budget is used up by a step in flight is dropped before another one is launched.
"""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

BLOCK = 256  # prompt chunks end on multiples of this, so that they fall together with prefix blocks

STOP = "stop"
LENGTH = "length"


class Limits(msgspec.Struct, frozen=True):
    """Bounds of one turn. Token counts; a row's last prompt token counts as its first decode step."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    prefill_step_size: int = 2048

    @property
    def seats(self) -> int:
        """Rows prefilling and running at once. One batched token stays free for the others' prompts."""
        return max(1, min(self.max_num_seqs, self.max_num_batched_tokens - 1))


class Chunk(NamedTuple):
    """`tokens` ids of row `rid` from `start` on, to be prefilled.

    `whole`: these are all of its ids but the last, and it joins in the same turn.
    """

    rid: int
    start: int
    tokens: int
    whole: bool


class Plan(msgspec.Struct, frozen=True):
    """What one turn does, in this order.

    `drop`: forget these rows (prefilling or running; the batch holds them). `admit`: rows that leave the queue.
    `chunks`: prompt chunks to run. `join`: rows whose prompt but its last token is computed, which join the
    running ones. `decode`: how many rows then decode one step, the joined ones included.
    """

    drop: list[int]
    admit: list[int]
    chunks: list[Chunk]
    join: list[int]
    decode: int

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that this turn computes."""
        return sum(chunk.tokens for chunk in self.chunks)


class Taken(NamedTuple):
    """Tokens that count, in columns, and the rows that ended with them."""

    rids: list[int]
    tokens: list[int]
    ended: list[int]
    reasons: list[str]


class _Row:
    __slots__ = ("budget", "computed", "ignore_eos", "launched", "left", "length", "read", "rid")

    def __init__(self, rid: int, length: int, budget: int, ignore_eos: bool) -> None:
        self.rid = rid
        self.length = length
        self.budget = budget
        self.ignore_eos = ignore_eos
        self.computed = 0  # prompt tokens prefilled
        self.launched = 0  # decode steps launched
        self.read = 0  # tokens taken
        self.left = False  # the batch was told to drop it; its last token is still in flight


class Scheduler:
    """First come, first served, with prompts in chunks beside the running rows' steps."""

    def __init__(self, limits: Limits, eos_token_ids: Iterable[int]) -> None:
        self._limits = limits
        self._eos = frozenset(eos_token_ids)
        self._waiting: dict[int, _Row] = {}
        self._prefilling: dict[int, _Row] = {}
        self._running: dict[int, _Row] = {}
        self._drop: list[int] = []

    def __contains__(self, rid: int) -> bool:
        return rid in self._waiting or rid in self._prefilling or rid in self._running

    @property
    def waiting(self) -> int:
        """Rows in the queue."""
        return len(self._waiting)

    @property
    def prefilling(self) -> int:
        """Rows admitted whose prompt is not computed yet."""
        return len(self._prefilling)

    @property
    def running(self) -> int:
        """Rows that decode."""
        return len(self._running)

    @property
    def busy(self) -> bool:
        """Whether the next plan has anything in it."""
        return bool(self._waiting or self._prefilling or self._running or self._drop)

    def add(self, rid: int, length: int, budget: int, *, ignore_eos: bool = False) -> None:
        """Queue a row of `length` ids that may generate `budget` more.

        Raises ValueError for a rid that is in use and for a length or budget below 1.
        """
        if rid in self:
            raise ValueError(f"row {rid} is in use")
        if length < 1 or budget < 1:
            raise ValueError(f"a row needs ids and a budget, not {length} and {budget}")
        self._waiting[rid] = _Row(rid, length, budget, ignore_eos)

    def abort(self, rids: Iterable[int]) -> None:
        """Forget these rows, wherever they are; unknown ones are normal."""
        for rid in rids:
            if self._waiting.pop(rid, None) is None:
                self._remove(rid)

    def abort_all(self) -> None:
        """Forget every row."""
        self.abort([*self._waiting, *self._prefilling, *self._running])

    def plan(self, prefill_tokens: int) -> Plan:
        """Decide one turn; rows that it launches count as launched.

        `prefill_tokens` bounds the prompt tokens of this turn (how many fit the time it may take). It is
        raised to one block, so that admissions always go on.
        """
        drop, self._drop = self._drop, []
        decode = 0
        for row in self._running.values():
            if row.launched < row.budget:
                row.launched += 1
                decode += 1
            elif not row.left:
                row.left = True
                drop.append(row.rid)

        turn = _Turn(self._limits, max(prefill_tokens, BLOCK), decode)
        for row in list(self._prefilling.values()):
            self._place(row, turn.advance(row))
        admit: list[int] = []
        while self._waiting and self._seats_free():
            row = next(iter(self._waiting.values()))
            joined = turn.advance(row)
            if not joined and row.computed == 0:
                break  # the turn is full: the row stays first in the queue
            del self._waiting[row.rid]
            admit.append(row.rid)
            self._place(row, joined)
        return Plan(drop, admit, turn.chunks, turn.join, turn.decode)

    def take(self, rids: list[int], tokens: list[int]) -> Taken:
        """Account for the tokens of a step that has come back, one for each of `rids`.

        Rows that are gone are left out. A row ends with `stop` at an end-of-sequence id, which is among its
        tokens, and with `length` when its budget is used up.
        """
        taken = Taken([], [], [], [])
        running = self._running
        for rid, token in zip(rids, tokens, strict=True):
            row = running.get(rid)
            if row is None:
                continue
            taken.rids.append(rid)
            taken.tokens.append(token)
            row.read += 1
            if token in self._eos and not row.ignore_eos:
                reason = STOP
            elif row.read == row.budget:
                reason = LENGTH
            else:
                continue
            taken.ended.append(rid)
            taken.reasons.append(reason)
            self._remove(rid)
        return taken

    def _remove(self, rid: int) -> None:
        row = self._prefilling.pop(rid, None) or self._running.pop(rid, None)
        if row is not None and not row.left:
            self._drop.append(rid)

    def _seats_free(self) -> bool:
        return len(self._prefilling) + len(self._running) < self._limits.seats

    def _place(self, row: _Row, joined: bool) -> None:
        if joined:
            self._prefilling.pop(row.rid, None)
            self._running[row.rid] = row
            row.launched = 1
        else:
            self._prefilling[row.rid] = row


class _Turn:
    """Fills one turn with prompt chunks until one of its bounds is met."""

    def __init__(self, limits: Limits, prefill_tokens: int, decode: int) -> None:
        self.chunks: list[Chunk] = []
        self.join: list[int] = []
        self.decode = decode
        self._batched = limits.max_num_batched_tokens - decode
        self._prefill = prefill_tokens
        self._step = limits.prefill_step_size
        self._aligns = min(self._batched, self._prefill, self._step) >= BLOCK

    def advance(self, row: _Row) -> bool:
        """Give `row` its next chunk. True when it joins the running rows in this turn."""
        left = row.length - 1 - row.computed
        count = max(min(left, self._batched, self._prefill, self._step), 0)
        if count < left and self._aligns:
            # 0 when what is left of this turn doesn't reach the border; the first row of the next turn does.
            count = max((row.computed + count) // BLOCK * BLOCK - row.computed, 0)
        joins = count == left and count < self._batched
        if count:
            self.chunks.append(Chunk(row.rid, row.computed, count, whole=joins and row.computed == 0))
        spent = count + joins  # its own step is work too: prompts of one token are no free admissions
        row.computed += count
        self._batched -= spent
        self._prefill -= spent
        if joins:
            self.join.append(row.rid)
            self.decode += 1
        return joins
