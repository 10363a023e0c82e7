"""A headless Chromium that tests type and click in, over the DevTools protocol on two pipes."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    " --disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars --remote-debugging-pipe"
)
WAIT = 60.0
"""Seconds in which a condition must become true."""


class Browser:
    """One tab. `errors` has what its scripts threw."""

    def __init__(self, folder: Path, width: int = 1400, height: int = 1000) -> None:
        assert CHROMIUM
        (read, self.commands), (self.answers, write) = os.pipe(), os.pipe()
        command = [CHROMIUM, *QUIET.split(), f"--window-size={width},{height}", f"--user-data-dir={folder / 'profile'}"]
        # the browser reads commands from 3 and writes to 4, and these may be the numbers of other ends of the pipes
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (read, write)]
        start = f'exec "$@" 3<&{ends[0]} 4>&{ends[1]}'
        self.process = subprocess.Popen(
            ["bash", "-c", start, "bash", *command, "about:blank"], pass_fds=ends, stderr=subprocess.DEVNULL
        )
        for end in (read, write, *ends):
            os.close(end)
        self.number, self.session, self.rest = 0, "", b""
        self.errors: list[str] = []
        target = next(one for one in self.send("Target.getTargets")["targetInfos"] if one["type"] == "page")
        self.session = self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Accessibility"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.commands)
        os.close(self.answers)

    def send(self, method: str, **parameters: Any) -> Any:
        """Send a command and return its result."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("method") == "Runtime.exceptionThrown":
                details = answer["params"]["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description") or details["text"])
            if answer.get("method") == "Log.entryAdded" and answer["params"]["entry"]["level"] == "error":
                self.errors.append(answer["params"]["entry"]["text"])
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            block = os.read(self.answers, 1 << 20)
            assert block, "the browser has ended"
            self.rest += block
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)

    def open(self, address: str) -> None:
        """Open an address and wait until it is loaded."""
        self.send("Page.navigate", url=address)
        self.until(f"document.readyState === 'complete' && location.href !== 'about:blank' && {json.dumps(address)}")

    def value(self, script: str) -> Any:
        """The value of an expression, or of the promise that it is."""
        found = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, script: str) -> None:
        """Wait until an expression is true; an element that is found is."""
        end = time.monotonic() + WAIT
        while not self.value(f"Boolean({script})"):
            assert time.monotonic() < end, f"never true: {script}"
            time.sleep(0.05)

    def key(self, name: str) -> None:
        """Press a key: "ArrowRight", "Tab", "+"."""
        text = {"text": name} if len(name) == 1 else {"text": "\r"} if name == "Enter" else {}
        codes = {"Tab": 9, "Enter": 13, "Escape": 27}
        for kind in ("keyDown", "keyUp"):
            about = {"type": kind, "key": name, "windowsVirtualKeyCode": codes.get(name, 0)}
            self.send("Input.dispatchKeyEvent", **about, **(text if kind == "keyDown" else {}))

    def text(self, words: str) -> None:
        """Type words into what has the focus."""
        self.send("Input.insertText", text=words)

    def mouse(self, kind: str, x: float, y: float, clicks: int = 1) -> None:
        """A mouse event: "Moved", "Pressed", "Released"."""
        pressed = {"button": "left", "buttons": 1, "clickCount": clicks} if kind != "Moved" else {}
        self.send("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **pressed)

    def place(self, selector: str) -> tuple[float, float, float, float]:
        """Left, top, width and height of an element in the window, after it was scrolled into view."""
        box = self.value(
            f"(() => {{ const one = document.querySelector({json.dumps(selector)});"
            " one.scrollIntoView({block: 'center'}); const box = one.getBoundingClientRect();"
            " return [box.left, box.top, box.width, box.height]; })()"
        )
        return box[0], box[1], box[2], box[3]

    def click(self, selector: str) -> None:
        """Click in the middle of an element."""
        left, top, width, height = self.place(selector)
        for kind in ("Moved", "Pressed", "Released"):
            self.mouse(kind, left + width / 2, top + height / 2)

    def roles(self) -> list[tuple[str, str]]:
        """Role and name of everything that a screen reader finds."""
        nodes = self.send("Accessibility.getFullAXTree")["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in nodes
            if not node["ignored"] and "role" in node
        ]

    def theme(self, name: str) -> None:
        """Prefer a "dark" or a "light" theme, as the settings of a system do."""
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def picture(self, path: Path, whole: bool = True) -> None:
        """Save a picture of the page."""
        data = self.send("Page.captureScreenshot", captureBeyondViewport=whole, **self._clip(whole))["data"]
        path.write_bytes(base64.b64decode(data))

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}
