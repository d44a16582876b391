"""Checks against other MLX servers: the same crowd over HTTP for Callboard and for each peer as it comes, in turn."""

import statistics
from pathlib import Path

import msgspec
import uvloop

from bench.checks.limits import spread
from bench.checks.report import Report
from bench.harness import RunningServer
from bench.load.plan import Plan
from bench.load.summary import Summary
from bench.peers import load, measure

TTFT_SHARE = 0.2


def against_peers(
    report: Report, model: Path, plan: Plan, peers: list[str], *, bar: float | None, ttft: bool, held: bool = True
) -> None:
    """Callboard's tokens per second are at least `bar` times the best peer's, in one run.

    With `ttft` its TTFT p99 is also at most a fifth of the shortest of theirs. Callboard runs before each peer and
    after the last; its figure is the median.
    """
    ours: list[Summary] = []
    theirs: dict[str, Summary] = {}
    with RunningServer(model) as server:

        def run_ours() -> None:
            now = msgspec.structs.replace(plan, seed=len(ours))
            ours.append(uvloop.run(load(server.url, {"engine": server.pids()["engine"]}, now, model)))

        for name in peers:
            run_ours()
            theirs[name] = measure(name, model, plan)
        run_ours()
    rate = statistics.median(each.tokens_per_second for each in ours)
    report.measured("streams", plan.streams)
    report.measured("tokens_per_second", spread([each.tokens_per_second for each in ours], 1))
    report.measured("ttft_p99_ms", spread([each.ttft_ms.p99 or 0.0 for each in ours], 1))
    report.measured("peers_tokens_per_second", {name: each.tokens_per_second for name, each in theirs.items()})
    report.measured("peers_ttft_p99_ms", {name: each.ttft_ms.p99 for name, each in theirs.items()})
    report.measured("peers_failed", {name: each.failures for name, each in theirs.items() if each.failures})
    report.expect(not any(each.failures for each in ours), "no request of ours failed", [e.failures for e in ours])
    ratio = round(rate / max(each.tokens_per_second for each in theirs.values()), 2)
    report.measured("ratio_to_the_best", ratio)
    if bar is not None and held:
        report.expect(ratio >= bar, f"at least {bar} × the best peer's tokens per second", ratio)
    if ttft:
        shortest = min(each.ttft_ms.p99 for each in theirs.values() if each.ttft_ms.p99)
        share = round(statistics.median(each.ttft_ms.p99 or 0.0 for each in ours) / shortest, 3)
        report.measured("ttft_p99_share_of_the_shortest", share)
        if held:
            report.expect(share <= TTFT_SHARE, f"TTFT p99 at most {TTFT_SHARE} of the shortest of theirs", share)
