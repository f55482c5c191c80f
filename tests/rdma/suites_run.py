"""Runs the suites: divides the tests over guests, runs these side by side, sums up.

An emulated x86 machine has one processor, so that a host with two is busy with two guests.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from tests.rdma import guest, report
from tests.rdma.images import Images, images
from tests.rdma.pod import prefixed
from tests.rdma.record import RECORD_ENV, SHARE_ENV
from tests.rdma.spec import Arch, Kernel

SUITES = ("tests/rdma/suites",)
GUESTS_MAX = 2  # more would each be slower: collecting the tests is the same work in every guest
RECORD = "record.jsonl"
TIMEOUT_S_DEFAULT = 1500.0  # four times what a quiet machine of two processors takes
RC_NO_TESTS = 5  # of pytest


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run and where."""

    arch: Arch
    kernel: Kernel
    guests: int
    arguments: tuple[str, ...]
    out: Path
    timeout_s: float
    memory_mib: int


def default_guests() -> int:
    """As many guests as processors here, up to the useful number."""
    return min(GUESTS_MAX, os.cpu_count() or 1)


def jobs(plan: Plan, made: Images) -> list[guest.Job]:
    """One job per guest; each has its own results folder and its share of the tests."""
    found = []
    for number in range(plan.guests):
        env = {RECORD_ENV: f"/out/{RECORD}"}
        if plan.guests > 1:
            env[SHARE_ENV] = f"{number}/{plan.guests}"
        script = (
            f"uname -r > /out/kernel; rm -f /out/{RECORD}; "
            'exec python3 -m pytest -p no:cacheprovider -p tests.rdma.record "$@"'
        )
        found.append(
            guest.Job(
                arch=plan.arch,
                images=made,
                command=("bash", "-c", script, "suites", *(plan.arguments or SUITES)),
                net="pair" if plan.kernel.namespaces else "loopback",
                out=plan.out / f"guest{number}",
                env=env,
                timeout_s=plan.timeout_s,
                memory_mib=plan.memory_mib,
                name=f"guest{number}",
            )
        )
    return found


def _kernel(found: list[guest.Job]) -> str:
    for job in found:
        path = job.out / "kernel"
        if path.exists():
            return path.read_text().strip()
    return "no kernel, as none came up"


def run(plan: Plan) -> report.Report:
    """Run the suites to their end; the report is also in `out`, as JSON."""
    begun_s = time.monotonic()
    found = jobs(plan, images(plan.arch, plan.kernel))
    sinks = [prefixed(job.name) for job in found] if len(found) > 1 else [guest.to_stdout]
    for job in found:
        job.out.mkdir(parents=True, exist_ok=True)
        for stale in ("kernel", RECORD):
            (job.out / stale).unlink(missing_ok=True)
    with guest.snapshot() as repo:
        rcs = guest.run_all(found, repo, sinks)
    came_to = report.Report(
        # A guest whose share has no tests ran none of them; that is no failure of its own.
        rcs=tuple(0 if rc == RC_NO_TESTS and len(found) > 1 else rc for rc in rcs),
        seconds=round(time.monotonic() - begun_s, 1),
        kernel=_kernel(found),
        cases=tuple(case for job in found for case in report.read(job.out / RECORD)),
    )
    (plan.out / report.RESULT).write_text(came_to.json())
    return came_to
