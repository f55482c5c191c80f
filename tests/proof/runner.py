"""Runs slices, a few at a time, and adds their tallies up into the scorecard.

Canaries run first; lines that compare times (`alone`) run last, one slice at a time. A run that is
stopped kills only what it started; its journal keeps the slices that were done.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from tests.proof.journal import Journal
from tests.proof.line import Line, Size, Tally
from tests.proof.slices import Child
from tests.proof.table import CANARIES, Row, Scorecard

POLL_S = 0.05
SAY_EVERY_S = 15.0


@dataclass(slots=True)
class Run:
    """One run of some lines.

    Attributes:
        lines: in the order of the table.
        jobs: processes at a time.
        canaries: also plant each line's bug and see that the line finds it.
    """

    lines: Sequence[Line]
    size: Size
    seed: int
    jobs: int
    journal: Journal
    canaries: bool = True
    rows: dict[str, Row] = field(default_factory=dict)
    units_left: dict[str, int] = field(default_factory=dict)
    began_s: float = field(default_factory=time.monotonic)
    said_s: float = 0.0
    stopping: bool = False

    def scorecard(self) -> Scorecard:
        """Run everything. Raises: KeyboardInterrupt on SIGINT, when all children are killed.

        The signal is only noted, and looked at between two steps: it must not come between a
        child's start and the list that it is killed by.
        """
        before = signal.getsignal(signal.SIGINT)
        if before is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._stop)
        try:
            return self._scorecard()
        finally:
            signal.signal(signal.SIGINT, before)

    def _stop(self, *_: object) -> None:
        self.stopping = True

    def _scorecard(self) -> Scorecard:
        for line in self.lines:
            reason = line.not_run()
            self.rows[line.id] = Row(line.id, line.name, self.seed, not_run=reason)
            self.units_left[line.id] = 0 if reason else line.units[self.size]
        if self.canaries:
            self.rows[CANARIES] = Row(CANARIES, "planted bugs that a line found", self.seed)
        able = [line for line in self.lines if not self.rows[line.id].not_run]
        # A planted bug must be found on a busy machine too, unless it shows in times only.
        together = [
            *self._canaries([x for x in able if not x.canary_alone]),
            *self._todo([x for x in able if not x.alone]),
        ]
        self._work(together, self.jobs)
        apart = self._canaries([x for x in able if x.canary_alone])
        self._work([*apart, *self._todo([x for x in able if x.alone])], 1)
        return Scorecard(self.size, list(self.rows.values()), time.monotonic() - self.began_s)

    def _canaries(self, lines: Sequence[Line]) -> Iterator[tuple[Line, int, int]]:
        """Slices without units, of those not done before; one for lines that share theirs."""
        begun = set()
        for line in lines:
            if self.canaries and line.canary is not None and line.canary not in begun:
                for slice_ in self._unless_done(line, 0, 0):
                    begun.add(line.canary)
                    yield slice_

    def _todo(self, lines: Sequence[Line]) -> Iterator[tuple[Line, int, int]]:
        """(line, seed, units) of the slices not done before."""
        for line in lines:
            for seed, units in line.slices(self.size, self.seed):
                yield from self._unless_done(line, seed, units)

    def _unless_done(self, line: Line, seed: int, units: int) -> Iterator[tuple[Line, int, int]]:
        before = self.journal.done(line, self.size, seed, units)
        if before is None:
            yield line, seed, units
        else:
            self._take(line, units, *before)

    def _work(self, todo: list[tuple[Line, int, int]], jobs: int) -> None:
        todo.reverse()
        children: list[Child] = []
        try:
            while todo or children:
                while todo and len(children) < jobs:
                    line, seed, units = todo.pop()
                    children.append(Child.start(line, seed, units, self.size))
                time.sleep(POLL_S)
                if self.stopping:
                    raise KeyboardInterrupt
                for child in tuple(children):
                    seconds = child.seconds
                    tally = child.poll()
                    if tally is None:
                        continue
                    children.remove(child)
                    self._ended(child, seconds, tally)
                self._say(children, len(todo))
        finally:
            for child in children:
                child.discard()

    def _ended(self, child: Child, seconds: float, tally: Tally) -> None:
        """Note and count a slice; a canary for every line whose it is."""
        sharing = [child.line] if child.units else [
            line for line in self.lines
            if line.canary is child.line.canary and not self.rows[line.id].not_run
        ]  # fmt: skip
        for line in sharing:
            # A failure is tried again by the next run, and so is what could not be done at all.
            if tally.clean and (tally.tried or not tally.not_run):
                self.journal.note(line, self.size, child.seed, child.units, seconds, tally)
            self._take(line, child.units, seconds / len(sharing), replace(tally))

    def _take(self, line: Line, units: int, seconds: float, tally: Tally) -> None:
        row = self.rows[line.id if units else CANARIES]
        if not units:
            tally.findings = [
                replace(finding, text=f"canary of {line.id}: {finding.text}")
                for finding in tally.findings
            ]
            if tally.not_run:
                tally.not_run = f"canary of {line.id}: {tally.not_run}"
        row.tally.add(tally)
        if units and tally.not_run and not tally.tried:
            row.tally.figure(f"slices not run ({tally.not_run})", 1)
        # A line of which a part ran is judged by that part; what is left out is said beside it.
        nothing = row.tally.clean and not row.tally.tried
        row.not_run = row.tally.not_run if nothing else ""
        row.seconds += seconds
        self.units_left[line.id] -= units
        if not tally.clean:
            for finding in tally.findings:
                _tell(f"{line.id} FOUND seed={finding.seed}: {finding.text}")
        elif units and not self.units_left[line.id]:
            _tell(f"{line.id} done: {row.tally.tried:,} tried, {row.seconds:.0f} s")

    def _say(self, children: Sequence[Child], slices_left: int) -> None:
        now = time.monotonic()
        if now - self.said_s < SAY_EVERY_S:
            return
        self.said_s = now
        now_running = ", ".join(
            f"{child.line.id} ({self._percent(child.line)} %)" if child.units else
            f"canary of {child.line.id}" for child in children
        )  # fmt: skip
        _tell(f"{now - self.began_s:6.0f} s: {now_running}; {slices_left} slices to go")

    def _percent(self, line: Line) -> int:
        return 100 - 100 * self.units_left[line.id] // max(1, line.units[self.size])


def _tell(text: str) -> None:
    """Progress for a person, on stderr: stdout is for the table."""
    print(f"[proof] {text}", file=sys.stderr, flush=True)
