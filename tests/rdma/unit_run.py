"""Runs the unit suite on another architecture's Python, in processes that divide the tests.

In user-mode emulation where this host allows it, else in guests; the summary says which.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from tests.rdma import report, suites_run, usermode
from tests.rdma.images import Images, images
from tests.rdma.progress import say
from tests.rdma.record import CLAIMS_ENV, RECORD_ENV
from tests.rdma.spec import Arch, Kernel

SUITE = "tests/unit"
# About the sources and this harness, not about the processor; they need git and the host's tools.
LEFT_OUT = tuple(f"{SUITE}/test_{name}.py" for name in ("arm64_build", "guest_runs", "tidy"))
TIMEOUT_S_DEFAULT = 6 * 3600.0
# Emulation is slow; what hangs is still found, and dumping every stack on the way there is no help.
PATIENCE = ("-o", "faulthandler_timeout=0", "-o", "timeout=1800", "-p", "tests.rdma.patience")


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run and where."""

    arch: Arch
    kernel: Kernel  # of the guests, where there have to be some
    processes: int
    arguments: tuple[str, ...]
    out: Path
    timeout_s: float
    memory_mib: int


def wanted(plan: Plan) -> tuple[str, ...]:
    """What pytest is asked for."""
    if plan.arguments:
        return plan.arguments
    say(f"left out, as they are not about the processor: {' '.join(LEFT_OUT)}")
    return (SUITE, *(f"--ignore={path}" for path in LEFT_OUT))


def runs(plan: Plan, shared: Path) -> list[usermode.Run]:
    """One pytest per process, all over the same tests."""
    (shared / suites_run.CLAIMS).mkdir()
    command = ("python3", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.rdma.record",
               *PATIENCE, *wanted(plan))  # fmt: skip
    return [
        usermode.Run(
            command,
            shared,
            {RECORD_ENV: f"/out/record-{number}.jsonl", CLAIMS_ENV: f"/out/{suites_run.CLAIMS}"},
        )
        for number in range(plan.processes)
    ]


def _emulated(plan: Plan, made: Images) -> report.Report:
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="unit-") as scratch:
        shared = Path(scratch)
        found = runs(plan, shared)
        rcs = usermode.run_all(made, plan.arch, found, plan.timeout_s)
        records = [shared / f"record-{number}.jsonl" for number in range(len(found))]
        for record in records:
            if record.exists():
                shutil.copyfile(record, plan.out / record.name)
        return report.Report(
            rcs=tuple(rcs),
            seconds=round(time.monotonic() - begun_s, 1),
            where=f"unit suite on {plan.arch.machine}, {len(found)} emulated processes on "
            f"{os.uname().machine}",
            cases=tuple(case for record in records for case in report.read(record)),
        )


def run(plan: Plan) -> report.Report:
    """Run to the end; the report is also in `out`, as JSON."""
    made = images(plan.arch, plan.kernel)
    try:
        came_to = _emulated(plan, made)
    except usermode.Impossible as reason:
        say(f"in guests instead: {reason}")
        came_to = suites_run.run(
            suites_run.Plan(
                arch=plan.arch, kernel=plan.kernel, guests=plan.processes,
                arguments=(*PATIENCE, *wanted(plan)), out=plan.out,
                timeout_s=plan.timeout_s, memory_mib=plan.memory_mib,
            )
        )  # fmt: skip
        came_to = replace(came_to, where=f"unit suite in {came_to.where} ({plan.arch.machine})")
    (plan.out / report.RESULT).write_text(came_to.json())
    return came_to
