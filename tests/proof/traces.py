"""Golden traces of the simulation: the same seed is the same run on any machine.

    python -m tests.proof.traces            compare with traces.json beside this file
    python -m tests.proof.traces --write    after a change of what the product or simulation does

A trace is the digest of everything that hosts did and were told in a run of R1, with the virtual
time of each and the number of the loop's steps. Whoever commits a change writes the traces of his
machine; CI compares them on another.

What they may depend on: the code, and the minor version of Python, whose asyncio has steps of its
own (each has an entry in the file). What they must not: processor, kernel, hash seed, clock,
locale, folder, the C kernel, the last digit of a logarithm. A library may make blocks of another
size, and so another run: so all of these seeds seal with `raw` and write no checkpoint; where zstd
seals, another zstd may give another trace.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from pathlib import Path

from tests.sim.plans import make_plan
from tests.sim.story import run_plan

GOLDEN = Path(__file__).with_name("traces.json")
SEEDS = (27, 37, 39, 44, 52, 104)  # of each flavour and fabric, one and several shards


def this_python() -> str:
    """Its minor version, as the file has it."""
    return ".".join(platform.python_version_tuple()[:2])


def trace_of(seed: int, folder: Path) -> str:
    """Run it. Raises: AssertionError when the run itself goes wrong, or is not one for this."""
    plan = make_plan(seed)
    assert plan.geometry.codec == "raw", f"seed {seed} depends on a library's sizes"
    assert not plan.geometry.checkpoint, f"seed {seed} depends on a library's file"
    outcome = run_plan(plan, folder / str(seed))
    assert not outcome.wrong, f"seed {seed}: {outcome.wrong}"
    return outcome.trace


def golden() -> dict[str, dict[str, str]]:
    """By Python's minor version, then by seed."""
    found: dict[str, dict[str, str]] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return found


def main(words: list[str] | None = None) -> int:
    """0 when all are as they were, 1 when one is not, 2 for a Python that has no entry."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.proof.traces", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--write", action="store_true", help="keep the traces of this code")
    args = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="entresol-traces-") as folder:
        here = {str(seed): trace_of(seed, Path(folder)) for seed in SEEDS}
    known = golden() if GOLDEN.exists() else {}
    before = known.get(this_python())
    for seed, trace in here.items():
        print(f"seed {seed}: {trace} {'as known' if before and before.get(seed) == trace else ''}")
    if args.write:
        known[this_python()] = here
        GOLDEN.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        return 0
    if before is None:
        print(f"no traces of Python {this_python()} are known")
        return 2
    return int(before != here)


if __name__ == "__main__":
    sys.exit(main())
