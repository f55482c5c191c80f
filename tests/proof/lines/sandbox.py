"""S9: what a daemon may still do once it serves, tried from inside of it, and the unit's score.

A unit is one daemon process, locked in as `entresold` locks itself in, with every attempt of
tests/daemon/sandbox_probe.py on the loop's thread and on another. An attempt survives if it ended
as it must: refused by the kernel, or allowed where the daemon needs it. The score of
systemd/entresold.service is one more attempt of every slice.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from unittest.mock import patch

from entresol_daemon import sandbox
from tests.daemon import sandbox_probe
from tests.proof.line import Line, Size, Slice, Tally

UNIT = Path(__file__).resolve().parents[3] / "systemd" / "entresold.service"
SCORE_MAX = 1.5
_SCORE = re.compile(r"Overall exposure level for \S+: ([0-9.]+)")


def score(unit: Path) -> float | None:
    """systemd's exposure of a unit file, 0 to 10; None where systemd-analyze is not there.

    Raises: RuntimeError when it says none.
    """
    command = shutil.which("systemd-analyze")
    if command is None:
        return None
    done = subprocess.run(
        [command, "security", "--offline=true", "--no-pager", str(unit)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    found = _SCORE.search(done.stdout)
    if found is None:
        raise RuntimeError(f"systemd-analyze said no score: {done.stderr[-500:]}")
    return float(found[1])


def run(work: Slice) -> Tally:
    """The score, then a locked-in daemon for each seed."""
    tally = Tally()
    found = score(UNIT)
    if found is None:
        tally.figure("max_unit score not run here, there is no systemd-analyze", 1)
    else:
        tally.tried += 1
        tally.figure("max_unit score", found)
        if found <= SCORE_MAX:
            tally.survived += 1
        else:
            tally.found(work.seed, f"the unit's score is {found}, at most {SCORE_MAX} is allowed")
    for seed in work.seeds:
        folder = work.folder / str(seed)
        folder.mkdir()
        version, outcomes = sandbox_probe.run(folder, mode="on")
        wrong = sandbox_probe.judge(version, outcomes)
        tally.tried += len(outcomes)
        tally.survived += len(outcomes) - len(wrong)
        tally.figure("max_landlock version", version)
        for text in wrong:
            tally.found(seed, text)
    return tally


def canary() -> None:
    """A daemon that is not locked in, and a unit that forbids nothing, are found."""
    import tempfile

    whole = sandbox_probe.run
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "work").mkdir()
        with patch.object(sandbox_probe, "run", lambda where, mode: whole(where, mode="off")):
            broken = run(Slice(1, 1, Size.COMMIT, folder / "work"))
        assert broken.findings, "a daemon without its sandbox was not noticed"
        bare = folder / "bare.service"
        bare.write_text("[Service]\nExecStart=/bin/true\n")
        found = score(bare)
        assert found is None or found > SCORE_MAX, "a unit that forbids nothing has a good score"


def _not_run() -> str:
    return "" if sandbox.abi() else "this kernel has no Landlock, or a container forbids it"


LINES = (
    Line(
        id="S9",
        name="the daemon's sandbox, from inside",
        unit="locked-in daemons",
        units={Size.COMMIT: 1, Size.NIGHTLY: 3, Size.RELEASE: 10},
        slice_units=5,
        run=run,
        canary=canary,
        not_run=_not_run,
    ),
)
