"""What a run of the suites in a guest came to: from pytest's JUnit file to one JSON object.

Nothing is green by silence: skips are listed with their reasons, and no tests at all is a failure.
"""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

JUNIT = "suites.xml"
RESULT = "results.json"
SLOWEST = 5


@dataclass(frozen=True, slots=True)
class Case:
    """One test and how it ended: passed, failed or skipped."""

    name: str
    outcome: str
    seconds: float
    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    """All tests of a run. `rc` is the guest's; the run succeeded when it is 0 and tests passed."""

    rc: int
    seconds: float
    kernel: str
    cases: tuple[Case, ...]

    def count(self, outcome: str) -> int:
        """How many tests ended so."""
        return sum(case.outcome == outcome for case in self.cases)

    @property
    def succeeded(self) -> bool:
        """Whether everything that ran passed, and something ran."""
        return self.rc == 0 and self.count("failed") == 0 and self.count("passed") > 0

    def json(self) -> str:
        """One object, readable by people as well."""
        counts = {name: self.count(name) for name in ("passed", "failed", "skipped")}
        return json.dumps({"succeeded": self.succeeded} | counts | asdict(self), indent=1) + "\n"

    def lines(self) -> list[str]:
        """The summary for a person."""
        slow = sorted(self.cases, key=lambda case: -case.seconds)[:SLOWEST]
        found = [
            f"soft-RoCE guest, {self.kernel}: {self.count('passed')} passed, "
            f"{self.count('failed')} failed, {self.count('skipped')} not run, "
            f"{self.seconds:.0f} s with the boot"
        ]
        found += [f"  slow: {case.seconds:6.1f} s  {case.name}" for case in slow]
        reasons = Counter(case.reason for case in self.cases if case.outcome == "skipped")
        found += [f"  not run: {count:4}  {reason}" for reason, count in sorted(reasons.items())]
        found += [
            f"  FAILED: {case.name}: {case.reason}"
            for case in self.cases
            if case.outcome == "failed"
        ]
        return found


def read(junit: Path) -> tuple[Case, ...]:
    """The tests in a JUnit file; none when the file is missing or cut short."""
    try:
        # Written by our own pytest in our own guest: no input from elsewhere.
        root = ElementTree.parse(junit).getroot()
    except (OSError, ElementTree.ParseError):
        return ()
    cases = []
    for node in root.iter("testcase"):
        outcome, reason = "passed", ""
        for child in node:
            if child.tag in ("failure", "error"):
                outcome = "failed"
            elif child.tag == "skipped":
                outcome = "skipped"
            else:
                continue
            reason = (child.get("message") or "").strip().split("\n")[0][:200]
        name = f"{node.get('classname', '')}.{node.get('name', '')}"
        cases.append(Case(name, outcome, float(node.get("time", "0")), reason))
    return tuple(cases)
