"""Which short prompts are run together."""

from hypothesis import given
from hypothesis import strategies as st

from actors.engine.prefill import GROUP_ROWS, GROUP_WASTE, group_by_length


@given(st.lists(st.integers(1, 512), max_size=120).map(sorted))
def test_groups_are_bounded_in_rows_and_padding(lengths: list[int]) -> None:
    groups = group_by_length(lengths)
    assert [place for group in groups for place in group] == list(range(len(lengths)))
    for group in groups:
        members = [lengths[place] for place in group]
        assert 0 < len(members) <= GROUP_ROWS
        assert len(members) * max(members) <= GROUP_WASTE * sum(members)


def test_equal_prompts_share_a_forward() -> None:
    assert group_by_length([7] * 40) == [range(32), range(32, 40)]
