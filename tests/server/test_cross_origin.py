"""Requests that a browser sends for pages of other sites."""

from typing import Any

import pytest
from http_worker import HttpWorker, chat

PAGE = "http://page.test"  # let in by the worker of conftest.py


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.test"},
        {"origin": "http://evil.test", "sec-fetch-site": "cross-site"},
        {"origin": "http://127.0.0.1.evil.test:1", "sec-fetch-site": "same-site"},
        {"origin": "http://localhost@evil.test"},
        {"origin": "null"},
        {"origin": "http://[evil"},
        {"sec-fetch-site": "cross-site"},
    ],
)
def test_other_sites_are_refused(worker: HttpWorker, headers: dict[str, str]) -> None:
    before = len(worker.streamer.streams)
    for path in ("/v1/chat/completions", "/v1/messages", "/api/generate", "/models/load"):
        answer = worker.client.post(path, json=chat(), headers=headers)
        assert answer.status_code == 403
        assert "--allow-origins" in answer.text
    answer = worker.client.post("/v1/chat/completions", json=chat(), headers=headers)
    assert answer.json()["error"]["code"] == "origin_not_allowed"
    assert answer.json()["error"]["type"] == "permission_error"
    assert "access-control-allow-origin" not in answer.headers
    assert len(worker.streamer.streams) == before
    assert worker.client.get("/v1/models", headers=headers).status_code == 200  # which the page can't read


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": PAGE},
        {"origin": PAGE, "sec-fetch-site": "cross-site"},
        {"origin": "https://proxied.test", "sec-fetch-site": "same-origin"},
        {"sec-fetch-site": "none"},
        {"origin": "http://localhost:3000", "sec-fetch-site": "same-site"},
        {"origin": "http://[::1]:3000"},
        {"origin": "app://obsidian.md", "sec-fetch-site": "cross-site"},
        {"origin": "vscode-webview://1a2b"},
        {"origin": "http://{host}"},
    ],
)
def test_others_are_let_in(worker: HttpWorker, headers: dict[str, str]) -> None:
    own = {name: value.format(host=f"127.0.0.1:{worker.port}") for name, value in headers.items()}
    assert worker.client.post("/v1/chat/completions", json=chat(), headers=own).status_code == 200


def test_a_star_lets_all_in(start_worker: Any) -> None:
    worker = start_worker(allow_origins=["*"])
    answer = worker.client.post("/v1/chat/completions", json=chat(), headers={"origin": "http://evil.test"})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "*"
