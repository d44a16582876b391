"""`Adapters`: which LoRA adapters are in memory, which rows use them, and who makes room for whom.

Owned by `actors.engine.model`, used by the engine on its one thread; files are read on a thread beside it. An adapter
that a row uses stays; of the others the least recently used one makes room. How many adapters rows use at once is the
scheduler's business (`Limits.max_loras`), which is why there always is room.

    on disk --begin--> being read --arrived--> resident --last row released--> idle --begin of another--> on disk
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import mlx.core as mx
import structlog

from actors.adapter_files import AdapterFiles, Contents
from actors.engine.lora import NONE, Lora, Selection, select

log = structlog.get_logger()

EMPTY = ""


class Adapters:
    """The adapters of one model, by name; `slots` of them fit into memory at once."""

    def __init__(self, lora: Lora, files: Sequence[AdapterFiles]) -> None:
        self._lora = lora
        self._files = {each.name: each for each in files}
        self._digests: dict[str, str] = {}
        self.slots = lora.slots
        self._in_slot = [EMPTY] * lora.slots
        self._users: list[set[int]] = [set() for _ in range(lora.slots)]
        self._used = [0] * lora.slots  # a count that grows with each use
        self._uses = 0
        self._slot_of: dict[int, int] = {}
        self._reading: dict[int, Future[Contents]] = {}
        self._reader = ThreadPoolExecutor(1, "adapters")
        self._known: tuple[tuple[int, ...], Selection | None] = ((), None)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    @property
    def loading(self) -> bool:
        """Whether rows may be waiting for a file."""
        return bool(self._reading)

    @property
    def resident(self) -> list[str]:
        """The adapters in memory, or on their way there."""
        return [name for name in self._in_slot if name]

    def digest(self, name: str) -> str:
        """Hash of the contents of a resident adapter; "" for no adapter."""
        return self._digests[name] if name else ""

    def ready(self, name: str) -> bool:
        """Whether a row with this adapter can be computed now; one without any always can."""
        return not name or (name in self._in_slot and self._in_slot.index(name) not in self._reading)

    def preload(self) -> None:
        """Fill the slots with the first adapters. Raises OSError and ValueError."""
        for slot, files in zip(range(self._lora.slots), self._files.values(), strict=False):
            self._put(slot, files.name, files.read())
            self._in_slot[slot] = files.name

    def begin(self, rows: Iterable[tuple[int, str]]) -> None:
        """These rows use these adapters from now on ("" is none); those that are not in memory are read."""
        later = []
        for rid, name in rows:
            if name in self._in_slot and name:
                self._use(rid, self._in_slot.index(name))
            elif name:
                later.append((rid, name))
        for rid, name in later:  # when all are taken that are to stay
            if name not in self._in_slot:
                self._load(name)
            self._use(rid, self._in_slot.index(name))

    def release(self, rids: Iterable[int]) -> None:
        """These rows use theirs no more; unknown ones are normal."""
        for rid in rids:
            slot = self._slot_of.pop(rid, None)
            if slot is not None:
                self._users[slot].discard(rid)

    def clear(self) -> None:
        """No row uses any."""
        self.release(list(self._slot_of))

    def arrived(self) -> Iterator[tuple[list[int], str]]:
        """Put what has been read where forwards find it; yields the rows that waited for it, and why they can't have
        it ("" when they can). Nothing may be in flight on the device."""
        for slot, future in list(self._reading.items()):
            if not future.done():
                continue
            del self._reading[slot]
            name = self._in_slot[slot]
            fault = ""
            try:
                self._put(slot, name, future.result())
            except (OSError, ValueError) as error:
                log.error("an adapter can't be loaded", adapter=name, error=str(error))
                fault = f"the adapter {name!r} can't be loaded: {error}"
                self._in_slot[slot] = EMPTY
            else:
                log.info("adapter loaded", adapter=name)
            rids = sorted(self._users[slot])
            if fault:
                self.release(rids)
            yield rids, fault

    @property
    def any_arrived(self) -> bool:
        """Whether `arrived` has something."""
        return any(future.done() for future in self._reading.values())

    @contextmanager
    def chosen(self, rids: Sequence[int]) -> Iterator[None]:
        """Forwards that are built in this block are of these rows, in this order."""
        slots = tuple(self._slot_of.get(rid, NONE) for rid in rids) if self._slot_of else ()
        if slots != self._known[0]:
            self._known = slots, select(slots)
        self._lora.chosen.selection = self._known[1]
        try:
            yield
        finally:
            self._lora.chosen.selection = None

    def _put(self, slot: int, name: str, contents: Contents) -> None:
        self._lora.put(slot, contents.layers)
        self._digests[name] = contents.digest

    def _use(self, rid: int, slot: int) -> None:
        self._uses += 1
        self._used[slot] = self._uses
        self._users[slot].add(rid)
        self._slot_of[rid] = slot

    def _load(self, name: str) -> None:
        free = [slot for slot, users in enumerate(self._users) if not users]
        # One that is still being read for rows that have left can be had, too: nobody reads what comes of it.
        slot = min(free, key=lambda slot: (bool(self._in_slot[slot]), self._used[slot]))
        if self._in_slot[slot]:
            log.info("adapter evicted", adapter=self._in_slot[slot], by=name)
        self._in_slot[slot] = name
        self._reading[slot] = self._reader.submit(self._files[name].read)


def mixes_rightly(adapters: Adapters, forward: Callable[[mx.array, Sequence[int]], mx.array]) -> bool:
    """Whether a row with an adapter and one without get together what each gets alone.

    `forward` gives logits (rows, tokens, vocabulary) of ids (rows, tokens) and the rows' numbers. Run once at load: a
    model's code may hand its layers something in which the rows don't come first.
    """
    (name, *_) = adapters.resident
    rids = (1, 2)
    ids = mx.array([[3, 4, 5], [5, 6, 7]], mx.uint32)
    adapters.begin([(1, name)])
    try:
        together = forward(ids, rids)
        apart = mx.concatenate([forward(ids[row : row + 1], [rid]) for row, rid in enumerate(rids)])
        worst = mx.abs(together.astype(mx.float32) - apart.astype(mx.float32)).max()
        size = mx.abs(apart.astype(mx.float32)).max()
        return float(worst) <= (1e-3 if apart.dtype == mx.float32 else 0.1) * float(size)
    finally:
        adapters.clear()
