"""Checks of several models behind one server: they come and go within a budget, and disturb nobody by that.

The server is one that `callboard serve --models-config` starts; clients speak HTTP and ZeroMQ.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from bench.ask import post
from bench.checks.report import Report
from bench.harness import RunningServer, is_running, wait_until
from bench.houses import house_of
from bench.models import other_tiny
from protocol import Client
from protocol.client.locate import ask_house
from protocol.errors import CallboardError
from protocol.messages import ModelAnswer, ModelOrder, ModelState

MODEL_TIME = 60.0  # seconds that loading or unloading one model may take here
STAY = 2.0  # seconds a model that was just loaded stays at least
PROMPTS = ("The capital of", "Once upon a time", "def main():", "Two and two", "A list of")


def no_model(tiny: Path, folder: Path) -> Path:
    """A folder that looks like a model and can't be loaded."""
    made = folder / "no-model"
    shutil.copytree(tiny, made)
    config = json.loads((made / "config.json").read_bytes())
    (made / "config.json").write_text(json.dumps(config | {"model_type": "nosuch"}))
    return made


@contextlib.contextmanager
def house(folder: Path, models: dict[str, dict[str, Any]], *arguments: str) -> Iterator[RunningServer]:
    """A server of these models, by name, with their settings."""
    lines = []
    for name, settings in models.items():
        lines += [f"[models.{json.dumps(name)}]", *(f"{key} = {json.dumps(value)}" for key, value in settings.items())]
    (folder / "models.toml").write_text("\n".join(lines))
    options = ["--models-config", str(folder / "models.toml"), *arguments]
    with house_of({}, *options) as server:
        yield server


def order(server: RunningServer, action: str, model: str = "") -> ModelAnswer:
    """Have the house do something about a model."""
    assert server.record is not None
    return ask_house(server.record.models, ModelOrder(1, action, model), MODEL_TIME)


def states(server: RunningServer) -> dict[str, ModelState]:
    """All models as they are now."""
    return {state.name: state for state in order(server, "list").models}


def connect(server: RunningServer, model: str) -> Client:
    """A ZeroMQ client of one model."""
    assert server.record is not None
    return Client(endpoint=server.record.models, model=model)


def by_http(server: RunningServer, model: str, prompt: str, tokens: int) -> str:
    """The answer of a model over HTTP. Raises AssertionError when there is none."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    answer = post(f"{server.url}/v1/completions", body, timeout=300)
    assert answer.status == 200, answer.body
    return str(answer.body["choices"][0]["text"])


def by_zmq(client: Client, prompt: str, tokens: int) -> str:
    """The same over ZeroMQ."""
    return client.generate(prompt, max_tokens=tokens, temperature=0, ignore_eos=True).text()


def cast_of(server: RunningServer, model: str) -> psutil.Process:
    """The process that supervises a loaded model's actors."""
    found = [line for line in _log(server) if line.get("event") == "loading" and line["model"] == model]
    return psutil.Process(found[-1]["child"])


def _log(server: RunningServer) -> list[dict[str, Any]]:
    return [event for line in server.log().splitlines() for event in _events(line)]


def _events(line: str) -> list[dict[str, Any]]:
    """What a line of the log says; where two processes wrote at once, it may hold several events, or none."""
    found: list[dict[str, Any]] = []
    try:
        while line.startswith("{"):
            event, end = json.JSONDecoder().raw_decode(line)
            found.append(event)
            line = line[end:]
    except ValueError:
        pass
    return found


def _memory(server: RunningServer) -> int:
    """Bytes of all processes of a server."""
    total = 0
    for process in [server_process(server), *server_process(server).children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            total += process.memory_info().rss
    return total


def server_process(server: RunningServer) -> psutil.Process:
    """The process of the house."""
    assert server.record is not None
    return psutil.Process(server.record.pid)


class CastWatch(threading.Thread):
    """Notes which processes each cast has, and whether one of them is left when the house says that it is unloaded."""

    def __init__(self, server: RunningServer) -> None:
        super().__init__(daemon=True)
        self._server = server
        self._process = server_process(server)
        self._pids: dict[str, set[int]] = {}
        self._read = 0
        self._done = threading.Event()
        self.left: list[str] = []
        self.unloads = 0
        self.most_casts = 0

    def run(self) -> None:
        """Look ten times a second."""
        while not self._done.wait(0.1):
            self._look()

    def _look(self) -> None:
        casts = 0
        with contextlib.suppress(psutil.Error):
            for child in self._process.children():
                with contextlib.suppress(psutil.Error):
                    command = child.cmdline()
                    if "--house" in command and is_running(child.pid):
                        casts += 1
                        name = f"cast{command[command.index('--index') + 1]}"
                        mine = {child.pid, *(actor.pid for actor in child.children(recursive=True))}
                        self._pids.setdefault(name, set()).update(mine)
        self.most_casts = max(self.most_casts, casts)
        lines = self._server.log().splitlines()
        for line in lines[self._read :]:
            for event in _events(line):
                if event["event"] != "unloaded":
                    continue
                self.unloads += 1
                cast = event["cast"]
                self.left += [f"{cast}: {pid}" for pid in self._pids.get(cast, ()) if is_running(pid)]
        self._read = len(lines)

    def stop(self) -> None:
        """End the watch."""
        self._done.set()
        self.join()


def mixed(
    report: Report,
    server: RunningServer,
    models: list[str],
    *,
    requests: int,
    threads: int,
    tokens: int,
    expected: dict[tuple[str, str], str],
) -> None:
    """Requests to models in random order, half of the threads over HTTP and half over ZeroMQ, with the texts that each
    model gave alone; what was unloaded is gone, and nobody waited longer than for those before it."""
    random_ = random.Random(7)
    work = [(random_.choice(models), random_.choice(PROMPTS)) for _ in range(requests)]
    wrong: list[str] = []
    waits: list[tuple[float, str]] = []
    lock = threading.Lock()
    watch = CastWatch(server)
    watch.start()

    def run(number: int) -> None:
        with contextlib.ExitStack() as stack:
            clients: dict[str, Client] = {}
            while True:
                with lock:
                    if not work:
                        return
                    model, prompt = work.pop()
                began = time.monotonic()
                try:
                    if number % 2:
                        text = by_http(server, model, prompt, tokens)
                    else:
                        if model not in clients:
                            clients[model] = stack.enter_context(connect(server, model))
                        text = by_zmq(clients[model], prompt, tokens)
                    if text != expected[model, prompt]:
                        wrong.append(f"{model}: {text!r}")
                except (AssertionError, CallboardError, OSError) as error:
                    wrong.append(f"{model}: {type(error).__name__} {error}")
                waits.append((time.monotonic() - began, model))

    running = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    began = time.monotonic()
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    report.measured("mixed_seconds", round(time.monotonic() - began, 1))
    watch.stop()
    report.expect(len(waits) == requests and not wrong, f"{requests} mixed requests have the right texts", wrong[:3])
    report.measured("unloads", watch.unloads)
    report.expect(watch.unloads > 0 and not watch.left, "after each unload its processes are gone", watch.left[:3])
    report.measured("most_casts_at_once", watch.most_casts)
    _waited(report, server, models, waits)


def _waited(report: Report, server: RunningServer, models: list[str], waits: list[tuple[float, str]]) -> None:
    log = _log(server)
    loads = [line["seconds"] for line in log if line["event"] == "loaded"]
    turn = 2 * max(*loads, STAY) + _longest_unload(log)
    report.measured("loads", len(loads))
    report.measured("longest_load_seconds", max(loads))
    longest = max(waits)
    report.measured("longest_wait_seconds", [round(longest[0], 2), longest[1]])
    report.measured("median_wait_seconds", round(sorted(waits)[len(waits) // 2][0], 2))
    allowed = len(models) * turn
    report.measured("load_and_queue_seconds", round(allowed, 1))
    report.expect(longest[0] <= allowed, "nobody waited longer than for loading and those before it", longest)


def _longest_unload(log: list[dict[str, Any]]) -> float:
    from datetime import datetime

    longest, began = 0.0, {}
    for line in log:
        if line["event"] in ("unloading", "unloaded"):
            at = datetime.fromisoformat(line["timestamp"]).timestamp()
            if line["event"] == "unloading":
                began[line["cast"]] = at
            else:
                longest = max(longest, at - began.get(line["cast"], at))
    return longest


def alone(server: RunningServer, models: list[str], tokens: int) -> dict[tuple[str, str], str]:
    """What each model says to each prompt, asked one after the other."""
    expected = {}
    for model in models:
        with connect(server, model) as client:
            for prompt in PROMPTS:
                expected[model, prompt] = by_zmq(client, prompt, tokens)
    return expected


def memory_returns(report: Report, server: RunningServer, model: str) -> None:
    """Loading a model takes memory, and unloading it gives all of that back, with its processes."""
    order(server, "unload", model)
    before = _memory(server)
    order(server, "load", model)
    with connect(server, model) as client:
        by_zmq(client, PROMPTS[0], 8)
    cast = cast_of(server, model)
    pids = [cast.pid, *(actor.pid for actor in cast.children(recursive=True))]
    during = _memory(server)
    answer = order(server, "unload", model)
    left = [pid for pid in pids if is_running(pid)]
    after = _memory(server)
    report.measured(f"{model}_megabytes_before_during_after", [round(b / 1e6) for b in (before, during, after)])
    report.expect(
        not answer.code and not left, f"{model}: its {len(pids)} processes are gone when that is answered", left
    )
    given_back = (during - after) / max(during - before, 1)
    report.expect(given_back > 0.95, f"{model}: its memory is given back", round(given_back, 3))


def kill_cast(report: Report, server: RunningServer, killed: str, other: str, tokens: int) -> None:
    """SIGKILL of a model's cast ends that model's processes and nothing else; the next request has it loaded again."""
    with connect(server, other) as client, connect(server, killed) as victim:
        undisturbed = by_zmq(client, PROMPTS[0], tokens)
        said = by_zmq(victim, PROMPTS[0], 8)
        cast = cast_of(server, killed)
        pids = [cast.pid, *(actor.pid for actor in cast.children(recursive=True))]
        stream = client.generate(PROMPTS[0], max_tokens=tokens, temperature=0, ignore_eos=True)
        text = next(stream).text
        os.kill(cast.pid, signal.SIGKILL)
        text += stream.text()
        report.expect(text == undisturbed, f"a stream of {other} goes on while {killed} is killed")
        wait_until(lambda: not any(is_running(pid) for pid in pids), 10, "the killed cast's processes are gone")
        report.expect(by_zmq(victim, PROMPTS[0], 8) == said, f"{killed} comes back for the next ZeroMQ request")
    report.expect(by_http(server, killed, PROMPTS[0], 8) == said, f"{killed} answers over HTTP again")


def cannot_load(report: Report, server: RunningServer, broken: str, other: str) -> None:
    """A model that can't be loaded says why, and others answer meanwhile."""
    body = {"model": broken, "prompt": "x", "max_tokens": 1}
    answer = post(f"{server.url}/v1/completions", body, timeout=60)
    report.expect(answer.status == 503 and "nosuch" in str(answer.body), f"{broken} says why it fails", answer.body)
    refused = order(server, "load", broken)
    report.expect(refused.code != "" and "nosuch" in refused.message, "so does the house", refused.message)
    report.expect(by_http(server, other, PROMPTS[0], 8) != "", f"{other} answers")


def several(report: Report, tiny: Path, demo: Path, folder: Path, *, requests: int, threads: int) -> None:
    """Three tiny models and the demo model within a budget that holds two, one of them pinned."""
    models: dict[str, dict[str, Any]] = {
        "a": {"model": str(tiny), "memory": 1, "pin": True},
        "b": {"model": str(other_tiny(1000)), "memory": 1},
        "c": {"model": str(other_tiny(2000)), "memory": 1},
        "demo": {"model": str(demo), "memory": 1, "aliases": ["gpt-4o-mini"]},
        "broken": {"model": str(no_model(tiny, folder)), "memory": 1},
    }
    names = ["a", "b", "c", "demo"]
    with house(folder, models, "--models-memory", "2", "--load-wait", "300") as server:
        pinned = cast_of(server, "a").pid
        expected = alone(server, names, 16)
        different = len({expected[name, PROMPTS[0]] for name in names})
        report.expect(different == len(names), "each model has texts of its own", expected)
        memory_returns(report, server, "demo")
        said = by_http(server, "gpt-4o-mini", "The capital of France is", 3)
        report.expect("Paris" in said, "an alias answers as its model", said)
        mixed(report, server, names, requests=requests, threads=threads, tokens=16, expected=expected)
        kill_cast(report, server, "b", "a", 400)
        cannot_load(report, server, "broken", "a")
        now = states(server)
        report.expect(cast_of(server, "a").pid == pinned and now["a"].loads == 1, "the pinned one stayed", now["a"])
        memory_returns(report, server, "c")
        server.terminate()
        report.expect(server.wait(40) == 0 and not server.leftover(), "SIGTERM ends all of it", server.leftover())
