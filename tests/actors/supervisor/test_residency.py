"""Which models are loaded: the budget holds, wants are served first come first served, and nobody starves."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.house_orders import HouseOrders
from actors.residency import (
    FIRST_DELAY,
    LEAST_STAY,
    LONGEST_DELAY,
    LONGEST_STAY,
    START_TIME,
    STEADY,
    WANT_TIME,
    Load,
    Model,
    Refused,
    Residency,
    Unload,
    default_claim,
)
from protocol.messages import ModelOrder

LOADING = 3.0  # seconds a load takes here
DRAINING = 4.0  # seconds that those who give way take at most
LIVE = ("loading", "ready", "unloading")


class Rig:
    """Models with processes that do what a test says, and a clock."""

    def __init__(self, budget, *models):
        self.residency = Residency([model if isinstance(model, Model) else Model(*model) for model in models], budget)
        self.now = 0.0

    def __getitem__(self, name):
        place = self.residency.find(name)
        assert place is not None
        return place

    def want(self, *names, keep_alive=None):
        for name in names:
            self.residency.want(self[name], self.now, keep_alive)

    def decide(self, after=0.0):
        """What is decided; what is to be loaded is started."""
        self.now += after
        actions = self.residency.decide(self.now)
        for action in actions:
            if isinstance(action, Load):
                self.residency.started(self[action.name], self.now)
            assert self.residency.claimed <= self.residency.budget
        return actions

    def ready(self, *names, after=LOADING):
        self.now += after
        for name in names:
            self.residency.ready(self[name], self.now)

    def gone(self, name, message=""):
        self.residency.ended(self[name], message, self.now)

    def use(self, name, streams, ended=0):
        self.residency.used(self[name], streams, ended, 100, self.now)

    def serve(self, *names):
        """Have these loaded."""
        self.want(*names)
        assert self.decide() == [Load(name) for name in names]
        self.ready(*names)
        return self

    def states(self):
        return {state.name: state.state for state in self.residency.states(self.now)}


def test_a_model_is_loaded_when_it_is_wanted_and_fits():
    rig = Rig(10, ("a", 6), ("b", 4), ("c", 1))
    assert rig.decide() == []
    rig.want("b", "a", "c")
    assert rig.decide() == [Load("b"), Load("a")]
    assert rig.states() == {"a": "loading", "b": "loading", "c": "waiting"}
    assert rig.residency.claimed == 10
    rig.ready("a")
    assert (rig["a"].state, rig["a"].takes) == ("ready", LOADING)


def test_the_least_recently_used_idle_one_gives_way_after_a_while():
    rig = Rig(2, ("a", 1), ("b", 1), ("c", 1)).serve("a", "b")
    rig.want("c")
    assert rig.decide() == []  # both were just loaded
    rig.now += LEAST_STAY
    rig.use("a", 0, ended=1)
    rig.want("c")
    assert rig.decide() == [Unload("b")]
    assert rig.decide(0.1) == []
    rig.gone("b")
    assert rig.decide() == [Load("c")]


def test_busy_ones_give_way_last_and_new_requests_for_them_wait():
    rig = Rig(2, ("a", 1), ("b", 1), ("c", 1)).serve("a", "b")
    rig.use("a", 3)
    rig.now += LONGEST_STAY
    rig.use("b", 0, ended=5)
    rig.want("c")
    assert rig.decide() == [Unload("b")]  # used later than a, but idle
    rig.gone("b")
    assert rig.decide() == [Load("c")]
    rig.ready("c")
    rig.use("c", 1)
    rig.now += LONGEST_STAY
    rig.want("b")
    assert rig.decide() == [Unload("a")]
    rig.want("a")
    assert rig.states() == {"a": "unloading", "b": "waiting", "c": "ready"}
    rig.gone("a")
    assert rig.decide() == [Load("b"), Unload("c")]  # c, which has had its time, for a
    assert rig["a"].state == "waiting"


def test_a_busy_one_is_left_when_an_idle_one_will_do_in_a_moment():
    rig = Rig(2, ("a", 1), ("b", 1), ("c", 1)).serve("a")
    rig.use("a", 1)
    rig.now += LONGEST_STAY
    rig.serve("b")
    rig.want("c")
    assert rig.decide() == []
    rig.want("c")
    assert rig.decide(LEAST_STAY) == [Unload("b")]


def test_a_later_want_only_takes_what_the_first_one_leaves():
    rig = Rig(10, ("a", 4), ("b", 4), ("big", 8), ("mid", 4), ("small", 2)).serve("a", "b")
    rig.now += LEAST_STAY
    rig.use("b", 0, ended=1)
    rig.want("big", "small", "mid")
    # big needs both, small fits beside it, and mid would take what big waits for.
    assert rig.decide() == [Unload("a"), Unload("b"), Load("small")]
    rig.gone("a")
    assert rig.decide() == []
    rig.gone("b")
    assert rig.decide() == [Load("big")]
    assert rig["mid"].state == "waiting"


def test_nothing_is_loaded_past_one_that_waits_for_those_that_were_just_loaded():
    rig = Rig(10, ("a", 6), ("big", 8), ("small", 3)).serve("a")
    rig.want("big", "small")
    assert rig.decide() == []  # small fits, but big, which comes first, would then have to wait for it
    rig.want("big", "small")
    assert rig.decide(LEAST_STAY) == [Unload("a")]


def test_only_as_many_give_way_as_have_to():
    rig = Rig(10, ("a", 1), ("b", 8), ("c", 8)).serve("a", "b")
    rig.now += LEAST_STAY
    rig.use("b", 0, ended=1)
    rig.want("c")
    assert rig.decide() == [Unload("b")]  # a was used longer ago, but would not help


def test_pinned_ones_stay_and_what_does_not_fit_beside_them_fails_at_once():
    rig = Rig(10, Model("a", 6, pinned=True), Model("b", 4), Model("c", 5))
    assert rig.decide() == [Load("a")]
    rig.ready("a")
    rig.now += LONGEST_STAY
    rig.want("c", "b")
    assert rig.decide() == [Load("b")]
    assert rig["c"].state == "failed"
    assert "does not fit beside the pinned ones: a" in rig["c"].message
    with pytest.raises(Refused, match="pinned"):
        rig.residency.unload(rig["a"])
    with pytest.raises(Refused, match=r"c can't be pinned.*a 0\.00 GB"):
        rig.residency.pin(rig["c"], rig.now)
    rig.residency.unpin(rig["a"], rig.now)
    rig.now += FIRST_DELAY
    rig.want("c")
    assert rig.decide() == [Unload("a")]
    rig.residency.pin(rig["c"], rig.now)


def test_a_pinned_one_stays_though_it_was_used_longest_ago():
    rig = Rig(2, Model("a", 1, pinned=True), Model("b", 1), Model("c", 1)).serve("a", "b")
    rig.now += LONGEST_STAY
    rig.use("b", 0, ended=1)
    rig.want("c")
    assert rig.decide() == [Unload("b")]


def test_pinned_models_that_do_not_fit_together_and_names_given_twice_are_refused():
    with pytest.raises(ValueError, match="don't fit"):
        Residency([Model("a", 6, pinned=True), Model("b", 5, pinned=True)], 10)
    with pytest.raises(ValueError, match=r"'x'.*a and b"):
        Residency([Model("a", 1, ("x",)), Model("b", 1, adapters=("x",))], 10)
    with pytest.raises(ValueError, match="same name"):
        Residency([Model("a", 1), Model("a", 1)], 10)


def test_models_answer_to_aliases_and_adapters_and_the_first_to_no_name():
    residency = Residency([Model("a", 1, ("x",)), Model("b", 1, adapters=("y",))], 10)
    found = {name: residency.find(name) for name in ("", "a", "x", "y", "z")}
    named = {name: place and place.model.name for name, place in found.items()}
    assert named == {"": "a", "a": "a", "x": "a", "y": "b", "z": None}


def test_an_idle_one_is_unloaded_after_its_time_and_a_request_may_change_that():
    rig = Rig(10, Model("a", 1, idle_ttl=60.0), Model("b", 1)).serve("a", "b")
    rig.use("a", 1)
    assert rig.decide(100.0) == []
    rig.use("a", 0, ended=1)
    assert rig.residency.state(rig["a"], rig.now).expires == 60.0
    assert rig.decide(59.9) == []
    assert rig.decide(0.2) == [Unload("a")]
    rig.want("b", keep_alive=0.0)
    assert rig.decide() == [Unload("b")]
    rig.gone("b")
    rig.gone("a")
    assert rig["b"].ttl < 0
    rig.serve("a")
    rig.want("a", keep_alive=-1.0)
    assert rig.decide(1000.0) == []


def test_wants_run_out_unless_they_are_repeated():
    rig = Rig(1, ("a", 1), ("b", 1)).serve("a")
    rig.want("b")
    assert rig.decide(WANT_TIME + 0.1) == []
    assert rig["b"].state == "unloaded"


def test_one_that_fails_to_load_is_tried_again_later_and_later():
    rig = Rig(1, ("a", 1))
    for delay in (FIRST_DELAY, 2 * FIRST_DELAY, 4 * FIRST_DELAY):
        rig.want("a")
        assert rig.decide() == [Load("a")]
        rig.gone("a", "no such architecture")
        state = rig.residency.state(rig["a"], rig.now)
        assert (state.state, state.message, state.retry_after) == ("failed", "no such architecture", delay)
        rig.want("a")
        assert rig.decide(delay - 0.1) == []
        assert rig.decide(0.2) == []  # that want is over
        assert rig["a"].state == "unloaded"
    for _ in range(10):
        rig.want("a")
        rig.decide()
        rig.gone("a", "no")
        rig.now = rig["a"].retry_at
        rig.decide()
    assert rig["a"].failures == 13
    rig.want("a")
    rig.decide()
    rig.gone("a", "no")
    assert rig["a"].retry_at - rig.now == LONGEST_DELAY


def test_one_that_dies_in_service_may_come_back_at_once_but_not_again_and_again():
    rig = Rig(1, ("a", 1)).serve("a")
    rig.gone("a", "killed")
    assert (rig["a"].state, rig["a"].message) == ("unloaded", "killed")
    rig.serve("a")
    rig.gone("a", "killed")
    assert rig["a"].state == "failed"
    rig.now += FIRST_DELAY
    rig.decide()
    rig.serve("a")
    rig.now += STEADY
    rig.gone("a", "killed")
    assert rig["a"].state == "unloaded"


def test_an_order_to_leave_is_obeyed_at_once_even_while_it_loads():
    rig = Rig(2, ("a", 1), ("b", 1)).serve("a")
    rig.want("b")
    rig.decide()
    for name in ("a", "b"):
        rig.residency.unload(rig[name])
    assert rig.decide() == [Unload("a"), Unload("b")]
    rig.gone("a")
    rig.gone("b", "was ended")
    assert rig.states() == {"a": "unloaded", "b": "unloaded"}
    assert rig.decide(10) == []


def test_a_broken_model_fails_with_its_reason_and_holds_up_nobody():
    rig = Rig(1, Model("a", 1, broken="it has no config.json"), Model("b", 1))
    rig.want("a", "b")
    assert rig.decide() == [Load("b")]
    assert rig["a"].message == "it has no config.json"


def test_weights_and_room_for_streams_are_claimed():
    assert default_claim(0, 1 << 40) == 1 << 30
    assert default_claim(10 << 30, 1 << 40) == (11 << 30) + (5 << 30)
    assert default_claim(10 << 30, 12 << 30) == 12 << 30


def progress(rig, name, after):
    rig.now += after
    return rig.residency.state(rig[name], rig.now).progress


def test_a_first_load_shows_progress_too_by_its_weights_and_the_speed_of_other_loads():
    gigabyte = 10**9
    models = [Model(name, 1, size=size * gigabyte) for name, size in (("big", 8), ("like", 4), ("small", 1))]
    rig = Rig(3, *models)
    rig.want("big", "like", "small")
    rig.decide()
    assert progress(rig, "big", START_TIME + 3) == pytest.approx((START_TIME + 3) / (START_TIME + 8))
    rig.ready("small", after=0)  # too small to tell how fast the others come
    assert progress(rig, "big", 0) == pytest.approx((START_TIME + 3) / (START_TIME + 8))
    rig.ready("like", after=0)  # 4 GB in 3 s
    assert progress(rig, "big", 0) == pytest.approx((START_TIME + 3) / (START_TIME + 6), abs=1e-3)
    assert progress(rig, "big", 100) == 0.99
    rig.ready("big", after=0)
    rig.residency.unload(rig["big"])
    rig.decide()
    rig.gone("big")
    rig.want("big")
    rig.decide()
    assert progress(rig, "big", 21) == pytest.approx(0.2)  # of the last load


class Client:
    """Wants a model again and again until it is served, and then uses it for a while."""

    def __init__(self, name, uses, began):
        self.name, self.uses, self.began = name, uses, began
        self.served_at = None


@settings(max_examples=60)
@given(st.data())
def test_the_budget_holds_nobody_starves_and_nothing_thrashes(data):
    """Random models and clients, with a clock of tenths of a second: everybody is served within what loading, giving
    way and the queue before it take, and a model that was loaded serves those who waited for it."""
    budget = 10
    claims = data.draw(st.lists(st.integers(1, 10), min_size=2, max_size=5), label="claims")
    pinned = data.draw(st.booleans(), label="pinned") and claims[0] + max(claims[1:]) <= budget
    models = [Model(str(i), claim, pinned=pinned and i == 0) for i, claim in enumerate(claims)]
    rig = Rig(budget, *models)
    arrivals = st.tuples(st.integers(0, 200), st.integers(0, len(models) - 1), st.integers(1, 80))
    coming = sorted(data.draw(st.lists(arrivals, min_size=1, max_size=25), label="arrivals"))
    clients: list[Client] = []
    until: dict[str, int] = {}  # when what was begun is done
    for tick in range(4000):
        rig.now = tick / 10
        clients += [Client(str(model), uses, tick) for at, model, uses in coming if at == tick]
        for place in rig.residency.places.values():
            name = place.model.name
            if place.state in ("loading", "unloading") and tick >= until[name]:
                rig.ready(name, after=0) if place.state == "loading" else rig.gone(name)
        for client in clients:
            place = rig[client.name]
            if client.served_at is None and place.state == "ready":
                client.served_at = tick
            if client.served_at is None and tick % 10 == client.began % 10:
                rig.want(client.name)
        for place in rig.residency.places.values():
            mine = [c for c in clients if c.name == place.model.name and c.served_at is not None]
            running = [c for c in mine if tick < c.served_at + c.uses]
            if place.state in ("ready", "unloading"):
                rig.use(place.model.name, len(running), len(mine) - len(running))
        loaded = {place.model.name: place for place in rig.residency.places.values() if place.state in LIVE}
        for action in rig.decide():
            if isinstance(action, Load):
                until[action.name] = tick + int(LOADING * 10)
            else:
                place = loaded[action.name]
                assert not place.pinned
                assert rig.now - place.ready_at >= LEAST_STAY
                assert any(p.state == "waiting" for p in rig.residency.places.values()), "nobody asked for its place"
                until[action.name] = tick + data.draw(st.integers(1, int(DRAINING * 10)))
        assert rig.residency.claimed <= budget
        if tick > 200 and all(client.served_at is not None for client in clients):
            break
    # Each model in the queue before it: those that give way stay for a while and drain, then it loads.
    turn = LOADING + max(LEAST_STAY, LOADING) + DRAINING + 1.0
    for client in clients:
        assert client.served_at is not None, f"{client.name} starved"
        assert (client.served_at - client.began) / 10 <= turn * (len(models) + 1)
    # Who waited for a model was served by its first load behind that: models don't take turns without serving.
    assert sum(place.loads for place in rig.residency.places.values()) <= len(clients) + sum(m.pinned for m in models)


@pytest.mark.parametrize("wanted_by", ["request", "order"])
def test_an_unload_is_answered_though_the_model_is_wanted_again_at_once(wanted_by):
    rig = Rig(1, ("a", 1)).serve("a")
    orders = HouseOrders(rig.residency)
    rig.use("a", 1)
    rig.now += 1
    orders.take(ModelOrder(1, "unload", "a"), b"first", None, rig.now)
    assert rig.decide() == [Unload("a")]
    assert orders.done(rig.now) == []
    rig.now += 1
    if wanted_by == "order":
        orders.take(ModelOrder(2, "load", "a"), b"second", None, rig.now)
    else:
        rig.want("a")
    rig.gone("a")
    assert rig.decide() == [Load("a")]
    assert [(sender, answer.rid, answer.code) for sender, _, answer in orders.done(rig.now)] == [(b"first", 1, "")]
