"""`browser`: Debian's Chromium without a window, driven by Selenium, for checks of the dashboard."""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

PATIENCE = 20.0  # seconds
_QUIET = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--no-proxy-server"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


def missing() -> str:
    """What of Chromium and its driver isn't here; empty when both are."""
    return ", ".join(name for name in ("chromium", "chromedriver") if shutil.which(name) is None)


class Page:
    """One window on one page."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        """Go to an address."""
        self.driver.get(url)

    def find(self, selector: str) -> WebElement:
        """The first element of a CSS selector. Raises NoSuchElementException."""
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        """All elements of a CSS selector."""
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        """The text of an element."""
        found = self.driver.execute_script("return document.querySelector(arguments[0])?.textContent ?? ''", selector)
        return str(found)

    def count(self, selector: str) -> int:
        """How many elements a selector finds."""
        return int(self.driver.execute_script("return document.querySelectorAll(arguments[0]).length", selector))

    def click(self, selector: str) -> None:
        """Click an element as a person does: it must be visible and in reach."""
        self.find(selector).click()

    def type(self, selector: str, text: str) -> None:
        """Type into a field."""
        self.find(selector).send_keys(text)

    def shown(self, selector: str) -> bool:
        """Whether an element can be seen."""
        return self.find(selector).is_displayed()

    def wait(self, condition: Callable[[], object], seconds: float = PATIENCE) -> bool:
        """Whether `condition` comes to hold."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if condition():
                return True
            time.sleep(0.1)
        return False

    def faults(self) -> list[str]:
        """What the page has complained about so far, in the browser's own words; reading empties it."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]  # type: ignore[no-untyped-call]  # selenium types this method not at all

    def picture(self, path: Path) -> None:
        """Save what is shown as PNG."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.driver.save_screenshot(str(path))


@contextmanager
def browser(width: int = 1360, height: int = 1000, *, phone: bool = False, dark: bool = True) -> Iterator[Page]:
    """A new, empty Chromium with one window."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with tempfile.TemporaryDirectory(prefix="cb-") as profile:
        for argument in (*_QUIET, f"--window-size={width},{height}", f"--user-data-dir={profile}"):
            options.add_argument(argument)
        if phone:
            metrics = {"width": width, "height": height, "pixelRatio": 2}
            options.add_experimental_option("mobileEmulation", {"deviceMetrics": metrics})
        driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        try:
            scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
            yield Page(driver)
        finally:
            driver.quit()
