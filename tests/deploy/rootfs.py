"""A bare Debian with systemd, as a folder: built by mmdebstrap, kept by what went into it.

Nobody writes to the folder afterwards: machines lay their own layer over it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.rdma import apt
from tests.rdma.cache import ensure
from tests.rdma.spec import HarnessError, Request
from tests.rdma.tools import KEYRING, SEARCH_PATH, tool

RELEASE = "bookworm"
SUITES = ("bookworm", "bookworm-updates", "bookworm-security")
# systemd as process 1, what the package depends on, and what the runbook's commands want.
PACKAGES = ("systemd", "systemd-sysv", "python3.11", "libgcc-s1", "libstdc++6", "curl", "udev")
BUILD_TIMEOUT_S = 900
ROOT = "root"
# What no run reads, and every copy would copy.
_WITHOUT = "usr/share/locale usr/share/man usr/share/doc usr/share/zoneinfo var/cache/apt"


def image(arch: str) -> Path:
    """The folder, built when it is not there. Raises: HarnessError with the step that failed."""
    request = Request("systemd", arch, SUITES, (*PACKAGES, *_WITHOUT.split()))
    return ensure(request, lambda out: _build(arch, out)) / ROOT


def _build(arch: str, out: Path) -> list[str]:
    if shutil.which("mmdebstrap", path=SEARCH_PATH) is None:
        _install_mmdebstrap()
    lines = apt.source_lines(SUITES, apt.host_mirrors())
    made = out / ROOT
    _step(
        [tool("mmdebstrap"), "--variant=minbase", "--quiet", f"--architectures={arch}",
         f"--include={','.join(PACKAGES)}", f"--keyring={KEYRING}",
         "--aptopt=Acquire::Retries \"3\"", "--format=directory",
         f"--customize-hook=cd \"$1\" && rm -rf {_WITHOUT}", RELEASE, str(made), *lines],
        "making a Debian root file system",
    )  # fmt: skip
    return _versions((made / "var/lib/dpkg/status").read_text(encoding="utf-8"))


def _versions(status: str) -> list[str]:
    """`name=version` of dpkg's status file."""
    found = []
    for paragraph in status.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in paragraph.splitlines() if ": " in line)
        if "Package" in fields:
            found.append(f"{fields['Package']}={fields['Version']}")
    return found


def _install_mmdebstrap() -> None:
    command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "mmdebstrap"]
    if os.geteuid() != 0:
        raise HarnessError(f"missing on this host; as root: {' '.join(command)}")
    subprocess.run(["apt-get", "update", "-qq"], check=False, capture_output=True)
    _step(command, "installing mmdebstrap")


def _step(command: list[str], what: str) -> str:
    env = os.environ | {"LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive", "PATH": SEARCH_PATH}
    done = subprocess.run(
        command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        timeout=BUILD_TIMEOUT_S,
    )  # fmt: skip
    if done.returncode:
        raise HarnessError(f"{what} failed: {(done.stderr or done.stdout).strip()[-400:]}")
    return done.stdout
