"""A Chromium without a window, driven over two pipes by the protocol of its developer tools: no package is needed.

https://chromedevtools.github.io/devtools-protocol: each message is JSON and ends with a zero byte. Chromium reads from
its file descriptor 3 and writes to 4.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome")
MISSING = f"no Chromium is found ({', '.join(NAMES)}); `apt-get install chromium` brings one"


def found() -> str | None:
    """The program, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One page. `errors` has its exceptions and the console's errors, `asked` the addresses that it asked for."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._waiting, self._number, self._session = b"", 0, ""
        self.errors: list[str] = []
        self.asked: list[str] = []
        self.loaded = False
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def _receive(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._waiting:
            if not select.select([self._reading], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError("Chromium does not answer.")
            piece = os.read(self._reading, 1 << 16)
            if not piece:
                raise EOFError("Chromium has ended.")
            self._waiting += piece
        message, self._waiting = self._waiting.split(b"\0", 1)
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        method, about = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = about["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and about["type"] == "error":
            self.errors.append(str([argument.get("value") for argument in about["args"]]))
        elif method == "Log.entryAdded" and about["entry"]["level"] == "error":
            self.errors.append(f"{about['entry']['text']} {about['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.asked.append(about["request"]["url"])
        elif method == "Page.loadEventFired":
            self.loaded = True

    def send(self, method: str, seconds: float = 120.0, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol; events that arrive meanwhile are noted."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._writing, data) :]
        until = time.monotonic() + seconds
        while (answer := self._receive(until)).get("id") != self._number:
            self._note(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def open(self, address: str) -> None:
        """Go to an address, and wait until the page and its scripts are loaded."""
        self.loaded = False
        self.send("Page.navigate", url=address)
        until = time.monotonic() + 60
        while not self.loaded:
            self._note(self._receive(until))

    def run(self, script: str) -> Any:
        """The value of a script's last expression; a promise is waited for."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"].get("exception", {}).get("description")))
        return answer["result"].get("value")

    def look(self, width: int, height: int = 900, dark: bool = False) -> None:
        """Be a screen of this width in CSS pixels (a phone's below 600) that prefers dark or light."""
        phone = width < 600
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[feature])

    def wider_by(self) -> int:
        """By how many CSS pixels the page is wider than its window, whose `innerWidth` grows with it on a phone."""
        return max(0, self.run("document.documentElement.scrollWidth - document.documentElement.clientWidth"))

    def press(self, key: str, code: int) -> None:
        """Press and release a key by its name and its Windows key code: "Tab" is 9, "ArrowRight" 39."""
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def type(self, text: str) -> None:
        """Type text where the focus is."""
        self.send("Input.insertText", text=text)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Drag the mouse from one place to another."""
        places = [start, *(((start[0] * (4 - i) + end[0] * i) / 4, start[1]) for i in range(1, 4)), end]
        for i, (x, y) in enumerate(places):
            kind = "mousePressed" if i == 0 else "mouseMoved"
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)
        self.send("Input.dispatchMouseEvent", type="mouseReleased", x=end[0], y=end[1], button="left", clickCount=1)

    def picture(self, path: Path, height: int | None = None) -> None:
        """Write the page as a PNG: the whole, or as much of its top as is `height` CSS pixels high."""
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height or size["height"], "scale": 1}
        answer = self.send("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))


@contextmanager
def page(program: str, folder: Path) -> Iterator[Page]:
    """A page in a new Chromium whose profile is in `folder`. It ends with the context."""
    to_read, to_write = os.pipe(), os.pipe()  # Chromium reads to_read[0] and writes to_write[1]
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    options += ["--disable-background-networking", "--remote-debugging-pipe", f"--user-data-dir={folder}"]
    shell = f'exec "$0" "$@" 3<&{to_read[0]} 4>&{to_write[1]}'
    process = subprocess.Popen(
        ["bash", "-c", shell, program, *options, "about:blank"],
        pass_fds=(to_read[0], to_write[1]),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_read[0])
    os.close(to_write[1])
    try:
        yield Page(to_write[0], to_read[1])
    finally:
        os.close(to_read[1])
        os.close(to_write[0])
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
