"""The host's tools: which are missing, and fetching them where that is allowed."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable

from tests.rdma.progress import say
from tests.rdma.spec import ARCHES, HarnessError

# Command -> Debian package. mkfs.erofs and depmod live where an unprivileged PATH may not look.
BUILD_TOOLS = {"mkfs.erofs": "erofs-utils", "depmod": "kmod", "modprobe": "kmod", "xz": "xz-utils"}
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
SEARCH_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin", "/usr/bin"))
INSTALL_TIMEOUT_S = 600


class NotHere(HarnessError):
    """This host can never run the harness: it is no Linux of Debian's family."""


def tool(command: str) -> str:
    """The path of a host command.

    Raises: HarnessError when it is missing.
    """
    found = shutil.which(command, path=SEARCH_PATH)
    if found is None:
        raise HarnessError(f"{command} is not installed")
    return found


def missing_packages(arches: Iterable[str]) -> list[str]:
    """Debian packages this host lacks to build and boot guests of these architectures."""
    wanted = dict(BUILD_TOOLS)
    for name in arches:
        wanted[ARCHES[name].qemu] = ARCHES[name].qemu_package
    missing = {
        package
        for command, package in wanted.items()
        if shutil.which(command, path=SEARCH_PATH) is None
    }
    if not os.path.exists(KEYRING):
        missing.add("debian-archive-keyring")
    return sorted(missing)


def ensure_tools(arches: Iterable[str]) -> None:
    """Install what is missing, when this process may.

    Raises: NotHere without apt and dpkg; HarnessError naming the packages when not root.
    """
    for needed in ("apt-get", "dpkg-deb", "tar"):
        if shutil.which(needed, path=SEARCH_PATH) is None:
            raise NotHere(f"guests are built from Debian packages and this host has no {needed}")
    missing = missing_packages(arches)
    if not missing:
        return
    command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing]
    if os.geteuid() != 0:
        raise HarnessError(f"missing on this host; as root: {' '.join(command)}")
    say(f"installing {' '.join(missing)}")
    env = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    for step in (["apt-get", "update", "-qq"], command):
        done = subprocess.run(
            step, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=INSTALL_TIMEOUT_S, check=False,
        )  # fmt: skip
        # A third-party source that does not answer fails the update; the install decides.
        if done.returncode and step is command:
            last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
            raise HarnessError(f"{' '.join(step[:2])} failed: {last}")
    left = missing_packages(arches)
    if left:
        raise HarnessError(f"still missing after the installation: {' '.join(left)}")
    say("host tools ready")
