"""The oracle outside the daemon: a journal of what was asked and answered, and who judges it.

The driver (a process of its own) writes a line before and after each operation. The judge (another
one) reads the file and keeps, per block, which contents a get may answer: a durable put leaves one,
an accepted put that or a miss, a forget that was acknowledged only a miss; what was under way when
the daemon died leaves both before and after. Any other answer is a lost block, wrong bytes or a
resurrection. Tenants and key versions are kept the same way.

Invariant: the judge knows nothing but the journal, so that whoever lies to the driver lies to it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from entresol_proto.status import Status

WRONG = -1  # "saw": bytes that no version of this block ever had
MISS = 0  # "saw": not there; versions count from 1
FINDINGS_MAX = 20

# The put never got as far as a record: it was refused at the door.
_REFUSED = frozenset(
    {
        Status.BREAKER_OPEN, Status.BUSY, Status.QUOTA, Status.DRAINING, Status.NOT_ADMITTED,
        Status.TOO_LARGE, Status.EXISTS, Status.BAD_REQUEST, Status.FORBIDDEN, Status.ERASED,
    }
)  # fmt: skip

Place = tuple[str, int]  # tenant, number of the block


class Journal:
    """Appends lines; whole ones, also when the writer is killed right after."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by `close`

    def note(self, *words: Any) -> None:
        """One line: the time and the words."""
        self._file.write(json.dumps([time.monotonic_ns(), *words]) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


@dataclass
class Judge:
    """What may be, by the journal so far, and what was seen that may not.

    Attributes:
        evicts: blocks may also leave by themselves.
    """

    evicts: bool = False
    checked: int = 0
    durable: int = 0
    forgotten: int = 0
    wrong: int = 0
    lost: int = 0
    findings: list[str] = field(default_factory=list)
    findings_dropped: int = 0
    may: dict[Place, set[int]] = field(default_factory=dict)
    exists: dict[str, set[bool]] = field(default_factory=dict)
    keys: dict[str, int] = field(default_factory=dict)  # the least version a tenant may be at
    _read_bytes: int = 0

    def read(self, path: Path) -> None:
        """Judge what was appended since the last look."""
        with open(path, "rb") as file:
            file.seek(self._read_bytes)
            raw = file.read()
        whole = raw[: raw.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        self.feed(json.loads(line) for line in whole.splitlines())

    def feed(self, lines: Iterable[list[Any]]) -> None:
        """Judge lines of a journal, in order."""
        for _, word, *rest in lines:
            getattr(self, "_on_" + word)(*rest)

    def found(self, text: str) -> None:
        """Note a finding."""
        if len(self.findings) < FINDINGS_MAX:
            self.findings.append(text)
        else:
            self.findings_dropped += 1

    def take(self, other: Judge) -> None:
        """Count what another judge saw."""
        self.checked += other.checked
        self.durable += other.durable
        self.forgotten += other.forgotten
        self.wrong += other.wrong
        self.lost += other.lost
        for text in other.findings:
            self.found(text)

    # Blocks.

    def _may(self, tenant: str, number: int) -> set[int]:
        return self.may.setdefault((tenant, number), {MISS})

    def _on_put(self, tenant: str, _ack: str, versions: dict[str, int]) -> None:
        for number, version in versions.items():
            self._may(tenant, int(number)).add(version)

    def _on_put_answered(
        self, tenant: str, ack: str, versions: dict[str, int], statuses: dict[str, int]
    ) -> None:
        for text, code in statuses.items():
            may, version, status = self._may(tenant, int(text)), versions[text], Status(code)
            if status is Status.OK:
                may.clear()
                may.add(version)
                if ack == "durable":
                    self.durable += 1
                if ack != "durable" or self.evicts:
                    may.add(MISS)
            elif status in _REFUSED:
                may.discard(version)
                if status is Status.EXISTS and ack == "durable" and not self.evicts:
                    self.durable += 1
                    if len(may) > 1:
                        may.discard(MISS)
                if not may:
                    may.add(MISS)

    def _on_forget(self, tenant: str, numbers: list[int]) -> None:
        for number in numbers:
            self._may(tenant, number).add(MISS)

    def _on_forgotten(self, tenant: str, numbers: list[int], complete: bool) -> None:
        if complete:
            self.forgotten += len(numbers)
            for number in numbers:
                self.may[tenant, number] = {MISS}

    def _on_saw(
        self, when: str, tenant: str, versions: dict[str, int], statuses: dict[str, int]
    ) -> None:
        """What a get gave. `when`: "load" beside other work, "quiet" with nothing wrong and nobody
        else about, "restart" the same, by a daemon that has just come back."""
        for text, seen in versions.items():
            number = int(text)
            may = self._may(tenant, number)
            self.checked += 1
            where = f"block {number} of {tenant} ({when})"
            if seen == WRONG:
                self.wrong += 1
                self.found(f"{where}: wrong bytes, allowed were {sorted(may)}")
            elif seen != MISS and seen not in may:
                self.wrong += 1
                self.found(f"{where}: version {seen} came back, allowed were {sorted(may)}")
            elif seen == MISS:
                self._judge_miss(where, when, may, Status(statuses[text]))
            if when == "restart":
                self.may[tenant, number] = {max(seen, MISS)}

    def _judge_miss(self, where: str, when: str, may: set[int], status: Status) -> None:
        if status in (Status.MISS, Status.ERASED):  # erased: its key was destroyed
            if MISS not in may and not self.evicts:
                self.lost += 1
                self.found(f"{where}: a durable block is lost, allowed were {sorted(may)}")
        elif when != "load" or status is Status.CORRUPT:
            self.found(f"{where}: {status.label} with nothing wrong, allowed were {sorted(may)}")

    # Tenants.

    def _on_add(self, tenant: str) -> None:
        self.exists.setdefault(tenant, {False}).add(True)

    def _on_added(self, tenant: str, done: bool) -> None:
        if done:
            self.exists[tenant] = {True}

    def _on_erase(self, tenant: str) -> None:
        self.exists.setdefault(tenant, {True}).add(False)
        for place, may in self.may.items():
            if place[0] == tenant:
                may.add(MISS)

    def _on_erased(self, tenant: str, done: bool) -> None:
        if not done:
            return
        self.exists[tenant] = {False}
        self.keys.pop(tenant, None)
        for place in self.may:
            if place[0] == tenant:
                self.may[place] = {MISS}

    def _on_rotate(self, tenant: str) -> None:
        self.keys.setdefault(tenant, 1)

    def _on_rotated(self, tenant: str, version: int) -> None:
        self.keys[tenant] = max(self.keys.get(tenant, 1), version)

    def _on_tenants(self, versions: dict[str, int]) -> None:
        """The operator's list, after a restart."""
        for tenant, may in self.exists.items():
            here = tenant in versions
            self.checked += 1
            if here not in may:
                self.lost += not here
                self.found(f"tenant {tenant} is {'back' if here else 'gone'} after a restart")
            self.exists[tenant] = {here}
            if not here:
                self._on_erased(tenant, True)
        for tenant, version in self.keys.items():
            if tenant in versions and versions[tenant] < version:
                self.lost += 1
                self.found(f"key version {version} of {tenant} was lost: {versions[tenant]} now")

    def _on_note(self, *_: Any) -> None:
        """For whoever reads the journal."""
