"""A machine of namespaces: systemd is its process 1, nothing of this one can be reached or changed.

Own process, mount, network (loopback only), name, IPC and cgroup namespaces; /proc/sys and /sys are
read-only, devices are the six that every program expects. Cgroups are version 2 in a subtree of
this machine's, also where version 1 has the controllers: systemd then has none, and `locks` says
what that leaves without effect.

Invariant: `close` leaves nothing: no process, no cgroup, no mount, no folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from tests.rdma.spec import HarnessError

BOOT_SECONDS_MAX = 120.0
RUN_SECONDS_MAX = 300.0
_NAMESPACES = ("--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup")
_ENTER = ("-m", "-u", "-i", "-n", "-p", "-C")
_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# $1: an empty folder, $2: files for inside, $3: the root file system, which stays as it is; where
# no layer can be laid over it, it is copied. The last line makes this shell systemd.
_BOOT = (
    r"""
set -e
root=$1/root
mkdir "$root" "$1/upper" "$1/work"
if ! mount -t overlay overlay -o "lowerdir=$3,upperdir=$1/upper,workdir=$1/work" "$root"; then
    cp -a "$3/." "$root"
    mount --bind "$root" "$root"
fi
for name in systemd-resolved systemd-networkd systemd-timesyncd; do
    ln -sf /dev/null "$root/etc/systemd/system/$name.service"
done
: > "$root/etc/machine-id"
mount -t proc proc "$root/proc"
mount --bind "$root/proc/sys" "$root/proc/sys"
mount -o remount,bind,ro "$root/proc/sys"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for name in null zero full random urandom tty; do
    : > "$root/dev/$name"
    mount --bind "/dev/$name" "$root/dev/$name"
done
mkdir "$root/dev/pts" "$root/dev/shm"
ln -s /proc/self/fd "$root/dev/fd"
ln -s pts/ptmx "$root/dev/ptmx"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
mount -t tmpfs tmpfs "$root/dev/shm"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mount -t tmpfs tmpfs "$root/tmp"
mkdir -p "$root/mnt/inside"
mount --bind "$2" "$root/mnt/inside"
mount -o remount,bind,ro "$root/mnt/inside"
hostname deploy
ip link set lo up
ip address add 10.77.0.1/32 dev lo
cd "$root"
mkdir -p .old
pivot_root . .old
umount -l /.old
mount --make-rshared /
exec env -i container=namespaces """
    + _PATH
    + r""" /lib/systemd/systemd --show-status=no
"""
)


def why_not() -> str:
    """Why no such machine can be made here; empty when one can be tried."""
    if os.geteuid() != 0:
        return "not root"
    for command in ("unshare", "nsenter", "dpkg-deb", "ip"):
        if shutil.which(command) is None:
            return f"there is no {command}"
    if _cgroup_root() is None:
        return "there are no cgroups of version 2"
    done = subprocess.run(
        ["unshare", *_NAMESPACES, "--fork", "mount", "-t", "tmpfs", "tmpfs", "/mnt"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return f"no namespaces: {done.stderr.strip()[-200:]}" if done.returncode else ""


def _cgroup_root() -> Path | None:
    """Where version 2 is mounted: alone, or beside version 1."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(place)
    return None


class Machine:
    """One machine. `boot`, then `run` as often as wanted, then `close`."""

    def __init__(self, system: Path, inside: Path) -> None:
        """`system` is its root file system, not changed; `inside` is /mnt/inside, read-only."""
        self.folder = Path(tempfile.mkdtemp(prefix="entresol-deploy-"))
        self._system = system
        self._inside = inside
        cgroups = _cgroup_root()
        assert cgroups is not None, "see why_not"
        self._cgroup = cgroups / self.folder.name
        self._unshare: subprocess.Popen[bytes] | None = None
        self._init_pid = 0

    @property
    def root(self) -> Path:
        """Its root file system, as this machine sees it while it runs."""
        assert self._init_pid, "not booted"
        return Path(f"/proc/{self._init_pid}/root")

    def boot(self) -> None:
        """Start, wait until systemd says that it is up. Raises: HarnessError."""
        self._cgroup.mkdir()
        with open(self.folder / "boot.log", "wb") as log:
            self._unshare = subprocess.Popen(
                ["sh", "-c", 'echo $$ > "$0/cgroup.procs"; exec unshare "$@"', str(self._cgroup),
                 *_NAMESPACES, "--fork", "--kill-child=SIGKILL", "--propagation", "private",
                 "sh", "-c", _BOOT, "boot", str(self.folder), str(self._inside), str(self._system)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        until_s = time.monotonic() + BOOT_SECONDS_MAX
        while True:
            if self._unshare.poll() is not None or time.monotonic() > until_s:
                said = (self.folder / "boot.log").read_text(errors="replace")[-500:]
                raise HarnessError(f"systemd did not come up: {said}")
            if self._find_init() and self._is_up():
                return
            time.sleep(0.1)

    def _find_init(self) -> bool:
        """systemd is the one child of unshare, once the shell before it has become it."""
        assert self._unshare is not None
        pid = self._unshare.pid
        with contextlib.suppress(OSError, ValueError):
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            self._init_pid = int(children[0]) if children else 0
            return Path(f"/proc/{self._init_pid}/comm").read_text().strip() == "systemd"
        return False

    def _is_up(self) -> bool:
        done = self.run("systemctl", "is-system-running", check=False)
        return done.stdout.strip() in ("running", "degraded")

    def command(self, *words: str) -> list[str]:
        """What runs `words` in there, as root."""
        enter = ["nsenter", "-t", str(self._init_pid), *_ENTER, "--"]
        return [*enter, "env", "-i", _PATH, "LC_ALL=C.UTF-8", "HOME=/root", *words]

    def run(
        self, *words: str, check: bool = True, seconds: float = RUN_SECONDS_MAX, stdin: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end. Raises: HarnessError when it fails and `check`."""
        done = subprocess.run(
            self.command(*words), input=stdin, capture_output=True, text=True, check=False,
            timeout=seconds, cwd="/",
        )  # fmt: skip
        if check and done.returncode:
            said = (done.stderr.strip() + "\n" + done.stdout.strip())[-1500:]
            raise HarnessError(f"{' '.join(words)}: exit status {done.returncode}\n{said}")
        return done

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start a command and leave it running; its output is the caller's to read."""
        return subprocess.Popen(
            self.command(*words), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, cwd="/",
        )  # fmt: skip

    def write(self, path: Path, text: str) -> None:
        """Make a file in there, also where something is mounted over the root file system."""
        self.run("sh", "-c", 'cat > "$0"', str(path), stdin=text)

    def show(self, unit: str, name: str) -> str:
        """One property of a unit."""
        return self.run("systemctl", "show", unit, "--property", name, "--value").stdout.strip()

    def journal(self, unit: str) -> str:
        """What a unit and systemd about it said."""
        return self.run("journalctl", "--no-pager", "-o", "cat", "-u", unit, check=False).stdout

    def close(self) -> None:
        """End it and remove everything of it. Idempotent."""
        process, self._unshare = self._unshare, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)  # takes process 1 with it, and that all others
            process.wait()
        for _ in range(100):
            if self._remove_cgroups():
                break
            time.sleep(0.1)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _remove_cgroups(self) -> bool:
        if not self._cgroup.exists():
            return True
        with contextlib.suppress(OSError):
            (self._cgroup / "cgroup.kill").write_text("1")
        for folder in sorted(self._cgroup.rglob("*"), key=lambda path: -len(path.parts)):
            if folder.is_dir():
                with contextlib.suppress(OSError):
                    folder.rmdir()
        with contextlib.suppress(OSError):
            self._cgroup.rmdir()
        return not self._cgroup.exists()
