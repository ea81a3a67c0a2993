"""A headless Chromium: Debian's `chromium` and `chromium-driver`, driven by selenium."""

from __future__ import annotations

import base64
import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

PROGRAMS = ("chromium", "chromedriver")
LONGEST_S = 30.0


def missing() -> str:
    """Why there is no browser here; empty if there is one."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    absent += [] if importlib.util.find_spec("selenium") else ["selenium"]
    return f"not installed: {', '.join(absent)}" if absent else ""


class Browser:
    """One window."""

    def __init__(self, driver: Chrome) -> None:
        self._driver = driver
        self.open = driver.get
        self.run = driver.execute_script
        """Run JavaScript and return its result."""

    def until(self, script: str, *arguments: Any) -> Any:
        """Wait until the JavaScript returns something true, and return that."""
        from selenium.common.exceptions import TimeoutException
        from selenium.webdriver.support.wait import WebDriverWait

        try:
            return WebDriverWait(self._driver, LONGEST_S, poll_frequency=0.05).until(
                lambda driver: driver.execute_script(f"return {script}", *arguments)
            )
        except TimeoutException:
            text = self.run("return document.body.innerText")
            raise AssertionError(f"never true: {script}\n{text}") from None

    def show(self, width: int, height: int, *, dark: bool = False) -> None:
        """The size of the page, and the colours that it is asked for."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """Save what is seen as PNG; `whole`: the page to its end."""
        options: dict[str, Any] = {"format": "png", "captureBeyondViewport": whole}
        if whole:
            size = self._driver.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssContentSize"]
            options["clip"] = {**size, "scale": 1}
        shot = self._driver.execute_cdp_cmd("Page.captureScreenshot", options)
        path.write_bytes(base64.b64decode(shot["data"]))

    def complaints(self) -> list[str]:
        """Console messages of the page since the last call: errors and violations of its policy."""
        logged = self._driver.get_log("browser")
        return [entry["message"] for entry in logged if entry["level"] == "SEVERE"]


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser of its own, with an empty profile."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--disable-dev-shm-usage",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
    with patch.dict(os.environ, no_proxy="*"):  # the driver is here
        driver = webdriver.Chrome(options=options, service=service)
    try:
        yield Browser(driver)
    finally:
        driver.quit()
