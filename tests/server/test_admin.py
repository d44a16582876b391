"""The dashboard's endpoints: files, state, the log's end, cancelling, and who may ask."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from http_worker import HttpWorker

from protocol.figures import Counts, LiveStream, Sample
from protocol.messages import EngineStats, Figures, PrefixStats
from server.admin import FILES
from server.log_tail import MOST, read_tail

FIGURES = Figures(
    0,
    Counts({"finished stop": 2}, 50),
    EngineStats(step=40, running=1, prefix=PrefixStats(memory_tokens=5)),
    {"running": 1},
    streams=[LiveStream(1, "mine", "http-0.7", "running", tokens=3)],
    samples=[Sample(10.0, 20), Sample(11.0, 50)],
)


def test_the_page_and_all_it_refers_to_are_served(worker: HttpWorker):
    page = worker.client.get("/admin")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    for path in FILES.iterdir():
        text = path.read_text(encoding="utf-8")
        assert worker.client.get(f"/admin/{path.name}").text == text
        assert not re.search(r"(?:src|href|from|import|url)\W{1,3}(?:https?:)?//", text), "nothing from elsewhere"
        for name in re.findall(r'"/admin/([\w.]+)"', text):
            assert (FILES / name).is_file()


@pytest.mark.parametrize("name", ["nothing.js", "..%2fadmin.py", "%2e%2e/admin.py", ".hidden", "style.css%00.html"])
def test_nothing_else_is_served(worker: HttpWorker, name: str):
    assert worker.client.get(f"/admin/{name}").status_code in (400, 404)


def test_the_state_holds_what_was_asked_for(worker: HttpWorker):
    worker.streamer.figures = FIGURES
    body = worker.client.get("/admin/api/state?since=9.5&streams=7&log=0").json()
    asked = worker.streamer.asked[-1]
    assert (asked.since, asked.streams) == (9.5, 7)
    assert (body["status"], body["model"], body["context"]) == ("ok", "tiny", 4096)
    assert {actor["name"] for actor in body["actors"]} == {"streamer", "engine"}
    assert (body["engine"]["step"], body["prefix"]["memory_tokens"]) == (40, 5)
    assert body["streams"][0]["label"] == "mine"
    assert [row[body["samples"]["columns"].index("tokens")] for row in body["samples"]["rows"]] == [20, 50]
    assert any("connected to the streamer" in line for line in body["log"]["lines"])
    assert "log" not in worker.client.get("/admin/api/state").json()
    assert worker.client.get("/admin/api/state?since=x").status_code == 400


def test_a_stream_is_cancelled_by_its_number(worker: HttpWorker):
    assert worker.client.post("/admin/api/streams/1/cancel", json={}).status_code == 200
    assert worker.client.post("/admin/api/streams/2/cancel", json={}).status_code == 404
    assert worker.streamer.cancelled_rids == [1, 2]


def test_forms_of_other_sites_change_nothing(worker: HttpWorker):
    before = len(worker.streamer.cancelled_rids)
    for path in ("/admin/api/streams/1/cancel", "/admin/api/engine/replace"):
        assert worker.client.post(path, content="{}", headers={"content-type": "text/plain"}).status_code == 400
    assert len(worker.streamer.cancelled_rids) == before


def test_only_files_are_open_without_the_key(start_worker: Callable[..., HttpWorker]):
    guarded = start_worker(api_keys=["key"])
    assert guarded.client.get("/admin").status_code == 200
    assert guarded.client.get("/admin/app.js").status_code == 200
    assert guarded.client.get("/admin/api/state").status_code == 401
    assert guarded.client.post("/admin/api/streams/1/cancel", json={}).status_code == 401
    assert guarded.client.get("/metrics").status_code == 401
    assert guarded.client.get("/admin/api/state", headers={"authorization": "Bearer key"}).status_code == 200


def test_the_logs_end_is_read_in_whole_lines(tmp_path: Path):
    path = tmp_path / "log"
    assert read_tail(path, 0) == (0, [])
    path.write_bytes(b"one\ntwo\nthr")
    assert read_tail(path, 0) == (8, ["one", "two"])
    path.write_bytes(b"one\ntwo\nthree\n")
    assert read_tail(path, 8) == (14, ["three"])
    assert read_tail(path, 14) == (14, [])
    os.truncate(path, 4)  # it was begun anew
    assert read_tail(path, 14) == (4, ["one"])
    path.write_bytes(b"x" * 99 + b"\n" + b"".join(b"%09d\n" % i for i in range(MOST // 10 + 5)))
    end, lines = read_tail(path, 0)
    assert end == path.stat().st_size
    assert lines[-1] == f"{MOST // 10 + 4:09}"
    assert len(lines) <= MOST // 10
    assert all(len(line) == 9 for line in lines)
