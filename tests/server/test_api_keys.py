"""API keys: which requests are let in."""

from collections.abc import Callable

import pytest
from http_worker import HttpWorker, chat


@pytest.fixture
def guarded(start_worker: Callable[..., HttpWorker]) -> HttpWorker:
    """A worker with two keys."""
    return start_worker(api_keys=["first-key", "schlüssel"], allow_origins=["http://page.test"])


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer"},
        {"authorization": "Bearer wrong"},
        {"authorization": "Basic first-key"},
        {"authorization": "first-key"},
        {"x-api-key": "first-ke"},
    ],
)
def test_without_a_key_nothing_is_served(guarded: HttpWorker, headers: dict[str, str]) -> None:
    for answer in (
        guarded.client.post("/v1/chat/completions", json=chat(), headers=headers),
        guarded.client.get("/v1/models", headers=headers),
        guarded.client.get("/nowhere", headers=headers),
    ):
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert "first" not in answer.text
    answer = guarded.client.post("/v1/messages", json=chat(max_tokens=1), headers=headers)
    assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer first-key"},
        {"authorization": "bearer first-key"},
        {"x-api-key": "first-key"},
        {"authorization": "Bearer schlüssel".encode()},
    ],
)
def test_every_key_opens(guarded: HttpWorker, headers: dict[str, str]) -> None:
    assert guarded.client.post("/v1/chat/completions", json=chat(), headers=headers).status_code == 200


def test_health_and_preflight_are_open(guarded: HttpWorker) -> None:
    assert guarded.client.get("/health").status_code == 200
    assert guarded.client.get("/ready").status_code == 200
    headers = {"origin": "http://page.test", "access-control-request-method": "POST"}
    assert guarded.client.options("/v1/chat/completions", headers=headers).status_code == 200
