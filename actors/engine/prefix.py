"""`PrefixCache`: what the engine knows of prefixes: found at admission, waited for, restored, committed.

Used by `actors.engine.engine` on the engine's one thread. The blocks themselves lie in `cache_store.store`. A row that
is admitted is told at once to go on from its beginning, or waits: for its blocks to be restored, or for another row
that is computing them right now.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import mlx.core as mx
import structlog

from actors.engine.block_cuts import PackedBlock
from actors.engine.claims import Claims
from actors.engine.commits import Commits
from actors.engine.device import Lane
from actors.engine.model import Model
from actors.engine.request import Request
from actors.engine.restoring import Phase, Restoring
from actors.engine.scheduler import BLOCK
from actors.engine.slots import SlotCache
from cache_store.keys import snapshot_key
from cache_store.store import PrefixStore, Tier
from protocol.messages import PrefixStats

log = structlog.get_logger()

SNAPSHOT_INTERVAL = 2048  # tokens
PATIENCE_S = 2.0  # how long a row waits for the next block of another at least …
PATIENCE_BLOCKS = 8  # … and as long as so many blocks take at the speed of prefill
LOAD_TRIES = 2  # after so many failed loads a row uses what is in memory
SLOW_DISK_REST_S = 30.0  # a disk that was too slow to read from is measured again after so long
FIRST_SPEED = 1e9  # bytes per second that a restore copies, before one was measured
FULL_WEIGHT = 8 << 20  # bytes that tell the speed


class Ready(NamedTuple):
    """A row that waits no longer: its caches (None: it begins at its beginning) hold `tokens` of its ids."""

    rid: int
    caches: list[Any] | None
    tokens: int


class Found(NamedTuple):
    """What the store has of a row's prefix: so many blocks and where each is."""

    keys: list[bytes]
    tiers: list[Tier]
    snapshot: Tier | None

    def on_ssd(self) -> list[bytes]:
        """Blocks, and perhaps a snapshot, that have to be loaded."""
        blocks = [key for key, tier in zip(self.keys, self.tiers, strict=True) if tier is Tier.SSD]
        return [*blocks, snapshot_key(self.keys[-1])] if self.snapshot is Tier.SSD else blocks


class _Waiter:
    """A row that waits for blocks of others."""

    __slots__ = ("awaited", "changes", "request", "since")

    def __init__(self, request: Request, awaited: list[bytes], changes: int, since: float) -> None:
        self.request = request
        self.awaited = awaited
        self.changes = changes
        self.since = since


class PrefixCache:
    """Prefixes of the rows of one engine. `speed` tells prefill's tokens per second now."""

    def __init__(
        self,
        model: Model,
        store: PrefixStore[PackedBlock],
        lane: Lane,
        *,
        requests: Mapping[int, Request],
        speed: Callable[[], float],
        interval: int = SNAPSHOT_INTERVAL,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        assert model.block_layout is not None
        self.store = store
        self.claims = Claims()
        self.commits = Commits(model.block_layout, store, lane, self.claims, interval)
        self.committing = 0.0  # seconds that cutting and storing blocks took of the engine's thread
        self.restoring = 0.0  # seconds of the device for restoring, and of the thread that waits for it
        self._model = model
        self._requests = requests
        self._layout = model.block_layout
        self._lane = lane
        self._speed = speed
        self._clock = clock
        self._copy_speed = FIRST_SPEED
        self._restoring: dict[int, tuple[Request, Restoring]] = {}
        self._waiting: dict[int, _Waiter] = {}
        self._tries: dict[int, int] = {}
        self._loading_since: dict[int, float] = {}
        self._slow_disk_tried = -SLOW_DISK_REST_S
        self._orphans: list[Restoring] = []
        self._lifts: dict[int, int] = {}

    @property
    def waits_for_disk(self) -> bool:
        """Whether rows wait, and for nothing but the SSD."""
        return bool(self._restoring) and all(row.phase is Phase.LOADING for _, row in self._restoring.values())

    def stats(self, yielded: int) -> PrefixStats:
        """Figures since the start; `yielded` bytes were let go for rows."""
        store = self.store.stats()
        return PrefixStats(
            store.memory_hit_tokens,
            store.ssd_hit_tokens,
            store.missed_tokens,
            self.committing,
            self.restoring,
            store.memory_blocks,
            store.memory_bytes,
            store.memory_limit_bytes,
            store.ssd.used_bytes,
            store.ssd.limit_bytes,
            store.ssd.queued_bytes,
            store.ssd.faults,
            yielded,
            self.store.acquired,
        )

    def stops(self, length: int) -> list[int]:
        """Where the forwards of a row of `length` ids have to end, so that a snapshot can be taken."""
        return self.commits.snapshot_ends(length)

    def of_row(self, rid: int, caches: list[Any], start: int, end: int) -> list[mx.array]:
        """Cut what a prefilling row's forward from `start` to `end` has made."""
        return self._timed(rid, lambda request: self.commits.of_row(request, caches, start, end))

    def of_padded(self, rid: int, caches: list[Any], place: int, length: int) -> list[mx.array]:
        """Cut the blocks of one row of a padded group of plain caches."""
        return self._timed(rid, lambda request: self.commits.of_padded(request, caches, place, length))

    def of_slot(self, rid: int, caches: list[SlotCache], slot: int, end: int) -> list[mx.array]:
        """Cut the block of a decoding row that has come to a border."""
        return self._timed(rid, lambda request: self.commits.of_slot(request, caches, slot, end))

    def of_solo(self, rid: int, caches: list[Any], end: int) -> list[mx.array]:
        """The same of a row that decodes on its own caches."""
        return self._timed(rid, lambda request: self.commits.of_solo(request, caches, end))

    def _timed(self, rid: int, cut: Callable[[Request], list[mx.array]]) -> list[mx.array]:
        request = self._requests.get(rid)
        if request is None:
            return []
        began = self._clock()
        arrays = cut(request)
        self.committing += self._clock() - began
        return arrays

    def settle(self) -> None:
        """Put into the store what has been computed."""
        if len(self.commits):
            began = self._clock()
            self.commits.settle()
            self.committing += self._clock() - began

    def begin(self, request: Request, *, patient: bool = True) -> bool:
        """A row is admitted: look for its prefix. True when it has to wait for it.

        `patient` rows wait for blocks that others compute.
        """
        self.settle()
        self._leave(request.rid)
        length = len(request.ids) + len(request.generated)
        if length < BLOCK:
            self.store.count(hit_tokens=0, missed_tokens=length)
            return False
        found = self._find(request)
        awaited = self._awaited(request, found) if patient else []
        if awaited:
            self._waiting[request.rid] = _Waiter(request, awaited, self.claims.changes, self._clock())
            for key in awaited:
                if (claimant := self.claims.claimant(key)) is not None:
                    self._lifts[claimant] = min(self._lifts.get(claimant, request.priority), request.priority)
            return True
        blocks = (length - 1) // BLOCK
        self._count(request, found)
        keys = request.keys(blocks)
        loaded = found.on_ssd()
        claim = self.claims.claim if patient else self.claims.take_over
        computed = keys[len(found.keys) :] if self._layout.has_blocks else []
        ends = self.commits.snapshot_ends(length)
        snapshots = [snapshot_key(keys[end // BLOCK - 1]) for end in ends if end // BLOCK > len(found.keys)]
        claim(request.rid, [*loaded, *computed, *snapshots])
        if not found.keys:
            return False
        if request.pin:
            self.store.pin([*found.keys, snapshot_key(found.keys[-1])])
        restoring = Restoring(
            self._layout,
            self.store,
            found.keys,
            found.tiers,
            found.snapshot,
            self._model.new_caches(),
            length,
        )
        self._restoring[request.rid] = request, restoring
        return True

    def waited_for(self) -> list[tuple[int, int]]:
        """Rows that others have begun to wait for, and the first priority among those; each is told once."""
        lifts, self._lifts = self._lifts, {}
        return list(lifts.items())

    def release(self, rids: Iterable[int]) -> None:
        """These rows are gone, parked or done with their prompts; unknown ones are normal."""
        for rid in rids:
            self._leave(rid)
            self._tries.pop(rid, None)

    def _leave(self, rid: int) -> None:
        self.claims.drop(rid)
        self._waiting.pop(rid, None)
        self._loading_since.pop(rid, None)
        _, restoring = self._restoring.pop(rid, (None, None))
        if restoring is not None:
            restoring.release()
            if not restoring.idle:
                self._orphans.append(restoring)  # its arrays are still being written to

    def clear(self) -> None:
        """All rows are gone."""
        self.release([*self._restoring, *self._waiting])
        self._lifts.clear()
        self.claims.clear()
        self.commits.clear()

    def advance(self, seconds: float) -> Iterator[list[Ready]]:
        """Do `seconds` of restoring, and see who need not wait any more. Yields after each dispatch, which has
        waited for the step in flight, and at the end if some row is ready."""
        self.store.poll()
        self._orphans = [restoring for restoring in self._orphans if not restoring.idle]
        ready = self._recheck()
        budget = max(int(self._copy_speed * seconds), 1)
        for rid, (request, restoring) in list(self._restoring.items()):
            if rid not in self._restoring:
                continue  # it left while another was restored
            restoring.poll()
            while budget > 0 and restoring.phase in (Phase.BUILDING, Phase.KEEPING):
                arrays = self._arrays(request, restoring, budget)
                self._lane.dispatch(arrays)
                began = self._lane.began
                yield []
                if rid not in self._restoring:
                    break
                self._lane.wait()
                count = sum(array.nbytes for array in arrays)
                budget -= max(count, 1)
                took = self._clock() - began
                self.restoring += took
                weight = 0.3 * min(1.0, count / FULL_WEIGHT)  # in few bytes fixed costs hide the speed
                self._copy_speed += weight * (count / max(took, 1e-6) - self._copy_speed)
                if restoring.phase is Phase.BUILDING:
                    restoring.built()
                self.settle()
            if restoring.phase is Phase.READY and rid in self._restoring:
                del self._restoring[rid]
                self._loading_since.pop(rid, None)
                for key in (*restoring.keys, snapshot_key(restoring.keys[-1])):
                    self.claims.settle(key)
                caches, tokens = restoring.finish()
                ready.append(Ready(rid, caches, tokens))
            elif restoring.phase is Phase.FAILED:
                self._tries[rid] = self._tries.get(rid, 0) + 1
                if not self.begin(request):
                    ready.append(Ready(rid, None, 0))
            elif restoring.phase is Phase.LOADING and self._overdue(rid, restoring.tokens):
                log.info("a row computes a prefix itself that the SSD was slow with", rid=rid)
                self._tries[rid] = LOAD_TRIES
                if not self.begin(request):
                    ready.append(Ready(rid, None, 0))
        if ready:
            yield ready

    def _overdue(self, rid: int, tokens: int) -> bool:
        """Whether a load has taken as long as computing so many tokens, and longer than any should."""
        since = self._loading_since.setdefault(rid, self._clock())
        return self._clock() - since > max(PATIENCE_S, tokens / max(self._speed(), 1e-3))

    def _arrays(self, request: Request, restoring: Restoring, budget: int) -> list[mx.array]:
        """The next piece of restoring a row."""
        if restoring.phase is Phase.BUILDING:
            return restoring.build(budget)
        return restoring.keep(
            budget, lambda caches, start, end: self.commits.of_row(request, caches, start, end, again=True)
        )

    def _find(self, request: Request) -> Found:
        """The longest prefix that the store has and that a row can begin from."""
        length = len(request.ids) + len(request.generated)
        keys = request.keys((length if self._layout.trims else length - 1) // BLOCK)
        ssd = self._tries.get(request.rid, 0) < LOAD_TRIES
        ssd = ssd and self._worth_loading()
        tiers: list[Tier] = []
        for key in keys:
            tier = self.store.where(key)
            if tier is None or (tier is Tier.SSD and not ssd):
                break
            tiers.append(tier)
        if not self._layout.has_snapshots:
            return Found(keys[: len(tiers)], tiers, None)
        for blocks in range(len(tiers), 0, -1):
            tier = self.store.where(snapshot_key(keys[blocks - 1]))
            if tier is not None and (ssd or tier is Tier.MEMORY):
                return Found(keys[:blocks], tiers[:blocks], tier)
        return Found([], [], None)

    def _worth_loading(self) -> bool:
        speed = self.store.stats().ssd.read_bytes_per_second
        if worth_loading(self._layout.block.nbytes, speed, self._speed()):
            return True
        now = self._clock()
        again = now - self._slow_disk_tried >= SLOW_DISK_REST_S
        if again:
            self._slow_disk_tried = now
        return again

    def _awaited(self, request: Request, found: Found) -> list[bytes]:
        """What others are about to bring, load from the SSD or compute, and this row would begin from."""
        length = len(request.ids) + len(request.generated)
        keys = request.keys((length - 1) // BLOCK)
        awaited = [key for key in found.on_ssd() if self.claims.coming(key, request.rid)]
        reach = len(found.keys)
        while reach < len(keys) and self.claims.coming(keys[reach], request.rid):
            awaited.append(keys[reach])
            reach += 1
        if not self._layout.has_snapshots:
            return awaited
        for blocks in range(len(keys), len(found.keys), -1):
            snapshot = snapshot_key(keys[blocks - 1])
            if self.claims.coming(snapshot, request.rid):
                return [snapshot]
        return [key for key in found.on_ssd() if key in awaited]

    def _recheck(self) -> list[Ready]:
        """Let waiting rows begin whose blocks have come, or won't."""
        ready: list[Ready] = []
        now = self._clock()
        patience = max(PATIENCE_S, PATIENCE_BLOCKS * BLOCK / max(self._speed(), 1e-3))
        taken: set[bytes] = set()
        for rid, waiter in list(self._waiting.items()):
            late = now - waiter.since > patience
            if waiter.changes == self.claims.changes and not late:
                continue
            waiter.changes = self.claims.changes
            left = [key for key in waiter.awaited if self.claims.coming(key, rid)]
            if len(left) < len(waiter.awaited):
                waiter.since = now  # it goes on
                waiter.awaited = left
            elif late and not taken.isdisjoint(left):
                waiter.since = now  # one that waited longer computes it from now on
            elif late:
                taken.update(left)
                log.info("a row computes a prefix itself that another was slow with", rid=rid)
                del self._waiting[rid]
                if not self.begin(waiter.request, patient=False):
                    ready.append(Ready(rid, None, 0))
                continue
            if not left:
                del self._waiting[rid]
                if not self.begin(waiter.request):
                    ready.append(Ready(rid, None, 0))
        return ready

    def _count(self, request: Request, found: Found) -> None:
        length = len(request.ids) + len(request.generated)
        ssd = BLOCK * sum(tier is Tier.SSD for tier in found.tiers)
        hit = min(BLOCK * len(found.keys), length - 1)
        self.store.count(hit_tokens=max(hit - ssd, 0), missed_tokens=length - hit, ssd_tokens=ssd)


def worth_loading(nbytes: int, read_speed: float, prefill_speed: float) -> bool:
    """Whether reading a block of `nbytes` takes less time than computing it; a disk not yet measured is tried."""
    return read_speed <= 0 or nbytes / read_speed < BLOCK / max(prefill_speed, 1e-3)
