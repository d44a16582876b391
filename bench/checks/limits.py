"""Checks of speed against what the model alone allows: a crowd against the bare limit, one stream against
`mlx_lm.generate`, several streams against one. Each compares runs that alternate in one check."""

import statistics
import time
from pathlib import Path

import msgspec
import uvloop

from bench.checks.crowds import run_plan
from bench.checks.report import Report
from bench.harness import RunningServer
from bench.load.plan import Plan
from bench.load.processor import ProcessorTime
from bench.mlx_child import MlxChild
from protocol import Client

PROMPT = range(1000, 1032)


def spread(values: list[float], digits: int = 3) -> list[float]:
    """Smallest, median and largest."""
    return [round(value, digits) for value in (min(values), statistics.median(values), max(values))]


def bare(report: Report, model: Path, plan: Plan, *, rounds: int, bar: float | None) -> None:
    """A crowd over HTTP against the same prompts prefilled and decoded in lockstep, `rounds` times each in turn.

    The first round warms both up. The ratio is the median over the other rounds. Without a `bar` it is only reported.
    """
    ratios, limits, rates, ttft, others = [], [], [], [], []
    failures: dict[str, int] = {}
    with RunningServer(model) as server, MlxChild("bench.bare_limit", str(model)) as child:
        for number in range(rounds + 1):
            now = msgspec.structs.replace(plan, seed=number)
            with ProcessorTime({"bare": child.pid}) as alone:
                took = child.ask(msgspec.to_builtins(now))
            with ProcessorTime(server.pids()) as together:
                summary = uvloop.run(run_plan(server, now))
            failures |= summary.failures
            if number:
                limits.append(plan.streams * plan.max_tokens / took["seconds"])
                rates.append(summary.tokens_per_second)
                ratios.append(rates[-1] / limits[-1])
                ttft.append(summary.ttft_ms)
                others.append([alone.others, together.others])
        peaks = summary.peak_memory_mib
    report.measured("streams", plan.streams)
    report.measured("bare_limit_tokens_per_second", spread(limits, 1))
    report.measured("tokens_per_second", spread(rates, 1))
    report.measured("ttft_p50_ms", spread([each.p50 or 0.0 for each in ttft], 1))
    report.measured("ttft_p99_ms", spread([each.p99 or 0.0 for each in ttft], 1))
    report.measured("itl_p99_ms", summary.itl_ms.p99)
    report.measured("peak_memory_mib", peaks)
    report.measured("processor_seconds", alone.seconds | together.seconds)
    report.measured("cores_used_by_others", others)
    report.measured("ratios", [round(ratio, 3) for ratio in ratios])
    ratio = statistics.median(ratios)
    report.measured("ratio", round(ratio, 3))
    report.expect(not failures, "no request failed", failures)
    if bar is not None:
        report.expect(ratio >= bar, f"at least {bar} × the bare limit (median of rounds)", round(ratio, 3))


def single_stream(report: Report, server: RunningServer, model: Path, *, tokens: int, rounds: int, bar: float) -> None:
    """One stream through the whole system over ZeroMQ against mlx_lm's own, alternating: tokens per second.

    The time to the first token is shown, too.
    """
    request = {"prompt": list(PROMPT), "tokens": tokens}
    ratios, ours, theirs, decode, first, their_first = [], [], [], [], [], []
    same = True
    with MlxChild("bench.single_stream", str(model)) as child, Client(endpoint=server.endpoint) as client:
        for number in range(rounds + 1):
            other = child.ask(request)
            times, ids = stream_times(client, tokens)
            same = same and ids == other["ids"]
            if number:
                theirs.append(tokens / other["times"][-1])
                ours.append(tokens / times[-1])
                ratios.append(ours[-1] / theirs[-1])
                decode.append((other["times"][-1] - other["times"][0]) / (times[-1] - times[0]))
                first.append(times[0])
                their_first.append(other["times"][0])
    report.measured("mlx_lm_tokens_per_second", spread(theirs))
    report.measured("tokens_per_second", spread(ours))
    report.measured("ratios", [round(ratio, 3) for ratio in ratios])
    report.measured("ratios_after_the_first_token", [round(ratio, 3) for ratio in decode])
    report.measured("prompt_tokens", len(PROMPT))
    report.measured("mlx_lm_first_token_ms", spread([1000 * seconds for seconds in their_first], 1))
    report.measured("first_token_ms", spread([1000 * seconds for seconds in first], 1))
    shares = [mine / other for mine, other in zip(first, their_first, strict=True)]
    report.measured("first_token_ratio", round(statistics.median(shares), 3))
    report.measured("same_tokens", same)
    ratio = statistics.median(ratios)
    report.measured("ratio", round(ratio, 3))
    report.expect(ratio >= bar, f"at least {bar} × mlx_lm.generate (median of rounds)", round(ratio, 3))


def stream_times(client: Client, tokens: int) -> tuple[list[float], list[int]]:
    """When each token of one stream arrived, in seconds from its start, and its ids."""
    began = time.perf_counter()
    stream = client.generate(ids=PROMPT, max_tokens=tokens, temperature=0, ignore_eos=True, return_ids=True)
    times, ids = [], []
    for delta in stream:
        times.append(time.perf_counter() - began)
        ids += delta.ids
    return times, ids


def scaling(
    report: Report, server: RunningServer, *, bars: dict[int, float], tokens: int, rounds: int, held: bool = True
) -> None:
    """Aggregate tokens per second of several streams at once against one alone, in rounds that go through all.

    `bars` maps a number of streams to how many times the one's rate theirs must be; not judged unless `held`.
    """
    rates: dict[int, list[float]] = {count: [] for count in (1, *bars)}
    failures: dict[str, int] = {}
    for number in range(rounds + 1):
        for count, found in rates.items():
            if count != 1 or number:
                plan = Plan(
                    via="zmq",
                    streams=count,
                    requests=count,
                    prompt_tokens=len(PROMPT),
                    max_tokens=tokens,
                    seed=number,
                    vocab_size=10_000,
                )
                summary = uvloop.run(run_plan(server, plan))
                failures |= summary.failures
                found.append(summary.tokens_per_second)
    report.measured("tokens_per_second", {str(count): found for count, found in rates.items()})
    report.expect(not failures, "no request failed", failures)
    for count, bar in bars.items():
        pairs = zip(rates[count][1:], rates[1], strict=True)
        ratio = round(statistics.median(many / one for many, one in pairs), 2)
        report.measured(f"ratio_of_{count}_streams", ratio)
        if held:
            report.expect(ratio >= bar, f"{count} streams at least {bar} × one (median of rounds)", ratio)
