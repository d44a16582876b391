"""Check of the dashboard's figures under load: what the page has, what `/metrics` has, what the stress harness saw.

The page's counts and rows are held against `/metrics`, at looks between which nothing changed; its plotted means of
TTFT and ITL against the means of `/metrics`; its throughput against the harness, over the same seconds. The means of
`/metrics` are held against the harness's; the harness's medians must lie in the bucket that has those of `/metrics`.
"""

import asyncio
import math
import re
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from statistics import mean, median

from bench import browser
from bench.ask import get
from bench.browser import Page
from bench.checks.dashboard import STATE
from bench.checks.report import Report
from bench.harness import RunningServer
from bench.load.driver import Progress, make_load, run_load
from bench.load.outcome import Outcome
from bench.load.plan import Plan
from protocol import Client
from protocol.errors import CallboardError

LABEL = "to be cancelled"
LOOK = 0.5  # seconds between two looks
_LINE = re.compile(r"^(\w+)(\{.*\})? (\S+)$", re.MULTILINE)
_OUTCOME = re.compile(r'outcome="(\w+)"')
_BOUND = re.compile(r'le="([^"]+)"')
UNITS = {"ms": 1e-3, "s": 1.0, "k": 1e3, "M": 1e6, "": 1.0}

Sample = dict[str, float]


def metrics(server: RunningServer) -> dict[str, float]:
    """Sums of `/metrics`: by name, requests by `requests OUTCOME`, and buckets by `NAME LE`."""
    found: dict[str, float] = {}
    # Not the library's parser: it would hold up the harness, which runs in this process.
    for name, labels, value in _LINE.findall(get(f"{server.url}/metrics").body):
        key = name
        if name == "callboard_requests_total":
            key = f"requests {_OUTCOME.findall(labels)[0]}"
        elif name.endswith("_bucket"):
            key = f"{name} {float(_BOUND.findall(labels)[0]):g}"
        found[key] = found.get(key, 0.0) + float(value)
    return found


def close(first: float, second: float, part: float = 0.02) -> bool:
    """Whether two figures agree."""
    return math.isclose(first, second, rel_tol=part, abs_tol=1e-9)


def worded(text: str) -> float:
    """The value of a figure as the page words it: seconds, or a count."""
    match = re.fullmatch(r"([\d.]+) ?(ms|s|k|M|)", text.strip())
    return float(match[1]) * UNITS[match[2]] if match else math.nan


@contextmanager
def load(server: RunningServer, plan: Plan) -> Iterator[tuple[Progress, list[Outcome]]]:
    """Run a plan beside the block, which is left when the plan has ended."""
    progress, outcomes = Progress(plan), list[Outcome]()

    async def run() -> None:
        async with make_load(plan, url=server.url, endpoint=server.endpoint) as way:
            outcomes.extend(await run_load(way, progress))

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        yield progress, outcomes
    finally:
        thread.join()


class Seen:
    """What the looks during a load found; those at the page and at `/metrics` count where nothing changed between."""

    def __init__(self) -> None:
        self.streams: list[tuple[float, float]] = []  # /metrics, and what the page asks for
        self.rows: list[tuple[float, float]] = []
        self.written: list[float] = []  # open streams as the page writes them
        self.speeds: list[float] = []  # tokens per second as the page writes them

    def look(self, server: RunningServer, page: Page, full: bool) -> None:
        """Look once. `full` says whether all streams of the harness are open."""
        before = metrics(server)
        state = get(f"{server.url}{STATE}?since=0").body
        after = metrics(server)
        if not full:
            return
        names = ("callboard_streams", "callboard_rows")
        engine = state["engine"]
        shown = (sum(state["phases"].values()), engine["running"] + engine["prefilling"] + engine["waiting"])
        for name, value, found in zip(names, shown, (self.streams, self.rows), strict=True):
            if before[name] == after[name]:
                found.append((before[name], value))
        self.written.append(float(page.text("#count") or 0))
        self.speeds.append(worded(page.text("#tiles .tile:nth-child(1) strong")))


def figures(report: Report, server: RunningServer, streams: int, rounds: int, tokens: int) -> None:
    """The page, `/metrics` and the stress harness agree on a load, during which the page cancels one more stream."""
    # A client that connects sees its own event loop, which opens many connections at once; a server sees requests.
    plan = Plan(
        via="http",
        streams=streams,
        requests=streams * rounds,
        prompt_tokens=64,
        max_tokens=tokens,
        vocab_size=49_152,
        connected=True,
    )
    before, seen = metrics(server), Seen()
    with browser.browser() as page:
        page.open(f"{server.url}/admin")
        page.wait(lambda: page.text("#status") == "ok")
        with load(server, plan) as (progress, outcomes):
            # Once the first tokens have come: the browser's work in between would hold up who waits for them.
            page.wait(lambda: progress.running == streams and progress.arrivals > 4 * streams)
            cancelled = _cancel_one(report, server, page, progress)
            while progress.completed + progress.failed < plan.requests:
                seen.look(server, page, progress.running == streams)
                time.sleep(LOOK)
        after = metrics(server)
        good = [outcome for outcome in outcomes if not outcome.error]
        report.expect(len(good) == plan.requests, "every request completed", len(good))
        page.wait(lambda: page.text("#count") == "")
        time.sleep(1.5)  # until the page has asked once more
        state = get(f"{server.url}{STATE}?since=0").body
        tiles = [page.text(f"#tiles .tile:nth-child({place}) strong") for place in range(1, 8)]
        faults = page.faults()
    columns = state["samples"]["columns"]
    samples = [dict(zip(columns, row, strict=True)) for row in state["samples"]["rows"]]
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    _counts(report, grown, good, cancelled, seen, streams)
    _latencies(report, grown, good)
    _plots(report, samples, grown, good, seen, streams)
    report.expect(
        state["generated"] == after["callboard_generated_tokens_total"], "the page's tokens are those of /metrics"
    )
    ended = sum(state["requests"].values())
    report.expect(tiles[5] == short(ended), "the page shows the requests that have ended", (tiles[5], ended))
    for tile, name in ((2, "ttft"), (3, "itl")):
        last = next((sample[name] for sample in reversed(samples[-30:]) if sample[name] > 0), 0.0)
        report.expect(close(worded(tiles[tile]), last), f"the page writes the latest {name}", (tiles[tile], last))
    report.expect(not faults, "the browser had nothing to complain about", faults)


def _cancel_one(report: Report, server: RunningServer, page: Page, progress: Progress) -> int:
    """Open one more stream and cancel it by its button, while those of the harness run; returns its tokens."""
    with Client(endpoint=server.endpoint) as client:
        stream = client.generate("One more.", max_tokens=4000, ignore_eos=True, label=LABEL)
        next(stream)
        listed = get(f"{server.url}{STATE}?streams=1000").body["streams"]
        rid = next((one["rid"] for one in listed if one["label"] == LABEL), -1)
        row = f".stream[data-rid='{rid}']"
        page.click("#tab-streams")
        shown = page.wait(lambda: page.count(row) == 1)
        report.expect(shown, "the page shows one more stream", (rid, page.count(".stream")))
        open_before = progress.running
        if shown:
            page.click(f"{row} button")
        gone = page.wait(lambda: page.count(row) == 0)
        page.click("#tab-overview")
        try:
            for _ in stream:
                pass
        except CallboardError:
            pass
        end = stream.end
        report.expect(
            gone and end is not None and end.outcome == "cancelled" and open_before == progress.plan.streams,
            f"Cancel ends it while {progress.plan.streams} streams run",
            (end, open_before),
        )
        report.expect(progress.failed == 0, "and no other", progress.failed)
        return end.usage.completion_tokens if end is not None else 0


def _counts(
    report: Report, grown: dict[str, float], good: list[Outcome], cancelled: int, seen: Seen, streams: int
) -> None:
    harness = sum(outcome.completion_tokens for outcome in good)
    counted = grown["callboard_generated_tokens_total"]
    report.measured("tokens_harness", harness)
    report.measured("tokens_cancelled", cancelled)
    report.measured("tokens_metrics", counted)
    report.expect(close(counted - cancelled, harness), "tokens agree within 2 %")
    ended = (grown["requests finished"], grown.get("requests cancelled", 0.0))
    report.expect(ended == (len(good), 1), "requests agree", ended)
    for what, pairs in (("streams", seen.streams), ("rows", seen.rows)):
        apart = max((abs(one - other) / max(one, 1.0) for one, other in pairs), default=math.inf)
        report.measured(f"{what}_looks", len(pairs))
        report.measured(f"{what}_apart_at_most", round(apart, 4))
        report.expect(apart <= 0.02, f"the page's open {what} are those of /metrics, at every look", pairs)
    for what, values in (("/metrics", [one for one, _ in seen.streams]), ("the page", seen.written)):
        middle = median(values) if values else math.nan
        report.expect(close(middle, streams), f"{what} shows the harness's open streams, in the median", middle)


def _latencies(report: Report, grown: dict[str, float], good: list[Outcome]) -> None:
    """Means to 2 %, as a histogram has the exact sum; medians to the bucket that they lie in."""
    found = {
        "itl": [gap for outcome in good for gap in outcome.gaps],
        "ttft": [outcome.ttft for outcome in good],
    }
    words = {"itl": "inter-token latency", "ttft": "time to first token"}
    for name, values in found.items():
        series = f"callboard_{name}_seconds"
        average = grown[f"{series}_sum"] / max(grown[f"{series}_count"], 1)
        report.measured(f"{name}_ms_harness", round(1000 * mean(values), 2))
        report.measured(f"{name}_ms_metrics", round(1000 * average, 2))
        report.expect(close(average, mean(values)), f"{words[name]} agrees within 2 %")
        low, high = bucket(grown, f"{series}_bucket", 0.5)
        middle = median(values)
        report.measured(f"{name}_ms_median_in_its_bucket", [round(1000 * each, 2) for each in (low, middle, high)])
        report.expect(0.98 * low <= middle <= 1.02 * high, f"{words[name]}: the median is in its bucket")
    parts = {}
    for part_name in ("received", "tokenize", "queue", "prefill"):
        count = max(grown[f"callboard_{part_name}_seconds_count"], 1)
        parts[part_name] = round(1000 * grown[f"callboard_{part_name}_seconds_sum"] / count, 1)
    whole = 1000 * grown["callboard_ttft_seconds_sum"] / max(grown["callboard_ttft_seconds_count"], 1)
    report.measured("ttft_ms_parts", parts | {"written": round(whole - sum(parts.values()), 1)})


def bucket(grown: dict[str, float], name: str, part: float) -> tuple[float, float]:
    """The bounds of the bucket that holds a quantile."""
    below = sorted((float(key.split()[1]), value) for key, value in grown.items() if key.startswith(f"{name} "))
    place = bisect_left([value for _, value in below], part * below[-1][1])
    return below[place - 1][0] if place else 0.0, below[place][0]


def _plots(
    report: Report, samples: Sequence[Sample], grown: dict[str, float], good: list[Outcome], seen: Seen, streams: int
) -> None:
    """The page's samples, one a second, against what the harness saw in the same seconds."""
    wall = time.time() - time.monotonic()
    arrivals = sorted(wall + at for outcome in good for at in accumulate(outcome.gaps, initial=outcome.first))
    spans = [span for span in pairwise(samples) if span[1]["at"] > arrivals[0] and span[0]["at"] < arrivals[-1]]
    grew = sum(now["tokens"] - before["tokens"] for before, now in spans)
    report.expect(close(grew, grown["callboard_generated_tokens_total"]), "the plots' tokens are those of /metrics")
    # The first and the last second are not all load, and one more stream was there at the beginning.
    inner = spans[1:-1]
    begin, end = inner[0][0], inner[-1][1]
    came = bisect_right(arrivals, end["at"]) - bisect_right(arrivals, begin["at"])
    seconds = end["at"] - begin["at"]
    speeds = (end["tokens"] - begin["tokens"]) / seconds, came / seconds
    report.measured("tokens_per_second_page_harness", [round(speed, 1) for speed in speeds])
    report.expect(close(*speeds), "the plotted throughput is the harness's, over the same seconds", speeds)
    rows = max(now["running"] + now["prefilling"] + now["waiting"] for _, now in inner)
    report.measured("rows_plotted_at_most", rows)
    report.expect(close(rows, streams), "the plotted rows reach the harness's streams", rows)
    plotted = [(now["tokens"] - before["tokens"]) / (now["at"] - before["at"]) for before, now in pairwise(samples)]
    strange = [speed for speed in seen.speeds if not any(close(speed, one) for one in plotted)]
    report.expect(bool(seen.speeds) and not strange, "the speeds that the page writes are those it plots", strange)
    gaps = [wall + at for outcome in good for at in _after(outcome)]
    firsts = [wall + outcome.first for outcome in good]
    for name, times in (("itl", gaps), ("ttft", firsts)):
        series = f"callboard_{name}_seconds"
        average = grown[f"{series}_sum"] / max(grown[f"{series}_count"], 1)
        page = weighed(spans, name, sorted(times))
        report.measured(f"{name}_ms_page", round(1000 * page, 2))
        report.expect(close(page, average), f"the plotted {name} is that of /metrics within 2 %", (page, average))


def _after(outcome: Outcome) -> list[float]:
    """When each gap between tokens ended."""
    return [*accumulate(outcome.gaps, initial=outcome.first)][1:]


def weighed(spans: Sequence[tuple[Sample, Sample]], name: str, times: list[float]) -> float:
    """Mean of the plotted means, each weighed by how many values the harness saw in its second."""
    counts = [bisect_right(times, now["at"]) - bisect_right(times, before["at"]) for before, now in spans]
    known = [(now[name], count) for (_, now), count in zip(spans, counts, strict=True) if now[name] > 0]
    return sum(value * count for value, count in known) / max(sum(count for _, count in known), 1)


def short(value: float) -> str:
    """A count as the page words it."""
    if value >= 1e4:
        return f"{value / 1e3:.1f}k"
    return str(round(value))
