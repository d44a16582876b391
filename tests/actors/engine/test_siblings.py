"""Choices that wait for the first of them."""

from actors.engine.siblings import Siblings


def test_those_that_wait_are_taken_once_and_in_order():
    siblings = Siblings()
    for rid in (2, 3, 4):
        siblings.wait(rid, 1)
    siblings.drop(3)
    siblings.drop(9)
    assert 2 in siblings
    assert siblings.take(1) == [2, 4]
    assert siblings.take(1) == []
    assert len(siblings) == 0
