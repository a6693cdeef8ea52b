"""Drive a headless Chromium through a pipe, with the DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

BINARY = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_TIMEOUT_S = 60


class Chromium:
    """One page of a headless Chromium; use it in a ``with`` block."""

    def __enter__(self) -> Chromium:
        """Start the browser."""
        assert BINARY is not None
        self._profile = tempfile.mkdtemp(prefix="chromium-")
        to_read, self._writer = os.pipe()
        self._reader, to_write = os.pipe()
        # The browser reads commands from descriptor 3 and writes answers to descriptor 4.
        words = [BINARY, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        words += ["--remote-debugging-pipe", "--disable-background-networking", f"--user-data-dir={self._profile}"]
        shell = 'read=$1 write=$2; shift 2; exec 3<&$read 4>&$write; exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", str(to_read), str(to_write), *words, "about:blank"],
            pass_fds=(to_read, to_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._buffer, self._number, self._session = b"", 0, None
        self.problems: list[str] = []
        """Errors and warnings of the console, and exceptions."""
        targets = self.send("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Accessibility"):
            self.send(f"{domain}.enable")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the browser."""
        self._session = None
        try:
            self.send("Browser.close")
            self._process.wait(20)
        finally:
            self._process.kill()
            self._process.wait()
            os.close(self._writer)
            os.close(self._reader)
            shutil.rmtree(self._profile, ignore_errors=True)

    def send(self, method: str, **parameters: object) -> dict[str, Any]:
        """Send a command and return its result."""
        self._number += 1
        message: dict[str, object] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._writer, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._reader, 1 << 16)
            assert data, "Chromium ended"
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\0", 1)
        event: dict[str, Any] = json.loads(line)
        if event.get("method") == "Runtime.exceptionThrown":
            self.problems.append(str(event["params"]["exceptionDetails"]))
        if event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] in {"error", "warning"}:
            self.problems.append(str(event["params"]["entry"]))
        return event

    def evaluate(self, expression: str) -> Any:  # noqa: ANN401 - JSON
        """Return the value of a JavaScript expression; a promise is awaited."""
        result = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait_for(self, expression: str) -> Any:  # noqa: ANN401 - JSON
        """Wait until a JavaScript expression is true, and return its value."""
        deadline = time.monotonic() + _TIMEOUT_S
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < deadline, (
                f"{expression} is not true; page: {self.evaluate('document.body.innerText')[:2000]}"
            )
            time.sleep(0.05)
        return value

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Open a page."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", features=scheme)
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.send("Page.navigate", url=url)
        self.wait_for("location.href !== 'about:blank' && document.readyState === 'complete'")

    def press(self, key: str, code: int, text: str = "") -> None:
        """Press a key."""
        for kind in ("keyDown", "keyUp"):
            extra = {"text": text} if text and kind == "keyDown" else {}
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **extra)

    def screenshot(self, path: Path) -> None:
        """Write a PNG of the whole page."""
        data = self.send("Page.captureScreenshot", captureBeyondViewport=True, format="png")["data"]
        path.write_bytes(base64.b64decode(data))
