"""`Constraints`: the grammars of the rows that have one, and the masks of each step.

Owned by the engine, whose one thread calls it and never waits for a grammar: matchers are made on side threads, and
the row is admitted when its own is ready. Masks are computed on a side thread, too, while the step's forward runs;
llguidance lets go of the GIL.
"""

import os
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import llguidance
import llguidance.numpy
import numpy as np
import numpy.typing as npt
import structlog

from actors.engine.constraint import Constraint
from actors.grammars import Grammars, InvalidGrammar
from actors.model_files import ModelFiles
from actors.tokenizer.text_tokenizer import load_tokenizer
from protocol.messages import Grammar, Submit

log = structlog.get_logger()

BUILDERS = 2  # threads that make matchers
NICENESS = 10  # of these threads, which must not take the processor from the step
REMEMBERED = 64  # matchers at their beginning, to be copied

Allowed = npt.NDArray[np.bool_]


class Wanted(NamedTuple):
    """A row whose next token needs a mask. `number` is that of this token, `last` the token before it."""

    rid: int
    number: int
    last: int


class Constraints:
    """Constraints by rid."""

    def __init__(self, files: ModelFiles, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._grammars = Grammars(files, lambda: load_tokenizer(files.path).backend, vocab_size)
        self._matchers = _Matchers(self._grammars)
        self._building: dict[int, Future[Constraint]] = {}
        self._ready: dict[int, Constraint] = {}
        self._builders = ThreadPoolExecutor(BUILDERS, "grammar", _lower_priority)
        self._masker = ThreadPoolExecutor(1, "masks")
        self._executor: llguidance.LLExecutor | None = None

    def prepare(self) -> None:
        """Make ready for the first grammar; holds the GIL, for a quarter of a second or more."""
        self._grammars.prepare()

    @property
    def building(self) -> int:
        """Rows that wait for their matcher."""
        return len(self._building)

    @property
    def at_work(self) -> list[int]:
        """Rows whose matcher is being made right now."""
        return [rid for rid, future in self._building.items() if future.running()]

    def is_building(self, rid: int) -> bool:
        """Whether this row waits for its matcher."""
        return rid in self._building

    def build(self, request: Submit, stop_ids: tuple[int, ...], generated: list[int]) -> None:
        """Begin to make the constraint of a row, and bring it to behind the tokens `generated` so far."""
        assert request.params is not None
        params = request.params

        def make() -> Constraint:
            matcher = None if params.grammar is None else self._matchers.fresh(params.grammar)
            constraint = Constraint(matcher, request.thinking, params.thinking_budget, stop_ids, params.min_tokens)
            constraint.consume(generated)
            return constraint

        self._building[request.rid] = self._builders.submit(make)

    def finished(self) -> list[tuple[int, str]]:
        """Rows whose constraint is there, each with what is wrong with it, "" for nothing."""
        done = [(rid, future) for rid, future in self._building.items() if future.done()]
        results: list[tuple[int, str]] = []
        for rid, future in done:
            del self._building[rid]
            try:
                constraint = future.result()
            except (InvalidGrammar, ValueError) as error:
                results.append((rid, str(error)))
                continue
            except Exception as error:  # one row's grammar must not end all others
                log.exception("a grammar could not be built", rid=rid)
                results.append((rid, f"the grammar could not be built: {error}"))
                continue
            if not constraint.error:
                self._ready[rid] = constraint
            results.append((rid, constraint.error))
        return results

    def drop(self, rid: int) -> None:
        """Forget a row; one without a constraint is normal."""
        future = self._building.pop(rid, None)
        if future is not None:
            future.cancel()
        self._ready.pop(rid, None)

    def clear(self) -> None:
        """Forget all rows."""
        for rid in [*self._building, *self._ready]:
            self.drop(rid)

    def failed(self, rids: list[int]) -> list[tuple[int, str]]:
        """Those of the rows whose grammar went wrong on the way, with the reason."""
        rows = [(rid, self._ready.get(rid)) for rid in rids]
        return [(rid, row.error) for rid, row in rows if row is not None and row.matcher is not None and row.error]

    def start(self, wanted: list[Wanted]) -> "Future[Allowed]":
        """Begin to compute which tokens the rows may generate: bool (rows, vocabulary). Not to be called again
        before that is done."""
        rows = [(self._ready.get(row.rid), row) for row in wanted]
        return self._masker.submit(self._masks, rows)

    def _masks(self, rows: list[tuple[Constraint | None, Wanted]]) -> Allowed:
        words = -(-self._vocab_size // 32)
        bits = np.full((len(rows), max(words, self._grammars.mask_words)), -1, np.int32)
        asked: list[tuple[llguidance.LLMatcher, int]] = []
        for place, (constraint, row) in enumerate(rows):
            if constraint is None:
                continue  # it ended, and its slot is about to be freed
            if constraint.consumed < row.number:
                constraint.consume([row.last])
            if constraint.asks_grammar and constraint.matcher is not None:
                asked.append((constraint.matcher, place))
        if asked:
            if self._executor is None:
                self._executor = llguidance.LLExecutor()
            llguidance.numpy.fill_next_token_bitmask_par(self._executor, asked, bits)
        allowed = np.unpackbits(bits.view(np.uint8), axis=1, count=self._vocab_size, bitorder="little").view(np.bool_)
        for place, (constraint, _) in enumerate(rows):
            if constraint is not None:
                _adjust(allowed[place], constraint)
        return allowed


def _adjust(allowed: Allowed, constraint: Constraint) -> None:
    """Bring in what isn't the grammar's business."""
    if constraint.only is not None:
        allowed[:] = False
        allowed[constraint.only] = True
        return
    if constraint.may_not_stop:
        stops = [token for token in constraint.stop_ids if token < len(allowed)]
        kept = allowed[stops].copy()
        allowed[stops] = False
        if not allowed.any():
            allowed[stops] = kept
    if constraint.asks_grammar and constraint.also is not None:
        allowed[constraint.also] = True
    if not allowed.any():
        allowed[:] = True  # an error, which ends the row; the draw needs something to draw from


class _Matchers:
    """Matchers of the grammars seen last, made and copied on builders' threads."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, str], llguidance.LLMatcher] = OrderedDict()

    def fresh(self, grammar: Grammar) -> llguidance.LLMatcher:
        """A matcher at its beginning. Raises InvalidGrammar, also when the model has no tokenizer for it."""
        key = (grammar.kind, grammar.text)
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
                return known.deep_copy()
        made = self._grammars.matcher(grammar)
        if not made.is_error():
            with self._lock:
                self._known[key] = made.deep_copy()
                if len(self._known) > REMEMBERED:
                    self._known.popitem(last=False)
        return made


def _lower_priority() -> None:
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
    except OSError as error:
        log.warning("grammars are compiled at normal priority", error=str(error))
