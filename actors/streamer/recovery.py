"""`Recovery`: which streams the engine is given, and when, so that one bad request can't take the others along.

Pure: no socket, no clock. Owned by the streamer's one thread, which tells it what happens and submits what is `due`.

While nothing has gone wrong every stream is due at once. After the death of an engine, streams that were decoding go
back at once; suspects follow one at a time, each when the one before has completed a decode step, and new streams when
no suspect is left. Suspects are the streams that the dead engine was prefilling for the first time, or was about to; a
stream that was being resumed is one only if that engine completed no step at all. Its trail (`actors.trail`) tells
which it was at; without one all are suspects that it may have admitted. A death is charged to the suspect
on trial, or to the only suspect there was; a stream charged twice is poison, and is failed alone.

To halve the time of many trials, the next suspect follows already when the one before has been admitted: its prompt is
then computed beside the other's first step. A death with two on trial is charged to neither; both are tried again
later, each strictly alone.
"""

from collections.abc import Iterable, Set

POISON = 2  # deaths charged to a stream until it is given up


class _Entry:
    __slots__ = ("admitted", "alone", "charges", "fresh", "priority", "sent", "suspect", "tried")

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self.fresh = True  # no engine has brought a token of it
        self.tried = False  # an engine had it
        self.sent = False  # the present engine has it
        self.admitted = False
        self.suspect = False
        self.alone = False  # to be tried with no other suspect beside it
        self.charges = 0


class Recovery:
    """Streams that are in the engine or wait for one, by rid, oldest first. `seats` rows run at once at most."""

    def __init__(self, seats: int) -> None:
        self._seats = seats
        self._entries: dict[int, _Entry] = {}
        self._unsent: dict[int, None] = {}
        self._silent: dict[int, None] = {}  # sent, and no token of them yet
        self._suspects: dict[int, None] = {}  # of those unsent
        self._trial: dict[int, None] = {}
        self._up = False
        self._stepped = False

    def __contains__(self, rid: int) -> bool:
        return rid in self._entries

    @property
    def stepped(self) -> bool:
        """Whether the present engine has completed a decode step."""
        return self._stepped

    @property
    def suspicious(self) -> bool:
        """Whether a death now could be put down to a stream."""
        return any(self._entries[rid].fresh for rid in self._silent)

    @property
    def suspects(self) -> int:
        """How many streams wait to be tried one at a time."""
        return len(self._suspects)

    # Events.

    def add(self, rid: int, priority: int = 0) -> None:
        """A new stream wants an engine."""
        self._entries[rid] = _Entry(priority)
        self._unsent[rid] = None

    def remove(self, rid: int) -> None:
        """A stream has ended; one that isn't here is normal."""
        if self._entries.pop(rid, None) is None:
            return
        for group in (self._unsent, self._silent, self._suspects, self._trial):
            group.pop(rid, None)

    def engine_up(self) -> None:
        """A new engine takes requests."""
        self._up, self._stepped = True, False

    def admitted(self, rids: Iterable[int]) -> None:
        """The engine has begun these prefills."""
        for rid in rids:
            entry = self._entries.get(rid)
            if entry is not None:
                entry.admitted = True

    def decoded(self, rids: Iterable[int]) -> None:
        """The engine has brought a token for each of these."""
        if not self._silent and self._stepped:
            return
        for rid in rids:
            self._stepped = True
            if rid not in self._silent:
                continue
            del self._silent[rid]
            entry = self._entries[rid]
            entry.fresh = entry.suspect = entry.alone = False
            entry.charges = 0
            self._trial.pop(rid, None)

    def due(self) -> list[int]:
        """Streams to submit now; they count as submitted."""
        if not self._up or not self._unsent:
            return []
        rids = [rid for rid in self._unsent if self._may_go_back(self._entries[rid])]
        if not rids and self._suspects:
            suspect = next(iter(self._suspects))
            if self._may_be_tried(self._entries[suspect]):
                self._trial[suspect] = None
                rids = [suspect]
        elif not rids and not self._trial:
            rids = list(self._unsent)
        for rid in rids:
            entry = self._entries[rid]
            entry.sent = entry.tried = True
            entry.admitted = False
            del self._unsent[rid]
            self._suspects.pop(rid, None)
            self._silent[rid] = None
        return rids

    def _may_be_tried(self, suspect: _Entry) -> bool:
        if not self._trial:
            return self._stepped or not self._silent
        (before,) = [self._entries[rid] for rid in self._trial][-1:]
        return len(self._trial) == 1 and before.admitted and not before.alone and not suspect.alone

    @staticmethod
    def _may_go_back(entry: _Entry) -> bool:
        return entry.tried and not entry.suspect

    def engine_down(self, planned: bool = False, trail: Set[int] | None = None) -> list[int]:
        """The engine is gone; `planned`: it was asked to go. `trail` are the rows it was at, None when not known.

        Returns the poison, which is forgotten here.
        """
        poison: list[int] = []
        if not planned and self._up:
            poison = self._blame(trail)
        self._up = self._stepped = False
        self._trial.clear()
        again = [rid for rid, entry in self._entries.items() if entry.sent]
        for rid in again:
            self._entries[rid].sent = False
        self._silent.clear()
        self._unsent = dict.fromkeys([*again, *self._unsent])
        for rid in poison:
            self.remove(rid)
        suspects = [rid for rid in self._unsent if self._entries[rid].suspect]
        # Those that have been charged go last: others are more likely to be innocent.
        suspects.sort(key=lambda rid: (self._entries[rid].charges, self._entries[rid].alone))
        self._suspects = dict.fromkeys(suspects)
        return poison

    def _blame(self, trail: Set[int] | None) -> list[int]:
        """Mark suspects, and charge the one that can be charged. Returns the poison."""
        if len(self._trial) == 1:
            return self._charge(next(iter(self._trial)))
        if self._trial:
            for rid in self._trial:
                self._entries[rid].alone = True
            return []
        suspects: list[int] = []
        unknown: list[int] = []
        for rid in self._silent:
            entry = self._entries[rid]
            if not entry.fresh:
                if not self._stepped and (trail is None or rid in trail):
                    suspects.append(rid)
            elif trail is not None:
                if rid in trail:
                    suspects.append(rid)
                else:
                    entry.tried = False  # it waited for its turn: as good as new
            elif entry.admitted:
                suspects.append(rid)
            else:
                unknown.append(rid)
        # The engine admits by priority and age, and reports it only after the turn that it may have died in.
        unknown.sort(key=lambda rid: self._entries[rid].priority)
        taken = sum(entry.sent for entry in self._entries.values()) - len(unknown)
        free = max(self._seats - taken, 0)
        if not suspects and not free:
            free = len(unknown)  # somebody is to blame: seats are an estimate, and a row can kill before it has one
        suspects += unknown[:free]
        for rid in unknown[free:]:
            self._entries[rid].tried = False  # it never ran: as good as new
        for rid in suspects:
            self._entries[rid].suspect = True
        return self._charge(suspects[0]) if len(suspects) == 1 else []

    def _charge(self, rid: int) -> list[int]:
        entry = self._entries[rid]
        entry.suspect = entry.alone = True
        entry.charges += 1
        return [rid] if entry.charges >= POISON else []
