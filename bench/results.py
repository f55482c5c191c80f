"""What a run of the bench found: lines, their verdicts, and the file that keeps them.

Invariant: the file is one flat object, `name: {value, unit, low, high, machine, date, commit}`. A
run replaces what it measured and nothing else, so that part of a run leaves the rest in place, and
every number says by itself where and when it was measured.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results.json"
# What the bench is for, in this order at the top of every report.
CANONICAL = ("get_flash_sealed_gbps", "first_byte_flash_p99_us")


@dataclass(frozen=True, slots=True)
class Line:
    """One measured quantity over its rounds."""

    name: str
    unit: str
    values: list[float]
    at_least: float | None = None
    at_most: float | None = None

    @property
    def value(self) -> float:
        return statistics.median(self.values)

    @property
    def holds(self) -> bool:
        """True when there is no budget or it is met."""
        low = self.at_least is None or self.value >= self.at_least
        return low and (self.at_most is None or self.value <= self.at_most)

    def text(self) -> str:
        """One row of the table."""
        budget = ""
        if self.at_least is not None:
            budget = f"at least {self.at_least:g}"
        elif self.at_most is not None:
            budget = f"at most {self.at_most:g}"
        verdict = ("" if not budget else "ok" if self.holds else "MISSED").rjust(6)
        spread = f"{min(self.values):.3g}..{max(self.values):.3g}"
        return (
            f"  {self.name:42} {self.value:9.4g} {self.unit:6} {spread:>16}  {budget:14} {verdict}"
        )


@dataclass(frozen=True, slots=True)
class Curve:
    """A quantity over another one, for a table and a picture.

    Attributes:
        of: the axis, with its unit.
        points: by the name of a variant, (x, value) pairs.
    """

    name: str
    of: str
    unit: str
    points: Mapping[str, list[tuple[float, float]]]

    def text(self) -> str:
        """A small table: a row per variant."""
        rows = [f"  {self.name} ({self.unit}) by {self.of}"]
        for variant, points in self.points.items():
            told = "  ".join(f"{x:g}: {y:.4g}" for x, y in points)
            rows.append(f"    {variant:22} {told}")
        return "\n".join(rows)


@dataclass(frozen=True, slots=True)
class Section:
    """What one section found: numbers, curves, and what did not run, with the reason."""

    lines: list[Line]
    curves: tuple[Curve, ...] = ()
    not_run: tuple[str, ...] = ()


def over(numerator: list[float], denominator: list[float]) -> list[float]:
    """Round by round, one over the other."""
    return [a / b for a, b in zip(numerator, denominator, strict=True)]


def machine() -> str:
    """Processor, cores, memory and Python, in one line."""
    model = platform.machine()
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            model = f"{line.partition(':')[2].strip()} {model}"
            break
    memory = next((row.split()[1] for row in _read("/proc/meminfo").splitlines()), "0")
    cores = len(os.sched_getaffinity(0))
    return (
        f"{model}, {cores} cores, {int(memory) >> 20} GiB, Linux {platform.release()}, "
        f"Python {platform.python_version()}"
    )


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def commit() -> str:
    """What is measured: the commit, with `+` when the tree differs from it; empty if unknown."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def rows(lines: Iterable[Line], *, where: str, size: str, now: datetime.datetime) -> dict[str, Any]:
    """The lines as the file keeps them."""
    beside = {
        "machine": where, "commit": commit(), "size": size,
        "date": now.astimezone(datetime.UTC).isoformat(timespec="seconds"),
        "load": round(os.getloadavg()[0], 1),
    }  # fmt: skip
    return {
        line.name: {
            "value": line.value, "unit": line.unit,
            "low": min(line.values), "high": max(line.values), **beside,
        }
        for line in lines
    }  # fmt: skip


def merge(path: Path, new: Mapping[str, Any]) -> dict[str, Any]:
    """Write the file with these rows over what it had; returns all of it.

    A file that is no such object is replaced: it is a report, nothing depends on it.
    """
    try:
        old = json.loads(path.read_text())
    except (OSError, ValueError):
        old = {}
    merged = {**(old if isinstance(old, dict) else {}), **new}
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(merged, indent=1, sort_keys=True) + "\n")
    scratch.replace(path)
    return merged
