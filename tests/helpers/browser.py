# SPDX-License-Identifier: BSD-3-Clause
"""A headless Chromium for tests of pages that must work without a network."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-device-scale-factor=1",
    "--hide-scrollbars",
)


def require_browser() -> tuple[str, str]:
    """Return the paths of chromium and chromedriver.

    If one is missing, skip the test, or fail it if FASTCLIP_TEST_BROWSER=1.
    """
    found = {
        "chromium": shutil.which("chromium") or shutil.which("google-chrome"),
        "chromedriver": shutil.which("chromedriver"),
    }
    if missing := [name for name, path in found.items() if path is None]:
        reason = f"{' and '.join(missing)} not found on PATH"
        if os.environ.get("FASTCLIP_TEST_BROWSER") == "1":
            pytest.fail(f"FASTCLIP_TEST_BROWSER=1, but {reason}")
        pytest.skip(reason)
    return str(found["chromium"]), str(found["chromedriver"])


class Page:
    """One open page.

    Attributes:
        driver: selenium's driver, for everything else.
    """

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(
        self, path: Path, width: int = 1280, height: int = 900, touch: bool = False, dark: bool = False
    ) -> None:
        """Load a file in a window of that size, and clear the logs of the page before."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": touch}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": touch})
        self.prefer(dark)
        self.driver.get("about:blank")
        self.driver.get_log("browser")
        self.driver.get_log("performance")
        self.driver.get(path.as_uri())
        self.settle()

    def prefer(self, dark: bool) -> None:
        """Set the system's preferred theme, and reduced motion, so that nothing moves during a test."""
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def settle(self) -> None:
        """Wait for two frames, after which pending changes have been drawn."""
        self.driver.execute_async_script(
            "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done()))"
        )

    def run(self, script: str, *arguments: Any) -> Any:
        """Run a script in the page and return its value."""
        return self.driver.execute_script(script, *arguments)

    def mouse(self, kind: str, x: float, y: float, **fields: Any) -> None:
        """Send a mouse event such as "mouseMoved"."""
        event = {"type": kind, "x": x, "y": y, "button": "left", "clickCount": 1, **fields}
        self.driver.execute_cdp_cmd("Input.dispatchMouseEvent", event)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Drag the mouse from one place to another."""
        self.mouse("mouseMoved", *start, button="none")
        self.mouse("mousePressed", *start)
        for share in (0.5, 1.0):
            x, y = (a + share * (b - a) for a, b in zip(start, end, strict=True))
            self.mouse("mouseMoved", x, y, buttons=1)
        self.mouse("mouseReleased", *end)
        self.settle()

    def click(self, x: float, y: float, count: int = 1) -> None:
        """Click `count` times at a place."""
        self.mouse("mouseMoved", x, y, button="none")
        for number in range(1, count + 1):
            self.mouse("mousePressed", x, y, clickCount=number)
            self.mouse("mouseReleased", x, y, clickCount=number)
        self.settle()

    def touch(self, *places: tuple[float, float]) -> None:
        """Move one finger along the places."""
        for kind, place in zip(("touchStart", *["touchMove"] * (len(places) - 1)), places, strict=True):
            points = [{"x": place[0], "y": place[1]}]
            self.driver.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
        self.driver.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
        self.settle()

    def messages(self) -> list[str]:
        """Return the console's errors and warnings since the page was opened or the last call."""
        return [f"{entry['level']}: {entry['message']}" for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Return the URLs that the page has requested, except data URLs."""
        found = []
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                found.append(message["params"]["request"]["url"])
        return [url for url in found if not url.startswith("data:")]

    def screenshot(self, path: Path) -> None:
        """Write a PNG image of the window."""
        path.write_bytes(self.driver.get_screenshot_as_png())


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """Start a browser with a fresh profile in a directory, and yield its page."""
    chromium, chromedriver = require_browser()
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*_FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(chromedriver))
    try:
        driver.set_page_load_timeout(60)
        driver.set_script_timeout(30)
        yield Page(driver)
    finally:
        driver.quit()
