"""Check of the dashboard with several models, in a real browser: which one is shown, and the buttons about them."""

import time
from pathlib import Path
from typing import Any

from bench import browser
from bench.browser import Page
from bench.checks.dashboard import PHONE, expect_fit
from bench.checks.report import Report
from bench.harness import RunningServer
from bench.houses import states
from protocol import Client


def models(report: Report, server: RunningServer, key: str, pictures: Path | None = None) -> None:
    """`server` has `alpha`, which is loaded, and `beta`, which is not; it wants `key`."""
    with browser.browser() as page:
        page.open(f"{server.url}/admin")
        page.driver.execute_script("sessionStorage.setItem('callboard-key', arguments[0])", key)
        page.open(f"{server.url}/admin?again")
        report.expect(page.wait(lambda: page.text("#status") == "ok"), "the page opens", page.text("#status"))
        page.faults()  # the refusal of the first look, without the key
        _rows(report, page)
        _buttons(report, server, page)
        _choice(report, server, page)
        _replace(report, server, page)
        faults = [fault for fault in page.faults() if "/models/unload" not in fault]  # which was refused on purpose
        report.expect(not faults, "the browser had nothing to complain about", faults)
    _look_around(report, server, key, pictures)


def _of(name: str, rest: str) -> str:
    return f".held[data-model='{name}'] {rest}"


def _press(page: Page, name: str, action: str, label: str) -> bool:
    """Click a button once it says what it will do."""
    button = _of(name, f"[data-action={action}]")
    if not page.wait(lambda: page.text(button) == label and page.find(button).is_enabled()):
        return False
    page.click(button)
    return True


def _rows(report: Report, page: Page) -> None:
    report.expect(page.wait(lambda: page.count(".held") == 2), "every model is shown", page.count(".held"))
    phases = [page.text(_of(name, ".phase")) for name in ("alpha", "beta")]
    report.expect(phases == ["ready", "unloaded"], "with its state", phases)
    report.expect("claimed" in page.text("#budget"), "and the budget", page.text("#budget"))
    names = [option.text for option in page.all("#choice option")]
    report.expect(page.shown("#choice") and names == ["alpha", "beta"], "the model shown can be chosen", names)


def _buttons(report: Report, server: RunningServer, page: Page) -> None:
    def state(name: str) -> dict[str, Any]:
        return states(server)[name]

    _press(page, "beta", "load", "Load")
    loaded = page.wait(lambda: page.text(_of("beta", ".phase")) == "ready", 60)
    report.expect(loaded and state("beta")["state"] == "ready", "Load loads it", page.text(_of("beta", ".phase")))
    _press(page, "beta", "pin", "Pin")
    report.expect(page.wait(lambda: state("beta")["pinned"]), "Pin pins it")
    _press(page, "beta", "load", "Unload")
    told = page.wait(lambda: "pinned" in page.text("#banner") and page.shown("#banner"))
    report.expect(told and state("beta")["state"] == "ready", "a pinned one says so and stays", page.text("#banner"))
    _press(page, "beta", "pin", "Unpin")
    report.expect(page.wait(lambda: not state("beta")["pinned"]), "Unpin lets it go again")
    _press(page, "beta", "load", "Unload")
    gone = page.wait(lambda: page.text(_of("beta", ".phase")) == "unloaded", 30)
    pids = [name for name in server.pids() if name.startswith("beta/")]
    report.expect(gone and not pids, "Unload unloads it, and its processes are gone", pids)


def _choice(report: Report, server: RunningServer, page: Page) -> None:
    def choose(name: str) -> None:
        page.click(f"#choice option[value='{name}']")

    with Client(endpoint=server.endpoint) as client:
        stream = client.generate("A long text.", max_tokens=3000, ignore_eos=True)
        next(stream)
        page.click("#tab-streams")
        report.expect(page.wait(lambda: page.count(".stream") == 1), "streams of the model shown are listed")
        choose("beta")
        report.expect(page.wait(lambda: page.count(".stream") == 0), "and not those of others")
        choose("alpha")
        report.expect(page.wait(lambda: page.count(".stream") == 1), "until it is chosen again")
        page.click(".stream button")
        report.expect(page.wait(lambda: page.count(".stream") == 0), "Cancel finds its stream")
        for _ in stream:
            pass
        report.expect(stream.end is not None and stream.end.outcome == "cancelled", "which has ended", stream.end)
    choose("beta")
    page.click("#tab-chat")
    page.type("#question", "Say something.\n")
    answered = page.wait(lambda: page.count(".said.assistant small"), 60)
    report.expect(answered and page.count(".said.failed") == 0, "the chat is with the model shown, which is loaded")
    page.click("#tab-overview")
    names = page.wait(lambda: "engine" in page.text("#actors"))
    report.expect(names and states(server)["beta"]["state"] == "ready", "its actors are shown", page.text("#actors"))


def _replace(report: Report, server: RunningServer, page: Page) -> None:
    """The model shown is `beta`."""

    def epochs() -> dict[str, int]:
        return {actor["name"]: int(actor["epoch"]) for actor in server.health()["actors"]}

    before = epochs()
    page.click("#replace")
    page.click("#confirm-yes")
    replaced = page.wait(lambda: epochs()["beta/engine"] > before["beta/engine"] and page.text("#status") == "ok", 60)
    after = epochs()
    report.expect(
        replaced and after["beta/engine"] == before["beta/engine"] + 1, "Replace engine replaces it once", after
    )
    report.expect(after["alpha/engine"] == before["alpha/engine"], "and not that of the other model", after)


def _look_around(report: Report, server: RunningServer, key: str, folder: Path | None) -> None:
    for name, (width, height), phone in (("desk", (1360, 1000), False), ("phone", PHONE, True)):
        with browser.browser(width, height, phone=phone, dark=not phone) as page:
            page.open(f"{server.url}/admin")
            page.driver.execute_script("sessionStorage.setItem('callboard-key', arguments[0])", key)
            page.open(f"{server.url}/admin?again")
            page.wait(lambda page=page: page.count(".held") == 2)  # type: ignore[misc]  # bound now, called now
            time.sleep(2.5)
            if phone:
                expect_fit(report, page, "models")
            if folder is not None:
                page.picture(folder / f"{name}-models.png")
