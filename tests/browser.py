"""A headless Chromium over the WebDriver protocol, spoken with httpx: Debian's `chromium` and `chromium-driver`."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

PROGRAMS = ("chromium", "chromedriver")
LONGEST_S = 30.0
STARTS = 3


def missing() -> str:
    """Why there is no browser here; empty if there is one."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"not installed: {', '.join(absent)}" if absent else ""


class Browser:
    """One window."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def _send(self, path: str, **body: Any) -> Any:
        answer = self._client.post(path, json=body).json()["value"]
        if isinstance(answer, dict) and "error" in answer:
            raise RuntimeError(f"{answer['error']}: {answer['message']}")
        return answer

    def open(self, url: str) -> None:
        self._send("url", url=url)

    def run(self, script: str, *arguments: Any) -> Any:
        """What the JavaScript returns."""
        return self._send("execute/sync", script=script, args=list(arguments))

    def until(self, script: str, *arguments: Any) -> Any:
        """What the JavaScript returns once that is true."""
        ends = time.monotonic() + LONGEST_S
        while not (found := self.run(f"return {script}", *arguments)):
            if time.monotonic() > ends:
                text = self.run("return document.body.innerText")
                raise AssertionError(f"never true: {script}\n{text}")
            time.sleep(0.05)
        return found

    def show(self, width: int, height: int, *, dark: bool = False) -> None:
        """The size of the page, and the colours that it is asked for."""
        self._command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._command("Emulation.setEmulatedMedia", features=[scheme])

    def _command(self, cmd: str, **params: Any) -> Any:
        return self._send("goog/cdp/execute", cmd=cmd, params=params)

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """Save what is seen as PNG; `whole`: the page to its end."""
        options: dict[str, Any] = {"captureBeyondViewport": whole}
        if whole:
            size = self._command("Page.getLayoutMetrics")["cssContentSize"]
            options["clip"] = {**size, "scale": 1}
        shot = self._command("Page.captureScreenshot", format="png", **options)
        path.write_bytes(base64.b64decode(shot["data"]))

    def complaints(self) -> list[str]:
        """What the page wrote to the console since the last call: errors and violations of its policy."""
        logged = self._send("se/log", type="browser")
        return [entry["message"] for entry in logged if entry["level"] == "SEVERE"]


@contextmanager
def _driver() -> Iterator[str]:
    """A driver that serves; its port. One ends at once if another process takes the port that it has found free."""
    command, said = ["chromedriver", "--port=0"], ""
    for _ in range(STARTS):
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as driver:
            try:
                assert driver.stdout is not None
                for line in driver.stdout:
                    said += line
                    if match := re.search(r"started successfully on port (\d+)", line):
                        yield match[1]
                        return
            finally:
                driver.terminate()
    raise RuntimeError(f"chromedriver did not start {STARTS} times: {said}")


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser of its own, with an empty profile."""
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
        _driver() as port,
        httpx.Client(
            base_url=f"http://127.0.0.1:{port}/session/", timeout=120, trust_env=False
        ) as client,
    ):
        arguments = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--disable-dev-shm-usage",
        ]
        options = {"args": [*arguments, f"--user-data-dir={profile}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        made = client.post(
            f"http://127.0.0.1:{port}/session",
            json={"capabilities": {"alwaysMatch": wanted}},
        ).json()["value"]
        if "sessionId" not in made:
            raise RuntimeError(made["message"])
        client.base_url = f"http://127.0.0.1:{port}/session/{made['sessionId']}/"
        try:
            yield Browser(client)
        finally:
            client.delete(f"http://127.0.0.1:{port}/session/{made['sessionId']}")
