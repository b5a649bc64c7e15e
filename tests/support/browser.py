"""A browser without a window, driven by the WebDriver protocol."""

from __future__ import annotations

import base64
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

from tests.support.tiers import HANGS_S

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
_FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars"
)

ENTER, CONTROL, RIGHT = "\ue007", "\ue009", "\ue014"  # keys, as the protocol names them


class Browser:
    """One window of a browser."""

    def __init__(self, http: httpx2.Client, session: str) -> None:
        self._http = http
        self._session = session

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        answer = self._http.request(method, f"/session/{self._session}{path}", json=body)
        value = answer.json()["value"]
        assert answer.status_code == 200, value
        return value

    def open(self, url: str) -> None:
        self._ask("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """Run the body of a function in the page, with `arguments`, and return what it returns."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def until(self, script: str) -> Any:
        """Wait until the expression `script` holds in the page; return its value."""
        deadline = time.monotonic() + HANGS_S
        while not (value := self.run(f"return {script}")):
            assert time.monotonic() < deadline, (script, self.run("return document.body.innerText"), self.log)
            time.sleep(0.1)
        return value

    def press(self, keys: str) -> None:
        """Press keys, whatever has the focus. Ctrl is held until the end."""
        actions = []
        for key in keys:
            actions.append({"type": "keyDown", "value": key})
            if key != CONTROL:
                actions.append({"type": "keyUp", "value": key})
        actions += [{"type": "keyUp", "value": CONTROL}] * (CONTROL in keys)
        self._ask("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def point_at(self, selector: str, x: float, y: float) -> None:
        """Move the pointer to a point of an element, in pixels from its top left corner."""
        left, top = self.run(
            "const b = document.querySelector(arguments[0]); b.scrollIntoView({block: 'center'});"
            "const r = b.getBoundingClientRect(); return [r.left, r.top]",
            selector,
        )
        move = {"type": "pointerMove", "duration": 0, "x": round(left + x), "y": round(top + y)}
        self._ask("POST", "/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": [move]}]})

    def resize(self, width: int, height: int) -> None:
        """Give the page a size in CSS pixels, also where a window could not be so narrow."""
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    def prefer(self, scheme: str) -> None:
        """Prefer a `light` or a `dark` page."""
        self.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def devtools(self, command: str, **parameters: Any) -> Any:
        return self._ask("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def picture(self, file: Path, selector: str = "html", height: int | None = None) -> None:
        """Write a PNG of the whole page, or of one element; with a `height` of so much of it from its top."""
        place = self.run("return document.querySelector(arguments[0]).getBoundingClientRect().toJSON()", selector)
        clip = {name: place[name] for name in ("x", "y", "width", "height")}
        clip["height"] = height or clip["height"]
        part = {} if selector == "html" and not height else {"clip": {**clip, "scale": 1}}
        found = self.devtools("Page.captureScreenshot", captureBeyondViewport=True, **part)
        file.write_bytes(base64.b64decode(found["data"]))

    @property
    def log(self) -> list[dict[str, Any]]:
        """What the browser has complained about since this was last asked."""
        found: list[dict[str, Any]] = self._ask("POST", "/se/log", {"type": "browser"})
        return found


@contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    """Start a browser whose profile lies in `folder`."""
    assert DRIVER is not None
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    driver = subprocess.Popen([DRIVER, f"--port={port}", "--silent"], stdout=subprocess.DEVNULL)
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}") as http:
            _await(http)
            options = {"binary": CHROMIUM, "args": [*_FLAGS.split(), f"--user-data-dir={folder / 'profile'}"]}
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            answer = http.post("/session", json={"capabilities": {"alwaysMatch": wanted}}).json()["value"]
            assert "sessionId" in answer, answer
            try:
                yield Browser(http, answer["sessionId"])
            finally:
                http.delete(f"/session/{answer['sessionId']}")  # ends the browser
    finally:
        driver.terminate()
        driver.wait()
        deadline = time.monotonic() + HANGS_S
        while (folder / "profile").exists() and time.monotonic() < deadline:  # its last processes still write there
            shutil.rmtree(folder / "profile", ignore_errors=True)


def _await(http: httpx2.Client) -> None:
    deadline = time.monotonic() + HANGS_S
    while time.monotonic() < deadline:
        try:
            if http.get("/status").json()["value"]["ready"]:
                return
        except httpx2.TransportError:
            time.sleep(0.1)
    raise AssertionError("chromedriver does not answer")
