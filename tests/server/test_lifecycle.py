"""A worker's life between supervisor and streamer: loading, draining, stopping, and losing either of them."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_streamer import FakeStream
from fake_supervisor import FakeSupervisor, system_state
from http_worker import HttpWorker, chat, post, read_answer, read_until

from protocol.messages import Alive, Drain, StartFailed, Stop
from server.schemas import HealthEngine, HealthPrefixCache

StartWorker = Callable[..., HttpWorker]

OVERDUE = "graceful shutdown exceeded"  # what uvicorn says of connections that were not closed in time
API = [("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("GET", "/v1/models")]


def test_loading(start_worker: StartWorker) -> None:
    worker = start_worker(serving=False)
    for _ in range(2):
        for method, path in API:
            response = worker.client.request(method, path, json={})
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "loading"
            assert int(response.headers["retry-after"]) >= 1
        assert worker.client.get("/ready").status_code == 503
        health = worker.client.get("/health")
        assert health.status_code == 503
        assert health.json()["status"] == "loading"
        assert health.json()["model"] == "tiny"
        worker.tell(system_state("loading", worker.streamer.endpoint))
    worker.serve()
    assert worker.client.post("/v1/chat/completions", json=chat()).status_code == 200


def test_ready_report(start_worker: StartWorker) -> None:
    worker = start_worker(serving=False)
    ready = worker.supervisor.wait_ready()
    assert (ready.role, ready.index, ready.epoch, ready.pid) == ("http", 0, 7, worker.process.pid)
    worker.serve()
    assert worker.streamer.names == ["http-0.7"]


def test_health(worker: HttpWorker) -> None:
    for status, code in [("ok", 200), ("degraded", 200), ("draining", 503), ("failed", 503), ("loading", 503)]:
        worker.tell(system_state(status, worker.streamer.endpoint))
        response = worker.client.get("/health")
        assert (response.status_code, response.json()["status"]) == (code, status)
        assert worker.client.get("/ready").status_code == code
    worker.serve()
    assert worker.client.get("/health").json() == {
        "status": "ok",
        "model": "tiny",
        "actors": [
            {"name": "streamer", "pid": 4242, "state": "ready", "epoch": 3},
            {"name": "engine", "pid": 4243, "state": "ready", "epoch": 4},
        ],
        "engine": dict.fromkeys(HealthEngine.__struct_fields__, 0)
        | {"step": 12, "running": 2, "prefilling": 1, "waiting": 5}
        | {"seconds_in_model": 1.5, "decoded": 99, "cache_bytes": 4096},
        "prefix_cache": dict.fromkeys(HealthPrefixCache.__struct_fields__, 0)
        | {"hit_rate": 0.4, "memory_tokens": 30, "ssd_tokens": 10, "computed_tokens": 60},
    }


def test_probes_count_requests(worker: HttpWorker) -> None:
    worker.streamer.on_generate = FakeStream.accept
    alive = worker.supervisor.probe()
    assert alive == Alive("http", 0, 7, worker.supervisor.probe().seq - 1, http=alive.http)
    with worker.connect() as raw:
        post(raw, "/v1/chat/completions", chat(stream=True))
        worker.streamer.stream()
        assert worker.supervisor.probe().streams == 1
        worker.streamer.stream().finish()
        worker.wait_until(lambda: worker.supervisor.probe().streams == 0)


def test_many_orders_at_once_are_all_obeyed(worker: HttpWorker) -> None:
    """The control socket's descriptor tells of changes only."""
    before = worker.supervisor.probe().seq
    for _ in range(50):
        for _ in range(20):
            worker.supervisor.order(system_state("ok", worker.streamer.endpoint))
        worker.supervisor.probe()
    assert worker.supervisor.probe().seq == before + 51


def test_drain(start_worker: StartWorker) -> None:
    worker = start_worker()
    worker.streamer.on_generate = FakeStream.accept
    with worker.connect() as raw:
        post(raw, "/v1/chat/completions", chat(stream=True))
        stream = worker.streamer.stream()
        worker.supervisor.order(Drain(30))
        assert worker.supervisor.probe().streams == 1
        response = worker.client.post("/v1/chat/completions", json=chat())
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "draining"
        assert int(response.headers["retry-after"]) >= 1
        assert worker.client.get("/health").json()["status"] == "draining"
        stream.text("still here")
        stream.finish()
        assert b"still here" in read_until(raw, b"[DONE]")
    worker.wait_until(lambda: worker.supervisor.probe().streams == 0)


def test_stop_ends_every_request(start_worker: StartWorker) -> None:
    worker = start_worker()
    worker.streamer.on_generate = FakeStream.accept
    with worker.connect() as streaming, worker.connect() as whole, worker.connect() as waiting:
        post(streaming, "/v1/chat/completions", chat(stream=True))
        worker.streamer.stream(count=1).text("Hello")
        read_until(streaming, b'"Hello"')
        post(whole, "/v1/chat/completions", chat())
        post(waiting, "/v1/chat/completions", chat(stream=True))
        worker.streamer.stream(count=3)
        worker.supervisor.order(Stop("engine_lost", "the engine was killed"))
        data = streaming.makefile("rb").read()
        assert b'data: {"error":{"message":"the engine was killed"' in data
        assert b"data: [DONE]" in data
        for raw in (whole, waiting):
            head, body = raw.makefile("rb").read().split(b"\r\n\r\n", 1)
            assert head.startswith(b"HTTP/1.1 503")
            assert b"retry-after" in head
            assert json.loads(body)["error"]["code"] == "engine_lost"
        assert worker.process.wait(10) == 0
        assert OVERDUE not in worker.log_text()


def test_stop_does_not_wait_for_those_who_read_nothing(start_worker: StartWorker) -> None:
    worker = start_worker()
    worker.streamer.on_generate = FakeStream.accept
    with worker.connect(receive_buffer=16384) as raw, worker.connect():
        post(raw, "/v1/chat/completions", chat(stream=True))
        worker.streamer.stream().text(*["x" * 200_000] * 60)
        assert worker.streamer.never(lambda: worker.streamer.stream().credit >= 64, seconds=0.3)
        worker.supervisor.order(Stop("server_stopped", "stopped"))
        assert worker.process.wait(10) == 0
        assert OVERDUE not in worker.log_text()


def test_signals_are_the_supervisors_business(worker: HttpWorker) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(worker.process.pid, number)
    assert worker.client.post("/v1/chat/completions", json=chat()).status_code == 200
    assert worker.process.poll() is None


def test_the_lifeline_ends_it(start_worker: StartWorker) -> None:
    worker = start_worker()
    worker.drop_lifeline()
    assert worker.process.wait(10) == 1


def test_a_dead_streamer_fails_its_streams_at_once(start_worker: StartWorker) -> None:
    worker = start_worker()
    worker.streamer.on_generate = FakeStream.accept
    with worker.connect() as raw:
        post(raw, "/v1/chat/completions", chat(stream=True))
        worker.streamer.stream().text("Hello")
        read_until(raw, b'"Hello"')
        worker.tell(system_state("degraded", worker.streamer.endpoint, streamer_state="dead"))
        data = read_until(raw, b"[DONE]")  # though it answers pings
        assert b'"code":"server_lost"' in data
    response = worker.client.post("/v1/chat/completions", json=chat())
    assert response.status_code == 503
    assert response.headers["retry-after"]
    assert worker.client.get("/health").status_code == 200


def test_a_slow_reader_loses_its_streamer(start_worker: StartWorker) -> None:
    worker = start_worker()
    worker.streamer.on_generate = FakeStream.accept
    with worker.connect(receive_buffer=16384) as raw:
        post(raw, "/v1/completions", {"prompt": ["a", "b"], "stream": True})
        for stream in (worker.streamer.stream(0, 2), worker.streamer.stream(1, 2)):
            stream.text(*["x" * 200_000] * 60)
        assert worker.streamer.never(lambda: worker.streamer.stream(0).credit >= 60, seconds=0.3)
        worker.tell(system_state("degraded", worker.streamer.endpoint, streamer_state="dead"))
        assert b'"code":"server_lost"' in read_until(raw, b"[DONE]")[-1000:]
    worker.wait_until(lambda: worker.supervisor.probe().streams == 0)


def test_a_new_streamer_takes_over(start_worker: StartWorker) -> None:
    worker = start_worker()
    old, worker.streamer = worker.streamer, worker.new_streamer(incarnation=2)
    worker.tell(system_state("degraded", old.endpoint, streamer_state="dead"))
    worker.tell(system_state("ok", worker.streamer.endpoint, epoch=9, streamer_state="starting"))
    assert worker.client.post("/v1/chat/completions", json=chat()).status_code == 503
    worker.serve(epoch=9)
    assert worker.client.post("/v1/chat/completions", json=chat()).status_code == 200
    assert len(worker.streamer.streams) == 1
    assert old.streams == []


def test_a_streamer_replaced_without_notice(start_worker: StartWorker) -> None:
    worker = start_worker()
    worker.streamer.on_generate = FakeStream.accept
    with worker.connect() as raw:
        post(raw, "/v1/chat/completions", chat())
        worker.streamer.stream()
        worker.streamer = worker.new_streamer(incarnation=2)
        worker.serve(epoch=9)
        status, body = read_answer(raw)
        assert status == 503
        assert b"server_lost" in body


def test_a_silent_streamer_is_left_and_found_again(start_worker: StartWorker) -> None:
    worker = start_worker()
    worker.streamer.on_generate = lambda stream: stream.text("Hello")
    with worker.connect() as raw:
        post(raw, "/v1/chat/completions", chat(stream=True))
        worker.streamer.stream()
        worker.streamer.silent = True
        assert b'"code":"server_lost"' in read_until(raw, b"[DONE]")
    assert worker.client.get("/health").json()["status"] == "degraded"
    assert worker.client.post("/v1/chat/completions", json=chat()).json()["error"]["code"] == "server_lost"
    worker.streamer.silent = False
    worker.serve()


def test_a_streamer_that_is_not_there_yet(start_worker: StartWorker) -> None:
    worker = start_worker(serving=False)
    worker.tell(system_state("ok", f"ipc://{worker.run_dir}/nobody"))
    assert worker.client.post("/v1/chat/completions", json=chat()).json()["error"]["code"] == "loading"
    worker.serve(epoch=9)  # while the attempt at the one before goes on
    assert "no connection to the streamer" not in worker.log_text()
    worker.supervisor.order(Stop("server_stopped", "stopped"))
    assert worker.process.wait(10) == 0


def test_bad_options_are_reported(tmp_path: Path, callboard_home: Path) -> None:
    run_dir = callboard_home / "bad-options"
    run_dir.mkdir()
    supervisor = FakeSupervisor(run_dir)
    read_end, write_end = os.pipe()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [
            sys.executable,
            "-P",
            "-m",
            "server.worker",
            "--run",
            str(run_dir),
            "--index",
            "0",
            "--epoch",
            "7",
        ]
        command += [
            "--lifeline",
            str(read_end),
            "--socket",
            str(listener.fileno()),
            "--options",
            '{"model_name": 5}',
        ]
        process = subprocess.run(
            command, pass_fds=(read_end, listener.fileno()), capture_output=True, timeout=10, check=False
        )
    assert process.returncode == 1
    failed = supervisor.wait_for(lambda: next((r for r in supervisor.reports if isinstance(r, StartFailed)), None))
    assert "model_name" in failed.message
    os.close(read_end)
    os.close(write_end)
    supervisor.close()


def test_several_workers_share_one_socket(worker: HttpWorker) -> None:
    """Nothing in the worker minds that others accept from the same listening socket."""
    run_dir = worker.run_dir / "second"
    run_dir.mkdir()
    supervisor = FakeSupervisor(run_dir)
    read_end, write_end = os.pipe()
    listener = worker._listener
    command = [sys.executable, "-P", "-m", "server.worker", "--run", str(run_dir), "--index", "0", "--epoch", "7"]
    command += [
        "--lifeline",
        str(read_end),
        "--socket",
        str(listener.fileno()),
        "--options",
        '{"model_name":"tiny"}',
    ]
    process = subprocess.Popen(command, pass_fds=(read_end, listener.fileno()), stderr=subprocess.DEVNULL)
    try:
        supervisor.wait_ready()
        supervisor.order(system_state("ok", worker.streamer.endpoint))
        worker.wait_until(lambda: len(worker.streamer.names) >= 2)
        supervisor.probe()
        worker.streamer.on_generate = FakeStream.accept
        connections = [worker.connect() for _ in range(200)]
        for raw in connections:
            post(raw, "/v1/chat/completions", chat(stream=True))
        worker.streamer.stream(count=200)
        assert len({one.identity for one in worker.streamer.streams}) >= 1
        for one in worker.streamer.streams:
            one.finish()
        for raw in connections:
            read_until(raw, b"[DONE]")
            raw.close()
        supervisor.order(Stop("server_stopped", "stopped"))
        assert process.wait(10) == 0
        assert worker.client.get("/health").status_code == 200
    finally:
        os.close(write_end)
        os.close(read_end)
        process.kill()
        process.wait()
        supervisor.close()


@pytest.mark.parametrize("garbage", [b"", b"\xc1", b"\x91\x63"])
def test_unreadable_orders_are_skipped(worker: HttpWorker, garbage: bytes) -> None:
    worker.supervisor._outbox.append((b"http-0-7", garbage))
    assert worker.supervisor.probe()
