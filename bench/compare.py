"""Compare Callboard with other MLX servers: each in turn, on the same models and loads, in runs that interleave.

    python bench/compare.py                         everything, in under 40 minutes (`make compare`)
    python bench/compare.py --quick                 small loads on the tiny model, to see that it works
    python bench/compare.py --peers mlx_lm.server --workloads tiny-256 --out FOLDER
    python bench/compare.py --again --workloads demo-16     these anew; the figures of the others stay as they are

Peers run as shipped, and under some loads with their best settings. What a peer has not done after 120 s is given up
and reported as such; a peer that was cut, or failed altogether, is not asked again under that load. Writes
`report.md`, plots and `compare.json` into `bench/results/compare`. Nothing else should run meanwhile.
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from actors.supervisor import raise_file_limit
from bench import compare_report
from bench.ask import post
from bench.checks.report import Report
from bench.comparison import METRICS, OURS, Run, Workload, best_peer, median, of, ratio, run_of
from bench.facts import machine_facts, without_paths
from bench.harness import ROOT, RunningServer, exit_on_sigterm
from bench.load.plan import Plan
from bench.mlx_child import MlxChild
from bench.models import demo_folder, endless, tiny_model
from bench.peers import PEERS, Peer, installed, load, running

FOLDER = ROOT / "bench" / "results" / "compare"
CUT = 120.0  # seconds a run may take
LIMIT = 38 * 60.0  # seconds after which no further run begins
BAR, TTFT_SHARE = 3.5, 0.2
HELD = "tiny-256"  # the load that the bars are for
VOCABULARY = 49_152


def _plan(streams: int, prompt: int, tokens: int, **more: Any) -> Plan:
    given: dict[str, Any] = {"requests": streams, "vocab_size": VOCABULARY} | more
    return Plan(via="http", streams=streams, prompt_tokens=prompt, max_tokens=tokens, **given)


WORKLOADS = [
    Workload(HELD, "256 streams", "tiny", _plan(256, 220, 64), rounds=3, best=True),
    Workload("tiny-1", "One stream", "tiny", _plan(1, 220, 256)),
    Workload("tiny-32", "32 streams", "tiny", _plan(32, 220, 64)),
    Workload("tiny-128", "128 streams", "tiny", _plan(128, 220, 64)),
    Workload("shared-prefix", "A shared prefix", "tiny", _plan(32, 2100, 32, requests=64, shared_prefix=2048)),
    Workload(
        "long-prefill",
        "Long prompts among streams",
        "tiny",
        _plan(32, 64, 96, requests=64, prompt_lengths="choice:64x15,8000x1"),
    ),
    Workload("abort-storm", "Abort storm", "tiny", _plan(128, 220, 64, requests=512, aborts=0.6)),
    Workload("demo-1", "One stream of a real model", "demo", _plan(1, 64, 48)),
    Workload("demo-5", "5 streams of a real model", "demo", _plan(5, 64, 48)),
    Workload("demo-16", "16 streams of a real model", "demo", _plan(16, 64, 48), best=True),
]
QUICK = [
    Workload(HELD, "4 streams", "tiny", _plan(4, 20, 8), rounds=2, best=True),
    Workload("abort-storm", "Abort storm", "tiny", _plan(4, 20, 8, requests=8, aborts=0.6)),
]

Place = tuple[str, Mapping[str, int]]  # a server's address, and its processes
Start = Callable[[], AbstractContextManager[Place]]


class Contest:
    """Runs loads on one model: ours, which is up all the time, and whoever is its opponent, in pairs. `runs` grow."""

    def __init__(self, model: Path, ours: Place, say: Callable[[str], None], ends: float, cut: float = CUT) -> None:
        self.runs: list[Run] = []
        self._model = model
        self._ours = ours
        self._say = say
        self._ends = ends
        self._cut = cut
        self._pairs = 0
        self._out: set[tuple[str, str]] = set()  # servers that are not asked again, with the workload

    def meet(self, name: str, best: bool, start: Start, workloads: Sequence[Workload]) -> None:
        """One opponent under each workload, ours before it. It is started anew after it was cut."""
        label = f"{name}, best settings" if best else name
        left = [workload for workload in workloads if (label, workload.name) not in self._out]
        while left:
            try:
                with start() as place:
                    while left:
                        if time.monotonic() > self._ends:
                            for workload in left:
                                self._note(workload, name, best, "not run: the comparison's time was over")
                            return
                        run = self._pair(left.pop(0), name, best, place)
                        if run.note or run.answers_after is None:
                            break
            except (OSError, RuntimeError, TimeoutError) as error:
                reason = without_paths(str(error).strip().splitlines()[0])
                if not left:
                    return
                for workload in left:
                    self._note(workload, name, best, f"did not start: {reason}")
                return

    def _pair(self, workload: Workload, name: str, best: bool, place: Place) -> Run:
        self._pairs += 1
        plan = msgspec.structs.replace(workload.plan, seed=self._pairs)
        self._run(workload.name, OURS, False, self._ours, plan)
        named = msgspec.structs.replace(plan, model=str(self._model))
        run = self._run(workload.name, name, best, place, named)
        if run.note or not run.completed:
            self._out.add((run.label, workload.name))
        return run

    def _run(self, workload: str, name: str, best: bool, place: Place, plan: Plan) -> Run:
        url, pids = place
        summary = uvloop.run(load(url, pids, plan, self._model, self._cut))
        run = run_of(workload, name, best, self._pairs, summary, answers(url, plan.model))
        self._add(run)
        return run

    def _note(self, workload: Workload, name: str, best: bool, note: str) -> None:
        self._pairs += 1
        run = Run(workload.name, name, best, self._pairs, note=note)
        self._out.add((run.label, workload.name))
        self._add(run)

    def _add(self, run: Run) -> None:
        self.runs.append(run)
        figures = f"{run.tokens_per_second:9.1f} tokens/s, {run.failed} of {run.requests} failed, TTFT p99 "
        self._say(f"  {run.workload:14} {run.label:30} {figures}{run.ttft_ms.p99} ms {run.note}")


def answers(url: str, model: str) -> float | None:
    """How many seconds a request of one token takes; None when it gets no answer within 30."""
    body = {"prompt": "a", "max_tokens": 1} | ({"model": model} if model else {})
    began = time.monotonic()
    with contextlib.suppress(OSError):
        if post(f"{url}/v1/completions", body, timeout=30).status == 200:
            return round(time.monotonic() - began, 3)
    return None


def starter(peer: Peer, model: Path) -> Start:
    """Starts a peer on a model."""

    @contextlib.contextmanager
    def start() -> Iterator[Place]:
        with running(peer, model) as (url, pid):
            yield url, {"peer": pid}

    return start


def compare(
    workloads: Sequence[Workload], peers: Sequence[str], say: Callable[[str], None]
) -> tuple[list[Run], dict[str, float]]:
    """Run everything; the runs, and the bare limit's tokens per second of the load that the bars are for."""
    for name in peers:
        installed(PEERS[name])
    ends = time.monotonic() + LIMIT
    runs: list[Run] = []
    bare: dict[str, float] = {}
    for model in dict.fromkeys(workload.model for workload in workloads):
        folder = endless(tiny_model() if model == "tiny" else demo_folder())
        mine = [workload for workload in workloads if workload.model == model]
        with RunningServer(folder, ready_seconds=300) as server:
            contest = Contest(folder, (server.url, server.pids()), say, ends)
            for number in range(max(workload.rounds for workload in mine)):
                if number == 0 and (held := [workload for workload in mine if workload.name == HELD]):
                    bare[HELD] = bare_limit(folder, held[0].plan)
                for name in peers:
                    now = [workload for workload in mine if number < workload.rounds]
                    contest.meet(name, False, starter(PEERS[name], folder), now)
            for name in peers:
                at_best = [workload for workload in mine if workload.best]
                contest.meet(name, True, starter(PEERS[name].at_its_best(), folder), at_best)
            runs += contest.runs
    return runs, bare


def bare_limit(folder: Path, plan: Plan) -> float:
    """Tokens per second of the bare limit, the better of two runs."""
    with MlxChild("bench.bare_limit", str(folder)) as child:
        took: float = min(child.ask(msgspec.to_builtins(plan))["seconds"] for _ in range(2))
    return round(plan.streams * plan.max_tokens / took, 1)


def judge(report: Report, runs: Sequence[Run], bare: Mapping[str, float], *, held: bool) -> None:
    """What must show of 256 streams: throughput, TTFT, no failure of ours anywhere."""
    failed = {f"{run.workload} {run.pair}": run.failures for run in runs if run.server == OURS and run.failed}
    report.expect(not failed, "no request of ours failed", failed)
    silent = [run.workload for run in runs if run.server == OURS and run.answers_after is None]
    report.expect(not silent, "ours answered after every load", silent)
    best = best_peer(runs, HELD)
    if not best:
        return
    rate = ratio(runs, HELD, best, METRICS["throughput"])
    ours = median(of(runs, HELD, OURS), METRICS["TTFT p99"])
    peers = dict.fromkeys(run.label for run in runs if run.workload == HELD and run.server != OURS and not run.best)
    theirs = [p99 for label in peers if (p99 := median(of(runs, HELD, label), METRICS["TTFT p99"]))]
    report.measured("best_peer", best)
    report.measured("ratio_to_the_best", str(rate))
    if ours and theirs:
        report.measured("ttft_p99_share_of_the_shortest", round(ours / min(theirs), 3))
    if bare.get(HELD):
        mine = median(of(runs, HELD, OURS), METRICS["throughput"]) or 0.0
        report.measured("part_of_the_bare_limit", round(mine / bare[HELD], 3))
    if held and rate is not None:
        report.expect(rate.median >= BAR, f"at least {BAR} × the best peer's tokens per second", str(rate))
        share = ours / min(theirs) if ours and theirs else None
        report.expect(share is None or share <= TTFT_SHARE, f"TTFT p99 at most {TTFT_SHARE} of theirs", share)


def write(
    folder: Path, runs: Sequence[Run], workloads: Sequence[Workload], bare: Mapping[str, float], peers: Sequence[str]
) -> None:
    """Write figures, plots and the report."""
    folder.mkdir(parents=True, exist_ok=True)
    versions = {name: " ".join(PEERS[name].packages) for name in peers}
    facts = machine_facts() | {"peers": versions}
    result = {"runs": runs, "bare_limit": bare, "workloads": workloads, "machine": facts}
    text = msgspec.json.format(msgspec.json.encode(result), indent=1).decode()
    (folder / "compare.json").write_text(without_paths(text) + "\n")
    compare_report.plot(runs, workloads, folder)
    (folder / "report.md").write_text(without_paths(compare_report.markdown(runs, workloads, bare, facts)))


class _Result(msgspec.Struct):
    runs: list[Run]
    bare_limit: dict[str, float]


def earlier(folder: Path, workloads: Sequence[Workload]) -> tuple[list[Run], dict[str, float]]:
    """What `compare.json` in this folder has of other workloads."""
    there = msgspec.json.decode((folder / "compare.json").read_bytes(), type=_Result)
    names = {workload.name for workload in workloads}
    bare = {name: limit for name, limit in there.bare_limit.items() if name not in names}
    return [run for run in there.runs if run.workload not in names], bare


def compare_all(
    report: Report,
    workloads: Sequence[Workload],
    peers: Sequence[str],
    folder: Path,
    held: bool,
    *,
    again: bool = False,
) -> None:
    """Run, write and judge. With `again` the figures of other workloads that are in `folder` stay."""
    raise_file_limit()
    kept, kept_bare = earlier(folder, workloads) if again else ([], {})
    runs, bare = compare(workloads, peers, lambda line: print(line, flush=True))
    runs, bare = kept + runs, kept_bare | bare
    write(folder, runs, WORKLOADS if again else workloads, bare, peers)
    judge(report, runs, bare, held=held)


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small loads on the tiny model")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=list(PEERS), metavar="PEER")
    parser.add_argument("--workloads", nargs="*", metavar="NAME", help="only these")
    parser.add_argument("--again", action="store_true", help="keep the figures of other workloads from --out")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for report, figures and plots")
    args = parser.parse_args()
    exit_on_sigterm()
    chosen = [w for w in (QUICK if args.quick else WORKLOADS) if args.workloads is None or w.name in args.workloads]
    if not chosen:
        parser.error("no workload of these names: " + ", ".join(workload.name for workload in WORKLOADS))
    if args.again and not (args.out / "compare.json").exists():
        parser.error(f"there are no earlier figures in {args.out}; leave --again out, or name their folder by --out")
    report = Report(lambda line: print(line, flush=True))
    began = time.monotonic()
    compare_all(report, chosen, args.peers, args.out, held=not args.quick, again=args.again)
    report.measured("minutes", round((time.monotonic() - began) / 60, 1))
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
