"""The figures of a real server: every HTTP worker tells the same, and they agree with what clients got."""

import shutil

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from bench.checks import metrics
from bench.checks.report import Report
from bench.harness import RunningServer, wait_until
from protocol import Client

NAMES = ("callboard_generated_tokens_total", "callboard_prompt_tokens_total", "callboard_itl_seconds_count")
FIRST = (
    *(f"callboard_{name}_seconds_{end}" for name in ("ttft", "received") for end in ("count", "sum")),
    *(f"callboard_{name}_seconds_sum" for name in ("tokenize", "queue", "prefill")),
)


def figures(server: RunningServer) -> dict[str, float]:
    """The sums of `NAMES` and `FIRST`, and finished requests; each request may go to another worker."""
    found: dict[str, float] = dict.fromkeys((*NAMES, *FIRST, "finished"), 0)
    for family in text_string_to_metric_families(httpx.get(f"{server.url}/metrics", trust_env=False).text):
        for sample in family.samples:
            if sample.name in NAMES or sample.name in FIRST:
                found[sample.name] = sample.value
            if sample.name == "callboard_requests_total" and sample.labels["outcome"] == "finished":
                found["finished"] += sample.value
    return found


def test_figures_agree_with_what_clients_got(server: RunningServer, client: Client):
    before = figures(server)
    streams = [client.generate(f"number {i}", max_tokens=12, ignore_eos=True) for i in range(8)]
    for stream in streams:
        stream.text()
    usages = [stream.end.usage for stream in streams if stream.end is not None]
    for _ in range(4):
        after = figures(server)
        assert after["finished"] - before["finished"] == 8
        assert after[NAMES[0]] - before[NAMES[0]] == sum(usage.completion_tokens for usage in usages) == 96
        assert after[NAMES[1]] - before[NAMES[1]] == sum(usage.prompt_tokens for usage in usages)
        assert after[NAMES[2]] - before[NAMES[2]] == 8 * 11


def test_http_requests_are_timed_from_their_arrival(server: RunningServer):
    body = {"prompt": "Hi", "max_tokens": 3, "ignore_eos": True}
    before = figures(server)
    for stream in (True, False):
        httpx.post(f"{server.url}/v1/completions", json=body | {"stream": stream}, trust_env=False).raise_for_status()
    grown: dict[str, float] = {}

    def told() -> bool:
        # The figures may come by another worker than the one that tells of the last request.
        after = figures(server)
        grown.update({name: after[name] - before[name] for name in FIRST})
        return grown[FIRST[0]] >= 2

    wait_until(told, 10, "both workers have told of their requests")
    assert grown[FIRST[0]] == grown[FIRST[2]] == 2
    inside = sum(grown[f"callboard_{part}_seconds_sum"] for part in ("tokenize", "queue", "prefill"))
    assert grown[FIRST[1]] > inside + grown[FIRST[3]]


def test_processes_are_watched(server: RunningServer):
    text = httpx.get(f"{server.url}/metrics", trust_env=False).text
    for name in server.pids():
        assert f'callboard_actor_up{{actor="{name}",model="tiny"}} 1.0' in text
        assert f'callboard_actor_memory_bytes{{actor="{name}",model="tiny"}} 0.0' not in text


def test_they_are_documented(server: RunningServer, report: Report):
    metrics.documented(report, server)
    assert report.failures == []


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_promtool_finds_nothing(server: RunningServer, report: Report):
    metrics.clean(report, server)
    assert report.failures == []
