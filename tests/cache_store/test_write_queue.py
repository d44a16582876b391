"""The write queue: order, bounds, and the throttle."""

import threading

import pytest

from cache_store.block import Tensor
from cache_store.write_queue import LINGER, Throttle, Write, WriteQueue


def write(key: bytes, nbytes: int = 10) -> Write:
    return Write(key, None, b"", False, "", [Tensor("t", "U8", (nbytes,), memoryview(bytes(nbytes)))])


def test_urgent_first_then_in_order_and_bounded_batches():
    queue = WriteQueue(100)
    for key, urgent in ((b"a", False), (b"b", True), (b"c", False), (b"d", True)):
        queue.put(write(key), urgent)
    assert [each.key for each in queue.take(3, 100, 0)] == [b"b", b"d", b"a"]
    assert [each.key for each in queue.take(3, 5, 0)] == [b"c"]
    assert queue.take(3, 5, 0) == []


def test_bytes_count_until_they_are_done():
    queue = WriteQueue(25)
    assert queue.has_room(1000), "a single block always fits"
    queue.put(write(b"a"), False)
    queue.put(write(b"b"), False)
    assert not queue.has_room(10)
    queue.take(2, 100, 0)
    assert not queue.has_room(10)
    queue.done(10)
    assert queue.has_room(10)
    assert (queue.blocks, queue.nbytes) == (1, 10)


def test_while_the_model_works_only_urgent_blocks_are_due():
    now = 100.0
    queue = WriteQueue(100, lambda: now)
    queue.set_at_work(True)
    queue.put(write(b"a"), False)
    now += LINGER - 1
    queue.put(write(b"b"), False)
    assert queue.take(9, 100, 0) == []
    queue.put(write(b"c"), True)
    assert [each.key for each in queue.take(9, 100, 0)] == [b"c"]
    now += 1
    assert [each.key for each in queue.take(9, 100, 0)] == [b"a"]
    queue.set_at_work(False)
    assert [each.key for each in queue.take(9, 100, 0)] == [b"b"]


def test_more_than_half_of_the_queue_waits_for_no_break():
    queue = WriteQueue(100)
    queue.set_at_work(True)
    for key in (b"a", b"b", b"c"):
        queue.put(write(key, 20), False)
    taken = queue.take(1, 100, 0)
    assert [each.key for each in taken] == [b"a"]
    queue.done(20)
    assert queue.take(9, 100, 0) == []


def test_a_break_ends_waiting():
    queue = WriteQueue(100)
    queue.set_at_work(True)
    queue.put(write(b"a"), False)
    timer = threading.Timer(0.1, queue.set_at_work, (False,))
    timer.start()
    assert [each.key for each in queue.take(1, 100, 60)] == [b"a"]


def test_a_call_ends_waiting():
    queue = WriteQueue(25)
    queue.call()
    assert queue.take(1, 1, 60) == []


def test_the_throttle_lets_a_second_pass_and_no_more():
    now = 100.0
    throttle = Throttle(1000, lambda: now)
    delays = [throttle.delay(500) for _ in range(3)]
    assert delays == pytest.approx([0.5, 1.0, 1.5])
    now += 60
    assert [throttle.delay(500) for _ in range(3)] == pytest.approx([0.0, 0.0, 0.5])


def test_dropping_releases_the_views():
    one = write(b"a")
    one.drop()
    with pytest.raises(ValueError, match="released"):
        one.tensors[0].data.tobytes()
