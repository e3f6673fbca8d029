"""A real browser, a real Prometheus and a cluster with the dashboard, for the tests of dashboard, report and metrics.

On a machine without the first two the tests skip. Where DISTMM_CI is set, as in ``.ci/run``, they fail.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed import Client, LocalCluster
from tornado.websocket import WebSocketClientConnection, websocket_connect

from distmm.telemetry import client as telemetry
from tests import forked
from tests.distmm.telemetry.pages import connections
from tests.until import until


def program(*names: str) -> str:
    """Return the path of the first of these programs that is installed."""
    for name in names:
        if path := shutil.which(name):
            return path
    message = f"none of {', '.join(names)} is installed (on Debian: apt-get install chromium prometheus)"
    if os.environ.get("DISTMM_CI"):
        pytest.fail(message)
    pytest.skip(message)


@pytest.fixture(scope="session")
def promtool() -> str:
    return program("promtool")


@pytest.fixture(scope="session")
def prometheus() -> str:
    return program("prometheus")


class Browser:
    """A page in headless Chromium, driven by its own remote debugging protocol."""

    def __init__(self, chromium: str, folder: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self.errors: list[str] = []
        self.messages = 0
        self.log = (folder / "chromium.log").open("w")
        self.process = subprocess.Popen(
            [
                chromium, "--headless=new", "--no-sandbox",
                "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run",
                "--disable-features=BackForwardCache",  # it keeps the connections of pages that were left
                "--remote-debugging-port=0", f"--user-data-dir={folder / 'profile'}", "about:blank",
            ],
            stdout=self.log, stderr=self.log,
        )  # fmt: skip
        port_file = folder / "profile" / "DevToolsActivePort"
        port = until(lambda: self._listens(port_file), "Chromium does not listen")
        self.socket = self.loop.run_until_complete(self._connect(port))
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def _listens(self, port_file: Path) -> str | None:
        """Return the port of the remote debugging protocol; None while it is not known."""
        assert self.process.poll() is None, "Chromium has ended"
        return port_file.read_text().partition("\n")[0] if port_file.exists() else None

    async def _connect(self, port: str) -> WebSocketClientConnection:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list") as answer:
            (page,) = [target for target in json.load(answer) if target["type"] == "page"]
        return await websocket_connect(page["webSocketDebuggerUrl"], max_message_size=1 << 28)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol, and note the errors that the page reports meanwhile."""
        return self.loop.run_until_complete(asyncio.wait_for(self._call(method, params), 120))

    async def _call(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        self.messages += 1
        number = self.messages
        await self.socket.write_message(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            text = await self.socket.read_message()
            assert text is not None, "Chromium has closed the connection"
            message = json.loads(text)
            if message.get("id") == number:
                assert "error" not in message, message["error"]
                return message["result"]
            if message.get("method") == "Runtime.exceptionThrown":
                details = message["params"]["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description") or details["text"])
            elif message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                self.errors.append(message["params"]["entry"]["text"])

    def open(self, url: str, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        """Load a page in a window of this size, for a reader who prefers this colour scheme."""
        # Errors of the page before do not count: a dashboard reports some when its cluster is closed.
        self.call("Page.navigate", url="about:blank")
        self.evaluate("document.readyState")
        self.errors.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )  # fmt: skip
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """Value of a JavaScript expression on the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def until(self, expression: str) -> Any:
        """Wait until a JavaScript expression is true on the page; return its value."""

        def value() -> Any:
            found = self.evaluate(expression)
            assert found or self.errors == [], self.errors
            return found

        return until(value, f"{expression} is not true")

    def screenshot(self, path: Path) -> bytes:
        """Take a picture of the window, and keep it as a file."""
        picture = base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        path.write_bytes(picture)
        return picture

    async def _disconnect(self) -> None:
        self.socket.close()  # it writes, so it runs in the loop of this browser

    def close(self) -> None:
        self.loop.run_until_complete(self._disconnect())
        self.process.terminate()
        self.process.wait(120)
        self.log.close()
        self.loop.close()


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    chromium = program("chromium", "chromium-browser", "google-chrome")  # may skip, so it comes first
    browser = Browser(chromium, tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder for screenshots: DISTMM_SCREENSHOTS if it is set (to look at them), else a temporary one."""
    kept = os.environ.get("DISTMM_SCREENSHOTS")
    folder = Path(kept) if kept else tmp_path_factory.mktemp("screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def cluster() -> Iterator[Client]:
    with (
        dask.config.set({"distributed.scheduler.work-stealing": False, "distributed.scheduler.allowed-failures": 100}),
        forked.workers(),
        LocalCluster(n_workers=2, threads_per_worker=1, memory_limit="2GiB", dashboard_address="127.0.0.1:0") as two,
        Client(two, set_as_default=False) as client,
    ):
        telemetry.install(client)
        with client.as_current():
            yield client


@pytest.fixture
def page(browser: Browser, cluster: Client) -> Iterator[Browser]:
    """A browser that leaves the page before the cluster closes: closing would interrupt Bokeh while it sends."""
    yield browser
    browser.open("about:blank")
    until(lambda: cluster.run_on_scheduler(connections) == 0)
