"""The scorecard of a run: rows for a person, for a program, and for a page.

Nothing is green by silence: a line that did not run says why, in every form.
"""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from tests.proof.line import Size, Tally

CANARIES = "C1"
SHOWN_FINDINGS_MAX = 5


@dataclass(slots=True)
class Row:
    """One line's result so far. `not_run` is why nothing of it ran, or empty."""

    id: str
    name: str
    seed: int
    tally: Tally = field(default_factory=Tally)
    seconds: float = 0.0
    not_run: str = ""

    @property
    def passed(self) -> bool:
        """It ran, and nothing was wrong."""
        return not self.not_run and self.tally.tried > 0 and self.tally.clean

    @property
    def in_part(self) -> str:
        """What of it did not run, and why, though the rest did; or empty."""
        return "" if self.not_run else self.tally.not_run

    def record(self) -> dict[str, Any]:
        """As `tests/proof.json` has it: with `tried`, `not_run` tells of a part."""
        tally = self.tally
        return {
            "id": self.id, "name": self.name, "seed": self.seed, "tried": tally.tried,
            "survived": tally.survived, "wrong_bytes": tally.wrong_bytes,
            "durable_lost": tally.durable_lost, "crashes": tally.crashes,
            "seconds": round(self.seconds, 1), "not_run": self.not_run or self.in_part,
        }  # fmt: skip


def named(name: str, in_part: str) -> str:
    """A line's name as a table has it, with what of it did not run."""
    return f"{name} (not run in part: {in_part})" if in_part else name


def machine() -> str:
    """In a few words: processors, memory, kernel, Python."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return (
        f"{os.cpu_count()} x {platform.machine()}, {memory_bytes / 2**30:.0f} GiB, "
        f"Linux {platform.release().split('-')[0]}, Python {platform.python_version()}"
    )


@dataclass(slots=True)
class Scorecard:
    """All rows of one run."""

    size: Size
    rows: list[Row]
    seconds: float

    @property
    def rc(self) -> int:
        """0 when every line that could run held, and some did."""
        ran = [row for row in self.rows if not row.not_run]
        return 0 if ran and all(row.passed for row in ran) else 1

    def json(self) -> str:
        """A list with one object a line."""
        return json.dumps([row.record() for row in self.rows], indent=1) + "\n"

    def text(self) -> str:
        """The table for a terminal, then figures, then what went wrong."""
        wide = max([len(row.name) for row in self.rows], default=4)
        head = (
            f"{'id':4} {'line':{wide}} {'seed':>6} {'tried':>12} {'survived':>12} {'wrong':>6} "
            f"{'lost':>5} {'crashes':>7} {'seconds':>8}"
        )
        out = [f"proof at {self.size.value} size, {machine()}, {self.seconds:.0f} s", head]
        for row in self.rows:
            if row.not_run:
                out.append(f"{row.id:4} {row.name:{wide}} NOT RUN: {row.not_run}")
                continue
            t = row.tally
            out.append(
                f"{row.id:4} {row.name:{wide}} {row.seed:>6} {t.tried:>12,} {t.survived:>12,} "
                f"{t.wrong_bytes:>6} {t.durable_lost:>5} {t.crashes:>7} {row.seconds:>8.1f}"
                f"{'' if row.passed else '  FAILED'}{'  IN PART' if row.in_part else ''}"
            )
        for row in self.rows:
            if row.in_part:
                out.append(f"  {row.id} NOT RUN IN PART: {row.in_part}")
        for row in self.rows:
            figures = " ".join(f"{n}={v:,.6g}" for n, v in sorted(row.tally.figures.items()))
            if figures:
                out.append(f"  {row.id}: {figures}")
        for row in self.rows:
            findings = row.tally.findings
            for finding in findings[:SHOWN_FINDINGS_MAX]:
                out.append(f"  {row.id} FOUND seed={finding.seed}: {finding.text}")
            more = len(findings) - SHOWN_FINDINGS_MAX + row.tally.findings_dropped
            if more > 0:
                out.append(f"  {row.id}: {more} more findings")
        out.append(self.verdict())
        return "\n".join(out)

    def verdict(self) -> str:
        """The sum in one sentence."""
        total = Tally()
        for row in self.rows:
            if not row.not_run and row.id != CANARIES:
                total.add(row.tally)
        left_out = [row.id for row in self.rows if row.not_run]
        left_out += [f"{row.id} in part" for row in self.rows if row.in_part]
        held = "WHAT RAN HELD" if left_out else "ALL HELD"
        return (
            f"tried {total.tried:,} · survived {total.survived:,} · wrong bytes "
            f"{total.wrong_bytes} · durable lost {total.durable_lost} · crashes {total.crashes} · "
            f"not run: {', '.join(left_out) or 'nothing'} · {self.seconds:,.0f} s · "
            f"{held if self.rc == 0 else 'FAILED'}"
        )

    def markdown(self) -> str:
        """The table for a page, with its date and machine."""
        day = datetime.now(UTC).strftime("%Y-%m-%d")
        worked_s = sum(row.seconds for row in self.rows)  # a run may be resumed: these add up
        out = [
            f"{self.size.value.capitalize()} size, {day}, {machine()}, {worked_s / 60:.0f} "
            "minutes of work, up to two slices at a time:",
            "",
            "| | Line | Seed | Tried | Survived | Wrong bytes | Durable lost | Crashes | Seconds |",
            "|---|---|---:|---:|---:|---:|---:|---:|---:|",
        ]
        for row in self.rows:
            t = row.tally
            cells = (
                f"{row.seed} | {t.tried:,} | {t.survived:,} | {t.wrong_bytes} | {t.durable_lost} | "
                f"{t.crashes} | {row.seconds:,.0f}"
            )
            if row.not_run:
                cells = f"| not run: {row.not_run} | | | | |"
            out.append(f"| {row.id} | {named(row.name, row.in_part)} | {cells} |")
        return "\n".join(out) + "\n"
