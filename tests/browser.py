"""Drive a headless Chromium by its DevTools protocol: open a page, run code in it, take screenshots."""

import base64
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--hide-scrollbars",
)
_START_S, _ANSWER_S = 60.0, 60.0


class Tab:
    """Control one page; what it says on its console, and what it asks the network for, is kept."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._number = 0
        self.complaints: list[str] = []  # errors, refusals of the policy, exceptions
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result. Raises: AssertionError if the browser refuses it."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=_ANSWER_S))
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"])[:600])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def run(self, code: str) -> Any:
        """Return the value of an expression in the page."""
        found = self.send("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def size(self, width: int, height: int, *, is_dark: bool = False) -> None:
        """Set the size of the window and the preferred colours."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        colours = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[colours])

    def open(self, url: str) -> None:
        """Load a page and wait until it is drawn."""
        self.send("Page.navigate", url=url)
        self.wait(
            "document.readyState === 'complete' && document.querySelector('#top') === null"
        )  # main.js replaces it
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def wait(self, condition: str, seconds: float = 30.0) -> None:
        """Wait until an expression is true in the page. Raises: AssertionError after a time."""
        end = time.monotonic() + seconds
        while not self.run(condition):
            assert time.monotonic() < end, f"not within {seconds} s: {condition}"
            time.sleep(0.02)

    def press(self, key: str) -> None:
        """Press a key."""
        for kind in ("keyDown", "keyUp"):
            self.send(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode={"Tab": 9, "ArrowLeft": 37, "ArrowRight": 39, "Enter": 13}.get(key, 0),
            )

    def screenshot(self, path: Path, *, is_whole: bool = False) -> None:
        """Write what is seen, or the whole page, as a PNG."""
        found = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=is_whole)
        path.write_bytes(base64.b64decode(found["data"]))


@contextmanager
def browser() -> Iterator[Tab]:
    """Start Chromium with a profile of its own, and end it."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", "--remote-debugging-port=0", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            with connect(_address(Path(profile)), max_size=None, open_timeout=_START_S, ping_interval=None) as socket:
                yield Tab(socket)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _address(profile: Path) -> str:
    """Return the address of the first tab, once the browser has written its port."""
    import urllib.request

    end = time.monotonic() + _START_S
    while time.monotonic() < end:
        try:
            port = (profile / "DevToolsActivePort").read_text().splitlines()[0]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=5) as reply:
                tabs = json.load(reply)
            return next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
        except (OSError, IndexError, StopIteration):
            time.sleep(0.05)
    raise AssertionError("Chromium did not start")
