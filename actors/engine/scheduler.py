"""`Scheduler`: which rows are dropped, admitted, prefilled and decoded in each turn of the engine.

Pure policy: no MLX, no socket, no clock. `actors.engine.engine` calls it on the engine's one thread: `add` and
`abort` as commands arrive, `plan` once a turn, `take` with the tokens of the step that has come back.

    waiting --admit--> prefilling --join--> running --stop / length / abort--> gone
       ^                    |                  |
       +------- park -------+------------------+        (the newest, when memory runs out)

Waiting rows are admitted by priority, then by age. Of the prompt tokens of a turn the oldest prefilling row gets half
at least, the others go to those that are closest to their end, so that a short prompt never waits for a long one.

Steps are double-buffered: when the tokens of one step are read, the next is on the device already. So a row
that stops is dropped by the plan after, and what the device computed for it meanwhile is not passed on. A row
whose budget is used up by a step in flight is dropped before another one is launched.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

BLOCK = 256  # prompt chunks don't cross multiples of this, so that they fall together with prefix blocks
FIRST_CHUNK = 512  # prompt tokens of a row's first turn beside running rows; it may double from turn to turn
MIN_CHUNK = 32  # prompt tokens that a turn computes at least, however slow the model is

STOP = "stop"
LENGTH = "length"


def no_bytes(length: int) -> int:
    """For rows whose memory is not counted."""
    return 0


class Limits(msgspec.Struct, frozen=True):
    """Bounds of one turn. Token counts; a row's last prompt token counts as its first decode step.

    All rows' caches together may take `cache_bytes`; a row of n tokens takes `row_bytes(n)`.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    prefill_step_size: int = 2048
    cache_bytes: int = 1 << 62
    row_bytes: Callable[[int], int] = no_bytes

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

    `drop`: forget these rows (prefilling or running; the batch holds them), those that are parked among them.
    `admit`: rows that leave the queue; one that was parked goes on behind the tokens it has.
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
    __slots__ = (
        "age",
        "budget",
        "chunk",
        "computed",
        "launched",
        "left",
        "length",
        "parked",
        "priority",
        "read",
        "rid",
        "stop_ids",
    )

    def __init__(self, rid: int, age: int, length: int, budget: int, stop_ids: frozenset[int], priority: int) -> None:
        self.rid = rid
        self.age = age
        self.priority = priority
        self.parked = False
        self.chunk = 0  # tokens of its last chunk
        self.length = length
        self.budget = budget
        self.stop_ids = stop_ids
        self.computed = 0  # prompt tokens prefilled
        self.launched = 0  # decode steps launched
        self.read = 0  # tokens taken
        self.left = False  # the batch was told to drop it; its last token is still in flight

    @property
    def rank(self) -> tuple[int, int]:
        """Lower goes first."""
        return self.priority, self.age

    @property
    def held(self) -> int:
        """Tokens in its caches with the next step's."""
        return self.length + self.launched

    def unpark(self) -> None:
        """Make the tokens so far part of what is to be computed."""
        self.parked = False
        self.chunk = 0  # tokens of its last chunk
        self.length += self.read
        self.budget -= self.read
        self.computed = self.launched = self.read = 0


class Scheduler:
    """First come, first served, with prompts in chunks beside the running rows' steps."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._ages = 0
        self.parkings = 0
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

    def fits(self, length: int) -> bool:
        """Whether a row of so many tokens can ever be admitted."""
        return self._limits.row_bytes(length) <= self._limits.cache_bytes

    def add(
        self, rid: int, length: int, budget: int, *, stop_ids: frozenset[int] = frozenset(), priority: int = 0
    ) -> None:
        """Queue a row of `length` ids that may generate `budget` more, until one of `stop_ids`.

        A lower `priority` goes first.

        Raises ValueError for a rid that is in use and for a length or budget below 1.
        """
        if rid in self:
            raise ValueError(f"row {rid} is in use")
        if length < 1 or budget < 1:
            raise ValueError(f"a row needs ids and a budget, not {length} and {budget}")
        self._ages += 1
        self._waiting[rid] = _Row(rid, self._ages, length, budget, stop_ids, priority)

    def computing(self, rid: int) -> bool:
        """Whether a row is on its way to its first step."""
        return rid in self._waiting or rid in self._prefilling

    def add_running(
        self, rid: int, length: int, budget: int, *, stop_ids: frozenset[int] = frozenset(), priority: int = 0
    ) -> bool:
        """Add a row like `add`, but one whose ids are computed and that joins the step of the last plan. Returns
        False, and adds nothing, when there is no seat or memory for it."""
        needs = self._limits.row_bytes(length + BLOCK)
        if not self._seats_free() or self._bytes() + needs > self._limits.cache_bytes:
            return False
        self.add(rid, length, budget, stop_ids=stop_ids, priority=priority)
        row = self._waiting.pop(rid)
        row.computed = length - 1
        self._place(row, True)
        return True

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
        raised to MIN_CHUNK, so that admissions always go on.
        """
        drop, self._drop = self._drop, []
        drop += self._park()
        decode = 0
        for row in self._running.values():
            if row.launched < row.budget:
                row.launched += 1
                decode += 1
            elif not row.left:
                row.left = True
                drop.append(row.rid)

        turn = _Turn(self._limits, max(prefill_tokens, MIN_CHUNK), decode)
        admit = self._admit()
        rows = sorted(self._prefilling.values(), key=lambda row: row.rank)
        if rows:
            kept = turn.keep(rows[0])
            for row in sorted(rows[1:], key=lambda row: (row.length - row.computed, row.rank)):
                self._place(row, turn.advance(row))
            turn.give_back(kept)
            self._place(rows[0], turn.advance(rows[0]))
        return Plan(drop, admit, turn.chunks, turn.join, turn.decode)

    def _admit(self) -> list[int]:
        """Move waiting rows to the prefilling ones, as seats and memory allow."""
        admitted: list[int] = []
        if not self._waiting or not self._seats_free():
            return admitted
        used = self._bytes()
        size = self._limits.row_bytes
        for row in sorted(self._waiting.values(), key=lambda row: row.rank):
            if not self._seats_free():
                break
            if row.launched > row.read:
                continue  # parked a moment ago: its last token is still in flight
            needs = size(row.length + row.read + BLOCK)
            spare = 2 * len(self._running) * (size(2 * BLOCK) - size(BLOCK)) if row.parked else 0
            if used + needs + spare > self._limits.cache_bytes and (self._prefilling or self._running):
                break  # the row stays first in the queue
            if row.parked:
                row.unpark()
            del self._waiting[row.rid]
            self._prefilling[row.rid] = row
            admitted.append(row.rid)
            used += needs
        return admitted

    def _bytes(self) -> int:
        size = self._limits.row_bytes
        return sum(size(row.held + 1) for row in (*self._prefilling.values(), *self._running.values()))

    def _park(self) -> list[int]:
        """Send the newest rows back to the queue until the others fit into memory."""
        parked: list[int] = []
        if self._limits.row_bytes is no_bytes:
            return parked
        used = self._bytes()
        rows = sorted((*self._prefilling.values(), *self._running.values()), key=lambda row: row.rank)
        while used > self._limits.cache_bytes and len(rows) > 1:
            row = rows.pop()
            used -= self._limits.row_bytes(row.held + 1)
            if row.left:
                continue  # on its way out
            self._prefilling.pop(row.rid, None)
            self._running.pop(row.rid, None)
            row.parked = True
            self._waiting[row.rid] = row
            parked.append(row.rid)
            self.parkings += 1
        return parked

    def take(self, rids: list[int], tokens: list[int]) -> Taken:
        """Account for the tokens of a step that has come back, one for each of `rids`.

        Rows that are gone are left out. A row ends with `stop` at one of its stop ids, which is among its
        tokens, and with `length` when its budget is used up.
        """
        taken = Taken([], [], [], [])
        running = self._running
        for rid, token in zip(rids, tokens, strict=True):
            row = running.get(rid) or self._waiting.get(rid)
            if row is None or not row.launched:
                continue
            taken.rids.append(rid)
            taken.tokens.append(token)
            row.read += 1
            if token in row.stop_ids:
                reason = STOP
            elif row.read == row.budget:
                reason = LENGTH
            else:
                continue
            taken.ended.append(rid)
            taken.reasons.append(reason)
            self.abort([rid])
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


class _Turn:
    """Fills one turn with prompt chunks until one of its bounds is met."""

    def __init__(self, limits: Limits, prefill_tokens: int, decode: int) -> None:
        self.chunks: list[Chunk] = []
        self.join: list[int] = []
        self.decode = decode
        self._batched = limits.max_num_batched_tokens - decode
        self._prefill = prefill_tokens
        self._step = limits.prefill_step_size
        self._beside_others = decode > 0

    def keep(self, row: _Row) -> int:
        """Set half of the turn's prompt tokens aside for `row`, if it needs as many."""
        kept = min(row.length - row.computed, max(self._prefill // 2, MIN_CHUNK), self._prefill)
        self._prefill -= kept
        return kept

    def give_back(self, tokens: int) -> None:
        """Tokens that were kept can be spent now."""
        self._prefill += tokens

    def advance(self, row: _Row) -> bool:
        """Give `row` its next chunk. True when it joins the running rows in this turn."""
        left = row.length - 1 - row.computed
        room = min(self._batched, self._prefill, self._step)
        if self._beside_others:
            # A prompt costs more per token the longer it is: feel the way up, for others wait.
            room = min(room, max(FIRST_CHUNK, 2 * row.chunk))
        count = max(min(left, room), 0)
        border = BLOCK - row.computed % BLOCK
        if count < left and count > border:
            count -= (row.computed + count) % BLOCK
        joins = count == left and count < self._batched and self._prefill > 0
        if count:
            self.chunks.append(Chunk(row.rid, row.computed, count, whole=joins and row.computed == 0))
        row.chunk = count
        spent = count + joins  # its own step is work too: prompts of one token are no free admissions
        row.computed += count
        self._batched -= spent
        self._prefill -= spent
        if joins:
            self.join.append(row.rid)
            self.decode += 1
        return joins
