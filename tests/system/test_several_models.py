"""A server of two models: client libraries at once, commands and curl lines, and what of a key's limits outlives it."""

import io
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ollama
import psutil
import pytest

from bench.ask import post
from bench.checks import metrics, models, several_clients
from bench.checks.clients import openai_client
from bench.checks.report import Report
from bench.curl_lines import SEVERAL, curl_lines, run_curl
from bench.harness import RunningServer, is_running, wait_until
from bench.houses import house_of
from protocol.errors import MODEL_NOT_FOUND, RequestRejected
from server.cli import main

AT_ONCE = ("openai", "anthropic", "ollama", "langchain-openai")  # litellm takes long to import: `make verify-…` has it


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_client_libraries_at_once_each_choose_their_model(house: RunningServer, report: Report):
    several_clients.clients_at_once(report, house, ["alpha", "beta"], AT_ONCE)
    assert report.failures == []


def test_models_come_and_go_and_a_client_of_each_is_served(house: RunningServer):
    with models.connect(house, "alpha") as first:
        said = models.by_zmq(first, "Once", 8)
        assert models.by_http(house, "beta", "Once", 8) != said
        cast = models.cast_of(house, "alpha")
        pids = [cast.pid, *(actor.pid for actor in cast.children(recursive=True))]
        answer = models.order(house, "unload", "alpha")
        assert [state.state for state in answer.models] == ["unloaded"]
        assert not any(is_running(pid) for pid in pids)
        now = models.states(house)
        assert {name: state.state for name, state in now.items()} == {"alpha": "unloaded", "beta": "ready"}
        assert now["alpha"].memory == 0
        assert models.by_zmq(first, "Once", 8) == said  # over the house, which loads it again
    with pytest.raises(RequestRejected, match="no model 'c'") as error:
        models.connect(house, "c")
    assert error.value.code == MODEL_NOT_FOUND


def test_a_response_goes_on_with_another_model(house: RunningServer):
    with openai_client(house) as client:
        first = client.responses.create(model="alpha", input="Hello", max_output_tokens=4, temperature=0)
        ask = {"max_output_tokens": 4, "temperature": 0, "input": "And?"}
        second = client.responses.create(model="beta", previous_response_id=first.id, **ask)  # type: ignore[call-overload]  # a dict of options
        alone = client.responses.create(model="beta", **ask)  # type: ignore[call-overload]  # a dict of options
        assert second.usage.input_tokens > alone.usage.input_tokens + 4
        for kept in (first, second):
            assert client.responses.retrieve(kept.id).output_text == kept.output_text
            client.responses.delete(kept.id)


def test_its_record_says_how_long_a_stop_may_take(house: RunningServer):
    assert house.record is not None
    assert house.record.stop_time == 30 + 20  # to drain, and to write prefixes


def test_ollama_asks_for_either(house: RunningServer):
    with ollama.Client(house.url, trust_env=False) as client:
        assert client.generate("beta", keep_alive=-1).done_reason == "load"
        assert {model.model for model in client.ps().models} == {"alpha:latest", "beta:latest"}
        assert {model.model for model in client.list().models} == {"alpha:latest", "beta:latest"}
        assert client.show("beta").capabilities == ["completion", "tools"]


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(house: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command of ours and returns its exit code and what it wrote to stdout and stderr."""
    monkeypatch.setenv("CALLBOARD_HOME", str(house.home))

    def run(*arguments: str, said: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(said))
        code = main([*arguments])
        return code, *capsys.readouterr()

    return run


def test_commands(house: RunningServer, run: Run):
    assert run("pin", "alpha")[1].startswith("alpha is ready, pinned")
    assert run("unload", "alpha") == (1, "", "callboard: alpha is pinned; unpin it first\n")
    assert run("unpin", "alpha")[1].startswith("alpha is ready (")
    assert run("load", "alpha")[1].startswith("alpha is ready (")
    shown = run("ps")[1]
    for text in ("2 models", "alpha", "beta", house.url):
        assert text in shown
    shown = run("top", "--once", "--model", "alpha")[1]
    assert "alpha/engine" in shown
    assert "the last seconds" in shown


@pytest.mark.parametrize(
    "command",
    [
        *(["load", "none"], ["unload", "none"], ["pin", "none"], ["unpin", "none"], ["chat", "none"]),
        *(["bench", "--model", "none"], ["top", "--once", "--model", "none"]),
    ],
    ids=" ".join,
)
def test_commands_name_the_models_there_are(run: Run, command: list[str]):
    assert run(*command) == (1, "", "callboard: there is no model 'none'; there are alpha, beta\n")


@pytest.mark.parametrize("command", [["load", "alpha"], ["unload", "alpha"], ["pin", "alpha"], ["stop"]], ids=" ".join)
def test_commands_name_the_servers_there_are(run: Run, command: list[str]):
    named = [*command, "other"] if command == ["stop"] else [*command, "--name", "other"]
    assert run(*named) == (1, "", "callboard: no server called 'other' (running: house)\n")


def test_chat_talks_to_the_model_that_was_named(house: RunningServer, run: Run):
    options = ("--temperature", "0", "--max-tokens", "8")
    answers = {}
    for model in ("alpha", "beta"):
        code, shown, _ = run("chat", model, *options, said="Hi\n/exit\n")
        assert code == 0
        assert shown.startswith(f"{model}: /reset")
        body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 8}
        answers[model] = post(f"{house.url}/v1/chat/completions", body).body["choices"][0]["message"]["content"]
        assert answers[model] in shown
    assert answers["alpha"] != answers["beta"]


def test_bench_says_which_model_it_measures(run: Run, tmp_path: Path):
    few = ("--prompts", "20", "--batches", "1", "--tokens", "2", "--json", str(tmp_path / "bench.json"))
    shown = run("bench", *few)[1].splitlines()
    assert shown[:2] == ["Measuring alpha; --model takes another: beta", "alpha"]
    assert run("bench", "--model", "beta", *few)[1].splitlines()[0] == "beta"
    assert json.loads((tmp_path / "bench.json").read_bytes())["model"] == "beta"
    code, _, complaint = run("bench", "demo", "--model", "beta", *few)
    assert (code, "--model is for a running server" in complaint) == (1, True)


@pytest.mark.parametrize("line", [line for line in curl_lines() if SEVERAL in line])
def test_curl_lines_about_several_models_work(house: RunningServer, line: str):
    status, body = run_curl(line, house.url)
    assert status == 200, body


def test_an_unknown_model_is_named_with_those_there_are(house: RunningServer):
    answer = post(f"{house.url}/models/load", {"model": "gamma"})
    assert answer.status == 404
    assert "this server has 'alpha', 'beta'" in answer.body["error"]["message"]


def test_its_metrics_are_documented(house: RunningServer, report: Report):
    metrics.documented(report, house)
    assert report.failures == []


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_promtool_finds_nothing_in_its_metrics(house: RunningServer, report: Report):
    metrics.clean(report, house)
    assert report.failures == []


def test_a_house_that_is_killed_while_it_charges_a_key_ends_whole_and_begins_anew(tiny_model: Path, tmp_path: Path):
    (tmp_path / "keys.toml").write_text('[alice]\nkey = "of alice"\nrequests_per_hour = 3\n')
    home = Path(tempfile.mkdtemp(prefix="cb-", dir="/tmp"))
    arguments = ("--preload", "", "--api-key-file", str(tmp_path / "keys.toml"))

    def start() -> RunningServer:
        return house_of({"alpha": tiny_model, "beta": tiny_model}, *arguments, name="charged", home=home)

    def ask(server: RunningServer) -> int:
        """A request that is wrong in itself, and counts all the same."""
        return post(f"{server.url}/v1/completions", {}, headers={"authorization": "Bearer of alice"}).status

    try:
        with start() as server, ThreadPoolExecutor(1) as pool:
            assert [ask(server) for _ in range(2)] == [400, 400]
            pids = server.pids()
            worker = psutil.Process(pids["http0"])
            os.kill(pids["supervisor"], signal.SIGSTOP)
            asked = pool.submit(ask, server)
            wait_until(lambda: bool(_clients(worker)), 20, "the request is there, and its charge is not answered")
            os.kill(pids["supervisor"], signal.SIGKILL)
            with pytest.raises(OSError, match=r"(?i)clos|reset|refused"):
                asked.result(20)
            wait_until(lambda: not server.leftover(), 20, "no process is left")
        with start() as server:
            assert [ask(server) for _ in range(4)] == [400, 400, 400, 429]
            assert len([path for path in (home / "run").iterdir() if path.is_dir()]) == 1
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _clients(worker: psutil.Process) -> list[object]:
    return [one for one in worker.net_connections("tcp") if one.status == psutil.CONN_ESTABLISHED]
