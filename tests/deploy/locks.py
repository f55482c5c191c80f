"""Which of the unit's restrictions hold in this machine: tried under the unit's own lines.

Invariant: a restriction counts as applied only if the same user could do it without and cannot do
it with the unit's lines; one that cannot be told apart here, or that no probe tries, is said to be
so.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.deploy.machine import Machine
from tests.rdma.spec import HarnessError

# Lines about the daemon's life, which a probe does not have, and those that only pair with others.
NOT_LOCKS = (
    "Type", "ExecStart", "ExecReload", "Restart", "RestartSec", "TimeoutStartSec",
    "TimeoutStopSec", "WatchdogSec", "User", "Group", "StateDirectory", "StateDirectoryMode",
    "RuntimeDirectory", "RuntimeDirectoryMode", "LoadCredential", "LimitNOFILE",
    "AmbientCapabilities", "IPAddressAllow", "SocketBindAllow", "SystemCallErrorNumber",
)  # fmt: skip
_LIFE = (
    "Type=", "Exec", "Restart=", "RestartSec=", "Timeout", "WatchdogSec=", "StateDirectory=",
    "RuntimeDirectory=",
)  # fmt: skip
_PYTHON = "/usr/lib/entresol/bin/python3 -IB /mnt/inside/probe.py"
MARK = "entresol-probe-mark"


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
    for folder in ("/tmp", "/dev"):
        machine.run("touch", f"{folder}/{MARK}")
    spaces = [
        machine.run("readlink", f"/proc/1/ns/{name}").stdout.strip() for name in ("mnt", "uts")
    ]
    with_locks = _run(machine, "entresold-probe", locks, spaces)
    plain = [line for line in locks if line.startswith(("User=", "Group="))]
    without = _run(machine, "entresold-probe-plain", plain, spaces)
    names = dict.fromkeys(line.partition("=")[0] for line in locks)
    tried = [name for name in names if name in with_locks]
    return Locks(
        applied=[name for name in tried if without[name] and not with_locks[name]],
        not_applied=[name for name in tried if with_locks[name]],
        not_told_apart=[name for name in tried if not without[name]],
        not_tried=[name for name in names if name not in with_locks and name not in NOT_LOCKS],
    )


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
