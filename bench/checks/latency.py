"""Check of the latency of one small request on an idle server, against the engine's own time in the model for it."""

import statistics
from pathlib import Path

from bench import bare_chain
from bench.checks.report import Report
from bench.harness import RunningServer
from bench.latency import Sample, measure, p50_ms, table

RAW_MS = 1.0  # that a raw client's round trip may take beyond the engine's time in the model
HTTP_MS = 3.0


def latency(report: Report, model: Path, requests: int, *serve: str) -> None:
    """16 ids in, one id out, tiny model: the medians of the round trip over ipc and over HTTP.

    Each is held against the engine's time in the model for it, prefill and step, as docs/performance.md defines it.
    How much of the rest is in the engine, between its taking the request in and its sending the token, is shown, too;
    and what a bare chain of three processes takes beyond the model on this machine, before and after.
    """
    chains = [statistics.median(bare_chain.measure(model, requests))]
    with RunningServer(model, *serve) as server:
        samples = measure(server, requests)
    chains.append(statistics.median(bare_chain.measure(model, requests)))
    report.measured("bare_chain_beyond_the_model_ms", [round(chain * 1000, 3) for chain in chains])
    judge(report, samples)


def judge(report: Report, samples: dict[str, list[Sample]]) -> None:
    """Write down the figures, and whether they hold."""
    traced = [*samples["raw"], *samples["client"]]
    engine = statistics.median(sample.in_engine for sample in traced)
    model = statistics.median(sample.in_model for sample in traced)
    report.measured("requests_each_way", len(samples["raw"]))
    report.measured("engine_p50_ms", p50_ms([engine]))
    report.measured("engine_in_the_model_p50_ms", p50_ms([model]))
    over = {}
    for way, each in samples.items():
        total = statistics.median(sample.total for sample in each)
        # HTTP requests carry no marks: theirs is set against the engine's times for the others.
        beyond = [sample.total - (sample.in_model if sample.parts else model) for sample in each]
        over[way] = statistics.median(beyond) * 1000
        report.measured(f"{way}_round_trip_p50_ms", p50_ms([total]))
        report.measured(f"{way}_beyond_the_model_ms", round(over[way], 3))
        report.measured(f"{way}_beyond_the_engine_ms", round((total - engine) * 1000, 3))
    report.measured("parts_p50_ms_raw_and_client", {part: [raw, client] for part, raw, client in table(samples)})
    report.expect(over["raw"] <= RAW_MS, f"over ipc p50 ≤ the time in the model + {RAW_MS:g} ms", round(over["raw"], 3))
    report.expect(
        over["http"] <= HTTP_MS, f"over HTTP p50 ≤ the time in the model + {HTTP_MS:g} ms", round(over["http"], 3)
    )
