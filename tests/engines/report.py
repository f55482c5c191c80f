"""What a run of the engines' suites came to, as one JSON object and as a table.

Nothing is green by silence: an environment that could not be built and a test that was skipped
stand there with their reasons; a suite that ended without a passed test, or before a test it had
begun, has failed.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.rdma.report import Case

RESULTS = "results.json"
RC_FAILED = 1
RC_CANNOT = 77  # what automake calls a skipped test
SLOWEST = 3


@dataclass(frozen=True, slots=True)
class Suite:
    """One environment's part.

    Attributes:
        versions: of what was tested.
        rc: of its pytest; None: it did not run, for `reason`.
        reason: also why it failed besides its tests.
        build_seconds: 0 when it was built before.
        cpu_seconds: processor time of the suite and of all processes that it waited for.
        figures: what its tests measured: {"test", "name", "value", "unit"}.
        log: where its output is, when it failed.
    """

    name: str
    rc: int | None
    reason: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    build_seconds: float = 0.0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    cases: tuple[Case, ...] = ()
    figures: tuple[dict[str, Any], ...] = ()
    log: str = ""

    def count(self, outcome: str) -> int:
        """How many tests ended so."""
        return sum(case.outcome == outcome for case in self.cases)

    @property
    def outcome(self) -> str:
        """passed, failed, or "not run here"."""
        if self.rc is None:
            return "not run here"
        good = self.rc == 0 and self.count("failed") == 0 and self.count("passed") > 0
        return "passed" if good else "failed"


@dataclass(frozen=True, slots=True)
class Report:
    """All suites of one run."""

    size: str
    suites: tuple[Suite, ...]
    seconds: float

    @property
    def rc(self) -> int:
        """1: something failed, or nothing was there to run; 77: something could not run here."""
        outcomes = {suite.outcome for suite in self.suites}
        if "failed" in outcomes or not outcomes:
            return RC_FAILED
        return RC_CANNOT if "not run here" in outcomes else 0

    def json(self) -> str:
        """One object, readable by people as well."""
        suites = [{"outcome": suite.outcome} | asdict(suite) for suite in self.suites]
        whole = {"rc": self.rc, "size": self.size, "seconds": self.seconds, "suites": suites}
        return json.dumps(whole, indent=1) + "\n"

    def lines(self) -> list[str]:
        """The summary for a person."""
        found = [f"engines at {self.size} size, {self.seconds:.0f} s", HEAD]
        for suite in self.suites:
            counts = (suite.count(name) for name in ("passed", "failed", "skipped"))
            versions = " ".join(f"{name} {version}" for name, version in suite.versions.items())
            found.append(
                ROW.format(suite.name, suite.outcome, *counts, round(suite.build_seconds),
                           round(suite.seconds), round(suite.cpu_seconds), versions)
            )  # fmt: skip
        for suite in self.suites:
            found += _details(suite)
        return found


ROW = "  {:8} {:13} {:>6} {:>6} {:>7} {:>7} {:>7} {:>6}  {}"
HEAD = ROW.format(
    "suite", "outcome", "passed", "failed", "not run", "build s", "tests s", "cpu s", "with"
)


def _details(suite: Suite) -> list[str]:
    found = []
    if suite.rc is None:
        found.append(f"NOT RUN HERE: {suite.name}: {suite.reason}")
    elif suite.reason:
        found.append(f"  {suite.name}: {suite.reason}")
    for one in suite.figures:
        found.append(f"  {suite.name}: {one['name']} = {one['value']:.6g} {one['unit']}")
    slow = sorted(suite.cases, key=lambda case: -case.seconds)[:SLOWEST]
    found += [f"  {suite.name}: {case.seconds:6.1f} s  {_short(case.name)}" for case in slow]
    reasons = Counter(case.reason for case in suite.cases if case.outcome == "skipped")
    for reason, count in sorted(reasons.items()):
        found.append(f"  {suite.name}: {count} not run: {reason.removeprefix('not run here: ')}")
    for case in suite.cases:
        if case.outcome == "failed":
            found.append(f"  {suite.name}: FAILED {_short(case.name)}: {case.reason}")
    if suite.log:
        found.append(f"  {suite.name}: its output is in {suite.log}")
    return found


def _short(name: str) -> str:
    return name.rpartition("/")[2]


def read_figures(path: Path) -> tuple[dict[str, Any], ...]:
    """What tests measured; a line cut short is not read."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ()
    found = []
    for line in lines:
        try:
            one = json.loads(line)
            found.append({"test": str(one["test"]), "name": str(one["name"]),
                          "value": float(one["value"]), "unit": str(one["unit"])})  # fmt: skip
        except (ValueError, KeyError, TypeError):
            continue
    return tuple(found)
