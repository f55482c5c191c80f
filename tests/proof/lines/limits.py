"""F3: every limit of limits.py and every range of a setting, at the limit and one past it.

A unit is one check of tests/bounds.py: a function, or a named test that is run in a pytest of its
own. Constants that have a stated reason instead are counted apart.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

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
    """All in one pytest; one by one if that fails, to say which."""
    tally.tried += len(nodes)
    if not nodes or _pytest(list(nodes), folder) == "":
        tally.survived += len(nodes)
        return
    for node, seed in nodes.items():
        said = _pytest([node], folder)
        if said:
            tally.found(seed, f"{node}: {said}")
        else:
            tally.survived += 1


def _pytest(nodes: list[str], folder: Path) -> str:
    """Its last words, or nothing when every test passed and at least one ran for each name."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp",
         str(folder / "pytest"), *nodes],
        cwd=ROOT, capture_output=True, text=True, timeout=TEST_DEADLINE_S, check=False,
    )  # fmt: skip
    return "" if done.returncode == 0 else done.stdout[-1_500:]


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
