"""S10: what leaves this tree is the same bytes whoever builds it, says what is in it, and uses
nothing that is banned; what our runs install is pinned by digest.

A unit is two builds of wheel and sdist, by two people (tests/supply.py). An attempt is one file
compared, one list checked, or one ban.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

from tests import supply
from tests.proof.line import Line, Size, Slice, Tally
from tests.unit import test_tidy
from tests.unit.test_supply import declared

BANS: tuple[Callable[[], None], ...] = (
    test_tidy.test_nothing_unpickles_or_evaluates,
    test_tidy.test_what_we_ship_uses_no_dangerous_call,
    test_tidy.test_what_we_ship_verifies_its_peers,
    test_tidy.test_nothing_binds_every_interface,
)


def run(work: Slice) -> Tally:
    """Two builds for each seed, which is the time they claim to have been made at."""
    tally = Tally()
    lock = supply.ROOT / ".ci" / "requirements.lock"
    if lock.exists():
        _note(tally, work.seed, supply.lock_problems(lock, declared()))
    else:
        tally.figure("max_lock not checked here, .ci is not in an sdist", 1)
    for ban in BANS:
        try:
            ban()
            _note(tally, work.seed, [])
        except AssertionError as error:
            _note(tally, work.seed, [f"{ban.__name__}: {str(error)[:500]}"])
    source = supply.snapshot(work.folder)
    for seed in work.seeds:
        base = work.folder / str(seed)
        for name, raw in _build_twice(tally, source, base, seed).items():
            tally.figure(f"max_bytes of {name}", len(raw))
            if name.endswith(".whl"):
                wheel = base / name
                wheel.write_bytes(raw)
                needs = supply.requirements_of(wheel)
                _note(tally, seed, supply.sbom_problems(supply.sbom_of(wheel), needs))
                tally.figure("max_native kernel in the wheel", "none-any" not in name)
    return tally


def _build_twice(
    tally: Tally, source: Path, base: Path, seed: int, *, only: str = ""
) -> dict[str, bytes]:
    """What the first of two people built, noted where the second one's is not the same."""
    epoch = str(int(supply.EPOCH) + seed)
    first, second = (supply.build(one, source, base, epoch, only=only) for one in supply.PEOPLE)
    wrong = supply.differences(first, second)
    tally.tried += len(first)
    tally.survived += max(0, len(first) - len(wrong))
    for text in wrong:
        tally.found(seed, text)
    return first


def _note(tally: Tally, seed: int, problems: list[str]) -> None:
    """One attempt, and what was wrong with it."""
    tally.tried += 1
    tally.survived += not problems
    for text in problems:
        tally.found(seed, text)


def canary() -> None:
    """A build that depends on who builds is found. Of the wheel, and without the native kernel,
    whose compilation takes longer than all the rest."""
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder:
        tree = supply.snapshot(Path(folder))
        hook = tree / "proto" / "build_sbom.py"
        hook.write_text(
            hook.read_text().replace('"version": 1,', '"version": os.environ["TZ"],', 1)
        )
        with patch.dict(os.environ, ENTRESOL_NATIVE="0"):
            _build_twice(tally, tree, Path(folder), 1, only="wheel")
    found = [one for one in tally.findings if ".whl differs" in one.text]
    assert found, "a wheel that knows its builder's time zone was not noticed"


LINES = (
    Line(
        id="S10",
        name="builds twice, bill of materials, lock, bans",
        unit="pairs of builds",
        units={Size.COMMIT: 1, Size.NIGHTLY: 2, Size.RELEASE: 5},
        slice_units=5,
        run=run,
        canary=canary,
        slice_deadline_s=900.0,
    ),
)
