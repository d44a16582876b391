"""`Scheduler`: which rows are dropped, admitted, prefilled and decoded in each turn of the engine.

Pure policy: no MLX, no socket, no clock. `actors.engine.engine` calls it on the engine's one thread: `add` and
`abort` as commands arrive, `plan` once a turn, `take` with the tokens of the step that has come back.

    waiting --admit--> prefilling --join--> running --stop / length / abort--> gone
       ^                    |                  |
       +------- park -------+------------------+        (the newest, when memory runs out)

A prefilling row may be held: it keeps its seat while its prefix is restored, or computed for another row, and goes on
behind the tokens that are in its caches then.

Waiting rows are admitted by priority, then by the turn that the streamer gave them, then by age; one whose LoRA adapter
finds no place is passed by others, but not for ever. Of the prompt tokens that a turn has time for, the first of the
prefilling rows gets half at least, the others go to those that are closest to their end, so that a short prompt never
waits for a long one. What counts is what they cost: deep in a prompt one may cost many times as much as at its start.

Steps are double-buffered: when the tokens of one step are read, the next is on the device already. So a row
that stops is dropped by the plan after, and what the device computed for it meanwhile is not passed on. A row
whose budget is used up by a step in flight is dropped before another one is launched.
"""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

BLOCK = 256  # a forward over a long prompt ends on the next multiple of this at the latest, where a prefix block ends
FIRST_CHUNK = 512  # prompt tokens of a row's first turn beside running rows; it may double from turn to turn
MIN_CHUNK = 32  # prompt tokens that a turn computes at least, however slow the model is …
MIN_PIECE = 8  # … and that the first of several rows computes, however deep in its prompt
PASSES = 64  # rows with other adapters that may pass one whose adapter finds no place
PART = 128  # tokens of a block that a chunk may end with, where it can't end on a border

STOP = "stop"
LENGTH = "length"


def no_bytes(length: int) -> int:
    """For rows whose memory is not counted."""
    return 0


def never_held(rid: int) -> bool:
    """For engines without a prefix cache."""
    return False


class Limits(msgspec.Struct, frozen=True):
    """Bounds of one turn. Token counts; a row's last prompt token counts as its first decode step.

    All rows' caches, and what is kept beside them for good, may take `cache_bytes`; those of a row of n tokens take
    `row_bytes(n)`. Each token in a row's caches adds `depth_cost` to what it costs to compute one more of its prompt;
    that is 1 at its start.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    prefill_step_size: int = 2048
    cache_bytes: int = 1 << 62
    row_bytes: Callable[[int], int] = no_bytes
    max_loras: int = 1 << 30  # adapters of all rows that are prefilling or running
    depth_cost: float = 0.0

    def admission_bytes(self, length: int) -> int:
        """Bytes that a row of so many tokens takes until it runs: its own caches, and beside them a slot of the batch,
        with one block more."""
        return self.row_bytes(length) + self.row_bytes(length + BLOCK)

    @property
    def seats(self) -> int:
        """Rows prefilling and running at once. One batched token stays free for the others' prompts."""
        return max(1, min(self.max_num_seqs, self.max_num_batched_tokens - 1))


class Chunk(NamedTuple):
    """`tokens` ids of row `rid` from `start` on, to be prefilled. Begins on a block border or ends at the next one.

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
    `chunks`: prompt chunks to run, a row's in order. `join`: rows whose prompt but its last token is computed, which
    join the running ones. `decode`: how many rows then decode one step, the joined ones included. `prefill_bytes`
    are set aside for the rows that are prefilled or join. `prefill_cost`: what the chunks cost, in tokens at the start
    of a prompt.
    """

    drop: list[int]
    admit: list[int]
    chunks: list[Chunk]
    join: list[int]
    decode: int
    prefill_bytes: int = 0
    prefill_cost: float = 0.0

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
        "adapter",
        "age",
        "budget",
        "chunk",
        "computed",
        "held_back",
        "launched",
        "left",
        "length",
        "parked",
        "passed",
        "priority",
        "read",
        "rid",
        "stop_ids",
        "turn",
    )

    def __init__(
        self,
        rid: int,
        age: int,
        length: int,
        budget: int,
        stop_ids: frozenset[int],
        priority: int,
        adapter: str,
        turn: int,
    ) -> None:
        self.rid = rid
        self.adapter = adapter
        self.passed = 0  # rows with other adapters that were admitted instead
        self.age = age
        self.priority = priority
        self.turn = turn
        self.parked = False
        self.held_back = False  # waits for its prefix
        self.chunk = 0  # tokens of its last chunk
        self.length = length
        self.budget = budget
        self.stop_ids = stop_ids
        self.computed = 0  # prompt tokens prefilled
        self.launched = 0  # decode steps launched
        self.read = 0  # tokens taken
        self.left = False  # the batch was told to drop it; its last token is still in flight

    @property
    def rank(self) -> tuple[int, int, int]:
        """Lower goes first."""
        return self.priority, self.turn, self.age

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

    def __init__(self, limits: Limits, hold: Callable[[int], bool] = never_held) -> None:
        """`hold` is asked of each row that is admitted, whether it has to wait for `go_on`."""
        self._limits = limits
        self._hold = hold
        self._ages = 0
        self.parkings = 0
        self._waiting: dict[int, _Row] = {}
        self._prefilling: dict[int, _Row] = {}
        self._running: dict[int, _Row] = {}
        self._drop: list[int] = []
        self._planned_bytes = 0  # what the turn of the last plan takes

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

    @property
    def goes_on(self) -> bool:
        """Whether there is more to launch behind the step of the last plan, whatever its tokens are."""
        more = any(row.launched < row.budget for row in self._running.values())
        return more or bool(self._waiting or self._prefilling)

    @property
    def leaving(self) -> list[int]:
        """Rows that the next plan drops."""
        return self._drop

    @property
    def idle(self) -> bool:
        """Whether all that there is to do is to wait for rows that are held."""
        held = all(row.held_back for row in self._prefilling.values())
        return held and not (self._running or self._drop) and not (self._waiting and self._seats_free())

    @property
    def planned_bytes(self) -> int:
        """What the rows of the last plan, those added since, and what is kept beside them take in its turn."""
        return self._planned_bytes

    def fits(self, length: int, kept_bytes: int = 0) -> bool:
        """Whether a row of so many tokens can ever be admitted beside what is kept for good."""
        return self._limits.admission_bytes(length) + kept_bytes <= self._limits.cache_bytes

    def add(
        self,
        rid: int,
        length: int,
        budget: int,
        *,
        stop_ids: frozenset[int] = frozenset(),
        priority: int = 0,
        adapter: str = "",
        turn: int = 0,
    ) -> None:
        """Queue a row of `length` ids that may generate `budget` more, until one of `stop_ids`.

        A lower `priority` goes first; of equal ones a lower `turn`. `adapter` names the LoRA adapter that it is
        computed with.

        Raises ValueError for a rid that is in use and for a length or budget below 1.
        """
        self._waiting[rid] = self._new_row(rid, length, budget, stop_ids, priority, adapter, turn)

    def _new_row(
        self, rid: int, length: int, budget: int, stop_ids: frozenset[int], priority: int, adapter: str, turn: int
    ) -> _Row:
        if rid in self:
            raise ValueError(f"row {rid} is in use")
        if length < 1 or budget < 1:
            raise ValueError(f"a row needs ids and a budget, not {length} and {budget}")
        self._ages += 1
        return _Row(rid, self._ages, length, budget, stop_ids, priority, adapter, turn)

    def computing(self, rid: int) -> bool:
        """Whether a row is on its way to its first step."""
        return rid in self._waiting or rid in self._prefilling

    def add_running(
        self,
        rid: int,
        length: int,
        budget: int,
        *,
        stop_ids: frozenset[int] = frozenset(),
        priority: int = 0,
        adapter: str = "",
        turn: int = 0,
    ) -> bool:
        """Add a row like `add`, but one whose ids are computed and that joins the step of the last plan, beside a row
        with the same adapter. Returns False, and adds nothing, when there is no seat or memory for it."""
        needs = self._limits.row_bytes(length + BLOCK)
        if not self._seats_free() or self._planned_bytes + needs > self._limits.cache_bytes:
            return False
        row = self._new_row(rid, length, budget, stop_ids, priority, adapter, turn)
        row.computed = length - 1
        self._place(row, True)
        self._planned_bytes += needs
        return True

    def lift(self, rid: int, priority: int) -> None:
        """A row of `priority` waits for what this one computes, which goes no later than that one would from now on.
        Rows that are gone are normal."""
        row = self._prefilling.get(rid)
        if row is not None:
            row.priority = min(row.priority, priority)

    def abort(self, rids: Iterable[int]) -> None:
        """Forget these rows, wherever they are; unknown ones are normal."""
        for rid in rids:
            self._forget(rid)

    def abort_all(self) -> None:
        """Forget every row."""
        self.abort([*self._waiting, *self._prefilling, *self._running])

    def go_on(self, rid: int, computed: int) -> None:
        """A held row goes on behind its first `computed` tokens. Rows that are gone or parked are normal.

        Raises ValueError for as many tokens as it has: the last one is its first decode step.
        """
        row = self._prefilling.get(rid)
        if row is None or not row.held_back:
            return
        if not 0 <= computed < row.length:
            raise ValueError(f"row {rid} of {row.length} ids can't have {computed} in its caches")
        row.held_back = False
        row.computed = computed

    def plan(self, prefill_tokens: int, running_bytes: int) -> Plan:
        """Decide one turn; rows that it launches count as launched.

        `prefill_tokens` bounds the prompt tokens of this turn: how many fit the time it may take, at the start of a
        prompt. It is raised to MIN_CHUNK, so that admissions always go on. `running_bytes` is what the batch needs for
        this turn's step of the rows that run now, and what is kept beside the rows for good.
        """
        drop, self._drop = self._drop, []
        parked, running_bytes = self._park(running_bytes)
        drop += parked
        decode = 0
        for row in self._running.values():
            if row.launched < row.budget:
                row.launched += 1
                decode += 1
            elif not row.left:
                row.left = True
                drop.append(row.rid)

        turn = _Turn(self._limits, max(prefill_tokens, MIN_CHUNK), decode)
        admit = self._admit(running_bytes)
        prefill_bytes = self._prefill_bytes
        self._planned_bytes = running_bytes + prefill_bytes
        rows = sorted((row for row in self._prefilling.values() if not row.held_back), key=lambda row: row.rank)
        if rows:
            kept = turn.keep(rows[0])
            for row in sorted(rows[1:], key=lambda row: (row.length - row.computed, row.rank)):
                self._place(row, turn.advance(row))
            turn.give_back(*kept)
            least = MIN_PIECE if len(rows) > 1 or decode else MIN_CHUNK
            self._place(rows[0], turn.advance(rows[0], least))
        return Plan(drop, admit, turn.chunks, turn.join, turn.decode, prefill_bytes, turn.cost)

    @property
    def _prefill_bytes(self) -> int:
        return sum(self._limits.admission_bytes(row.length) for row in self._prefilling.values())

    def _admit(self, running_bytes: int) -> list[int]:
        """Move waiting rows to the prefilling ones, as seats and memory allow."""
        admitted: list[int] = []
        if not self._waiting or not self._seats_free():
            return admitted
        used = running_bytes + self._prefill_bytes
        size = self._limits.row_bytes
        adapters = {row.adapter for row in (*self._prefilling.values(), *self._running.values())} - {""}
        stuck: _Row | None = None  # the first whose adapter finds no place
        for row in sorted(self._waiting.values(), key=lambda row: row.rank):
            if not self._seats_free():
                break
            if row.launched > row.read:
                continue  # parked a moment ago: its last token is still in flight
            if row.adapter:
                if stuck is not None and stuck.passed >= PASSES:
                    continue
                if row.adapter not in adapters and len(adapters) >= self._limits.max_loras:
                    stuck = stuck or row
                    continue
            needs = self._limits.admission_bytes(row.length + row.read)
            spare = 2 * len(self._running) * (size(2 * BLOCK) - size(BLOCK)) if row.parked else 0
            if used + needs + spare > self._limits.cache_bytes and (self._prefilling or self._running):
                break  # the row stays first in the queue
            if row.adapter:
                adapters.add(row.adapter)
                if stuck is not None:
                    stuck.passed += 1
            if row.parked:
                row.unpark()
            del self._waiting[row.rid]
            self._prefilling[row.rid] = row
            row.held_back = self._hold(row.rid)
            admitted.append(row.rid)
            used += needs
        return admitted

    def _park(self, running_bytes: int) -> tuple[list[int], int]:
        """Send the newest rows back to the queue until the others fit into memory; returns what runs then takes."""
        parked: list[int] = []
        used = running_bytes + self._prefill_bytes
        if used <= self._limits.cache_bytes:
            return parked, running_bytes
        rows = sorted((*self._prefilling.values(), *self._running.values()), key=lambda row: row.rank)
        while used > self._limits.cache_bytes and len(rows) > 1:
            row = rows.pop()
            if row.rid in self._prefilling:
                used -= self._limits.admission_bytes(row.length)
            else:
                freed = self._limits.row_bytes(row.held + 1)
                running_bytes -= freed
                used -= freed
            if row.left:
                continue  # on its way out
            self._prefilling.pop(row.rid, None)
            self._running.pop(row.rid, None)
            row.parked = True
            self._waiting[row.rid] = row
            parked.append(row.rid)
            self.parkings += 1
        return parked, running_bytes

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
            self._forget(rid)
        return taken

    def _forget(self, rid: int) -> None:
        if self._waiting.pop(rid, None) is not None:
            return
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
        self.cost = 0.0
        self.chunks: list[Chunk] = []
        self.join: list[int] = []
        self.decode = decode
        self._batched = limits.max_num_batched_tokens - decode
        self._prefill = float(prefill_tokens)
        self._depth_cost = limits.depth_cost
        self._step = limits.prefill_step_size
        self._half = prefill_tokens / 2
        self._begun = False  # whether a row beside the first was begun that will go on in a later turn
        self._beside_others = decode > 0

    def keep(self, row: _Row) -> tuple[float, int]:
        """Set half of the turn's prompt tokens aside for `row`, if it needs as many."""
        left = row.length - row.computed
        kept = min(self._cost(row, left), self._prefill / 2), min(left, -(-self._batched // 2))
        self.give_back(-kept[0], -kept[1])
        return kept

    def give_back(self, cost: float, tokens: int) -> None:
        """What was kept can be spent now."""
        self._prefill += cost
        self._batched += tokens

    def _cost(self, row: _Row, tokens: int) -> float:
        return tokens * (1 + self._depth_cost * (row.computed + tokens / 2))

    def _affordable(self, row: _Row) -> int:
        """How many tokens of `row` cost no more than what is left; `_cost` solved for them."""
        if self._prefill <= 0:
            return 0
        first = 1 + self._depth_cost * row.computed
        tokens = 2 * self._prefill / (first + math.sqrt(first * first + 2 * self._depth_cost * self._prefill))
        return int(tokens + 1e-6)  # what was kept for so many is enough for so many

    def advance(self, row: _Row, least: int = 0) -> bool:
        """Give `row` its next chunk. True when it joins the running rows in this turn.

        A prompt that a turn can take whole isn't begun when this one has no room for all of it, unless `least` tokens
        of it are to be computed anyhow: whole ones are computed together, while each piece of one costs a forward of
        its own. For the same reason no more than one is begun that the turn doesn't take whole.
        """
        left = row.length - 1 - row.computed
        room = min(self._batched, max(self._affordable(row), least), self._step)
        if room < left and not row.computed and not least:
            if self._begun or (left <= FIRST_CHUNK and self._cost(row, left) <= self._half):
                return False
            self._begun = room > 0
        if self._beside_others:
            # A prompt costs more per token the longer it is: feel the way up, for others wait.
            room = min(room, max(FIRST_CHUNK, 2 * row.chunk))
        count = chunk_tokens(row.computed, left, room)
        joins = count == left and count < self._batched and self._prefill > 0
        whole = joins and row.computed == 0
        start, end = row.computed, row.computed + count
        # A chunk that begins inside a block ends with it, so that forwards of whole blocks keep to the grid.
        if start % BLOCK and end > (border := start + BLOCK - start % BLOCK):
            self.chunks.append(Chunk(row.rid, start, border - start, whole=False))
            start = border
        if end > start:
            self.chunks.append(Chunk(row.rid, start, end - start, whole))
        row.chunk = count
        cost = self._cost(row, count)
        row.computed += count
        self.cost += cost
        self._batched -= count + joins  # its own step is work too: prompts of one token are no free admissions
        self._prefill -= cost + joins
        if joins:
            self.join.append(row.rid)
            self.decode += 1
        return joins


def chunk_tokens(computed: int, left: int, room: int) -> int:
    """Prompt tokens that a row computes in a turn with room for `room`, of which `left` are left to it.

    A chunk that can't reach the end of its block gets an equal part of the way there, not all of the room: the piece
    that would be left over costs a forward of its own. A longer one may end halfway through a block.
    """
    if left <= room:
        return left
    if room < 1:
        return 0
    ahead = min(BLOCK - computed % BLOCK, left)
    if room < ahead:
        parts = -(-ahead // room)
        return -(-ahead // parts)
    return ahead + (room - ahead) // PART * PART
