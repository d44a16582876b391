"""`Traces`: what the engine's thread did for requests that asked for a trace, from their arrival to their first token.

Pure; used by `actors.engine.actor` on the engine's one thread. Costs nothing while nobody asks.
"""

from collections.abc import Iterable

from protocol.messages import EngineStats, EngineTrace


class Traces:
    """Traced rows whose first token has not been sent."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[float, EngineStats]] = {}

    def begin(self, rid: int, now: float, stats: EngineStats) -> None:
        """The row arrived at `now`; `stats` are the engine's sums then."""
        self._rows[rid] = now, stats

    def take(self, rids: Iterable[int], now: float, stats: EngineStats) -> list[EngineTrace]:
        """The traces of those of `rids` whose first token is about to be sent."""
        if not self._rows:
            return []
        found = [(rid, *self._rows.pop(rid)) for rid in rids if rid in self._rows]
        return [
            EngineTrace(
                rid,
                queued,
                now,
                stats.in_model - before.in_model,
                stats.in_python - before.in_python,
                stats.in_sockets - before.in_sockets,
            )
            for rid, queued, before in found
        ]

    def drop(self, rids: Iterable[int]) -> None:
        """These rows are gone; those without a trace are normal."""
        for rid in rids:
            self._rows.pop(rid, None)

    def clear(self) -> None:
        """All rows are gone."""
        self._rows.clear()
