"""What a run of the bench found: lines, their verdicts, and the file that keeps them.

Invariant: results.json is one flat object, `name: {value, unit, low, high}`. A run replaces what it
measured and nothing else, and never a number of a larger size by one of `--quick`. Beside it,
results.about.json says of every number where, when, at which commit and size it was measured, and
keeps the curves.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from entresol_proto.fabric.memory import huge_pages_are_made

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results.json"
ABOUT = Path(__file__).parent / "results.about.json"
QUICK = "quick"
# The two numbers of flash: in this order, first in the summary of every run.
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
        per: one of what grows, where the value is a total that can be divided by it.
    """

    name: str
    of: str
    unit: str
    points: Mapping[str, list[tuple[float, float]]]
    per: str = ""

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

    def __add__(self, other: Section) -> Section:
        """Both, this one first."""
        return Section(
            [*self.lines, *other.lines],
            (*self.curves, *other.curves),
            (*self.not_run, *other.not_run),
        )


def over(numerator: list[float], denominator: list[float]) -> list[float]:
    """Round by round, one over the other."""
    return [a / b for a, b in zip(numerator, denominator, strict=True)]


def machine() -> str:
    """Processor, cores, memory and its pages, system and Python, in one line."""
    model = platform.machine()
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            model = f"{line.partition(':')[2].strip()} {model}"
            break
    memory = next((row.split()[1] for row in _read("/proc/meminfo").splitlines()), "0")
    cores = len(os.sched_getaffinity(0))
    pages = "huge" if huge_pages_are_made() else "ordinary"
    return (
        f"{model}, {cores} cores, {int(memory) >> 20} GiB in {pages} pages, "
        f"Linux {platform.release()}, Python {platform.python_version()}"
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


def beside(size: str, now: datetime.datetime) -> dict[str, Any]:
    """What is kept beside each number of a run."""
    return {
        "machine": machine(), "commit": commit(), "size": size,
        "date": now.astimezone(datetime.UTC).isoformat(timespec="seconds"),
        "load": round(os.getloadavg()[0], 1),
    }  # fmt: skip


def save(
    lines: Iterable[Line],
    curves: Iterable[Curve],
    told: Mapping[str, Any],
    *,
    results: Path | None = None,
    about: Path | None = None,
) -> dict[str, Any]:
    """Merge a run into both files; returns all of results.json.

    A file that is no object is replaced: it is a report, nothing depends on it.
    """
    results, about = results or RESULTS, about or ABOUT
    rows, of_rows = load(results), load(about)
    for line in lines:
        larger = of_rows.get(line.name, {}).get("size", QUICK) != QUICK
        if told.get("size") == QUICK and larger and line.name in rows:
            continue
        rows[line.name] = {
            "value": line.value, "unit": line.unit,
            "low": min(line.values), "high": max(line.values),
        }  # fmt: skip
        of_rows[line.name] = dict(told)
    for curve in curves:
        of_rows[curve.name] = {**told, "curve": asdict(curve)}
    _store(results, rows)
    _store(about, of_rows)
    return rows


def curves_of(about: Path = ABOUT) -> list[Curve]:
    """The curves that were kept."""
    kept = [row["curve"] for row in load(about).values() if "curve" in row]
    return [Curve(**one) for one in kept]


def load(path: Path) -> dict[str, Any]:
    """A file of results; empty when there is none, or no object in it."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _store(path: Path, content: Mapping[str, Any]) -> None:
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    scratch.replace(path)
