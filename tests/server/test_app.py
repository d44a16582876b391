"""The application without its process: faults of ours, and what the backend makes of the supervisor's words."""

import asyncio
from typing import Any

import httpx
import msgspec
import pytest
from fake_supervisor import system_state

import protocol.errors
from protocol.messages import Stop
from server.app import make_app
from server.backend import STALE_AFTER, Backend
from server.backends import Backends
from server.errors import ApiError, from_client_error
from server.options import HttpOptions
from server.schemas import HealthEngine, HealthPrefixCache


class ConnectedBackend(Backend):
    """Serves, but its client is broken."""

    def client(self) -> Any:
        return object()


def request(backends: Backends, method: str, path: str, body: Any = None, **options: Any) -> httpx.Response:
    async def send() -> httpx.Response:
        app = make_app(backends, HttpOptions(model_name="tiny", **options))

        async def with_state(scope: Any, receive: Any, send: Any) -> None:
            scope["state"] = {"abort": lambda: None}
            await app(scope, receive, send)

        transport = httpx.ASGITransport(with_state, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, json=body, headers={"origin": "http://page.test"})

    return asyncio.run(send())


@pytest.mark.parametrize("stream", [False, True])
def test_a_fault_of_ours_shows_no_details(stream: bool, capsys: pytest.CaptureFixture[str]) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": stream}
    backends = Backends(["tiny"], "http-0.1")
    backends.first = ConnectedBackend("tiny", "http-0.1")
    response = request(backends, "POST", "/v1/chat/completions", body, allow_origins=["*"])
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "object" not in response.text.replace('"object"', "")
    assert response.headers["x-request-id"]
    assert response.headers["access-control-allow-origin"] == "*"
    assert "AttributeError" in capsys.readouterr().out
    assert backends.in_work == 0


def test_every_code_of_the_protocol_has_a_place() -> None:
    names = [name for name in vars(protocol.errors) if name.isupper()]
    assert len(names) > 10
    for name in names:
        code = getattr(protocol.errors, name)
        error = from_client_error(protocol.errors.CallboardError(code, ""))
        body = msgspec.json.decode(error.body())["error"]
        assert body["code"] in (code, "context_length_exceeded")
        assert error.status in (400, 404, 429, 500, 503, 504)
        assert ("retry-after" in error.response().headers) == (error.status in (429, 503))
        assert body["message"]


def test_health_follows_the_supervisor() -> None:
    backends = Backends(["tiny"], "http-0.1")
    assert backends.status == "loading"
    body = request(backends, "GET", "/health").json()
    assert body == {
        "status": "loading",
        "model": "tiny",
        "actors": [],
        "engine": dict.fromkeys(HealthEngine.__struct_fields__, 0),
        "prefix_cache": dict.fromkeys(HealthPrefixCache.__struct_fields__, 0),
    }


def test_silence_of_the_supervisor_shows() -> None:
    now = [100.0]
    backend = Backend("tiny", "http-0.1", clock=lambda: now[0])
    backend.on_state(system_state("ok", streamer_state="starting"))
    backend._client = object()  # type: ignore[assignment]  # a connection that is never used here
    assert backend.status == "ok"
    now[0] += STALE_AFTER + 1
    assert backend.status == "degraded"


def test_states_refuse_with_their_codes() -> None:
    def code(backend: Backend) -> str:
        with pytest.raises(ApiError) as caught:
            backend.client()
        assert caught.value.status == 503
        return caught.value.code

    backends = Backends(["tiny"], "http-0.1")
    backend = backends.first
    assert code(backend) == "loading"
    backend.on_state(system_state("failed", streamer_state="dead", message="the engine was killed"))
    assert code(backend) == "server_stopped"
    assert "the engine was killed" in request(backends, "GET", "/health").json()["message"]
    backend.on_state(system_state("draining", streamer_state="dead"))
    assert code(backend) == "draining"
    drained = Backend("tiny", "http-0.1")
    drained.on_state(system_state("ok", streamer_state="dead"))
    drained.on_drain()
    assert code(drained) == "draining"
    drained.on_stop(Stop("engine_lost", "the engine died"))
    assert code(drained) == "engine_lost"
