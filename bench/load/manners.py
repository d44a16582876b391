"""How a client of a load run behaves: it reads to the end, reads slowly, aborts, or vanishes. Pure."""

import random

READS, SLOW, ABORTS, VANISHES = "reads", "slow", "aborts", "vanishes"
LEAVING = (ABORTS, VANISHES)
SLOW_PAUSE = 0.05  # seconds that a slow reader takes for each piece


def manner(key: object, *, aborts: float, vanish: float, slow: float) -> str:
    """The manner of one request, the same for the same key; the arguments are shares of 1."""
    place = random.Random(f"manner {key}").random()
    for name, share in ((ABORTS, aborts), (VANISHES, vanish), (SLOW, slow)):
        if place < share:
            return name
        place -= share
    return READS


def leaves_after(key: object, tokens: int) -> int:
    """After how many arrivals of tokens a client that leaves does so: at least one, and before the last."""
    return random.Random(f"leaves {key}").randint(1, max(1, tokens - 1))
