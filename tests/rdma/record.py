"""A pytest plugin for guests: each outcome is written down as it comes, one JSON object a line.

A guest that is killed in the middle so leaves what it had found, and the test it was in. The plugin
also takes this guest's share of the tests when several guests divide them.
"""

from __future__ import annotations

import json
import os
import zlib
from typing import IO

import pytest

RECORD_ENV = "ENTRESOL_RDMA_RECORD"  # file to write to
SHARE_ENV = "ENTRESOL_RDMA_SHARE"  # "k/n": the k-th of n shares, from 0


def in_share(nodeid: str, share: str) -> bool:
    """Whether a test belongs to a share; each belongs to just one of the n, wherever it stands."""
    number, of = map(int, share.split("/"))
    return zlib.crc32(nodeid.encode()) % of == number


class Recorder:
    """Writes lines {"test", "begun"} and {"test", "outcome", "seconds", "reason"}."""

    def __init__(self, file: IO[str]) -> None:
        """`file` is line-buffered and stays open to the end of the process."""
        self._file = file
        self._seconds: dict[str, float] = {}
        self._outcome: dict[str, tuple[str, str]] = {}

    def _write(self, line: dict[str, object]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write({"test": nodeid, "begun": True})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = report.nodeid
        self._seconds[test] = self._seconds.get(test, 0.0) + report.duration
        outcome, reason = report.outcome, ""
        if report.skipped and isinstance(report.longrepr, tuple):
            reason = report.longrepr[2].removeprefix("Skipped: ")
        elif report.failed:
            lines = [line[2:] for line in report.longreprtext.splitlines() if line[:2] == "E "]
            reason = (lines or report.longreprtext.splitlines() or [""])[0].strip()[:200]
        # A failed or skipped phase decides; a passed one after it does not undo that.
        if test not in self._outcome or outcome != "passed":
            self._outcome[test] = (outcome, reason)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        outcome, reason = self._outcome.pop(nodeid, ("failed", "no report"))
        seconds = round(self._seconds.pop(nodeid, 0.0), 2)
        self._write({"test": nodeid, "outcome": outcome, "seconds": seconds, "reason": reason})


def pytest_configure(config: pytest.Config) -> None:
    """Take part only where the harness asked for it."""
    path = os.environ.get(RECORD_ENV)
    if path:
        config.pluginmanager.register(Recorder(open(path, "a", buffering=1)))  # noqa: SIM115


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave other guests' shares to them."""
    share = os.environ.get(SHARE_ENV)
    if share:
        others = [item for item in items if not in_share(item.nodeid, share)]
        items[:] = [item for item in items if in_share(item.nodeid, share)]
        config.hook.pytest_deselected(items=others)
