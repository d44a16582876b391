"""Which of several models are loaded, and which give way: decisions without processes, sockets or a clock of its own.

The house (`actors.house`) tells what happens (`want`, `started`, `ready`, `used`, `ended` …) and does what `decide`
says.

    unloaded --wanted--> waiting --room--> loading --ready--> ready --gives way, idle, ordered--> unloading --> unloaded
                                              +--died--> failed --after back-off--> unloaded

A model claims bytes from `loading` until its processes are gone, and all claims together stay within the budget. Wants
are served first come, first served: while the first one waits for room, a later one may only take what that leaves.
Those that give way are unpinned, idle ones before busy ones, the least recently used first. One that was just loaded
stays for a while, so that the requests that waited for it are served before it can be asked to leave.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from protocol.messages import ModelState

WANT_TIME = 3.0  # seconds a want lasts unless it is repeated
LEAST_STAY = 2.0  # seconds a model that was just loaded stays
LONGEST_STAY = 20.0  # seconds a busy one stays at most when others want its place; else as long as it took to load
STEADY = 10.0  # seconds of service after which a death is forgotten
FIRST_DELAY = 2.0  # seconds until a model that failed may be loaded again; doubled each time
LONGEST_DELAY = 60.0
START_TIME = 2.0  # seconds that processes take to start, before they read weights
FIRST_SPEED = 1e9  # bytes of weights read per second, before a load has shown it
LIKE = 4  # a model's load tells of others that have up to so many times its weights


class Model(NamedTuple):
    """What is fixed about a model. `claim` and `size` (of its weights) are in bytes; `idle_ttl` in seconds, 0: none.
    `broken` says why it can never be loaded."""

    name: str
    claim: int
    aliases: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    pinned: bool = False
    idle_ttl: float = 0.0
    task: str = "generate"
    size: int = 0
    broken: str = ""


@dataclass
class Place:
    """A model and how it stands. Times are on the caller's clock. `turn` numbers the oldest open want (None: nobody
    wants it), and `wanted_until` is when it ends without another. `ttl` is `idle_ttl`, or what a request set it to;
    below 0: never.

    `engine` is the epoch of its engine while that is ready, else 0. `leave`: it was ordered to leave. `failures` count
    in a row; `takes` is how long loading took the last time.
    """

    model: Model
    state: str = "unloaded"
    pinned: bool = False
    ttl: float = 0.0
    turn: int | None = None
    wanted_until: float = 0.0
    last_used: float = 0.0
    loading_at: float = 0.0
    ready_at: float = 0.0
    streams: int = 0
    ended: int = 0
    memory: int = 0
    leave: bool = False
    message: str = ""
    failures: int = 0
    retry_at: float = 0.0
    takes: float = 0.0
    loads: int = 0
    endpoint: str = ""
    engine: int = 0

    @property
    def claims(self) -> int:
        """Bytes of the budget that it holds."""
        return self.model.claim if self.state in ("loading", "ready", "unloading") else 0


class Load(NamedTuple):
    """Start the model's processes, and call `started`."""

    name: str


class Unload(NamedTuple):
    """Have the model finish what runs, and leave."""

    name: str


Action = Load | Unload


class Refused(Exception):
    """An order can't be carried out; the text is for whoever gave it."""


@dataclass
class Residency:
    """The places of all models, in the order they were named in."""

    models: list[Model]
    budget: int
    places: dict[str, Place] = field(init=False)

    def __post_init__(self) -> None:
        """Raises ValueError when two models answer to one name, or the pinned ones don't fit together."""
        self.places = {m.name: Place(m, pinned=m.pinned, ttl=m.idle_ttl or -1.0) for m in self.models}
        self._names: dict[str, str] = {}
        self._turns = 0
        for model in self.models:
            for name in (model.name, *model.aliases, *model.adapters):
                if self._names.setdefault(name, model.name) != model.name or name == "":
                    raise ValueError(f"the name {name!r} is given twice, to {self._names[name]} and {model.name}")
        if len(self.places) != len(self.models):
            raise ValueError("two models have the same name")
        pinned = [place.model for place in self.places.values() if place.pinned]
        if sum(model.claim for model in pinned) > self.budget:
            raise ValueError(f"the pinned models don't fit into {_gb(self.budget)} together: {_claims(pinned)}")

    def find(self, name: str) -> Place | None:
        """The place of the model that `name` (a name, an alias, an adapter; "" is the first model) stands for."""
        if not name:
            return self.places[self.models[0].name]
        known = self._names.get(name)
        return self.places[known] if known is not None else None

    @property
    def claimed(self) -> int:
        """Bytes of the budget that are taken."""
        return sum(place.claims for place in self.places.values())

    # Events.

    def want(self, place: Place, now: float, keep_alive: float | None = None) -> None:
        """Somebody has requests for the model, or wants it loaded. Holds for `WANT_TIME`."""
        if keep_alive is not None:
            place.ttl = keep_alive
        place.last_used = now
        if place.state == "ready" or (place.state == "failed" and now < place.retry_at):
            return  # it is there, or whoever asks is told why it can't be
        if place.turn is None or now > place.wanted_until:
            self._turns += 1
            place.turn = self._turns
        place.wanted_until = now + WANT_TIME

    def pin(self, place: Place, now: float) -> None:
        """Never have it give way; it is loaded when it isn't. Raises Refused when the pinned ones would not fit."""
        others = [other.model for other in self.places.values() if other.pinned and other is not place]
        if place.model.claim + sum(model.claim for model in others) > self.budget:
            raise Refused(
                f"{place.model.name} can't be pinned: it claims {_gb(place.model.claim)}, and of the budget of "
                f"{_gb(self.budget)} the pinned models hold {_claims(others) or 'nothing'}"
            )
        place.pinned = True
        self.want(place, now)

    def unpin(self, place: Place, now: float) -> None:
        """Have it give way like any other from now on."""
        place.pinned = False
        place.last_used = now

    def unload(self, place: Place) -> None:
        """Have it leave, and nobody wait for it any more. Raises Refused when it is pinned."""
        if place.pinned:
            raise Refused(f"{place.model.name} is pinned; unpin it first")
        place.turn = None
        if place.state == "waiting":
            place.state = "unloaded"
        elif place.state in ("loading", "ready"):
            place.leave = True

    def started(self, place: Place, now: float) -> None:
        """Its processes were started."""
        place.state, place.loading_at, place.message, place.endpoint, place.leave = "loading", now, "", "", False
        place.streams = place.ended = place.memory = 0

    def ready(self, place: Place, now: float) -> None:
        """It can serve."""
        if place.state == "loading":
            place.state, place.ready_at, place.last_used = "ready", now, now
            place.takes, place.turn = now - place.loading_at, None
            place.loads += 1

    def used(self, place: Place, streams: int, ended: int, memory: int, now: float) -> None:
        """How many streams are open, how many requests have ended in all, and how much memory its processes take."""
        if streams or place.streams or ended != place.ended:
            place.last_used = now
        place.streams, place.ended, place.memory = streams, ended, memory

    def ended(self, place: Place, message: str, now: float) -> None:
        """Its processes are gone. `message` says why when it was not asked to leave."""
        wanted, was_ready = place.state != "unloading", place.state in ("ready", "unloading")
        if was_ready and now - place.ready_at >= STEADY:
            place.failures = 0
        place.state, place.leave, place.endpoint = "unloaded", False, ""
        place.streams = place.ended = place.memory = 0
        if not wanted:
            place.ttl = place.model.idle_ttl or -1.0
            return
        place.message = message
        place.failures += 1
        delay = FIRST_DELAY * 2.0 ** (place.failures - (2 if was_ready else 1))
        if delay >= FIRST_DELAY:  # one death of a model that had served asks for no patience
            place.retry_at = now + min(LONGEST_DELAY, delay)
            place.state, place.turn = "failed", None

    def excuse(self, seconds: float) -> None:
        """The house itself stood still for so long (a laptop slept): no want has run out by that."""
        for place in self.places.values():
            place.wanted_until += seconds
            place.last_used += seconds

    # Decisions.

    def decide(self, now: float) -> list[Action]:
        """What is to be done now. Each action is told once, save `Load`, which is told until `started` is called."""
        actions: list[Action] = []
        for place in self.places.values():
            self._settle(place, now)
            if place.leave or self._idles(place, now):
                place.leave = False
                place.state = "unloading"
                actions.append(Unload(place.model.name))
        return actions + self._make_room(now)

    def _settle(self, place: Place, now: float) -> None:
        """Bring the state of a model that is not loaded up to date."""
        if place.state == "failed" and now >= place.retry_at:
            place.state = "unloaded"
        if place.pinned and place.state in ("unloaded", "waiting"):
            self.want(place, now)
        if place.turn is not None and now > place.wanted_until:
            place.turn = None
        if place.state in ("unloaded", "waiting"):
            place.state = "unloaded" if place.turn is None else "waiting"

    def _idles(self, place: Place, now: float) -> bool:
        if place.state != "ready" or place.pinned or place.ttl < 0 or place.streams:
            return False
        served = place.ended > 0 or now - place.ready_at >= LEAST_STAY
        return served and now - place.last_used >= place.ttl

    def _make_room(self, now: float) -> list[Action]:
        actions: list[Action] = []
        places = self.places.values()
        free = self.budget - self.claimed
        left = free + sum(place.claims for place in places if place.state == "unloading")  # once these are gone
        queue = [place for place in places if place.state == "waiting"]
        for place in sorted(queue, key=lambda place: place.turn or 0):
            claim = place.model.claim
            if reason := self._never_fits(place):
                place.state, place.message, place.turn = "failed", reason, None
                place.retry_at = now + FIRST_DELAY
                continue
            if claim > left:
                victims = self._victims(claim - left, now)
                if not victims:
                    break  # those behind it would only take what it waits for
                for victim in victims:
                    left += victim.claims
                    victim.state = "unloading"
                    actions.append(Unload(victim.model.name))
            left -= claim
            if claim <= free:
                free -= claim
                actions.append(Load(place.model.name))
        return actions

    def _never_fits(self, place: Place) -> str:
        """Why the model can't be loaded however long it waits; "" when it can."""
        if place.model.broken:
            return place.model.broken
        pinned = [other.model for other in self.places.values() if other.pinned and other is not place]
        if place.model.claim + sum(model.claim for model in pinned) <= self.budget:
            return ""
        beside = f" beside the pinned ones: {_claims(pinned)}" if pinned else ""
        return f"{place.model.name} claims {_gb(place.model.claim)} of {_gb(self.budget)}, and does not fit{beside}"

    def _victims(self, wanted: int, now: float) -> list[Place]:
        """Who gives way so that `wanted` bytes come free; nobody when that can't be had now."""
        ready = [place for place in self.places.values() if place.state == "ready" and not place.pinned]
        ready.sort(key=lambda place: (place.streams > 0, place.last_used, place.ready_at))
        settled = [place for place in ready if now - place.ready_at >= self._stay(place)]
        victims = _enough(settled, wanted)
        if any(victim.streams for victim in victims) and _enough([p for p in ready if not p.streams], wanted):
            return []  # idle ones will do in a moment
        return victims

    @staticmethod
    def _stay(place: Place) -> float:
        return LEAST_STAY if not place.streams else max(LEAST_STAY, min(place.takes, LONGEST_STAY))

    def _load_time(self, place: Place) -> float:
        """Seconds that loading a model takes: as long as the last time, or what its weights take at the speed that
        loads of others showed. Small ones show nothing of the disk."""
        if place.takes:
            return place.takes
        size = place.model.size
        shown = [other for other in self.places.values() if other.takes and other.model.size * LIKE >= size > 0]
        seconds = sum(max(0.1, other.takes - START_TIME) for other in shown)
        speed = sum(other.model.size for other in shown) / seconds if shown else FIRST_SPEED
        return START_TIME + size / speed

    # For others to see.

    def states(self, now: float) -> list[ModelState]:
        """All models as clients see them."""
        return [self.state(place, now) for place in self.places.values()]

    def state(self, place: Place, now: float) -> ModelState:
        """One model as clients see it."""
        model = place.model
        progress = retry_after = expires = 0.0
        if place.state == "ready":
            progress = 1.0
            if place.ttl >= 0 and not place.pinned:
                expires = max(0.1, place.ttl - (0.0 if place.streams else now - place.last_used))
        elif place.state == "loading":
            elapsed = now - place.loading_at
            takes = self._load_time(place)
            progress = min(0.99, elapsed / takes)
            retry_after = max(1.0, takes - elapsed)
        elif place.state == "failed":
            retry_after = max(0.1, place.retry_at - now)
        elif place.state in ("waiting", "unloading"):
            retry_after = max(LEAST_STAY, self._load_time(place))
        return ModelState(
            name=model.name,
            state=place.state,
            aliases=list(model.aliases),
            message=place.message,
            progress=round(progress, 3),
            claim=model.claim,
            memory=place.memory,
            pinned=place.pinned,
            idle_ttl=max(0.0, place.ttl),
            expires=round(expires, 1),
            retry_after=round(retry_after, 1),
            streams=place.streams,
            loads=place.loads,
            endpoint=place.endpoint if place.state == "ready" else "",
            task=model.task,
            adapters=list(model.adapters),
            size=model.size,
        )


def default_claim(size: int, budget: int) -> int:
    """Bytes that a model with weights of `size` bytes claims: room for these, and for the caches of its streams."""
    return min(budget, size * 11 // 10 + max(1 << 30, size // 2))


def _enough(places: list[Place], wanted: int) -> list[Place]:
    """The first of `places` that claim `wanted` bytes together, without those that are not needed; else none."""
    chosen: list[Place] = []
    for place in places:
        if sum(p.claims for p in chosen) >= wanted:
            break
        chosen.append(place)
    spare = sum(p.claims for p in chosen) - wanted
    if spare < 0:
        return []
    for place in reversed(chosen.copy()):  # the most recently used first
        if place.claims <= spare:
            chosen.remove(place)
            spare -= place.claims
    return chosen


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"


def _claims(models: list[Model]) -> str:
    return ", ".join(f"{model.name} {_gb(model.claim)}" for model in models)
