"""Who computes which block: whatever rows do, a block that is waited for has a claimant, or the wait has an end."""

from hypothesis import given
from hypothesis import strategies as st

from actors.engine.claims import Claims

KEYS = [bytes([n]) for n in range(6)]


def test_the_first_claimant_has_it_and_others_wait() -> None:
    claims = Claims()
    claims.claim(1, KEYS[:3])
    claims.claim(2, KEYS)
    assert [claims.claimant(key) for key in KEYS] == [1, 1, 1, 2, 2, 2]
    assert claims.coming(KEYS[0], 2)
    assert not claims.coming(KEYS[0], 1)
    claims.launch(KEYS[0])
    claims.drop(1)
    assert claims.coming(KEYS[0], 2), "it was cut before its row left"
    assert not claims.coming(KEYS[1], 2)
    claims.settle(KEYS[0])
    assert not claims.coming(KEYS[0], 2)


def test_who_takes_over_computes_it() -> None:
    claims = Claims()
    claims.claim(1, KEYS)
    claims.take_over(2, KEYS[1:])
    assert [claims.claimant(key) for key in KEYS] == [1, 2, 2, 2, 2, 2]
    claims.drop(1)
    claims.drop(1)
    assert claims.claimant(KEYS[0]) is None


STEPS = st.lists(
    st.tuples(st.sampled_from(["claim", "take_over", "launch", "settle", "drop"]), st.integers(0, 3), st.integers(0, 5))
)


@given(STEPS)
def test_every_wait_ends_when_rows_are_gone_and_blocks_are_settled(steps: list[tuple[str, int, int]]) -> None:
    claims = Claims()
    flying: set[bytes] = set()
    for what, rid, place in steps:
        before = {key for key in KEYS if claims.coming(key, 99)}
        changes = claims.changes
        match what:
            case "claim":
                claims.claim(rid, KEYS[: place + 1])
            case "take_over":
                claims.take_over(rid, KEYS[place:])
                flying -= set()
            case "launch":
                claims.launch(KEYS[place])
                flying.add(KEYS[place])
            case "settle":
                claims.settle(KEYS[place])
                flying.discard(KEYS[place])
            case "drop":
                claims.drop(rid)
        gone = before - {key for key in KEYS if claims.coming(key, 99)}
        assert not gone or claims.changes > changes, "whoever waits must be told"
        assert all(claims.coming(key, 99) for key in flying)
    for rid in range(4):
        claims.drop(rid)
    for key in flying:
        claims.settle(key)
    assert not any(claims.coming(key, 99) for key in KEYS)
