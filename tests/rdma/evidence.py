"""What suites count and measure beside passing or failing, and the tables made of it.

In a guest: `trying` counts one fault, `figure` writes one measured line, both into the record that
outcomes go to. On the host: `Evidence` sums the lines up. Nothing in the tables is typed in, so
that a fault nobody tried reads as not tried.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.rdma.record import RECORD_ENV

FLAKEY = (
    "power cut", "writes fail", "reads fail", "device gone", "reads corrupted",
    "writes corrupted", "one byte of every write", "one byte of every read",
)  # fmt: skip
NETEM = ("loss", "delay", "reorder", "duplicate", "corrupt", "rate", "all of it", "silence")
FAULTS = (
    "link cut mid-read",
    "peer killed",
    "daemon killed",
    "rkey after lease end",
    "rkey of another session",
    "out-of-bounds read",
    "forged lease",
    "1,000 leases at once",
    "memlock too small",
    "device removed",
    *(f"flakey: {what}" for what in FLAKEY),
    "dust: bad blocks",
    "null_blk: bad sectors",
    "log-writes: power cut",
    *(f"netem: {what}" for what in NETEM),
)


def _write(line: dict[str, Any]) -> None:
    path = os.environ.get(RECORD_ENV)
    if path:  # elsewhere a suite runs on its own, and nobody sums up
        with open(path, "a", encoding="utf-8") as record:
            record.write(json.dumps(line) + "\n")


def figure(name: str, **values: Any) -> None:
    """Write one measured line down."""
    _write({"figure": name, "values": values})


class Trial:
    """One fault under way, and what it cost."""

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.wrong_bytes = 0
        self.past_deadline = 0
        self.durable_lost = 0

    def same(self, found: bytes | bytearray | memoryview, wanted: bytes | memoryview) -> None:
        """Count bytes that are not as they should be. Raises: AssertionError when there are any."""
        found, wanted = bytes(found), bytes(wanted)
        wrong = abs(len(found) - len(wanted))
        if found != wanted:
            wrong += sum(one != other for one, other in zip(found, wanted, strict=False))
        self.wrong_bytes += wrong
        assert not wrong, f"{self.fault}: {wrong} wrong bytes"

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """What happens here must be over in time. Raises: AssertionError or TimeoutError else."""
        begun = time.monotonic()
        try:
            yield
        except TimeoutError:
            self.past_deadline += 1
            raise
        took = time.monotonic() - begun
        if took > seconds:
            self.past_deadline += 1
            raise AssertionError(f"{self.fault}: took {took:.1f} of {seconds:.1f} s")


@contextlib.contextmanager
def trying(fault: str) -> Iterator[Trial]:
    """Count one trial of a fault; it is survived if the block ends well."""
    assert fault in FAULTS, fault
    trial, survived = Trial(fault), False
    try:
        yield trial
        survived = True
    finally:
        _write(
            {"fault": fault, "survived": survived, "wrong_bytes": trial.wrong_bytes,
             "past_deadline": trial.past_deadline, "durable_lost": trial.durable_lost}
        )  # fmt: skip


@dataclass(slots=True)
class Count:
    """What became of all trials of one fault."""

    tried: int = 0
    survived: int = 0
    wrong_bytes: int = 0
    past_deadline: int = 0
    durable_lost: int = 0


@dataclass(slots=True)
class Evidence:
    """The sum of some records."""

    faults: dict[str, Count] = field(default_factory=dict)
    figures: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def add(self, record: Path) -> None:
        """Sum up one guest's record, if it left one. A line cut short is not read."""
        if not record.exists():
            return
        for line in record.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                entry = json.loads(line)
                if "figure" in entry:
                    self.figures.append((str(entry["figure"]), dict(entry["values"])))
                elif "fault" in entry:
                    self._count(entry)

    def _count(self, entry: dict[str, Any]) -> None:
        wrong, late = int(entry["wrong_bytes"]), int(entry["past_deadline"])
        lost = int(entry.get("durable_lost", 0))
        count = self.faults.setdefault(str(entry["fault"]), Count())
        count.tried += 1
        count.survived += bool(entry["survived"])
        count.wrong_bytes += wrong
        count.past_deadline += late
        count.durable_lost += lost

    def of(self, name: str) -> list[dict[str, Any]]:
        """The values of all figures of that name."""
        return [values for found, values in self.figures if found == name]

    def fault_lines(self) -> list[str]:
        """The table of faults, all of them, for a person; nothing when none was tried."""
        if not self.faults:
            return []
        found = [f"  {'faults':32}  tried  survived  wrong bytes  durable lost  past deadline"]
        for name in (*FAULTS, *sorted(self.faults.keys() - set(FAULTS))):
            one = self.faults.get(name)
            if one is None:
                found.append(f"  {name:32}      0  not tried in this run")
            else:
                found.append(
                    f"  {name:32}  {one.tried:5}  {one.survived:8}  {one.wrong_bytes:11}"
                    f"  {one.durable_lost:12}  {one.past_deadline:13}"
                )
        return found

    def read_lines(self) -> list[str]:
        """Our reads beside perftest's, one line per message size."""
        return [
            f"  READ beside ib_read_bw, {values['size'] >> 10} KiB x {values['depth']} in flight: "
            f"{values['ours_mb_per_s']} of {values['theirs_mb_per_s']} MB/s, "
            f"ratio {values['ratio']} (at least {values['ratio_min']}); "
            f"of ib_read_bw -e: {values['ratio_events']}"
            for values in self.of("read")
        ]


def sum_of(records: Sequence[Path]) -> Evidence:
    """The evidence in the records of all guests of a run."""
    found = Evidence()
    for record in records:
        found.add(record)
    return found
