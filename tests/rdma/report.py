"""What a run of the suites in guests came to: from the lines the recorder wrote to one JSON object.

Nothing is green by silence: skips are listed with their reasons, a test that was begun and never
ended is a failure, and so is a run without tests.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.rdma import cost
from tests.rdma.evidence import Evidence
from tests.rdma.spec import RC_NO_RESULT

RESULT = "results.json"
SLOWEST = 5
OUTCOMES = ("passed", "failed", "skipped")


@dataclass(frozen=True, slots=True)
class Case:
    """One test and how it ended: passed, failed or skipped."""

    name: str
    outcome: str
    seconds: float
    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    """All tests of a run, and the guests' exit codes: a success is all 0 and a test that passed."""

    rcs: tuple[int, ...]
    seconds: float
    where: str  # in words: which machines, how many
    cases: tuple[Case, ...]
    evidence: Evidence = field(default_factory=Evidence)

    def count(self, outcome: str) -> int:
        """How many tests ended so."""
        return sum(case.outcome == outcome for case in self.cases)

    @property
    def succeeded(self) -> bool:
        """Whether everything that ran passed, and something ran."""
        return not any(self.rcs) and self.count("failed") == 0 and self.count("passed") > 0

    @property
    def rc(self) -> int:
        """An exit code for the whole: 1 where a test failed, else a guest's own.

        So a guest that came to no result hides no failure, not even of the test it died in.
        """
        if self.succeeded:
            return 0
        if self.count("failed"):
            return 1
        own = [rc for rc in self.rcs if rc]
        return next((rc for rc in own if rc != RC_NO_RESULT), max((1, *own)))

    def json(self) -> str:
        """One object, readable by people as well."""
        counts = {name: self.count(name) for name in OUTCOMES}
        return json.dumps({"succeeded": self.succeeded} | counts | asdict(self), indent=1) + "\n"

    def lines(self) -> list[str]:
        """The summary for a person."""
        slow = sorted(self.cases, key=lambda case: -case.seconds)[:SLOWEST]
        found = [
            f"{self.where}: {self.count('passed')} passed, {self.count('failed')} failed, "
            f"{self.count('skipped')} not run, {self.seconds:.0f} s in all"
        ]
        found += [f"  slow: {case.seconds:6.1f} s  {case.name}" for case in slow]
        reasons = Counter(case.reason for case in self.cases if case.outcome == "skipped")
        found += [f"  not run: {count:4}  {reason}" for reason, count in sorted(reasons.items())]
        found += [
            f"  FAILED: {case.name}: {case.reason}"
            for case in self.cases
            if case.outcome == "failed"
        ]
        costs = [cost.Cost(**values) for values in self.evidence.of(cost.FIGURE)]
        return [
            *found,
            *self.evidence.read_lines(),
            *cost.lines(costs),
            *self.evidence.fault_lines(),
        ]


def read(record: Path) -> tuple[Case, ...]:
    """The tests in one guest's record; none when there is none. A line cut short is not read."""
    try:
        lines = record.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ()
    cases: dict[str, Case] = {}
    for line in lines:
        try:
            entry = json.loads(line)
            name = str(entry["test"])
            if "begun" in entry:
                cases[name] = Case(name, "failed", 0.0, "begun and never ended")
            else:
                outcome, seconds = str(entry["outcome"]), float(entry["seconds"])
                cases[name] = Case(name, outcome, seconds, str(entry["reason"]))
        except (ValueError, KeyError, TypeError):
            continue
    return tuple(cases.values())
