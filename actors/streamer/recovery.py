"""`Recovery`: which streams the engine is given, and when, so that one bad request can't take the others along.

Pure: no socket, no clock. Owned by the streamer's one thread, which tells it what happens and submits what is `due`.

While nothing has gone wrong every stream is due at once. After the death of an engine, streams that were decoding go
back at once; suspects follow a few at a time, and new streams when no suspect is left. Suspects are the streams that
the dead engine was prefilling for the first time, or was about to; a stream that was being resumed is one only if that
engine completed no step at all. Its trail (`actors.trail`) tells which it was at; without one all are suspects that it
may have admitted. A death is charged to the suspect on trial, or to the only suspect there was; a stream charged twice
is poison, and is failed alone.

So that many trials take little more than the suspects' prompts, a turn of the engine tries a group of about the root
of their number, at most `TOGETHER`; the next group is on its way already while the one before is admitted, and that
one's prompts are computed beside the first step of the one before it. A death that its trail can't put down to one of
those on trial is charged to none; those that it may be put down to are tried again later, each strictly alone.

A stream may also kill while it decodes, and always at the same place. So one that goes back is near that place until
it has got `PASSED` tokens, and nobody is tried meanwhile. Streams that were near at `REPEATS` deaths in a row are
suspects, too: they are tried in groups of about the root of their number, each until it has passed; those of a group
that dies are tried alone.
"""

from collections.abc import Iterable, Set
from math import isqrt

POISON = 2  # deaths charged to a stream until it is given up
PASSED = 4  # tokens after which a stream that went back is beyond the step that the engine died in: one was in flight,
# and one or two had not reached us
ON_TRIAL = 4  # groups at once: two on their way, one whose prompts are computed, one in its first step
TOGETHER = 4  # suspects of a group at most: their prompts are to fit a turn of the engine
REPEATS = 3  # deaths in a row near the same place that make a decoding stream a suspect


class _Entry:
    __slots__ = ("admitted", "alone", "charges", "fresh", "group", "priority", "repeats", "sent", "suspect", "tried")

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self.fresh = True  # no engine has brought a token of it
        self.tried = False  # an engine had it
        self.sent = False  # the present engine has it
        self.admitted = False
        self.suspect = False
        self.alone = False  # to be tried with no other suspect beside it
        self.group = 0  # that it is or was tried in
        self.charges = 0
        self.repeats = 0  # deaths in a row that it was near

    @property
    def decoder(self) -> bool:
        """Whether it is to get so far that it is near no more before it is cleared."""
        return self.repeats >= REPEATS

    def clear(self) -> None:
        """It is no suspect any more."""
        self.suspect = self.alone = False
        self.charges = 0


class Recovery:
    """Streams that are in the engine or wait for one, by rid, oldest first. `seats` rows run at once at most."""

    def __init__(self, seats: int) -> None:
        self._seats = seats
        self._entries: dict[int, _Entry] = {}
        self._unsent: dict[int, None] = {}
        self._silent: dict[int, None] = {}  # sent, and no token of them yet
        self._near: dict[int, int] = {}  # sent again: tokens left until they have passed
        self._suspects: dict[int, None] = {}  # of those unsent
        self._trial: dict[int, None] = {}
        self._up = False
        self._stepped = False
        self._groups = 0  # tried so far
        self._together = 1  # suspects that are tried in one group
        self._decoders_together = 1
        self._turned = False  # the engine has completed a turn since a suspect was submitted

    def __contains__(self, rid: int) -> bool:
        return rid in self._entries

    @property
    def stepped(self) -> bool:
        """Whether the present engine has completed a decode step."""
        return self._stepped

    @property
    def suspicious(self) -> bool:
        """Whether a death now could be put down to a stream."""
        return bool(self._trial) or any(self._entries[rid].fresh for rid in self._silent)

    @property
    def suspects(self) -> int:
        """How many streams wait to be tried."""
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
        self._near.pop(rid, None)
        for group in (self._unsent, self._silent, self._suspects, self._trial):
            group.pop(rid, None)

    def engine_up(self) -> None:
        """A new engine takes requests."""
        self._up, self._stepped = True, False

    def admitted(self, rids: Iterable[int]) -> None:
        """The engine has completed a turn, and begun these prefills in it."""
        self._turned = True
        for rid in rids:
            entry = self._entries.get(rid)
            if entry is not None:
                entry.admitted = True

    def decoded(self, rids: Iterable[int]) -> None:
        """The engine has brought a token for each of these."""
        if not self._silent and not self._near and self._stepped:
            return
        for rid in rids:
            self._stepped = True
            silent = rid in self._silent
            if not silent and rid not in self._near:
                continue
            entry = self._entries[rid]
            if silent:
                del self._silent[rid]
                entry.fresh = False
                if not entry.decoder:
                    entry.clear()
                    self._trial.pop(rid, None)
            if rid in self._near:
                self._near[rid] -= 1
                if not self._near[rid]:
                    del self._near[rid]
                    entry.clear()
                    entry.repeats = 0
                    self._trial.pop(rid, None)

    def due(self) -> list[int]:
        """Streams to submit now; they count as submitted."""
        if not self._up or not self._unsent:
            return []
        rids = [rid for rid in self._unsent if self._may_go_back(self._entries[rid])]
        if not rids and self._suspects:
            rids = self._next_trial()
            self._turned &= not rids
            self._trial.update(dict.fromkeys(rids))
            self._groups += 1
            for rid in rids:
                self._entries[rid].group = self._groups
        elif not rids and not self._trial:
            rids = list(self._unsent)
        for rid in rids:
            entry = self._entries[rid]
            if not entry.fresh:
                self._near[rid] = PASSED
            entry.sent = entry.tried = True
            entry.admitted = False
            del self._unsent[rid]
            self._suspects.pop(rid, None)
            self._silent[rid] = None
        return rids

    def _next_trial(self) -> list[int]:
        """The suspects to be tried next; none while that has to wait."""
        first = next(iter(self._suspects))
        suspect = self._entries[first]
        if self._trial:
            others = [self._entries[rid] for rid in self._trial]
            groups = {entry.group for entry in others}
            waiting = {entry.group for entry in others if not entry.admitted}
            follows = not waiting or (len(waiting) == 1 and self._turned)
            alone = any(entry.alone or entry.decoder for entry in (suspect, *others))
            if len(groups) >= ON_TRIAL or alone or not follows:
                return []
        else:
            if not self._stepped and self._silent:
                return []
            if any(rid not in self._silent or self._entries[rid].admitted for rid in self._near):
                return []
        if suspect.alone:
            return [first]
        kind = suspect.decoder
        entries = [(rid, self._entries[rid]) for rid in self._suspects]
        alike = [rid for rid, entry in entries if entry.decoder == kind and not entry.alone]
        return alike[: self._decoders_together if kind else self._together]

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
        self._near.clear()
        again = [rid for rid, entry in self._entries.items() if entry.sent]
        for rid in again:
            self._entries[rid].sent = False
        self._silent.clear()
        self._unsent = dict.fromkeys([*again, *self._unsent])
        for rid in poison:
            self.remove(rid)
        suspects = [rid for rid in self._unsent if self._entries[rid].suspect]
        # Those that have been charged go last: others are more likely to be innocent. Decoding ones go first, as
        # nobody else can be judged beside them.
        suspects.sort(key=self._order)
        self._suspects = dict.fromkeys(suspects)
        decoders = sum(self._entries[rid].decoder for rid in suspects)
        self._decoders_together = isqrt(decoders)
        self._together = min(isqrt(len(suspects) - decoders), TOGETHER)
        return poison

    def _order(self, rid: int) -> tuple[int, bool, bool]:
        entry = self._entries[rid]
        return entry.charges, entry.alone, not entry.decoder

    def _blame(self, trail: Set[int] | None) -> list[int]:
        """Mark suspects, and charge the one that can be charged. Returns the poison."""
        others = [rid for rid in self._near if rid not in self._trial and self._was_at(rid, trail)]
        for rid in others:
            entry = self._entries[rid]
            entry.repeats += 1
            entry.suspect |= entry.decoder
        for rid in self._trial:
            self._entries[rid].repeats += rid in self._near
        if self._trial:
            known = [rid for rid in self._trial if trail is not None and self._was_at(rid, trail)]
            tried = known or list(self._trial)
            if len(tried) == 1 and not others:
                return self._charge(tried[0])
            for rid in tried:
                self._entries[rid].alone = True
            return []
        suspects = self._silent_suspects(trail)
        for rid in suspects:
            self._entries[rid].suspect = True
        suspects += [rid for rid in others if self._entries[rid].suspect and rid not in suspects]
        return self._charge(suspects[0]) if len(suspects) == 1 and others in ([], suspects) else []

    def _was_at(self, rid: int, trail: Set[int] | None) -> bool:
        """Whether the dead engine was at a stream that had gone back to it."""
        return rid not in self._silent or (self._entries[rid].admitted if trail is None else rid in trail)

    def _silent_suspects(self, trail: Set[int] | None) -> list[int]:
        """Streams that the dead engine had brought no token of, and that may be to blame."""
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
        return suspects

    def _charge(self, rid: int) -> list[int]:
        entry = self._entries[rid]
        entry.suspect = entry.alone = True
        entry.charges += 1
        return [rid] if entry.charges >= POISON else []
