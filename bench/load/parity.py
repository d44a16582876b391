"""Whether every stream of a run got what it gets alone: each recorded request is asked again, one at a time.

The solo runs share no prefix with the run before (another `cache_salt`), so a block that went wrong under load can't be
its own witness. A stream that left, or was cut short, is compared as far as it came.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from bench.load.driver import Load
from bench.load.manners import READS
from bench.load.outcome import Outcome
from bench.load.plan import Ask, Plan, max_tokens

SALT = "solo"


class Difference(msgspec.Struct, frozen=True):
    """Where a stream first differs from its solo run. `place` counts tokens (over ZeroMQ) or characters (over HTTP);
    `wanted` and `got` are what stands there. `ids` is prompt and answer up to there, empty over HTTP."""

    index: int
    place: int
    wanted: Any
    got: Any
    ids: list[int]
    prompt_tokens: int


def solo_plan(plan: Plan) -> Plan:
    """The plan for a load client that runs solo what the plan has run."""
    return msgspec.structs.replace(plan, cache_salt=SALT, aborts=0.0, vanish=0.0, slow=0.0, record=True, turns=1)


async def compare_solo(
    load: Load, plan: Plan, outcomes: Iterable[Outcome], told: Callable[[int], None] = lambda _: None
) -> tuple[int, list[Difference]]:
    """Run every recorded request alone on `load`, which runs `solo_plan(plan)`; how many there were, and what differs.

    `told` hears of each that is done. Raises RuntimeError when a solo run fails itself.
    """
    compared, found = 0, []
    for outcome in outcomes:
        if outcome.error or not (outcome.ids or outcome.text):
            continue
        tokens = len(outcome.ids) or max_tokens(plan, outcome.index)
        alone = Outcome(outcome.index)
        await load.run(Ask(outcome.index, outcome.prompt, tokens, READS, 0), alone)
        if alone.error:
            raise RuntimeError(f"request {outcome.index} failed alone: {alone.error}")
        compared += 1
        told(compared)
        difference = first_difference(outcome, alone)
        if difference is not None:
            found.append(difference)
    return compared, found


def first_difference(outcome: Outcome, alone: Outcome) -> Difference | None:
    """Where a stream differs from its solo run, None when it is the beginning of it, and all of it if it completed."""
    got: Sequence[Any] = outcome.ids or outcome.text
    wanted: Sequence[Any] = alone.ids or alone.text
    whole = wanted if not outcome.left else wanted[: len(got)]
    if got == whole:
        return None
    place = next((i for i, (a, b) in enumerate(zip(whole, got, strict=False)) if a != b), min(len(whole), len(got)))
    alone_has, has = (part[place] if place < len(part) else None for part in (wanted, got))
    ids = [*outcome.prompt, *outcome.ids[:place]] if outcome.ids else []
    return Difference(outcome.index, place, alone_has, has, ids, len(outcome.prompt))
