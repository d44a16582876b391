"""`Report`: what one check measured and whether it holds. Checks write to it; `verify.py` and tests read it."""

from collections.abc import Callable
from typing import Any


def _silent(_: str) -> None:
    return None


class Report:
    """`figures` by name, `claims` with whether each holds. `say` prints lines as they come."""

    def __init__(self, say: Callable[[str], None] = _silent) -> None:
        self.figures: dict[str, Any] = {}
        self.claims: list[tuple[str, bool]] = []
        self._say = say

    def measured(self, name: str, value: object) -> None:
        """Note a figure; `name` carries the unit, as in `seconds_to_half`."""
        self.figures[name] = value
        self._say(f"  {name.replace('_', ' ')}: {value}")

    def expect(self, holds: bool, claim: str, got: object = None) -> None:
        """Note whether a claim holds; `got` is shown when it does not."""
        text = claim if holds or got is None else f"{claim}; got {got!r}"
        self.claims.append((text, holds))
        self._say(f"  {'ok  ' if holds else 'FAIL'} {text}")

    @property
    def failures(self) -> list[str]:
        """Claims that don't hold; a check that claimed nothing has failed too."""
        if not self.claims:
            return ["the check claimed nothing"]
        return [text for text, holds in self.claims if not holds]
