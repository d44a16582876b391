"""Admission counts and the time a refused client is told to wait."""

from actors.streamer.admission import Admission


def test_room_is_running_plus_waiting():
    admission = Admission(2, 3)
    assert [admission.has_room(n) for n in (0, 4, 5, 6)] == [True, True, False, False]


def test_a_client_with_less_than_its_part_finds_room_that_a_flood_has_not_taken():
    admission = Admission(10, 10)
    assert not admission.has_share(20, 20, 1)
    assert not admission.has_share(20, 20, 2)
    assert admission.has_share(20, 0, 2)
    assert admission.has_share(27, 9, 2)
    assert not admission.has_share(27, 10, 2)
    assert not admission.has_share(28, 0, 2)


def test_retry_after_follows_the_rate_at_which_streams_end():
    admission = Admission(2, 3)
    assert admission.retry_after(5.0) == 1.0
    for second in range(0, 100, 10):
        admission.ended(second)
    assert admission.retry_after(100.0) == 10.0
    assert admission.retry_after(100_000.0) == 60.0
    for _ in range(100):
        admission.ended(100.0)
    assert admission.retry_after(100.1) == 1.0
