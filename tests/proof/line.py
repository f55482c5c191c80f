"""What a line of the scorecard is: work counted in units, cut into slices, added up in tallies.

Invariant: what a slice does depends on its first seed, its number of units and the size alone, so
that any unit can be run again by its seed. Unit n of a slice has the seed `slice.seed + n`.
"""

from __future__ import annotations

import enum
import importlib
import os
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

LINES_PACKAGE = "tests.proof.lines"
FINDINGS_KEPT_MAX = 20  # of one tally; the counts go on
BETWEEN_REASONS = "; "  # why a tally lacks something


class Size(enum.StrEnum):
    """How much is tried."""

    COMMIT = "commit"
    NIGHTLY = "nightly"
    RELEASE = "release"


class NotRunError(Exception):
    """Raised by a line's run or canary that finds, half-way, that this machine cannot do it."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of a line's work.

    Attributes:
        seed: of the first unit.
        units: how many.
        size: of the whole run, for lines whose units differ by it.
        folder: an empty one of this slice's own, removed afterwards.
        trace: tell what happens, on stdout: a person replays this slice.
        minimise: look for the smallest run that still fails, where the line can.
    """

    seed: int
    units: int
    size: Size
    folder: Path
    trace: bool = False
    minimise: bool = False

    @property
    def seeds(self) -> range:
        """The seed of every unit."""
        return range(self.seed, self.seed + self.units)


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that must not be. `seed` runs it again."""

    seed: int
    text: str


@dataclass(slots=True)
class Tally:
    """What came of some work.

    Attributes:
        tried: attempts, in what the line counts (images, operations, inputs).
        survived: attempts after which every promise held.
        wrong_bytes: blocks served with other bytes than were stored.
        durable_lost: blocks that were acknowledged as durable and are gone.
        crashes: processes that died, or errors that are not documented.
        findings: each fails the line, whatever the counts say.
        figures: other numbers. They add up over slices; names that begin with `max_` or `min_`
            keep the largest or the smallest.
        not_run: what this machine could not do after all, and why: all of it where nothing was
            tried, else a part; or empty.
    """

    tried: int = 0
    survived: int = 0
    wrong_bytes: int = 0
    durable_lost: int = 0
    crashes: int = 0
    findings: list[Finding] = field(default_factory=list)
    findings_dropped: int = 0
    figures: dict[str, float] = field(default_factory=dict)
    not_run: str = ""

    def found(self, seed: int, text: str) -> None:
        """Note a finding."""
        if len(self.findings) < FINDINGS_KEPT_MAX:
            self.findings.append(Finding(seed, text))
        else:
            self.findings_dropped += 1

    def lacks(self, reason: str) -> None:
        """Note what could not be done here; each reason once."""
        known = self.not_run.split(BETWEEN_REASONS) if self.not_run else []
        more = [each for each in reason.split(BETWEEN_REASONS) if each and each not in known]
        self.not_run = BETWEEN_REASONS.join([*known, *dict.fromkeys(more)])

    def figure(self, name: str, value: float) -> None:
        """Add a number to those of its name."""
        before = self.figures.get(name)
        if before is None:
            self.figures[name] = value
        elif name.startswith("max_"):
            self.figures[name] = max(before, value)
        elif name.startswith("min_"):
            self.figures[name] = min(before, value)
        else:
            self.figures[name] = before + value

    def add(self, other: Tally) -> None:
        """Take in another one."""
        self.tried += other.tried
        self.survived += other.survived
        self.wrong_bytes += other.wrong_bytes
        self.durable_lost += other.durable_lost
        self.crashes += other.crashes
        self.findings_dropped += other.findings_dropped
        self.lacks(other.not_run)
        for finding in other.findings:
            self.found(finding.seed, finding.text)
        for name, value in other.figures.items():
            self.figure(name, value)

    @property
    def clean(self) -> bool:
        """Nothing was wrong, lost, crashed or found, and every attempt survived."""
        return not (self.wrong_bytes or self.durable_lost or self.crashes or self.findings) and (
            self.survived == self.tried
        )


def _always() -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the scorecard.

    Attributes:
        id: as the scorecard has it: R1, F2, S5.
        name: what is shown, in a few words.
        unit: what `units` counts.
        units: how many at each size.
        slice_units: at most so many in one process; a slice should take 10 to 60 s.
        run: does the units of a slice. May raise: that is a crash with the slice's seed, but for
            NotRunError.
        canary: plants a bug and returns if the line's own run found it. Raises: AssertionError
            when it did not; NotRunError. Lines that name the same function share it: it runs once.
        alone: nothing runs beside it, for lines that compare times.
        canary_alone: nor beside its canary, whose bug shows in times only.
        in_memory: its folder need not be on a disk, where one was only slow: what the line says of
            disks it says of simulated ones.
        slice_deadline_s: a slice that takes longer is killed, and counts as a crash.
        not_run: a reason why this machine cannot run the line, or "".
    """

    id: str
    name: str
    unit: str
    units: Mapping[Size, int]
    slice_units: int
    run: Callable[[Slice], Tally]
    canary: Callable[[], None] | None
    alone: bool = False
    canary_alone: bool = False
    in_memory: bool = False
    slice_deadline_s: float = 300.0
    not_run: Callable[[], str] = _always

    def slices(self, size: Size, seed: int) -> Iterator[tuple[int, int]]:
        """(seed, units) of each slice."""
        left = self.units[size]
        while left > 0:
            units = min(left, self.slice_units)
            yield seed, units
            seed += units
            left -= units


def find_lines() -> dict[str, Line]:
    """Every line of `tests.proof.lines`, in the order of the scorecard: R, G, F, S, K, Q.

    `ENTRESOL_PROOF_LINES` names another package to look in: the frame's own tests have one.
    """
    package = importlib.import_module(os.environ.get("ENTRESOL_PROOF_LINES", LINES_PACKAGE))
    found: dict[str, Line] = {}
    for module in pkgutil.iter_modules(package.__path__):
        for line in importlib.import_module(f"{package.__name__}.{module.name}").LINES:
            if line.id in found:
                raise ValueError(f"two lines are called {line.id}")
            found[line.id] = line
    return dict(sorted(found.items(), key=lambda item: order(item[0])))


def order(line_id: str) -> tuple[int, int]:
    """Sort key of an id such as R11."""
    return "RGFSKQ".find(line_id[0]), int(line_id[1:])
