"""What a client asks again when the server of one of several models was unloaded."""

from protocol.client.repeats import Repeats
from protocol.errors import CANCELLED, DRAINING
from protocol.messages import End, Generate, SamplingParams


def request(ref: int, *more: int) -> Generate:
    return Generate(ref, SamplingParams(), prompt="x", more_refs=[*more])


def refused(ref: int, code: str = DRAINING) -> End:
    return End(ref, "rejected", code=code)


def test_only_requests_of_which_nothing_came_are_due():
    repeats = Repeats()
    first, second, third = request(1), request(2, 3), request(4)
    for each in (first, second, third):
        repeats.sent(each)
    repeats.begun(3)  # one choice of the second: neither is asked again
    assert repeats.due() == [first, third]
    assert [ref in repeats for ref in (1, 2, 3, 4)] == [True, False, False, True]
    repeats.begun(1)
    repeats.begun(1)
    assert repeats.due() == [third]
    repeats.forget()
    assert repeats.due() == []


def test_a_refusal_of_a_model_on_its_way_out_is_held_back_and_others_are_not():
    repeats = Repeats()
    repeats.sent(request(1))
    assert repeats.holds_back(refused(1))
    assert not repeats.holds_back(refused(1, CANCELLED))
    assert not repeats.holds_back(refused(2))
