"""The load harness on real servers: every stream against its solo run, its report, and what it takes by itself."""

import asyncio
import json
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import msgspec
import pytest

from bench import null_server
from bench.checks import loads
from bench.checks.report import Report
from bench.compare import Contest, write
from bench.comparison import Workload
from bench.harness import ROOT, RunningServer
from bench.load.driver import Progress, make_load, run_load
from bench.load.outcome import Outcome
from bench.load.plan import Plan


def test_streams_in_motion_have_the_tokens_of_their_solo_runs(server: RunningServer, report: Report, tiny_model: Path):
    plan = Plan(
        via="zmq",
        streams=24,
        requests=36,
        prompt_tokens=1,
        max_tokens=1,
        prompt_lengths="uniform:4:200",
        output_lengths="uniform:6:16",
        aborts=0.2,
        slow=0.1,
    )
    loads.parity(report, server, tiny_model, plan)
    assert report.failures == []
    assert report.figures["temperature 0: left"]["aborts"] > 0


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's classes")
def test_zeromqs_threads_take_no_core_from_the_engines(server: RunningServer):
    pid = server.pids()["engine"]
    threads = {each: (each / "comm").read_text().strip() for each in Path(f"/proc/{pid}/task").iterdir()}
    classes = {int(each.name): os.sched_getscheduler(int(each.name)) for each in threads}
    zeromq = {int(each.name) for each, name in threads.items() if name.startswith("ZMQbg")}
    assert len(zeromq) >= 2
    assert {tid for tid, kind in classes.items() if kind == os.SCHED_BATCH} == zeromq
    assert classes[pid] == os.SCHED_OTHER


def test_the_command_writes_figures_time_line_and_page(server: RunningServer, tmp_path: Path):
    command = [sys.executable, "bench/stress.py", "--url", server.url, "--quiet", "--streams", "6", "--requests", "10"]
    command += ["--turns", "2", "--prompt-tokens", "12", "--max-tokens", "6", "--arrivals", "poisson:100", "--parity"]
    command += ["--aborts", "0.2", "--vanish", "0.1", "--slow", "0.1"]
    command += ["--json", str(tmp_path / "run.json"), "--html", str(tmp_path / "run.html")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((tmp_path / "run.json").read_bytes())
    assert written["result"]["failed"] == 0
    assert written["result"]["parity"]["different"] == 0
    assert written["result"]["parity"]["compared"] >= written["result"]["completed"] > 0
    assert {"client", "engine", "streamer"} <= written["timeline"][-1]["memory"].keys()
    assert "<svg" in (tmp_path / "run.html").read_text()


def test_where_the_engine_s_time_goes_is_measured(server: RunningServer, report: Report):
    plan = Plan(via="http", streams=8, requests=8, prompt_tokens=8, max_tokens=30_000)
    loads.engine_busy(report, server, plan, seconds=0, bar=None)
    assert report.failures == []
    own = report.figures["own_figures"]
    assert 0.1 < own["model"] < 1
    assert sum(own[name] for name in ("model", "python", "sockets", "elsewhere")) > 0.99


def test_the_load_process_takes_more_than_a_server_brings(report: Report):
    loads.harness_limit(report, 100, 30, least=200)
    assert report.failures == []


def test_clients_that_vanish_count_as_such():
    plan = Plan(via="zmq", streams=8, requests=16, prompt_tokens=5, max_tokens=40, vanish=0.3, aborts=0.2)
    with null_server.running("zmq", step_ms=1) as (_, endpoint, _):

        async def run() -> list[Outcome]:
            async with make_load(plan, endpoint=endpoint) as load:
                return await run_load(load, Progress(plan))

        outcomes = asyncio.run(run())
    gone = [outcome for outcome in outcomes if outcome.left]
    assert {outcome.manner for outcome in gone} == {"vanishes", "aborts"}
    assert all(not outcome.error for outcome in outcomes)
    assert all(0 < outcome.arrivals <= 40 for outcome in outcomes)


def test_a_comparison_runs_in_pairs_and_is_written(server: RunningServer, tiny_model: Path, tmp_path: Path):
    plan = Plan(via="http", streams=4, requests=8, prompt_tokens=9, max_tokens=5)
    storm = msgspec.structs.replace(plan, max_tokens=40, aborts=0.5)
    workloads = [Workload("crowd", "A crowd", "tiny", plan), Workload("storm", "A storm", "tiny", storm)]
    contest = Contest(tiny_model, (server.url, server.pids()), lambda _: None, time.monotonic() + 60)
    with null_server.running("http", step_ms=1) as (url, _, pid):
        contest.meet("null", False, lambda: nullcontext((url, {"peer": pid})), workloads)
    assert [(run.server, run.pair) for run in contest.runs] == [
        ("callboard", 1),
        ("null", 1),
        ("callboard", 2),
        ("null", 2),
    ]
    assert all(run.failed == 0 and run.answers_after is not None for run in contest.runs), contest.runs
    assert contest.runs[3].left
    write(tmp_path, contest.runs, workloads, {}, [])
    assert "| null |" in (tmp_path / "report.md").read_text()
    assert str(tmp_path) not in (tmp_path / "compare.json").read_text()
