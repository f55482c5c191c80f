"""Runs the suites: in several guests side by side, which divide the tests, and sums up.

An emulated x86 machine has one processor, so that a host with two is busy with two guests.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.rdma import guest, report
from tests.rdma.evidence import sum_of
from tests.rdma.images import Images, images
from tests.rdma.pod import prefixed
from tests.rdma.record import CLAIMS_ENV, RECORD_ENV
from tests.rdma.spec import Arch, Kernel

SUITES = ("tests/rdma/suites",)
# Importing the whole tier takes as long as booting, so that only the first guest does; it begins
# with these, and the others are busy with the rest for longer.
OF_THE_TIER = tuple(f"{SUITES[0]}/test_{name}.py" for name in ("end_to_end", "leases_and_cost"))
# Faults in volume, which `make proof` runs as its lines G1 to G3; by name they run here as well.
OF_THE_PROOF = tuple(
    f"{SUITES[0]}/test_{name}.py" for name in ("flash_devices", "netem", "verbs_leases")
)
GUESTS_MAX = 2  # more would each be slower: collecting the tests is the same work in every guest
CLAIMS = "claims"
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
    env: Mapping[str, str] = field(default_factory=dict)  # for the tests


def default_guests() -> int:
    """As many guests as processors here, up to the useful number."""
    return min(GUESTS_MAX, os.cpu_count() or 1)


def record_of(name: str) -> str:
    """The file, in the folder all guests see, that a guest's outcomes go to."""
    return f"record-{name}.jsonl"


def jobs(plan: Plan, made: Images, common: Path) -> list[guest.Job]:
    """One job per guest; each has its own results folder, and `common` to divide the tests by."""
    found = []
    (common / CLAIMS).mkdir()
    for number in range(plan.guests):
        name = f"guest{number}"
        left = OF_THE_PROOF + (OF_THE_TIER if number else ())
        rest = tuple(f"--ignore={path}" for path in left)
        script = (
            "uname -r > /out/kernel; "
            'exec python3 -m pytest -p no:cacheprovider -p tests.rdma.record "$@"'
        )
        found.append(
            guest.Job(
                arch=plan.arch,
                images=made,
                command=("bash", "-c", script, "suites", *(plan.arguments or (*SUITES, *rest))),
                net="pair" if plan.kernel.namespaces else "loopback",
                out=plan.out / name,
                env=dict(plan.env)
                | {RECORD_ENV: f"/pod/{record_of(name)}", CLAIMS_ENV: f"/pod/{CLAIMS}"},
                timeout_s=plan.timeout_s,
                memory_mib=plan.memory_mib,
                name=name,
                common=common,
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
    made = images(plan.arch, plan.kernel)
    with tempfile.TemporaryDirectory(prefix="suites-") as scratch:
        found = jobs(plan, made, Path(scratch))
        sinks = [prefixed(job.name) for job in found] if len(found) > 1 else [guest.to_stdout]
        for job in found:
            job.out.mkdir(parents=True, exist_ok=True)
            (job.out / "kernel").unlink(missing_ok=True)
        with guest.snapshot() as repo:
            rcs = guest.run_all(found, repo, sinks)
        records = [Path(scratch) / record_of(job.name) for job in found]
        came_to = report.Report(
            # Where all tests were deselected, pytest says so; the report counts what passed.
            rcs=tuple(0 if rc == RC_NO_TESTS and len(found) > 1 else rc for rc in rcs),
            seconds=round(time.monotonic() - begun_s, 1),
            where=f"soft-RoCE guests: {len(found)} of {_kernel(found)}",
            cases=tuple(case for record in records for case in report.read(record)),
            evidence=sum_of(records),
        )
        for record, job in zip(records, found, strict=True):
            if record.exists():
                shutil.copyfile(record, job.out / "record.jsonl")
    (plan.out / report.RESULT).write_text(came_to.json())
    return came_to
