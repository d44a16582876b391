"""Check of what looking at the dashboard costs the server: the page's requests in its own rhythm, without a browser."""

import time
from typing import NamedTuple

import psutil

from bench.ask import get
from bench.checks.dashboard import PREFIXES, STATE, Traffic
from bench.checks.report import Report
from bench.harness import RunningServer
from protocol import Client

BAR = 0.01  # of the processes' CPU time
SHOWN = 200  # streams that the page asks for
PREFIXES_EVERY = 5  # seconds, and all else every second; see server/dashboard/
PAGES = 20  # at once, so that what they take can be told from noise
CHAINS = 200  # as many as are shown at most
CHAIN = 600  # tokens, which are two blocks
VIEWS = ("overview", "streams", "prefixes", "log")


class Pages:
    """Pages that show one view, each with its own clock; all ask over this one thread."""

    def __init__(self, server: RunningServer, view: str) -> None:
        self._server = server
        self._view = view
        self._offset = 0
        self.shown = 0  # streams, lines or chains of the last answer that had any

    def run(self, seconds: float) -> None:
        """Ask for so long, spread over each second."""
        began = time.monotonic()
        for turn in range(int(seconds)):
            for place in range(PAGES):
                time.sleep(max(0.0, began + turn + place / PAGES - time.monotonic()))
                self._look((turn + place) % PREFIXES_EVERY == 0)
        time.sleep(max(0.0, began + seconds - time.monotonic()))

    def _look(self, tree: bool) -> None:
        streams = SHOWN if self._view == "streams" else 0
        log = self._offset if self._view == "log" else -1
        since = time.time() - 1
        state = get(f"{self._server.url}{STATE}?since={since}&streams={streams}&log={log}").body
        if self._view == "streams":
            self.shown = len(state["streams"])
        if self._view == "log":
            self._offset = state["log"]["offset"]
            self.shown = len(state["log"]["lines"]) or self.shown
        if self._view == "prefixes" and tree:
            self.shown = len(get(f"{self._server.url}{PREFIXES}").body["chains"]["rows"])


class Used(NamedTuple):
    """CPU seconds of all processes, tokens that came, and seconds, of one stretch."""

    cpu: float
    tokens: int
    seconds: float


def cost(report: Report, server: RunningServer, streams: int, seconds: float) -> None:
    """What one page takes of the CPU time of all processes while many streams run, by the view that it shows."""
    _grow_tree(server)
    traffic = Traffic(server, streams, tokens=16_000)
    try:
        deadline = time.monotonic() + 60
        while server.load()["running"] < streams and time.monotonic() < deadline:
            time.sleep(0.2)
        alone = [_used(server, seconds, None)]
        shown, watched = {}, {}
        for view in VIEWS:
            pages = Pages(server, view)
            watched[view] = _used(server, seconds, pages)
            alone.append(_used(server, seconds, None))
            shown[view] = pages.shown
    finally:
        traffic.end()
    report.measured("cpu_seconds_per_second_all", round(sum(u.cpu for u in alone) / sum(u.seconds for u in alone), 3))
    report.measured("shown", shown)
    parts = {
        view: part_of_one(used, before, after)
        for (view, used), before, after in zip(watched.items(), alone[:-1], alone[1:], strict=True)
    }
    report.measured("cpu_part_of_one_page", {view: round(part, 5) for view, part in parts.items()})
    report.expect(shown["streams"] == streams, "all streams were looked at", shown)
    report.expect(shown["prefixes"] >= CHAINS / 2 and shown["log"] > 0, "so were prefixes and the log", shown)
    for view, part in parts.items():
        report.expect(part <= BAR, f"a page that shows {view} takes at most 1 % of all processes' CPU time", part)


def part_of_one(watched: Used, before: Used, after: Used) -> float:
    """What one of the pages took, as a part of what the processes take without it.

    Without pages a token costs what it did before and after: where pages leave less time for tokens, what the engine
    takes less for these must not hide what the pages cost.
    """
    per_token = (before.cpu + after.cpu) / (before.tokens + after.tokens)
    own = watched.tokens * per_token
    return max(0.0, watched.cpu - own) / PAGES / max((before.cpu + after.cpu) / 2, 1e-9)


def _used(server: RunningServer, seconds: float, pages: Pages | None) -> Used:
    processes = [psutil.Process(pid) for pid in server.pids().values()]

    def look() -> tuple[float, int, float]:
        cpu = sum(sum(process.cpu_times()[:2]) for process in processes)
        return cpu, int(get(f"{server.url}{STATE}?since={time.time()}").body["generated"]), time.monotonic()

    cpu, tokens, began = look()
    if pages is None:
        time.sleep(seconds)
    else:
        pages.run(seconds)
    cpu_now, tokens_now, now = look()
    return Used(cpu_now - cpu, tokens_now - tokens, now - began)


def _grow_tree(server: RunningServer) -> None:
    """As many chains of prefix blocks as the page shows."""
    with Client(endpoint=server.endpoint) as client:
        prompts = [[*[100 + number] * CHAIN] for number in range(CHAINS)]
        for stream in [client.generate(ids=ids, max_tokens=1, ignore_eos=True) for ids in prompts]:
            stream.text()
