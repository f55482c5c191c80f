"""Which of the unit's restrictions hold in this machine: tried under the unit's own lines.

Invariant: a restriction counts as applied only if the same user could do it without and cannot do
it with the unit's lines; one that cannot be told apart here, or that no probe tries, is said to be
so. What the page says of a line (systemd/README.md) must be what was found.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.deploy.machine import Machine
from tests.rdma.spec import HarnessError

# Lines about the daemon's life, which a probe does not have, and those that only pair with others.
NOT_LOCKS = (
    "Type", "ExecStart", "ExecReload", "Restart", "RestartSec", "TimeoutStartSec",
    "TimeoutStopSec", "WatchdogSec", "User", "Group", "StateDirectory", "StateDirectoryMode",
    "RuntimeDirectory", "RuntimeDirectoryMode", "LoadCredential",
    "AmbientCapabilities", "IPAddressAllow", "SocketBindAllow", "SystemCallErrorNumber",
)  # fmt: skip
_LIFE = (
    "Type=", "Exec", "Restart=", "RestartSec=", "Timeout", "WatchdogSec=", "StateDirectory=",
    "RuntimeDirectory=",
)  # fmt: skip
_PYTHON = "/usr/lib/entresol/bin/python3 -IB /mnt/inside/probe.py"
MARK = "entresol-probe-mark"
# What other steps of the life find out, which no probe could.
BY_STEPS = {"ReadWritePaths": "engines of other users", "DevicePolicy": "other drives"}
PAGE = Path(__file__).parents[2] / "systemd/README.md"
_HELD, _NOT_APPLIED = "held", "**not applied**"
_NOT_TOLD_APART, _NOT_TRIED = "not told apart", "not tried"


@dataclass(frozen=True, slots=True)
class Locks:
    """Names of settings, sorted by what became of them."""

    applied: list[str]
    not_applied: list[str]  # it can be done, with and without
    not_told_apart: list[str]  # it cannot be done here even without
    not_tried: list[str]


def look(machine: Machine) -> Locks:
    """Try every probe with and without the unit's lines. Raises: HarnessError."""
    unit = (machine.root / "usr/lib/systemd/system/entresold.service").read_text()
    service = unit.partition("[Service]\n")[2].partition("[Install]")[0]
    locks = [line for line in service.splitlines()
             if line and not line.startswith(("#", *_LIFE))]  # fmt: skip
    machine.run("mkdir", "-p", "/usr/lib/modules")
    for folder in ("/tmp", "/dev", "/usr/lib/modules"):
        machine.run("touch", f"{folder}/{MARK}")
    spaces = [
        machine.run("readlink", f"/proc/1/ns/{name}").stdout.strip() for name in ("mnt", "uts")
    ]
    with_locks = _run(machine, "entresold-probe", locks, spaces)
    plain = [line for line in locks if line.startswith(("User=", "Group="))]
    without = _run(machine, "entresold-probe-plain", plain, spaces)
    machine.run("rm", f"/usr/lib/modules/{MARK}")
    machine.run("rmdir", "--ignore-fail-on-non-empty", "/usr/lib/modules")
    names = dict.fromkeys(line.partition("=")[0] for line in locks)
    tried = [name for name in names if name in with_locks]
    return Locks(
        applied=[name for name in tried if without[name] and not with_locks[name]],
        not_applied=[name for name in tried if with_locks[name]],
        not_told_apart=[name for name in tried if not without[name]],
        not_tried=[name for name in names if name not in (*with_locks, *NOT_LOCKS, *BY_STEPS)],
    )


def claims(page: str) -> dict[tuple[str, ...], str]:
    """What the page says of the unit's lines: a row's settings, and its last cell."""
    table = page.partition("## The unit, line by line")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    return {tuple(re.findall(r"`([A-Z]\w+)=", row[0])): row[-1] for row in rows}


def contradicted(said: dict[tuple[str, ...], str], locks: Locks) -> list[str]:
    """Where the page says more than was found, or less than one is told of: a line that holds must
    have been tried, and one that was tried must not be called untried. Of a row of several lines
    each that is tried counts, and one must be."""
    findings = []
    for names, state in said.items():
        if state.startswith(_HELD):
            weak = [name for name in names if name in locks.not_applied + locks.not_told_apart]
            tried = [name for name in names if name in (*locks.applied, *NOT_LOCKS, *BY_STEPS)]
            if weak or not tried:
                findings.append(f"{', '.join(weak or names)}: held, says the page, and is not")
        elif state.startswith(_NOT_TRIED):
            known = [name for name in names if name not in locks.not_tried]
            if known:
                findings.append(f"{', '.join(known)}: not tried, says the page, and is")
        elif state.startswith(_NOT_TOLD_APART):
            known = [name for name in names if name not in locks.not_told_apart]
            if known:
                findings.append(f"{', '.join(known)}: not told apart, says the page, and is")
        elif not state.startswith((_NOT_APPLIED, "-", "`", "never reached")):
            findings.append(f"{', '.join(names)}: the page says {state[:40]!r}, whatever that is")
    return findings


def _run(machine: Machine, name: str, lines: list[str], spaces: list[str]) -> dict[str, bool]:
    """Setting -> whether what it forbids could be done."""
    text = "\n".join([
        "[Service]", "Type=oneshot", f"StateDirectory={name}", f"RuntimeDirectory={name}",
        f"ExecStart={_PYTHON} {' '.join(spaces)}", *lines, "",
    ])  # fmt: skip
    machine.write(Path(f"/run/systemd/system/{name}.service"), text)
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "start", f"{name}.service")
    machine.run("rm", "-rf", f"/var/lib/{name}", f"/run/systemd/system/{name}.service")
    found = {}
    for line in machine.journal(f"{name}.service").splitlines():
        words = line.split()
        if len(words) >= 2 and words[1] in ("yes", "no"):
            found[words[0]] = words[1] == "yes"
    if len(found) < 20:
        raise HarnessError(
            f"the probe said too little: {machine.journal(name + '.service')[-800:]}"
        )
    return found
