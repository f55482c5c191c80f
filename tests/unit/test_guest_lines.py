"""What the guest lines of the scorecard make of a guest, and how a write log is read."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from tests.proof.line import NotRunError, Size, Slice
from tests.proof.lines import guest
from tests.rdma import blockdev, evidence, report, suites_run
from tests.rdma.spec import RC_NO_RESULT, HarnessError


def made(
    *outcomes: str, faults: dict[str, evidence.Count] | None = None, rcs: tuple[int, ...] = (0,)
) -> report.Report:
    cases = tuple(report.Case(f"t{n}", outcome, 0.5, "why") for n, outcome in enumerate(outcomes))
    found = evidence.Evidence(faults=faults or {}, figures=[("flash device", {"puts": 7})])
    return report.Report(rcs=rcs, seconds=9.0, where="guests", cases=cases, evidence=found)


def test_a_guests_counts_are_the_lines() -> None:
    faults = {
        "flakey: power cut": evidence.Count(5, 4, 1, 0, 2),
        "netem: loss": evidence.Count(3, 3),
    }
    tally = guest.tally_of(made("passed", "skipped", faults=faults), 9)
    assert (tally.tried, tally.survived) == (8, 7)
    assert (tally.wrong_bytes, tally.durable_lost) == (1, 2)
    assert not tally.clean
    assert tally.figures == {"why": 1, "flash device puts": 7}


@pytest.mark.parametrize(
    "came_to",
    [
        made("passed", "failed"),
        made("passed", rcs=(1,)),
        made(),
        made("passed", faults={"netem: loss": evidence.Count(1, 1, 0, 1)}),
    ],
)
def test_what_did_not_go_well_is_a_finding_with_its_seed(came_to: report.Report) -> None:
    tally = guest.tally_of(came_to, 9)
    assert [finding.seed for finding in tally.findings] == [9]


def test_a_machine_that_boots_no_guest_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (line, *_) = guest.LINES
    work = Slice(1, 1, Size.COMMIT, tmp_path)
    monkeypatch.delenv(guest.REQUIRED_ENV, raising=False)
    monkeypatch.setattr(guest, "ensure_tools", lambda arches: None)
    monkeypatch.setattr(suites_run, "run", lambda plan: made(rcs=(RC_NO_RESULT,)))
    with pytest.raises(NotRunError, match="no result"):
        line.run(work)
    assert line.canary is not None
    with pytest.raises(NotRunError, match="no result"):
        line.canary()
    monkeypatch.setenv(guest.REQUIRED_ENV, "1")
    with pytest.raises(HarnessError, match="no result"):
        line.run(work)


def entry(sector: int, flags: int, data: bytes) -> bytes:
    """As the kernel writes it: a sector of header, then the data, in whole sectors."""
    marked = bool(flags & 8)
    sectors = 0 if marked else len(data) // 512
    head = struct.pack("<QQQQ", sector, sectors, flags, len(data) if marked else 0)
    return (head + (data if marked else b"")).ljust(512, b"\0") + (b"" if marked else data)


def test_a_write_log_is_read_in_order(tmp_path: Path) -> None:
    entries = [
        entry(8, 0, b"a" * 1024), entry(0, 1, b""), entry(0, 8, b"m0\0"), entry(2, 2, b"b" * 512),
    ]  # fmt: skip
    head = struct.pack("<QQQI", blockdev.LOG_MAGIC, 1, len(entries), 512).ljust(512, b"\0")
    path = tmp_path / "log"
    path.write_bytes(head + b"".join(entries))
    assert blockdev.read_log(str(path)) == [
        blockdev.Logged(4096, b"a" * 1024, False, ""),
        blockdev.Logged(0, b"", True, ""),
        blockdev.Logged(0, b"", False, "m0"),
        blockdev.Logged(1024, b"b" * 512, False, ""),
    ]
    path.write_bytes(b"\0" * 1024)
    with pytest.raises(ValueError, match="no log"):
        blockdev.read_log(str(path))


def test_requests_to_the_device_mapper_have_the_kernels_layout() -> None:
    assert blockdev._HEAD.size == 312  # struct dm_ioctl, linux/dm-ioctl.h
    assert blockdev._SPEC.size == 40  # struct dm_target_spec
