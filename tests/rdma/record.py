"""A pytest plugin for guests: each outcome is written down as it comes, one JSON object a line.

A guest that is killed in the middle so leaves what it had found, and the test it was in. Guests
that divide the tests take one at a time, by making a folder of its name where all of them can see
it: who made it runs the test. One that is booted again goes on with the test it died in.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

RECORD_ENV = "ENTRESOL_RDMA_RECORD"  # file to write to, one per guest
CLAIMS_ENV = "ENTRESOL_RDMA_CLAIMS"  # folder of what is taken, the same for all of them


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


class Taker:
    """Runs what no other guest has taken, the tests marked slow first."""

    def __init__(self, claims: Path, unfinished: set[str]) -> None:
        """`unfinished` were taken by this guest before it had to be booted again."""
        self._claims = claims
        self._unfinished = unfinished

    def take(self, nodeid: str) -> bool:
        """Whether the test is ours; at most one guest is told so."""
        name = hashlib.sha256(nodeid.encode()).hexdigest()[:32]
        try:
            (self._claims / name).mkdir()
        except FileExistsError:
            return nodeid in self._unfinished
        return True

    def _taken(self, items: list[pytest.Item]) -> Iterator[pytest.Item]:
        slow_first = sorted(items, key=lambda item: item.get_closest_marker("slow") is None)
        return (item for item in slow_first if self.take(item.nodeid))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """In place of pytest's own: which test comes next is not known before this one is over."""
        if session.testsfailed or session.config.option.collectonly:
            return None
        for item in self._taken(session.items):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
        return True


def unfinished(record: Path) -> set[str]:
    """The tests that a record says were begun and never ended."""
    found: dict[str, bool] = {}
    if record.exists():
        for line in record.read_text(encoding="utf-8").splitlines():
            try:
                entry = json.loads(line)
                found[entry["test"]] = "begun" in entry
            except (ValueError, KeyError, TypeError):
                continue
    return {test for test, open_ in found.items() if open_}


def pytest_configure(config: pytest.Config) -> None:
    """Take part only where the harness asked for it."""
    path, claims = os.environ.get(RECORD_ENV), os.environ.get(CLAIMS_ENV)
    if not path:
        return
    if claims:
        config.pluginmanager.register(Taker(Path(claims), unfinished(Path(path))))
    config.pluginmanager.register(Recorder(open(path, "a", buffering=1)))  # noqa: SIM115
