"""Checks of the dashboard: every button in a real browser, its figures under load, and what looking at it costs."""

import asyncio
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

from bench import browser
from bench.ask import get, post
from bench.browser import Page
from bench.checks.report import Report
from bench.harness import RunningServer
from bench.load.driver import Progress, make_load, run_load
from bench.load.outcome import Outcome
from bench.load.plan import Plan
from protocol import Client
from protocol.errors import CallboardError

STATE = "/admin/api/state"
PREFIXES = "/admin/api/prefixes"
REPLAYED_PER_SECOND = 40  # times as often as one page asks, so that it can be told from noise


def metrics(server: RunningServer, **options: Any) -> dict[str, float]:
    """Sums of `/metrics`: by name, and requests by `requests OUTCOME`."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(get(f"{server.url}/metrics", **options).body):
        for sample in family.samples:
            key = f"requests {sample.labels['outcome']}" if sample.name == "callboard_requests_total" else sample.name
            found[key] = found.get(key, 0.0) + sample.value
    return found


def close(first: float, second: float, part: float = 0.02) -> bool:
    """Whether two figures agree."""
    return math.isclose(first, second, rel_tol=part, abs_tol=1e-9)


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


def figures(report: Report, server: RunningServer, streams: int, rounds: int, tokens: int) -> None:
    """The page, `/metrics` and the stress harness agree on a load."""
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
    before = metrics(server)
    with browser.browser() as page:
        page.open(f"{server.url}/admin")
        page.wait(lambda: page.text("#status") == "ok")
        apart = []
        with load(server, plan) as (progress, outcomes):
            while progress.completed + progress.failed < plan.requests:
                rows = metrics(server).get("callboard_streams", 0.0)
                shown = get(f"{server.url}{STATE}").body["phases"]
                if progress.running == streams:
                    apart.append(abs(rows - sum(shown.values())))
                time.sleep(0.25)
        after = metrics(server)
        good = [outcome for outcome in outcomes if not outcome.error]
        report.expect(len(good) == plan.requests, "every request completed", len(good))
        page.wait(lambda: page.text("#count") == "")
        time.sleep(1.5)  # until the page has asked once more
        state = get(f"{server.url}{STATE}").body
        tile = page.text("#tiles .tile:nth-child(6) strong")
        faults = page.faults()

    def grown(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    harness = sum(outcome.completion_tokens for outcome in good)
    report.measured("tokens_harness", harness)
    report.measured("tokens_metrics", grown("callboard_generated_tokens_total"))
    report.expect(close(grown("callboard_generated_tokens_total"), harness), "tokens agree within 2 %")
    report.expect(grown("requests finished") == plan.requests, "requests agree", grown("requests finished"))
    gaps = [gap for outcome in good for gap in outcome.gaps]
    itl = grown("callboard_itl_seconds_sum") / max(grown("callboard_itl_seconds_count"), 1)
    report.measured("itl_ms_harness", round(1000 * sum(gaps) / len(gaps), 2))
    report.measured("itl_ms_metrics", round(1000 * itl, 2))
    report.expect(close(itl, sum(gaps) / len(gaps)), "inter-token latency agrees within 2 %")
    ttft = grown("callboard_ttft_seconds_sum") / max(grown("callboard_ttft_seconds_count"), 1)
    seen = sum(outcome.ttft for outcome in good) / len(good)
    report.measured("ttft_ms_harness", round(1000 * seen, 1))
    report.measured("ttft_ms_metrics", round(1000 * ttft, 1))
    parts = {}
    for part in ("received", "tokenize", "queue", "prefill"):
        count = max(grown(f"callboard_{part}_seconds_count"), 1)
        parts[part] = round(1000 * grown(f"callboard_{part}_seconds_sum") / count, 1)
    parts["written"] = round(1000 * ttft - sum(parts.values()), 1)
    report.measured("ttft_ms_parts", parts)
    report.expect(close(ttft, seen), "time to first token agrees within 2 %")
    report.expect(
        state["generated"] == after["callboard_generated_tokens_total"], "the page's tokens are those of /metrics"
    )
    ended = sum(state["requests"].values())
    report.expect(tile.strip() == short(ended), "the page shows the requests that have ended", (tile, ended))
    report.expect(not faults, "the browser had nothing to complain about", faults)


def short(value: float) -> str:
    """A count as the page words it."""
    if value >= 1e4:
        return f"{value / 1e3:.1f}k"
    return str(round(value))


class Traffic:
    """Streams that run until they are cancelled, as far as their budget goes."""

    def __init__(self, server: RunningServer, count: int, tokens: int = 2000) -> None:
        self._client = Client(endpoint=server.endpoint)
        self.streams = [
            self._client.generate(f"number {i}", max_tokens=tokens, ignore_eos=True, label=f"traffic-{i}")
            for i in range(count)
        ]
        self._threads = [threading.Thread(target=self._read, args=(stream,)) for stream in self.streams]
        for thread in self._threads:
            thread.start()

    @staticmethod
    def _read(stream: Any) -> None:
        try:
            for _ in stream:
                pass
        except CallboardError:
            pass

    def end(self) -> None:
        """Cancel what still runs."""
        for stream in self.streams:
            stream.cancel()
        for thread in self._threads:
            thread.join()
        self._client.close()


def buttons(report: Report, server: RunningServer, key: str, pictures: Path | None = None) -> None:
    """Every button of the page does what it says. The server wants `key`."""
    with browser.browser() as page:
        page.open(f"{server.url}/admin")
        report.expect(page.wait(lambda: page.shown("#key-dialog")), "the page asks for the key")
        page.type("#key", "wrong")
        page.click("#unlock")
        report.expect(page.wait(lambda: page.shown("#key-dialog")), "a wrong key doesn't open it")
        page.wait(lambda: page.find("#key").get_attribute("value") == "")
        page.type("#key", key)
        page.click("#unlock")
        report.expect(page.wait(lambda: page.text("#status") == "ok"), "the right key opens it", page.text("#status"))
        page.faults()  # the refusals of the key
        _overview(report, server, page, key)
        _streams(report, server, page)
        _prefixes(report, server, page, key)
        _chat(report, page)
        _log(report, page)
        faults = page.faults()
        report.expect(not faults, "the browser had nothing to complain about", faults)
        touched = set(page.driver.execute_script("return window.touched ?? []"))
        report.expect(
            touched >= {"replace", "cancel-all", "send", "halt", "forget", "pause"}, "buttons were pressed", touched
        )
    if pictures is not None:
        take_pictures(server, key, pictures)


def _watch_clicks(page: Page) -> None:
    script = "addEventListener('click', (e) => (window.touched ??= []).push(e.target.id), true)"
    page.driver.execute_script(script)


def _overview(report: Report, server: RunningServer, page: Page, key: str) -> None:
    _watch_clicks(page)
    report.expect(page.count("#tiles .tile") == 7, "seven figures are shown", page.count("#tiles .tile"))
    actors = {"supervisor", *server.pids()}
    report.expect(page.count("#actors .actor") == len(actors), "every actor is shown", page.count("#actors .actor"))
    for minutes, label in (("1", "−60 s"), ("15", "−15 min"), ("5", "−5 min")):
        page.click(f"[data-minutes='{minutes}']")
        report.expect(label in page.text("#charts .chart svg"), f"{minutes} min: the plots go back so far")
    epoch = _epoch(server)
    page.click("#replace")
    page.click("#confirm [value=no]")
    page.click("#replace")
    page.click("#confirm-yes")
    replaced = page.wait(lambda: _epoch(server) > epoch and page.text("#status") == "ok", 60)
    report.expect(replaced and _epoch(server) == epoch + 1, "Replace engine asks, and replaces it once")


def _epoch(server: RunningServer) -> int:
    return next(int(actor["epoch"]) for actor in server.health()["actors"] if actor["name"] == "engine")


def _streams(report: Report, server: RunningServer, page: Page) -> None:
    page.click("#tab-streams")
    report.expect(page.shown("#streams") and not page.shown("#overview"), "Streams shows the streams")
    report.expect(page.wait(lambda: page.shown("#no-streams")), "without streams it says so")
    traffic = Traffic(server, 6)
    try:
        report.expect(page.wait(lambda: page.count(".stream") == 6), "all streams are shown", page.count(".stream"))
        report.expect(page.wait(lambda: page.text(".stream .phase") == "running"), "their phase is shown")
        rid = page.find(".stream").get_attribute("data-rid")
        page.click(f".stream[data-rid='{rid}'] button")
        gone = page.wait(lambda: page.count(f".stream[data-rid='{rid}']") == 0)
        ended = [stream for stream in traffic.streams if stream.end is not None and stream.end.outcome == "cancelled"]
        report.expect(gone and len(ended) == 1, "Cancel ends one stream, and no other", len(ended))
        page.click("#cancel-all")
        page.click("#confirm-yes")
        report.expect(page.wait(lambda: page.count(".stream") == 0), "Cancel all shown ends the others")
        report.expect(page.wait(server.is_idle), "the engine has nothing left to do")
    finally:
        traffic.end()


def _prefixes(report: Report, server: RunningServer, page: Page, key: str) -> None:
    """Four prompts with a common beginning of three blocks, two more of their own each: a chain of 768 tokens and four
    of 512 behind it."""
    with Client(endpoint=server.endpoint) as client:
        for number in range(4):
            ids = [*[7] * 768, *[100 + number] * 513]
            client.generate(ids=ids, max_tokens=1, ignore_eos=True).text()
    page.click("#tab-prefixes")
    rows = "#tree .chain:not(.head)"
    report.expect(page.wait(lambda: page.count(rows) >= 5), "Prefixes shows the chains", page.text("#tree"))
    shown = [[cell.text for cell in row.find_elements("css selector", "span")] for row in page.all(rows)]
    trunk = next((i for i, row in enumerate(shown) if row[1:3] == ["0", "768"]), -1)
    behind = [row[1:3] for row in shown[trunk + 1 : trunk + 5]]
    report.expect(trunk >= 0 and behind == [["768", "512"]] * 4, "the common beginning, and what parts from it", shown)
    report.expect(shown[trunk][5] == "3×", "with its hits", shown[trunk])
    report.expect(
        "blocks in memory" in page.text("#tree-note"), "and how many blocks there are", page.text("#tree-note")
    )
    page.click("[data-tier='memory']")
    report.expect(page.count(rows) == len(shown), "In memory leaves what is in memory", page.count(rows))
    page.click("[data-tier='all']")
    refused = get(f"{server.url}{PREFIXES}")
    report.expect(refused.status == 401, "without the key nobody sees them", refused.status)
    allowed = get(f"{server.url}{PREFIXES}", headers={"authorization": f"Bearer {key}"})
    report.expect(len(allowed.body["chains"]["rows"]) == len(shown), "with it as many", allowed.body)


def _chat(report: Report, page: Page) -> None:
    page.click("#tab-chat")
    page.click(".options summary")
    page.find("#max-tokens").clear()
    page.type("#max-tokens", "12")
    page.type("#temperature", "0")
    page.type("#system", "Be brief.")
    page.type("#question", "Say something.")
    page.click("#send")
    report.expect(page.wait(lambda: page.count(".said.assistant small")), "Send brings an answer")
    note = page.text(".said.assistant small")
    report.expect("tokens" in note and "per second" in note, "with its speed", note)
    page.find("#max-tokens").clear()
    page.type("#max-tokens", "4000")
    page.type("#question", "And now a long text.\n")
    page.wait(lambda: page.text(".said:last-child span"))
    page.click("#halt")
    stopped = page.wait(lambda: "stopped" in page.text(".said:last-child small"))
    report.expect(stopped, "Stop ends the answer", page.text(".said:last-child"))
    page.click("#forget")
    report.expect(page.count(".said") == 0, "Forget empties the chat")


def _log(report: Report, page: Page) -> None:
    page.click("#tab-log")
    report.expect(page.wait(lambda: page.count("#lines div") > 3), "Log shows lines")
    page.type("#filter", "replacing")
    report.expect(page.wait(lambda: 0 < page.count("#lines div") < 4), "the filter leaves what it names")
    page.find("#filter").clear()
    page.driver.execute_script("document.getElementById('filter').dispatchEvent(new Event('input'))")
    page.click("[data-level='warning']")
    report.expect(page.count("#lines div.info") == 0, "Warnings leaves out what is none")
    page.click("[data-level='all']")
    page.click("#pause")
    report.expect(page.text("#pause") == "Go on", "Pause can be undone")
    page.click("#pause")
    page.click("#tab-overview")
    report.expect(page.shown("#overview"), "Overview is where it began")


def settled(page: Page) -> bool:
    """Whether the page has come to show a healthy server."""
    return page.wait(lambda: page.text("#status") == "ok")


def take_pictures(server: RunningServer, key: str, folder: Path) -> None:
    """What the page looks like under traffic, on a desk and on a phone."""
    traffic = Traffic(server, 8)
    try:
        for name, width, height, phone in (("desk", 1360, 1000, False), ("phone", 390, 844, True)):
            with browser.browser(width, height, phone=phone, dark=not phone) as page:
                page.open(f"{server.url}/admin")
                page.driver.execute_script("sessionStorage.setItem('callboard-key', arguments[0])", key)
                page.open(f"{server.url}/admin?again")
                settled(page)
                for view in ("overview", "streams", "prefixes", "chat", "log"):
                    page.click(f"#tab-{view}")
                    time.sleep(2.5)
                    page.picture(folder / f"{name}-{view}.png")
    finally:
        traffic.end()


def cost(report: Report, server: RunningServer, streams: int, seconds: float) -> None:
    """What a page that looks on costs of the processes' CPU time, while many streams run."""
    traffic = Traffic(server, streams, tokens=8000)
    try:
        deadline = time.monotonic() + 60
        while server.load()["running"] < streams and time.monotonic() < deadline:
            time.sleep(0.2)
        fronts = [psutil.Process(pid) for name, pid in server.pids().items() if name.startswith(("http", "streamer"))]
        every = [psutil.Process(pid) for pid in server.pids().values()]
        alone, all_alone = _cpu(fronts, every, seconds, lambda _: None)
        shown: list[int] = []

        def ask(_: float) -> None:
            since = time.time() - 1
            body = get(f"{server.url}{STATE}?since={since}&streams=200").body
            shown.append(len(body["streams"]))

        watched, _ = _cpu(fronts, every, seconds, ask)
    finally:
        traffic.end()
    report.measured("streams_shown", shown[-1])
    part = max(0.0, watched - alone) / REPLAYED_PER_SECOND / all_alone
    report.measured("cpu_seconds_per_second_all", round(all_alone, 3))
    report.measured("cpu_part_of_one_page", round(part, 5))
    report.expect(shown[-1] == streams, "all streams were looked at", shown[-1])
    report.expect(part <= 0.01, "one page takes at most 1 % of the processes' CPU time", part)


def _cpu(fronts: list[psutil.Process], every: list[psutil.Process], seconds: float, ask: Any) -> tuple[float, float]:
    """CPU seconds per second of some processes and of all, while `ask` is called many times a second."""

    def used(processes: list[psutil.Process]) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    began, front, whole = time.monotonic(), used(fronts), used(every)
    calls = int(seconds * REPLAYED_PER_SECOND)
    for call in range(calls):
        ask(call)
        time.sleep(max(0.0, began + (call + 1) / REPLAYED_PER_SECOND - time.monotonic()))
    took = time.monotonic() - began
    return (used(fronts) - front) / took, (used(every) - whole) / took


def replay(report: Report, server: RunningServer) -> None:
    """What the page asks for, without a browser: it sees a stream, and can end it."""
    traffic = Traffic(server, 2)
    try:
        until = time.monotonic() + 20
        rids: list[int] = []
        while len(rids) < 2 and time.monotonic() < until:
            state = get(f"{server.url}{STATE}?since=0&streams=10&log=0").body
            rids = [stream["rid"] for stream in state["streams"] if stream["label"].startswith("traffic")]
        report.expect(len(rids) == 2, "both streams are seen", state["streams"])
        report.expect(state["log"]["offset"] > 0, "the log is there")
        cancelled = post(f"{server.url}/admin/api/streams/{rids[0]}/cancel", {})
        report.expect(cancelled.status == 200, "a stream is cancelled", cancelled)
        again = post(f"{server.url}/admin/api/streams/{rids[0]}/cancel", {})
        report.expect(again.status == 404, "once", again)
        tree = get(f"{server.url}{PREFIXES}").body
        columns, held = tree["chains"]["columns"], sum(row[4] for row in tree["chains"]["rows"])
        report.expect(
            columns[4] == "memory_blocks" and held == tree["memory_looked"] <= tree["memory_blocks"],
            "the tree has every block that was looked at once",
            tree,
        )
    finally:
        traffic.end()
