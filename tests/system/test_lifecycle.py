"""Start and end of `callboard serve`: draining, stopping at once, and starts that fail with the cause."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from actors.blas import has_cuda_backend
from actors.priority import NICE
from bench.ask import get, post
from bench.harness import RunningServer, StartFailed, callboard, wait_until
from protocol import Client
from protocol.errors import CallboardError, RequestFailed, RequestRejected
from server.cli import main

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


def give(server: RunningServer, number: signal.Signals) -> None:
    """Send a signal; SIGTERM in the place of one that this process ignores (`nohup`), as what it starts then does."""
    assert server.process is not None
    server.process.send_signal(signal.SIGTERM if signal.getsignal(number) is signal.SIG_IGN else number)


def test_a_hang_up_lets_running_streams_finish_and_refuses_new_ones(tiny_model: Path):
    with RunningServer(tiny_model) as server, Client(endpoint=server.endpoint) as client:
        stream = client.generate(ids=[700, 800], max_tokens=800, **GREEDY)
        endless = client.generate(ids=[700], max_tokens=60_000, **GREEDY)  # the server drains until it is cancelled
        next(stream)
        next(endless)
        give(server, signal.SIGHUP)
        wait_until(lambda: server.health()["status"] == "draining", 20, "health says draining")
        refused = post(f"{server.url}/v1/completions", {"prompt": "a", "max_tokens": 1})
        assert refused.status == 503
        assert refused.error["code"] == "draining"
        assert int(refused.headers["retry-after"]) >= 1
        assert get(f"{server.url}/ready").status == 503
        with pytest.raises(RequestRejected, match="shutting down"):
            client.generate("a", max_tokens=1).text()
        assert 1 + sum(delta.count for delta in stream) == 800
        assert server.exit_code() is None
        endless.cancel()
        assert server.wait(20) == 0
        wait_until(lambda: not server.leftover(), 5, "nothing is left")
        assert not list((server.home / "run").iterdir())


def test_stop_now_sends_a_second_sigterm_which_stops_at_once(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    drain = ("--drain-timeout", "600")  # beyond the time of a test
    with RunningServer(tiny_model, *drain) as server, Client(endpoint=server.endpoint) as client:
        stream = client.generate(ids=[700, 800], max_tokens=60_000, **GREEDY)
        next(stream)
        errors: list[CallboardError] = []

        def read() -> None:
            try:
                stream.text()
            except CallboardError as error:
                errors.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        monkeypatch.setenv("CALLBOARD_HOME", str(server.home))
        assert main(["stop", "--now"]) == 0
        assert capsys.readouterr().out == f"{server.name} was stopped\n"
        server.wait(20)
        reader.join(20)
        assert [type(error) for error in errors] == [RequestFailed]
        assert errors[0].code == "server_stopped"
        wait_until(lambda: not server.leftover(), 5, "nothing is left")


def test_the_drain_ends_when_its_time_is_over(tiny_model: Path):
    with RunningServer(tiny_model, "--drain-timeout", "0.5") as server, Client(endpoint=server.endpoint) as client:
        stream = client.generate(ids=[700, 800], max_tokens=60_000, **GREEDY)
        next(stream)
        give(server, signal.SIGINT)
        with pytest.raises(RequestFailed) as failure:
            stream.text()
        assert failure.value.code == "server_stopped"
        assert server.wait(20) == 0


def test_a_single_model_comes_and_goes_by_commands(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    options = ("--lazy-load-model", "--auto-unload-idle-seconds", "900", "--memory-budget-gb", "3")
    with RunningServer(tiny_model, *options, "--served-model-name", "only") as server:
        monkeypatch.setenv("CALLBOARD_HOME", str(server.home))

        def run(*arguments: str) -> str:
            assert main([*arguments]) == 0
            return capsys.readouterr().out

        [held] = server.health()["models"]
        assert (held["name"], held["state"], held["loads"]) == ("only", "unloaded", 0)
        assert (held["claim"], held["idle_ttl"]) == (3 << 30, 900)
        assert re.search(rf"^{server.name} +only +{server.url} ", run("ps"), re.MULTILINE)
        assert run("load", "only", "--name", server.name).startswith("only is ready (")
        answer = post(f"{server.url}/v1/completions", {"model": "only", "prompt": "a", "max_tokens": 1})
        assert answer.status == 200
        assert run("unload", "only").startswith("only is unloaded (")
        assert run("stop", server.name) == f"{server.name} was stopped\n"
        assert server.wait(5) == 0
        assert server.leftover() == []


def fails_to_start(model: Path | str, *arguments: str, port: int = 0) -> str:
    """What a start that fails prints; it exits non-zero, without a traceback, and leaves no process behind."""
    server = RunningServer(model, *arguments, port=port, ready_seconds=60)
    with pytest.raises(StartFailed) as failure, server:
        pass
    assert server.leftover() == []
    assert failure.value.code not in (None, 0)
    assert "Traceback" not in failure.value.log
    return failure.value.log.strip().splitlines()[-1]


def test_a_missing_model_folder():
    assert "/no/such/model" in fails_to_start("/no/such/model")


def copy_of(model: Path, folder: Path) -> Path:
    """A copy of a model that a test may break."""
    return Path(shutil.copytree(model, folder / "broken"))


def test_an_unsupported_architecture(tiny_model: Path, tmp_path: Path):
    broken = copy_of(tiny_model, tmp_path)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "model_type": "nonesuch"}))
    last = fails_to_start(broken)
    assert "nonesuch" in last
    assert "engine" in last


def test_weights_that_are_cut_short(tiny_model: Path, tmp_path: Path):
    broken = copy_of(tiny_model, tmp_path)
    weights = broken / "model.safetensors"
    with open(weights, "r+b") as file:
        file.truncate(weights.stat().st_size // 2)
    assert "engine" in fails_to_start(broken)


def test_a_folder_without_a_tokenizer(tiny_model: Path, tmp_path: Path):
    broken = copy_of(tiny_model, tmp_path)
    (broken / "tokenizer.json").unlink()
    assert "tokenizer" in fails_to_start(broken)


def test_a_port_in_use(tiny_model: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert str(port) in fails_to_start(tiny_model, port=port)


def test_a_start_that_takes_too_long(tiny_model: Path):
    assert "--start-timeout" in fails_to_start(tiny_model, "--start-timeout", "0.01")


def test_a_name_that_cannot_be_one(tiny_model: Path):
    assert "name" in fails_to_start(tiny_model, "--name", "../up")


def test_http_says_loading_until_the_model_serves(tiny_model: Path):
    server = RunningServer(tiny_model, port=free_port())
    try:
        server.launch()
        seen: list[int] = []

        def ready() -> bool:
            try:
                seen.append(get(f"http://127.0.0.1:{server.wanted_port}/ready").status)
            except OSError:
                return False
            return seen[-1] == 200

        wait_until(ready, 60, "it is ready")
        assert set(seen) == {503, 200}
        server.wait_ready(5)
    finally:
        server.close()


def free_port() -> int:
    """A port that nobody listens on right now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def test_the_version():
    run = subprocess.run([callboard(), "--version"], capture_output=True, text=True, timeout=30, check=True)
    assert run.stdout.split()[0] == "callboard"


def test_what_serves_streams_goes_behind_the_engine(server: RunningServer):
    """On Linux where the CPU computes; the first thread of each process is asked."""
    if sys.platform != "linux" or has_cuda_backend():
        pytest.skip("priorities are set where the CPU computes, on Linux")
    nice = {name: os.getpriority(os.PRIO_PROCESS, pid) for name, pid in server.pids().items()}
    engine = nice.pop("engine")
    assert nice.pop("supervisor") == engine == os.getpriority(os.PRIO_PROCESS, 0)
    assert set(nice.values()) == {min(engine + NICE, 19)}
    assert {"http0", "http1", "streamer", "tokenizer0", "tokenizer1"} == set(nice)
