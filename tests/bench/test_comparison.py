"""What a comparison makes of its runs: ratios of pairs, the best peer, where ours loses, and who is asked again."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from bench import compare_report
from bench.checks.report import Report
from bench.compare import HELD, Contest, Place, earlier, judge, write
from bench.comparison import METRICS, OURS, Ratio, Run, Workload, best_peer, losses, ratio
from bench.load.plan import Plan
from bench.load.summary import Spread

PLAN = Plan(via="http", streams=2, requests=2, prompt_tokens=4, max_tokens=4)
WORKLOADS = [Workload(HELD, "Two streams", "tiny", PLAN, rounds=2)]


def run(server: str, pair: int, rate: float, ttft: float, *, done: int = 10, best: bool = False, note: str = "") -> Run:
    spread = Spread(ttft / 2, ttft, ttft, ttft)
    return Run(
        HELD,
        server,
        best,
        pair,
        rate,
        spread,
        spread,
        10,
        done,
        10 - done,
        memory_mib=rate,
        answers_after=0.1,
        note=note,
    )


RUNS = [
    run(OURS, 1, 100, 10),
    run("slow", 1, 20, 100),
    run(OURS, 2, 120, 12),
    run("slow", 2, 30, 90),
    run(OURS, 3, 110, 11),
    run("fast", 3, 25, 60),
    run(OURS, 4, 110, 11),
    run("fast", 4, 55, 5, best=True),
]


def test_ratios_are_of_pairs():
    assert ratio(RUNS, HELD, "slow", METRICS["throughput"]) == Ratio(4.0, 4.5, 5.0)
    assert str(Ratio(4.0, 4.5, 5.0)) == "4.50 (4.00–5.00)"
    assert ratio(RUNS, HELD, "nobody", METRICS["throughput"]) is None
    assert best_peer(RUNS, HELD) == "slow"
    assert best_peer(RUNS, HELD, best_settings=True) == "fast, best settings"


def test_what_is_judged_are_peers_as_shipped():
    report = Report()
    judge(report, RUNS, {HELD: 200.0}, held=True)
    assert report.failures == []
    assert report.figures["ttft_p99_share_of_the_shortest"] == pytest.approx(0.183)
    assert report.figures["part_of_the_bare_limit"] == 0.55
    report = Report()
    judge(report, [*RUNS, run(OURS, 5, 100, 40), run("fair", 5, 50, 45)], {}, held=True)
    assert len(report.failures) == 2
    report = Report()
    judge(report, [run(OURS, 1, 100, 10, done=9)], {}, held=True)
    assert any("no request of ours failed" in failure for failure in report.failures)


def test_losses_name_figure_and_peer_and_leave_out_latencies_of_those_who_failed():
    lost = {(loss.metric, loss.label) for loss in losses(RUNS, WORKLOADS)}
    assert ("TTFT p99", "fast, best settings") in lost
    assert ("memory", "slow") in lost
    assert "throughput" not in {metric for metric, _ in lost}
    failing = [run(OURS, 1, 100, 10), run("broken", 1, 10, 1, done=3)]
    assert {loss.metric for loss in losses(failing, WORKLOADS)} == {"memory"}


def test_the_report_shows_good_and_bad(tmp_path: Path):
    runs = [*RUNS, Run(HELD, "dead", False, 5, note="did not start: no such model")]
    text = compare_report.markdown(runs, WORKLOADS, {HELD: 220.0}, {"cores": 2})
    assert "The best peer as shipped is slow: ours is 4.50 (4.00–5.00) × as fast." in text
    assert "ours is 0.50 of it" in text
    assert "did not start: no such model" in text
    assert f"- {HELD}, TTFT p99: 2.20 of fast, best settings's" in text
    compare_report.plot(runs, WORKLOADS, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {
        f"{n}.svg" for n in ("throughput", "ttft-p99", "itl-p99", "memory")
    }


def test_figures_of_workloads_that_are_not_run_again_stay(tmp_path: Path):
    other = Workload("other", "Others", "tiny", PLAN)
    theirs = [msgspec.structs.replace(run, workload="other") for run in RUNS]
    write(tmp_path, [*RUNS, *theirs], [*WORKLOADS, other], {HELD: 220.0, "other": 10.0}, [])
    assert earlier(tmp_path, [other]) == (RUNS, {HELD: 220.0})
    assert earlier(tmp_path, WORKLOADS) == (theirs, {"other": 10.0})


def contest(ends: float, tmp_path: Path) -> Contest:
    return Contest(tmp_path, ("http://127.0.0.1:1", {}), lambda _: None, ends)


def test_a_peer_that_does_not_start_is_noted_and_not_asked_again(tmp_path: Path):
    starts = []

    @contextlib.contextmanager
    def start() -> Iterator[Place]:
        starts.append(1)
        raise RuntimeError("exited with 3\nand a long log")
        yield "", {}

    meeting = contest(time.monotonic() + 60, tmp_path)
    for _ in range(2):
        meeting.meet("broken", False, start, WORKLOADS)
    assert len(starts) == 1
    assert [run.note for run in meeting.runs] == ["did not start: exited with 3"]


def test_when_the_time_is_over_what_is_left_is_noted(tmp_path: Path):
    @contextlib.contextmanager
    def start() -> Iterator[Place]:
        yield "http://127.0.0.1:1", {}

    meeting = contest(time.monotonic() - 1, tmp_path)
    meeting.meet("late", False, start, WORKLOADS)
    assert [run.note for run in meeting.runs] == ["not run: the comparison's time was over"]
