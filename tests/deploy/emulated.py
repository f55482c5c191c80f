"""The package of another processor, installed by apt in a Debian of that processor's programs.

    python -m tests.deploy.emulated [--arch arm64|amd64] [--packages DIR]

Installed, used, upgraded, downgraded, removed and purged, in user-mode emulation. No systemd runs
there: what units do is `python -m tests.deploy`'s, on this processor, and they are the same files.
Needs root, a mirror of Debian, and qemu-user with binfmt_misc (Debian: qemu-user-static,
binfmt-support); a compiler for the processor is installed with apt. 77: this machine cannot.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.deploy import containers, packages, rootfs
from tests.deploy.containers import MACHINES, RC_CANNOT
from tests.deploy.packages import Packages
from tests.deploy.world import expect
from tests.rdma.spec import HarnessError
from tests.rdma.tools import SEARCH_PATH

STEP_SECONDS_MAX = 1_800.0  # an emulated start is some thirty times as long
# $1: a folder of its own, $2: packages, $3: the root file system, which stays as it is, $4: what to
# run in it. All that is mounted goes with the namespaces.
_ENTER = r"""
set -e
root=$1/root
mkdir -p "$root" "$1/upper" "$1/work"
if [ ! -e "$1/copied" ] &&
   ! mount -t overlay overlay -o "lowerdir=$3,upperdir=$1/upper,workdir=$1/work" "$root" \
       2>/dev/null; then
    cp -a "$3/." "$root"
    : > "$1/copied"
fi
mount -t proc proc "$root/proc"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for name in null zero full random urandom tty; do
    : > "$root/dev/$name"
    mount --bind "/dev/$name" "$root/dev/$name"
done
mkdir -p "$root/dev/shm" "$root/mnt/packages"
ln -s /proc/self/fd "$root/dev/fd"
mount -t tmpfs tmpfs "$root/dev/shm"
mount -t tmpfs tmpfs "$root/tmp"
mount --bind "$2" "$root/mnt/packages"
ip link set lo up
exec chroot "$root" env -i LC_ALL=C.UTF-8 HOME=/root DEBIAN_FRONTEND=noninteractive \
    PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin sh -ec "$4"
"""
_NAMESPACES = ("--mount", "--uts", "--ipc", "--net", "--pid")
_LEFT = (
    "find / -xdev -iname '*entresol*' -not -path '/proc/*' -not -path '/mnt/*' "
    "-not -path '/var/log/*' -not -path '/tmp/*'"
)
_APT = "apt-get install -y -qq --no-install-recommends --allow-downgrades"


@dataclass(slots=True)
class Place:
    """A root file system with a layer of its own, and the packages to try in it."""

    folder: Path
    system: Path
    built: Packages

    def run(self, script: str) -> str:
        """Run it as root in there; what it printed. Raises: HarnessError with its last words."""
        done = subprocess.run(
            ["unshare", *_NAMESPACES, "--fork", "--kill-child=SIGKILL", "--propagation", "private",
             "sh", "-c", _ENTER, "enter", str(self.folder), str(self.built.first.parent),
             str(self.system), script],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
            timeout=STEP_SECONDS_MAX, cwd="/",
        )  # fmt: skip
        if done.returncode:
            said = (done.stderr.strip() + "\n" + done.stdout.strip())[-1_500:]
            raise HarnessError(f"exit status {done.returncode}\n{said}")
        return done.stdout.strip()


def install(place: Place) -> str:
    place.run(f"{_APT} /mnt/packages/{place.built.first.name}")
    arch = place.run("dpkg-query -W -f '${Architecture} ${Status}' entresol")
    changed = place.run("dpkg -V entresol")
    expect(not changed, f"dpkg finds other files than it installed: {changed}")
    expect(place.run("id -un entresol") == "entresol", "there is no user")
    version = place.run("entresold --version")
    expect(place.built.first_version in version, f"it says {version}")
    return f"{arch}; {version}"


def use(place: Place) -> str:
    """A daemon of the package, by its user: a block out and home, its health, a clean stop."""
    life = containers.LIFE.replace("import pyverbs  # the distribution's\n\n", "")
    place.run("install -d -o entresol -m 0700 /var/tmp/life")
    quoted = life.replace("mktemp -d", "mktemp -d -p /var/tmp/life").replace("'", "'\\''")
    said = place.run(f"runuser -u entresol -- sh -c '{quoted}'; rm -r /var/tmp/life")
    return said.splitlines()[-1]


def upgrade(place: Place) -> str:
    place.run("echo '# of the operator' >> /etc/entresol/entresold.toml")
    place.run("install -d -o entresol /var/lib/entresol; echo kept > /var/lib/entresol/blocks")
    place.run(f"{_APT} -o Dpkg::Options::=--force-confold /mnt/packages/{place.built.next.name}")
    version = place.run("entresold --version")
    expect(place.built.next_version in version, f"it says {version}")
    _kept(place)
    place.run("test -e /usr/share/entresol/of-the-next-version")
    return f"{version}; configuration and data are kept"


def downgrade(place: Place) -> str:
    place.run(f"{_APT} -o Dpkg::Options::=--force-confold /mnt/packages/{place.built.first.name}")
    version = place.run("entresold --version")
    expect(place.built.first_version in version, f"it says {version}")
    place.run("test ! -e /usr/share/entresol/of-the-next-version")
    _kept(place)
    return f"{version}; the formats are the same, so it may"


def remove(place: Place) -> str:
    said = place.run("apt-get remove -y entresol")
    expect("are kept: /var/lib/entresol" in said, "it does not say what is kept")
    place.run("test ! -e /usr/bin/entresold; test ! -e /usr/lib/entresol")
    _kept(place)
    return "programs are gone; configuration and data are kept"


def purge(place: Place) -> str:
    place.run("apt-get purge -y entresol")
    left = place.run(_LEFT).split()
    expect(not left, f"left behind: {left}")
    there = place.run("getent passwd entresol || true")
    expect(not there, "the user is there")
    return "nothing of it is left: files, keys, user"


def _kept(place: Place) -> None:
    text = place.run("cat /etc/entresol/entresold.toml /var/lib/entresol/blocks")
    expect("# of the operator" in text and "kept" in text, "what the operator had is gone")


STEPS: tuple[tuple[str, Callable[[Place], str]], ...] = (
    ("install", install), ("use", use), ("upgrade", upgrade), ("downgrade", downgrade),
    ("remove", remove), ("purge", purge),
)  # fmt: skip


def prepare(arch: str) -> Path:
    """The root file system, and on this machine what builds one and the package.

    Raises: HarnessError.
    """
    wanted = []
    if os.uname().machine != MACHINES[arch]:
        if shutil.which("arch-test", path=SEARCH_PATH) is None:
            wanted.append("arch-test")
        compiler = f"gcc-{MACHINES[arch]}-linux-gnu"
        if shutil.which(f"{MACHINES[arch]}-linux-gnu-gcc", path=SEARCH_PATH) is None:
            wanted += [compiler.replace("_", "-"), f"libc6-dev-{arch}-cross"]
    containers.install_here(wanted)
    return rootfs.image(arch)


def live(arch: str, folder: Path, at: Path | None) -> None:
    """All of it, a line each. Raises: HarnessError, Broken."""
    tell = containers.teller()
    system = prepare(arch)
    tell("root file system", f"a minimal Debian, {arch}")
    built = packages.build(arch, at or folder)
    tell("packages", f"two versions, {built.first.stat().st_size / 1e6:.0f} MB unpacked")
    place = Place(folder / "place", system, built)
    place.folder.mkdir()
    for name, step in STEPS:
        tell(name, step(place))


def main(arguments: list[str] | None = None) -> int:
    """Run; returns the exit status."""
    options = argparse.ArgumentParser(prog="python -m tests.deploy.emulated", description=__doc__)
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    options.add_argument("--arch", choices=sorted(MACHINES), default="arm64")
    options.add_argument("--packages", type=Path, metavar="DIR", help="take both from here")
    chosen = options.parse_args(arguments)
    reason = containers.why_not(chosen.arch)
    if reason:
        print(f"not run here: {reason}")
        return RC_CANNOT
    return containers.in_a_folder(
        "entresol-emulated-", lambda folder: live(chosen.arch, folder, chosen.packages)
    )


if __name__ == "__main__":
    sys.exit(main())
