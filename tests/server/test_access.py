"""Who may ask: named keys with limits, trusted hosts, TLS; and what of it is logged."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_streamer import embed
from http_worker import HttpWorker, chat, post

from protocol.messages import CallFailed, Embed, Embedded, Quota
from server.key_file import ApiKey, KeyFileError, digest_of, read_key_file

LIMITS = [Quota("requests", 5, 60.0), Quota("tokens", 100, 86400.0)]
ALICE = {"authorization": "Bearer of alice"}
BOSS = {"authorization": "Bearer of boss"}


@pytest.fixture(scope="module")
def guarded() -> HttpWorker:
    """A worker with a limited key and one for administrators."""
    keys = [ApiKey("alice", digest_of(b"of alice"), LIMITS), ApiKey("boss", digest_of(b"of boss"), admin=True)]
    worker = HttpWorker(api_keys=keys, trusted_hosts=["127.0.0.1", "*.example"])
    yield worker
    worker.close()


def test_a_key_is_charged_and_named_in_the_log(guarded: HttpWorker):
    assert guarded.client.post("/v1/chat/completions", json=chat(), headers=ALICE).status_code == 200
    line = guarded.wait_log(event="request", key="alice")
    assert "Hi" not in str(line)
    guarded.wait_until(lambda: len(guarded.streamer.charges) == 2)
    before, after = guarded.streamer.charges
    assert (before.name, before.quotas, before.requests, before.tokens) == ("alice", LIMITS, 1, 0)
    assert (after.requests, after.tokens) == (0, 5 + 3)
    guarded.client.post("/v1/chat/completions", json=chat(), headers=BOSS)
    assert len(guarded.streamer.charges) == 2


def test_what_is_embedded_counts_too(guarded: HttpWorker):
    for path, count in (("/v1/embeddings", 5), ("/api/embed", 5)):
        before = len(guarded.streamer.charges)
        answer = guarded.client.post(
            path, json={"model": "tiny", "input": ["one two", "and three more"]}, headers=ALICE
        )
        assert answer.status_code == 200
        guarded.wait_until(lambda before=before: len(guarded.streamer.charges) == before + 2)
        assert (guarded.streamer.charges[-1].requests, guarded.streamer.charges[-1].tokens) == (0, count)
        assert guarded.wait_log(event="request", path=path)["prompt_tokens"] == count


def test_a_client_that_goes_while_its_text_is_cut_leaves_nothing_and_pays(
    guarded: HttpWorker, monkeypatch: pytest.MonkeyPatch
):
    streamer = guarded.streamer
    held: list[Any] = []

    def only_ids(call: Embed) -> Embedded | CallFailed:
        return CallFailed(call.ref, "prompt_too_long", "5000 tokens", "input") if call.texts else embed(call)

    monkeypatch.setattr(streamer, "on_embed", only_ids)
    monkeypatch.setattr(streamer, "on_tokenize", lambda *call: held.append(call))
    charges, calls = len(streamer.charges), len(streamer.embeds)
    with guarded.connect() as raw:
        post(raw, "/api/embed", {"model": "tiny", "input": ["w " * 5000, "w w"]}, ALICE)
        streamer.wait_for(lambda: held)
        assert guarded.supervisor.probe().streams == 1
    monkeypatch.setattr(streamer, "on_tokenize", streamer.tokenize)
    streamer.tokenize(*held[0])
    guarded.wait_until(lambda: guarded.supervisor.probe().streams == 0)
    guarded.wait_until(lambda: len(streamer.charges) == charges + 2)
    assert len(held) == 1
    assert [len(call.ids) for call in streamer.embeds[calls:]] == [0, 2]
    assert (streamer.charges[-1].requests, streamer.charges[-1].tokens) == (0, 4096 + 2)
    answer = guarded.client.post("/api/embed", json={"model": "tiny", "input": ["w " * 5000]}, headers=ALICE)
    assert answer.json()["prompt_eval_count"] == 4096


def test_beyond_its_limits_a_key_gets_429(guarded: HttpWorker):
    guarded.streamer.on_charge = lambda charge: CallFailed(charge.ref, "rate_limit_exceeded", "slower", "", 7.2)
    for path, kind in (("/v1/chat/completions", "rate_limit_error"), ("/v1/messages", "rate_limit_error")):
        answer = guarded.client.post(path, json=chat(max_tokens=5), headers=ALICE)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "8")
        assert answer.json()["error"]["type"] == kind
    assert guarded.client.get("/v1/models", headers=ALICE).status_code == 200


def test_only_administrators_look_behind_the_scenes(guarded: HttpWorker):
    for path in ("/metrics", "/admin/api/state"):
        assert guarded.client.get(path, headers=ALICE).status_code == 403
        assert guarded.client.get(path, headers=BOSS).status_code == 200


def test_hosts_that_are_not_trusted(guarded: HttpWorker):
    assert guarded.client.get("/health").status_code == 200
    assert guarded.client.get("/health", headers={"host": "a.example"}).status_code == 200
    assert guarded.client.get("/health", headers={"host": "evil.test"}).status_code == 400


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_https(start_worker: Callable[..., HttpWorker], tmp_path: Path):
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    subject = ["-subj", "/CN=localhost", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command = ["openssl", "req", "-x509", "-nodes", "-days", "2", *subject, "-keyout", key, "-out", cert]
    subprocess.run(command, check=True, capture_output=True)
    worker = start_worker(tls_cert=cert, tls_key=key, log_prompts=True)
    assert worker.url.startswith("https:")
    with worker.client.stream("POST", "/v1/chat/completions", json=chat("a secret", stream=True)) as answer:
        assert "world" in answer.read().decode()
    assert "a secret" in worker.wait_log(event="prompt")["body"]


def test_key_files(tmp_path: Path):
    path = tmp_path / "keys.toml"
    path.write_text(
        f'[alice]\nkey = "of alice"\nrequests_per_minute = 5\ntokens_per_day = 100\n'
        f'[boss]\nsha256 = "{digest_of(b"of boss")}"\nadmin = true\n'
    )
    alice, boss = read_key_file(path)
    assert alice == ApiKey("alice", digest_of(b"of alice"), LIMITS)
    assert boss == ApiKey("boss", digest_of(b"of boss"), admin=True)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "no key"),
        ("x", "not TOML"),
        ("alice = 1", r"\[alice\] must be a table"),
        ("[alice]", "needs either key"),
        ('[alice]\nkey = "a"\nsha256 = "b"', "needs either key"),
        ('[alice]\nsha256 = "b"', "64 hex digits"),
        ('[alice]\nkey = "a"\nrequests_per_week = 1', "requests_per_week"),
        ('[alice]\nkey = "a"\nrequests_per_day = 0', "above 0"),
        ('[alice]\nkey = "a"\nadmin = 1', "true or false"),
    ],
)
def test_key_files_that_are_wrong_say_where(tmp_path: Path, text: str, wrong: str):
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(KeyFileError, match=wrong):
        read_key_file(path)
