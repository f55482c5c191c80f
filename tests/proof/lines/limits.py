"""F3: every limit of limits.py and every range of a setting, at the limit and one past it.

A unit is one check of tests/bounds.py: a function, or a named test that is run in a pytest of its
own. Constants that have a stated reason instead are counted apart.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch
from xml.etree import ElementTree

from tests import bounds
from tests.proof.line import Line, Size, Slice, Tally

ROOT = Path(__file__).resolve().parents[3]
TEST_DEADLINE_S = 600.0


def checks() -> list[tuple[str, Callable[[], None] | str]]:
    """(name, function or test) of everything that is checked, in a fixed order."""
    found: list[tuple[str, Callable[[], None] | str]] = list(bounds.settings_checks())
    nodes: dict[str, list[str]] = {}
    for name, check in (*bounds.CHECKS.items(), *bounds.AT_WORK.items()):
        if isinstance(check, bounds.Test):
            nodes.setdefault(check.node, []).append(name)
        elif not isinstance(check, bounds.Reason):
            found.append((name, check))
    return found + [(", ".join(names), node) for node, names in nodes.items()]


def run(work: Slice) -> Tally:
    """The checks whose numbers are the seeds, over and over if there are more seeds."""
    tally = Tally()
    listed = checks()
    reasons = [one for one in bounds.CHECKS.values() if isinstance(one, bounds.Reason)]
    tally.figure("max_constants", len(bounds.CHECKS))
    tally.figure("max_constants with a reason instead", len(reasons))
    nodes: dict[str, int] = {}
    for seed in work.seeds:
        name, check = listed[seed % len(listed)]
        if isinstance(check, str):
            nodes[check] = seed
            continue
        tally.tried += 1
        try:
            check()
            tally.survived += 1
        except Exception as error:
            tally.found(seed, f"{name}: {type(error).__name__}: {error}")
    _run_tests(nodes, work.folder, tally)
    return tally


def _run_tests(nodes: dict[str, int], folder: Path, tally: Tally) -> None:
    """All in one pytest; one by one if that fails, to say which. A test that was skipped as a whole
    was not tried."""
    if not nodes:
        return
    went = _pytest(list(nodes), folder)
    for node, seed in nodes.items():
        alone = went if not went.failed else _pytest([node], folder)
        if not alone.failed and not alone.passed(node) and alone.skipped(node):
            tally.lacks(f"{node}: {alone.skipped(node)[0]}")
            continue
        tally.tried += 1
        if alone.failed:
            tally.found(seed, f"{node}: {alone.failed}")
        elif not alone.passed(node):
            tally.found(seed, f"{node}: no test of this name ran")
        else:
            tally.survived += 1


@dataclass(frozen=True, slots=True)
class Went:
    """How a pytest went: its last words where it failed, and (test, why it was skipped) of all."""

    failed: str
    cases: tuple[tuple[str, str | None], ...] = ()

    def passed(self, node: str) -> int:
        """Tests of this name that ran."""
        return sum(why is None for name, why in self.cases if _of(name, node))

    def skipped(self, node: str) -> list[str]:
        """Why those of this name did not run that did not."""
        return [why for name, why in self.cases if _of(name, node) and why is not None]


def _of(name: str, node: str) -> bool:
    """Whether a case as pytest reports it is the test of this name, or a case of it."""
    file, *_, test = node.split(":")
    wanted = f"{file.removesuffix('.py').replace('/', '.')}.{test}"
    return name == wanted or name.startswith(wanted + "[")


def _pytest(nodes: list[str], folder: Path) -> Went:
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp",
         str(folder / "pytest"), f"--junit-xml={report}", *nodes],
        cwd=ROOT, capture_output=True, text=True, timeout=TEST_DEADLINE_S, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        return Went(done.stdout[-1_500:] or done.stderr[-1_500:] or f"exit {done.returncode}")
    cases = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        skipped = case.find("skipped")
        why = None if skipped is None else skipped.get("message", "skipped")
        cases.append((f"{case.get('classname')}.{case.get('name')}", why))
    return Went("", tuple(cases))


def canary() -> None:
    """A limit that is off by one is found, in a frame, in a machine and in a setting."""
    from entresol_daemon import config_values
    from entresol_proto.wire.cursor import Cursor

    listed = [name for name, _ in checks()]
    faults = (
        ("KEYS_PER_FRAME_MAX", patch.object(Cursor, "check_count", lambda *_: None)),
        ("[tls] session_age_max_ns",
         patch.object(config_values, "_in_range", lambda value, about: value)),
    )  # fmt: skip
    for name, fault in faults:
        with fault:
            broken = run(Slice(listed.index(name), 1, Size.COMMIT, Path("/nonexistent")))
        assert broken.findings, f"{name}: a limit that is not kept was not found"


_ALL = len(checks())

LINES = (
    Line(
        id="F3",
        name="every limit, and one past it",
        unit="checks",
        units={Size.COMMIT: _ALL, Size.NIGHTLY: _ALL, Size.RELEASE: _ALL},
        slice_units=_ALL,
        run=run,
        canary=canary,
        slice_deadline_s=900.0,
    ),
)
