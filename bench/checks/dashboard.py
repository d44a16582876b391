"""Checks of the dashboard: every button in a real browser, what it looks like, and its requests without one.

Its figures under load are `dashboard_figures`, what looking at it costs is `dashboard_cost`.
"""

import threading
import time
from pathlib import Path
from typing import Any

from bench import browser
from bench.ask import get, post
from bench.browser import Page
from bench.checks.report import Report
from bench.harness import RunningServer
from protocol import Client
from protocol.errors import CallboardError

STATE = "/admin/api/state"
PREFIXES = "/admin/api/prefixes"
PHONE = (390, 844)  # pixels


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
    look_around(report, server, key, pictures)


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
    # Asked again before the page has seen that the first question is closed.
    page.driver.execute_script(
        "for (const each of ['#confirm [value=no]', '#replace']) document.querySelector(each).click()"
    )
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
    page.click("[data-tier='ssd']")
    on_ssd = page.wait(lambda: page.count(rows) == _chains_on_ssd(server, key) > 0)
    report.expect(on_ssd, "On the SSD leaves what is on the SSD", (page.count(rows), _chains_on_ssd(server, key)))
    page.click("[data-tier='all']")
    refused = get(f"{server.url}{PREFIXES}")
    report.expect(refused.status == 401, "without the key nobody sees them", refused.status)
    allowed = get(f"{server.url}{PREFIXES}", headers={"authorization": f"Bearer {key}"})
    report.expect(len(allowed.body["chains"]["rows"]) == len(shown), "with it as many", allowed.body)


def _chains_on_ssd(server: RunningServer, key: str) -> int:
    chains = get(f"{server.url}{PREFIXES}", headers={"authorization": f"Bearer {key}"}).body["chains"]
    place = chains["columns"].index("ssd_blocks")
    return sum(row[place] > 0 for row in chains["rows"])


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


def expect_fit(report: Report, page: Page, view: str, width: int = PHONE[0]) -> None:
    """Nothing of what a phone shows is wider than the phone."""
    root = "document.documentElement.scrollWidth"
    found = page.driver.execute_script(f"return [{root}, innerWidth]")
    report.expect(max(found) <= width, f"{view} fits {width} px", found)


def look_around(report: Report, server: RunningServer, key: str, folder: Path | None) -> None:
    """Every view under traffic, on a desk and on a phone, whose width none exceeds; pictures of them go to `folder`."""
    traffic = Traffic(server, 8)
    try:
        for name, (width, height), phone in (("desk", (1360, 1000), False), ("phone", PHONE, True)):
            with browser.browser(width, height, phone=phone, dark=not phone) as page:
                page.open(f"{server.url}/admin")
                page.driver.execute_script("sessionStorage.setItem('callboard-key', arguments[0])", key)
                page.open(f"{server.url}/admin?again")
                settled(page)
                for view in ("overview", "streams", "prefixes", "chat", "log"):
                    page.click(f"#tab-{view}")
                    time.sleep(2.5)
                    if phone:
                        expect_fit(report, page, view)
                    if folder is not None:
                        page.picture(folder / f"{name}-{view}.png")
    finally:
        traffic.end()


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
