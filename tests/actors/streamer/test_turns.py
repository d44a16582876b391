"""Clients take turns, however many items one of them brings."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.streamer.turns import MAX_PRIORITIES, FairQueue, Turns

CLIENTS = st.sampled_from([b"a", b"b", b"c"])


@given(
    st.lists(
        st.one_of(st.tuples(st.just("append"), CLIENTS), st.just(("take", b"")), st.tuples(st.just("drop"), CLIENTS))
    )
)
def test_a_fair_queue_loses_nothing_and_keeps_each_clients_order(steps):
    queue: FairQueue[tuple[bytes, int]] = FairQueue()
    waiting: dict[bytes, list[tuple[bytes, int]]] = {b"a": [], b"b": [], b"c": []}
    for number, (what, client) in enumerate(steps):
        if what == "append":
            item = client, number
            queue.append(client, item)
            waiting[client].append(item)
        elif what == "drop" and waiting[client]:
            queue.discard(client, waiting[client].pop())
        elif what == "take" and any(waiting.values()):
            item = queue.take()
            assert waiting[item[0]].pop(0) == item
        assert len(queue) == sum(map(len, waiting.values()))
    queue.discard(b"a", (b"a", -1))
    rest = [queue.take() for _ in range(len(queue))]
    assert sorted(rest) == sorted(item for lane in waiting.values() for item in lane)
    with pytest.raises(IndexError):
        queue.take()


@given(st.lists(CLIENTS, max_size=60), st.lists(CLIENTS, max_size=60))
def test_while_two_clients_wait_neither_is_served_twice_before_the_other(first, later):
    queue: FairQueue[bytes] = FairQueue()
    left: Counter[bytes] = Counter()
    since: dict[bytes, Counter[bytes]] = {}

    def serve():
        client = queue.take()
        left[client] -= 1
        since[client] = Counter()
        for other, served in since.items():
            if other != client and left[other]:
                served[client] += 1
                assert served[client] <= 1, "it was served twice while another waited"

    for client in first:
        since.setdefault(client, Counter()) if left[client] else since.__setitem__(client, Counter())
        queue.append(client, client)
        left[client] += 1
    for client in later:
        if len(queue):
            serve()
        if not left[client]:
            since[client] = Counter()
        queue.append(client, client)
        left[client] += 1
    while len(queue):
        serve()


def test_what_is_given_back_comes_first():
    queue: FairQueue[int] = FairQueue()
    for item in (1, 2):
        queue.append(b"a", item)
    queue.append(b"b", 3)
    taken = queue.take()
    queue.give_back(b"a", taken)
    assert [queue.take() for _ in range(3)] == [1, 3, 2]


@given(st.lists(st.tuples(CLIENTS, st.integers(0, 3)), max_size=80))
def test_streams_are_served_in_turn_whenever_they_come(arrivals):
    """Each arrival is followed by so many services, of the lowest number first: no other client is served more than
    twice from the moment a client's only stream waits until that is served."""
    turns = Turns()
    own: dict[bytes, dict[int, int]] = {b"a": {}, b"b": {}, b"c": {}}
    waiting: list[tuple[int, int, bytes]] = []
    behind: dict[bytes, Counter[bytes]] = {}

    def serve():
        waiting.sort()
        number, _, client = waiting.pop(0)
        turns.served(number)
        behind.pop(client, None)
        for served in behind.values():
            served[client] += 1
            assert served[client] <= 2
        if any(one[2] == client for one in waiting):
            behind[client] = Counter()

    for age, (client, services) in enumerate(arrivals):
        if not any(one[2] == client for one in waiting):
            behind[client] = Counter()
        waiting.append((turns.next(own[client]), age, client))
        for _ in range(services):
            if waiting:
                serve()
    while waiting:
        serve()


def test_priorities_have_numbers_of_their_own():
    turns = Turns()
    urgent: dict[int, int] = {}
    numbers = [turns.next(urgent, -1) for _ in range(5)]
    assert numbers == [0, 1, 2, 3, 4]
    turns.served(4, -1)
    assert turns.next({}, 0) == 0
    assert turns.next({}, -1) == 4


def test_a_client_cannot_make_numbers_grow_without_bound():
    turns = Turns()
    own: dict[int, int] = {}
    for priority in range(10_000):
        turns.served(turns.next(own, priority) + 1, priority)
    assert len(own) <= MAX_PRIORITIES
    assert turns.next(own, 9_999) == 1
