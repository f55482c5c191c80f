"""A real headless browser, driven over its debugging pipe: no driver and no package in between.

Protocol: Chrome DevTools Protocol, JSON messages ended by a zero byte on descriptors 3 and 4
(`--remote-debugging-pipe`).
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

SECONDS_MAX = 60.0
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def browser() -> str:
    """Path of one that is installed, or nothing."""
    return next((found for name in NAMES if (found := shutil.which(name))), "")


class Browser:
    """One page in a browser of its own, and what it complained about."""

    def __init__(self, program: str, folder: Path, *, dark: bool = False) -> None:
        self._to, theirs_in = os.pipe()[::-1]
        theirs_out_end: int
        self._from, theirs_out_end = os.pipe()

        def hand_over() -> None:
            # The browser reads commands at 3 and writes answers at 4.
            reader, writer = os.dup(theirs_in), os.dup(theirs_out_end)
            os.dup2(reader, 3)
            os.dup2(writer, 4)

        words = [program, "--headless", "--remote-debugging-pipe", "--no-first-run",
                 "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage",
                 f"--user-data-dir={folder}", "--window-size=1150,1000"]  # fmt: skip
        if os.geteuid() == 0:
            words.append("--no-sandbox")  # it refuses to run as root with it
        if dark:
            words.append("--force-dark-mode")
        self._process = subprocess.Popen(
            [*words, "about:blank"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, preexec_fn=hand_over, close_fds=False,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out_end)
        self._number = 0
        self._raw = b""
        self.complaints: list[str] = []
        self.requests: list[str] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(row["targetId"] for row in targets if row["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page, flatten=True)
        self._session = attached["sessionId"]
        for room in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{room}.enable")

    _session = ""

    def call(self, method: str, **parameters: Any) -> Any:
        """One command and its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + SECONDS_MAX
        while b"\0" not in self._raw:
            left = end - time.monotonic()
            ready = select.select([self._from], [], [], max(0.0, left))[0]
            more = os.read(self._from, 1 << 20) if ready else b""
            assert more, f"the browser says nothing: {self._process.poll()}"
            self._raw += more
        line, _, self._raw = self._raw.partition(b"\0")
        found = dict(json.loads(line))
        self._note(found)
        return found

    def _note(self, found: dict[str, Any]) -> None:
        method, told = found.get("method"), found.get("params", {})
        if method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.complaints.append(str(told["entry"]["text"]))
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(told["exceptionDetails"])[:500])
        elif method == "Network.requestWillBeSent":
            self.requests.append(str(told["request"]["url"]))

    def open(self, url: str) -> None:
        """Go there."""
        self.call("Page.navigate", url=url)

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until an expression is true."""
        end = time.monotonic() + SECONDS_MAX
        script = f"(() => {{ try {{ return !!({condition}) }} catch {{ return false }} }})()"
        while not self.evaluate(script):
            assert time.monotonic() < end, (condition, self.complaints)
            time.sleep(0.1)

    def picture(self) -> bytes:
        """A PNG of the page."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(Exception):
            self._session = ""
            self.call("Browser.close")
        try:
            self._process.wait(SECONDS_MAX)
        finally:
            self._process.kill()
            self._process.wait()
            os.close(self._to)
            os.close(self._from)
