"""A worker of several models: each request finds its own, waits until it is there, and says how it stands."""

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_house import STEP, FakeHouse
from fake_streamer import FakeStream, say_hello
from http_worker import chat, post

from protocol.messages import Charge, ModelAnswer, ModelOrder, Quota, WantModel
from server.key_file import ApiKey, digest_of

ADMIN = {"authorization": "Bearer admin"}
USER = {"authorization": "Bearer user"}


@pytest.fixture(scope="module")
def shared_house() -> Iterator[FakeHouse]:
    house = FakeHouse(
        api_keys=[
            ApiKey("admin", digest_of(b"admin"), admin=True),
            ApiKey("user", digest_of(b"user"), quotas=[Quota("requests", 9, 60.0)]),
        ]
    )
    house.client.headers.update(ADMIN)
    yield house
    house.close()


@pytest.fixture
def house(shared_house: FakeHouse) -> Iterator[FakeHouse]:
    """The shared one with `tiny` loaded, and `other` not."""
    if "tiny" not in shared_house.streamers:
        shared_house.load("tiny")
    shared_house.streamers["tiny"].on_generate = say_hello
    shared_house.streamers["tiny"].streams.clear()
    yield shared_house
    if "other" in shared_house.streamers:
        shared_house.unload("other")
    shared_house.set("other", "unloaded", message="", retry_after=0.0)
    shared_house.set("tiny", "ready", expires=0.0)


class Asking:
    """One request on a thread of its own."""

    def __init__(self, house: FakeHouse, path: str, body: Any, **options: Any) -> None:
        self.answers: list[httpx.Response] = []

        def ask() -> None:
            self.answers.append(house.client.post(path, json=body, **options))

        self._thread = threading.Thread(target=ask)
        self._thread.start()

    def answer(self) -> httpx.Response:
        self._thread.join(10)
        return self.answers[0]


def text_of(answer: httpx.Response) -> str:
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


@pytest.mark.parametrize("name", ["tiny", "gpt", None])
def test_a_loaded_model_answers_at_once_under_all_its_names(house: FakeHouse, name: str | None):
    before = house.count()
    body = chat() | {"model": name}
    answer = house.client.post("/v1/chat/completions", json=body)
    assert text_of(answer) == "Hello, world"
    assert answer.json()["model"] == (name or "tiny")
    assert house.streamers["tiny"].stream().request.model == ""
    assert house.heard(WantModel, before) == []


@pytest.mark.parametrize("name", ["other", "fr"])
def test_a_request_waits_until_its_model_is_there(house: FakeHouse, name: str):
    before = house.count()
    asking = Asking(house, "/v1/chat/completions", chat(model=name))
    assert house.wait_wanted("other", before).waiting == 1
    house.set("other", "loading", progress=0.5)
    streamer = house.load("other")
    assert text_of(asking.answer()) == "Hello, world"
    assert streamer.stream().request.model == ("fr" if name == "fr" else "")
    assert house.streamers["tiny"].streams == []


def test_the_house_hears_how_many_wait(house: FakeHouse):
    before = house.count()
    asking = [Asking(house, "/tokenize", {"model": "other", "prompt": "a", "messages": []}) for _ in range(2)]
    assert [one.answer().status_code for one in asking] == [400, 400]  # which nothing is loaded for
    assert house.heard(WantModel, before) == []
    asking = [Asking(house, "/v1/chat/completions", chat(model="other")) for _ in range(2)]
    house.worker.supervisor.wait_for(lambda: WantModel("other", 2) in house.heard(WantModel, before))
    house.load("other")
    assert [text_of(one.answer()) for one in asking] == ["Hello, world"] * 2


def test_a_model_that_fails_to_load_says_why(house: FakeHouse):
    before = house.count()
    asking = Asking(house, "/v1/chat/completions", chat(model="other"))
    house.wait_wanted("other", before)
    house.set("other", "loading")
    house.set("other", "failed", message="its weights are damaged", retry_after=4.0)
    for answer in (asking.answer(), house.client.post("/v1/chat/completions", json=chat(model="other"))):
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "4"
        assert "'other' could not be loaded: its weights are damaged" in answer.json()["error"]["message"]
    assert text_of(house.client.post("/v1/chat/completions", json=chat())) == "Hello, world"


def test_an_unknown_model_is_answered_with_what_there_is(house: FakeHouse):
    answer = house.client.post("/v1/chat/completions", json=chat(model="none"))
    assert answer.status_code == 404
    assert "'none' does not exist here; this server has 'tiny', 'gpt', 'other', 'fr'" in answer.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_meets_a_model_on_its_way_out_waits_for_the_next(house: FakeHouse, stream: bool):
    def refuse(one: FakeStream) -> None:
        one.reject("draining", "the server is shutting down and takes no new requests")

    first = house.count()
    house.load("other").on_generate = refuse
    leaving = house.streamers["other"]
    house.set("other", "ready")
    before = house.count()
    asking = Asking(house, "/v1/chat/completions", chat(model="other", stream=stream), headers=USER)
    leaving.stream(0)
    house.unload("other")
    house.wait_wanted("other", before)
    house.load("other")
    answer = asking.answer()
    assert answer.status_code == 200
    assert "world" in answer.text
    house.worker.supervisor.wait_for(lambda: len(house.heard(Charge, first)) == 2)
    assert [(charge.requests, charge.tokens) for charge in house.heard(Charge, first)] == [(1, 0), (0, 8)]


def test_a_stream_that_had_begun_is_not_asked_again(house: FakeHouse):
    def break_off(one: FakeStream) -> None:
        one.accept()
        one.fail("server_stopped", "the model was unloaded")

    streamer = house.load("other")
    streamer.on_generate = break_off
    answer = house.client.post("/v1/chat/completions", json=chat(model="other"))
    assert answer.status_code == 503
    assert len(streamer.streams) == 1


def test_a_client_that_leaves_does_not_wait_on(house: FakeHouse):
    before = house.count()
    with house.worker.connect() as raw:
        post(raw, "/v1/chat/completions", chat(model="other"), ADMIN)
        house.wait_wanted("other", before)
    house.worker.wait_log(reason="client_gone", path="/v1/chat/completions")
    assert house.worker.supervisor.probe().streams == 0


def test_without_patience_it_is_refused_with_how_far_it_is():
    house = FakeHouse(load_wait=0)
    try:
        house.set("other", "loading", progress=0.25, retry_after=3.2)
        before = house.count()
        answer = house.client.post("/v1/chat/completions", json=chat(model="other"))
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "4"
        error = answer.json()["error"]
        assert error["code"] == "loading"
        assert error["message"] == "the model 'other' is still loading (25%)"
        assert house.wait_wanted("other", before).waiting == 1
        house.say_own("draining")
        assert house.client.post("/v1/chat/completions", json=chat()).json()["error"]["code"] == "draining"
        assert house.client.get("/ready").status_code == 503
    finally:
        house.close()


def test_all_models_are_listed(house: FakeHouse):
    tiny, other, fr = house.client.get("/v1/models").json()["data"]
    assert (tiny["id"], tiny["state"], tiny["aliases"], tiny["size"]) == ("tiny", "ready", ["gpt"], STEP)
    assert (other["id"], other["state"], other["pinned"]) == ("other", "unloaded", False)
    assert (fr["id"], fr["parent"], fr["state"]) == ("fr", "other", "unloaded")
    assert tiny["max_model_len"] == 4096
    assert house.client.get("/v1/models/other").json()["id"] == "other"
    assert house.client.get("/v1/models/none").status_code == 404
    health = house.client.get("/health").json()
    assert health["status"] == "ok"
    assert {actor["name"] for actor in health["actors"]} == {"http0", "tiny/streamer", "tiny/engine"}
    assert [(model["name"], model["state"]) for model in health["models"]] == [("tiny", "ready"), ("other", "unloaded")]
    assert house.client.get("/ready").json() == {"status": "ok"}


def test_figures_name_their_model(house: FakeHouse):
    house.load("other")
    text = house.client.get("/metrics").text
    assert text.count("callboard_generated_tokens_total{") == 2
    assert 'callboard_model_state{model="other",state="ready"} 1.0' in text
    assert 'callboard_actor_up{actor="supervisor",model=""} 1.0' in text
    page = house.client.get("/admin/api/state?model=other").json()
    assert page["model"] == "other"
    assert [model["name"] for model in page["models"]] == ["tiny", "other"]
    assert (page["budget"], page["claimed"]) == (10 * STEP, 5 * STEP)
    assert house.client.get("/admin/api/state?model=gone").json()["model"] == "tiny"
    house.client.post("/admin/api/streams/1/cancel?model=other", json={})
    assert house.streamers["other"].cancelled_rids == [1]
    assert house.streamers["tiny"].cancelled_rids == []


@pytest.mark.parametrize("action", ["load", "unload", "pin", "unpin"])
def test_orders_go_to_the_house(house: FakeHouse, action: str):
    def done(order: ModelOrder) -> ModelAnswer:
        return ModelAnswer(order.rid, models=[house.models["other"]])

    before = house.count()
    asking = Asking(house, f"/models/{action}", {"model": "fr"})
    order = house.answer_orders(done, before)
    assert (order.action, order.model) == (action, "other")
    assert asking.answer().json()["model"]["name"] == "other"

    before = house.count()
    asking = Asking(house, f"/models/{action}", {"model": "other"})
    house.answer_orders(lambda order: ModelAnswer(order.rid, "invalid_request", "it is pinned"), before)
    assert asking.answer().status_code == 400
    assert "it is pinned" in asking.answer().text


def test_orders_are_for_admins_and_for_models_that_exist(house: FakeHouse):
    assert house.client.post("/models/unload", json={"model": "tiny"}, headers=USER).status_code == 403
    assert house.client.post("/models/load", json={"model": "none"}).status_code == 404
    assert house.client.post("/models/load", json={}).status_code == 400


@pytest.mark.parametrize("kind", ["text/plain", None])
def test_orders_come_as_json_which_pages_of_other_sites_cannot_send(house: FakeHouse, kind: str | None):
    before = house.count()
    headers = {"content-type": kind} if kind else {}
    answer = house.client.post("/models/unload", content=b'{"model": "tiny"}', headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "content-type")
    assert house.heard(ModelOrder, before) == []


def test_a_key_is_charged_by_the_house(house: FakeHouse):
    before = house.count()
    assert house.client.post("/v1/chat/completions", json=chat(), headers=USER).status_code == 200
    house.worker.supervisor.wait_for(lambda: len(house.heard(Charge, before)) == 2)
    charges = [(charge.name, charge.requests, charge.tokens) for charge in house.heard(Charge, before)]
    assert charges == [("user", 1, 0), ("user", 0, 8)]
    assert house.streamers["tiny"].charges == []


def test_beyond_its_limits_a_key_loads_no_model(house: FakeHouse):
    supervisor, before = house.worker.supervisor, house.count()
    usual = supervisor.on_charge
    supervisor.on_charge = lambda charge: ModelAnswer(charge.ref, "rate_limit_exceeded", "slower", retry_after=7.2)
    try:
        answer = house.client.post("/v1/chat/completions", json=chat(model="other"), headers=USER)
    finally:
        supervisor.on_charge = usual
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "8")
    assert house.heard(WantModel, before) == []


def test_only_admins_keys_say_how_long_a_model_stays(house: FakeHouse):
    before = house.count()
    for keep_alive in (0, -1):
        body = {"model": "tiny", "prompt": "Hi", "keep_alive": keep_alive}
        assert house.client.post("/api/generate", json=body, headers=USER).status_code == 200
    assert house.client.post("/api/generate", json={"model": "tiny", "keep_alive": -1}, headers=USER).is_success
    answer = house.client.post("/api/generate", json={"model": "tiny", "keep_alive": 0}, headers=USER)
    assert (answer.status_code, "may not unload" in answer.text) == (403, True)
    house.client.post("/api/generate", json={"model": "tiny", "keep_alive": 60})
    house.worker.supervisor.wait_for(lambda: house.heard(WantModel, before))
    assert house.heard(WantModel, before) == [WantModel("tiny", 0, 60.0)]


def test_ollama_loads_keeps_and_unloads(house: FakeHouse):
    tags = house.client.get("/api/tags").json()["models"]
    assert [model["name"] for model in tags] == ["tiny:latest", "other:latest"]
    assert [model["name"] for model in house.client.get("/api/ps").json()["models"]] == ["tiny:latest"]
    assert house.client.post("/api/show", json={"model": "other"}).json()["capabilities"] == ["completion", "tools"]

    before = house.count()
    asking = Asking(house, "/api/generate", {"model": "other:latest", "keep_alive": "1h30m"})
    house.wait_wanted("other", before)
    house.load("other")
    assert asking.answer().json()["done_reason"] == "load"
    house.worker.supervisor.wait_for(lambda: WantModel("other", 0, 5400.0) in house.heard(WantModel, before))
    house.set("other", "ready", expires=5400.0)
    _, other = house.client.get("/api/ps").json()["models"]
    assert other["expires_at"] < "2300"
    assert other["size"] == 7

    before = house.count()
    assert house.client.post("/api/chat", json={"model": "other", "keep_alive": 0}).json()["done_reason"] == "unload"
    house.worker.supervisor.wait_for(lambda: WantModel("other", 0, 0.0) in house.heard(WantModel, before))
    house.unload("other")
    before = house.count()
    house.client.post("/api/chat", json={"model": "other", "keep_alive": 0})
    assert house.heard(WantModel, before) == []  # it isn't loaded to be unloaded
    answer = house.client.post("/api/generate", json={"model": "tiny", "prompt": "Hi", "keep_alive": "soon"})
    assert answer.status_code == 400
