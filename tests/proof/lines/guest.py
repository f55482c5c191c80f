"""Lines that need a kernel with faults of its own: they boot a guest and read back what it found.

G1: the flash engine over dm-flakey, dm-log-writes, dm-dust and null_blk. G2: tcp and verbs over
netem. G3: leases over verbs, on soft-RoCE. The guest's suites count (tests/rdma/evidence.py).

Invariant: every kind of fault that a line is about was tried in its guest; or a test said why it
could not be, and the line says so; or it is a finding. A machine that boots no guest says so too.
With ENTRESOL_RDMA_REQUIRED set, what could not be tried is a finding.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.proof.line import Line, NotRunError, Size, Slice, Tally
from tests.rdma import suites_run
from tests.rdma.evidence import FLAKEY
from tests.rdma.evidence import NETEM as WORSE
from tests.rdma.qemu import MEMORY_MIB_DEFAULT
from tests.rdma.report import Report
from tests.rdma.spec import ARCHES, KERNELS, RC_NO_RESULT, HarnessError
from tests.rdma.tools import ensure_tools

REQUIRED_ENV = "ENTRESOL_RDMA_REQUIRED"
SUITES = Path("tests/rdma/suites")
ARCH = ARCHES["x86"]
KERNEL = KERNELS["7.2"]
GUEST_TIMEOUT_S = 1_500.0  # ten times what a quiet machine takes
SLICE_DEADLINE_S = 1_800.0
FLASH = (f"{SUITES}/test_flash_devices.py",)
NETEM = (f"{SUITES}/test_netem.py",)
LEASES = (f"{SUITES}/test_verbs_leases.py",)
FENCES = (f"{SUITES}/test_verbs_fences.py",)
# What must have been tried: faults by their names, those of networks with the fabric over them.
ON_DEVICES = (
    *(f"flakey: {what}" for what in FLAKEY),
    "dust: bad blocks", "null_blk: bad sectors", "log-writes: power cut",
)  # fmt: skip
ON_NETWORKS_FIRST = tuple(
    f"netem: {what} over {fabric}"
    for fabric in ("tcp-plain", "verbs") for what in ("loss", "all of it", "silence")
)  # fmt: skip
ON_NETWORKS = (
    *(f"netem: {what} over {fabric}" for fabric in ("tcp-plain", "verbs") for what in WORSE),
    *(f"netem: {what} over tcp-tls" for what in ("all of it", "silence")),
)
ON_LEASES_FIRST = (
    "rkey after lease end", "rkey of another session", "out-of-bounds read", "forged lease",
)  # fmt: skip
ON_LEASES = (*ON_LEASES_FIRST, "1,000 leases at once")
# What canaries plant, the test that must find it, and the fault which that counts.
BUGS = (
    ("no flush", f"{FLASH[0]}::test_dm_log_writes", "log-writes: power cut"),
    ("all is well", f"{NETEM[0]}::test_a_bad_network[tcp-plain-silence]", "netem: silence"),
    ("no revoke", f"{LEASES[0]}::test_hostile_reads[rkey after lease end]", "rkey after lease end"),
)  # fmt: skip


def boot(work: Slice, arguments: tuple[str, ...], env: Mapping[str, str] | None = None) -> Report:
    """The suites' outcome in one guest. Raises: HarnessError when this machine boots none."""
    ensure_tools([ARCH.name])
    plan = suites_run.Plan(
        arch=ARCH, kernel=KERNEL, guests=1, arguments=arguments, out=work.folder / "out",
        timeout_s=GUEST_TIMEOUT_S, memory_mib=MEMORY_MIB_DEFAULT,
        env={"ENTRESOL_PROOF_SEED": str(work.seed), "ENTRESOL_PROOF_UNITS": str(work.units)}
        | dict(env or {}),
    )  # fmt: skip
    plan.out.mkdir(parents=True, exist_ok=True)
    report = suites_run.run(plan)
    if report.rc == RC_NO_RESULT and not report.cases:
        raise HarnessError("a guest came to no result, twice")
    return report


def tally_of(report: Report, seed: int, wanted: Sequence[str] = ()) -> Tally:
    """A guest's counts as the scorecard has them; what of `wanted` it lacks, and why."""
    tally = Tally()
    for fault, count in report.evidence.faults.items():
        tally.tried += count.tried
        tally.survived += count.survived
        tally.wrong_bytes += count.wrong_bytes
        tally.durable_lost += count.durable_lost
        if count.past_deadline:
            tally.found(seed, f"{fault}: {count.past_deadline} past their deadline")
    for case in report.cases:
        if case.outcome == "failed":
            tally.found(seed, f"{case.name}: {case.reason}")
        elif case.outcome == "skipped":
            tally.figure(case.reason, 1)
    _lacks(report, seed, wanted, tally)
    if not tally.findings and not report.succeeded and not _only_skipped(report):
        tally.found(seed, f"the guest's exit status is {report.rc}")
    for name, values in report.evidence.figures:
        for key, value in values.items():
            if isinstance(value, int) and key not in ("seed", "lives"):
                tally.figure(f"{name} {key}", value)
    return tally


def _tried(report: Report) -> Counter[str]:
    """How often each fault was tried, by name."""
    found = Counter({fault: count.tried for fault, count in report.evidence.faults.items()})
    for values in report.evidence.of("netem"):
        found[f"netem: {values['what']} over {values['fabric']}"] += 1
    return found


def _only_skipped(report: Report) -> bool:
    """Every test said that it could not run."""
    return bool(report.cases) and report.count("skipped") == len(report.cases)


def _lacks(report: Report, seed: int, wanted: Sequence[str], tally: Tally) -> None:
    """Note what was not tried: in words where tests were skipped, as a finding where none was."""
    tried = _tried(report)
    missing = ", ".join(kind for kind in wanted if not tried[kind])
    skipped = Counter(
        case.reason.removeprefix("not run here: ") for case in report.cases
        if case.outcome == "skipped"
    )  # fmt: skip
    reasons = [f"{count} tests in the guest: {why}" for why, count in sorted(skipped.items())]
    lacking = [f"not tried: {missing}"] * bool(missing) + reasons
    if not lacking:
        return
    if not skipped or os.environ.get(REQUIRED_ENV):
        tally.found(seed, "; ".join(lacking))
    else:
        tally.lacks("; ".join(lacking))


def _boot(work: Slice, arguments: tuple[str, ...], env: Mapping[str, str] | None = None) -> Report:
    try:
        return boot(work, arguments, env)
    except HarnessError as error:
        if os.environ.get(REQUIRED_ENV):
            raise
        raise NotRunError(f"no guest boots here: {error}") from error


def _planted() -> None:
    """The bugs of all three lines, each in the test of its own that must find it, in one guest."""
    with tempfile.TemporaryDirectory(prefix="entresol-guest-") as folder:
        work = Slice(1, 1, Size.COMMIT, Path(folder))
        bugs = ",".join(bug for bug, _, _ in BUGS)
        tests = tuple(test for _, test, _ in BUGS)
        report = _boot(work, tests, {"ENTRESOL_PROOF_CANARY": bugs})
    for bug, _, fault in BUGS:
        count = report.evidence.faults.get(fault)
        assert count is not None, f"{bug}: nothing was tried: {report.lines()}"
        assert count.wrong_bytes or count.durable_lost, f"{bug}: {report.lines()}"


def _line(
    name: str, what: str, unit: str, units: Sequence[int], *, commit: tuple[str, ...],
    larger: tuple[str, ...], slice_units: int, wanted: tuple[tuple[str, ...], tuple[str, ...]],
) -> Line:  # fmt: skip
    """A line that runs `commit` in a guest at that size, and `larger` at the others; `wanted` is
    what either must try."""

    def run(work: Slice) -> Tally:
        first = work.size is Size.COMMIT
        report = _boot(work, commit if first else larger)
        return tally_of(report, work.seed, wanted[0] if first else wanted[1])

    return Line(
        id=name, name=what, unit=unit, units=dict(zip(Size, units, strict=True)),
        slice_units=slice_units, run=run, canary=_planted, slice_deadline_s=SLICE_DEADLINE_S,
    )  # fmt: skip


LINES = (
    _line(
        "G1", "flash engine on failing block devices, in a guest", "lives per fault", (1, 2, 6),
        commit=FLASH, larger=FLASH, slice_units=3, wanted=(ON_DEVICES, ON_DEVICES),
    ),
    _line(
        "G2", "tcp and verbs over a bad network, in a guest", "sessions per fault and fabric",
        (1, 2, 4), commit=(*NETEM, "-k", "not tls and (loss or all or silence)"), larger=NETEM,
        slice_units=2, wanted=(ON_NETWORKS_FIRST, ON_NETWORKS),
    ),
    # At commit size CI runs the suite of fences by itself.
    _line(
        "G3", "leases over verbs, in a guest", "rounds of hostile reads", (2, 6, 24),
        commit=LEASES, larger=(*FENCES, *LEASES), slice_units=12,
        wanted=(ON_LEASES_FIRST, ON_LEASES),
    ),
)  # fmt: skip
