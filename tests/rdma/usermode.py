"""Python of another architecture on this kernel: QEMU's user mode, in namespaces of our own.

No machine is emulated, only the instructions of the processes, and nothing has to boot; what
the kernel does is this host's. For suites that need no kernel of the architecture.

Owns one invariant: nothing outside the namespaces changes. The kernel learns to start foreign
programs in a user namespace's own binfmt_misc (Linux 6.7), mounts are private, and the processes
end with the first of them.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.rdma.apt import PrivateApt
from tests.rdma.cache import ensure
from tests.rdma.guest import snapshot
from tests.rdma.images import Images, _step, _unpack
from tests.rdma.progress import say
from tests.rdma.spec import (
    RC_TIMED_OUT,
    USERLAND_RELEASE,
    USERLAND_SUITES,
    Arch,
    HarnessError,
    Request,
)
from tests.rdma.tools import SEARCH_PATH, tool

KILL_WAIT_S = 10
KERNEL_LEAST = (6, 7)
_EMULATOR = "qemu-{machine}-static"
# An executable or shared object of this architecture: the first twenty bytes, and which bits count.
_MAGIC = {
    "aarch64": (
        r"\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00",
        r"\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff",
    ),
}
ENVIRONMENT = {
    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LC_ALL": "C.UTF-8",
    "PYTHONUNBUFFERED": "1", "ENTRESOL_EMULATED_USER_MODE": "1",
    "PYTHONPATH": "/repo/daemon:/repo/client:/repo/proto:/repo:/site",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "PYTEST_ADDOPTS": "-p pytest_asyncio.plugin -p pytest_timeout",
}  # fmt: skip


class Impossible(HarnessError):
    """This host's kernel or its settings do not allow it; a whole machine may still be emulated."""


@dataclass(frozen=True, slots=True)
class Run:
    """One command inside; `shared` is a folder of this host that it sees as /out."""

    command: tuple[str, ...]
    shared: Path
    env: dict[str, str] = field(default_factory=dict)


def check_kernel(release: str) -> None:
    """Raises: Impossible on a kernel whose binfmt_misc is the same for everybody."""
    found = tuple(int(part) for part in release.split("-")[0].split(".")[:2] if part.isdigit())
    if found < KERNEL_LEAST:
        least = ".".join(map(str, KERNEL_LEAST))
        raise Impossible(f"user-mode emulation needs Linux {least}, this is {release}")


def emulator_request(arch: Arch) -> Request:
    """The one program out of Debian's package of all of them."""
    packages = ("qemu-user-static", _EMULATOR.format(machine=arch.machine))
    return Request("emulator", arch.name, USERLAND_SUITES, packages)


def emulator(arch: Arch) -> Path | None:
    """QEMU for this architecture's processes; None where the processor needs none.

    Raises: HarnessError when it cannot be fetched.
    """
    if platform.machine() == arch.machine:
        return None
    name = _EMULATOR.format(machine=arch.machine)

    def build(out: Path) -> list[str]:
        host = _step([tool("dpkg"), "--print-architecture"], "asking for this architecture").strip()
        apt = PrivateApt(out / "apt", host, USERLAND_SUITES, USERLAND_RELEASE)
        say(f"emulator for {arch.name}: asking {' '.join(USERLAND_SUITES)}")
        apt.update()
        wanted = [deb for deb in apt.resolve("qemu-user-static") if deb.name == "qemu-user-static"]
        [package] = apt.download(wanted, out / "debs")
        _unpack(package, out, "--wildcards", f"*/bin/{name}")
        for part in ("apt", "debs"):
            _step(["rm", "-rf", str(out / part)], "cleaning up")
        return [deb.pin for deb in wanted]

    return ensure(emulator_request(arch), build) / "usr/bin" / name


def compile_kernel(repo: Path, arch: Arch) -> None:
    """The native kernel for this architecture, where this host has a compiler for it.

    Without one its tests skip, and say so.
    """
    compiler = shutil.which(f"{arch.machine}-linux-gnu-gcc", path=SEARCH_PATH)
    if compiler is None:
        return
    folder = repo / "proto/entresol_proto/native"
    _step(
        [compiler, "-std=c11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden",
         "-o", str(folder / "_kernel.so"), str(folder / "kernel.c")],
        "compiling the native kernel",
    )  # fmt: skip


@contextlib.contextmanager
def tree(made: Images, arch: Arch) -> Iterator[Path]:
    """The user space, the Python packages and the repository as folders, as a guest sees them."""
    with tempfile.TemporaryDirectory(prefix="entresol-tree-") as scratch, snapshot() as repo:
        root = Path(scratch) / "root"
        for image, part in (
            (made.root / "root.erofs", "."), (made.site / "site.erofs", "site"), (repo, "repo"),
        ):  # fmt: skip
            _step(
                [tool("fsck.erofs"), f"--extract={root / part}", "--overwrite", str(image)],
                f"unpacking {image.name}",
            )
        compile_kernel(root / "repo", arch)
        yield root


def script(root: Path, arch: Arch, program: Path | None, run: Run) -> str:
    """What the first process of the namespaces does, in this host's shell."""
    lines = ["set -e"]
    if program is not None:
        magic, mask = _MAGIC[arch.machine]
        entry = f":entresol-{arch.name}:M::{magic}:{mask}:{program}:F"
        binfmt = "/proc/sys/fs/binfmt_misc"
        lines += [
            f"mount -t binfmt_misc binfmt_misc {binfmt}",
            f"printf %s {shlex.quote(entry)} > {binfmt}/register",
        ]
    at = shlex.quote(str(root))
    lines += [
        f"mount -t proc proc {at}/proc",
        f"mount --rbind /dev {at}/dev",
        f"mount --rbind /sys {at}/sys",
        f"mount -t tmpfs tmpfs {at}/dev/shm",
        f"mount -t tmpfs tmpfs {at}/tmp",
        f"mount -t tmpfs tmpfs {at}/run",
        f"mount --bind {shlex.quote(str(run.shared))} {at}/out",
        "ulimit -n 65536 2> /dev/null || :",
    ]
    env = [f"{name}={value}" for name, value in sorted((ENVIRONMENT | run.env).items())]
    inside = ["/usr/bin/env", "-i", *env, "/bin/bash", "-c", 'cd /repo; "$@"; exit $?', "run"]
    lines.append(f"chroot {at} {shlex.join([*inside, *run.command])}")
    return "\n".join(lines) + "\n"


class Process:
    """A run under way; use as a context manager, so that it ends however the block ends."""

    def __init__(self, root: Path, arch: Arch, program: Path | None, run: Run) -> None:
        """Starts at once; output goes to ours. Raises: Impossible."""
        spaces = ["--user", "--mount", "--pid", "--ipc", "--fork", "--kill-child"]
        self._process = subprocess.Popen(
            [tool("setpriv"), "--pdeathsig", "KILL", tool("unshare"), *spaces,
             # Once its user ids stand for somebody, starting a program as root gives root's powers.
             "/bin/sh", "-c", 'read -r mapped; exec /bin/sh -c "$1"', "sh",
             script(root, arch, program, run)],
            stdin=subprocess.PIPE, stdout=sys.stdout, stderr=sys.stderr, start_new_session=True,
        )  # fmt: skip
        try:
            self._map_users()
        except BaseException:
            self.kill()
            raise

    def _map_users(self) -> None:
        """Give its user namespace ids: ours, or as root all there are."""
        folder = Path(f"/proc/{self._process.pid}")
        mine = os.readlink("/proc/self/ns/user")
        deadline = time.monotonic() + KILL_WAIT_S
        while os.readlink(folder / "ns/user") == mine:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise Impossible("this host allows no user namespaces")
            time.sleep(0.01)
        everybody = os.geteuid() == 0
        for name, own in (("uid", os.geteuid()), ("gid", os.getegid())):
            if name == "gid" and not everybody:
                (folder / "setgroups").write_text("deny")
            (folder / f"{name}_map").write_text("0 0 65536" if everybody else f"0 {own} 1")
        assert self._process.stdin is not None
        self._process.stdin.write(b"mapped\n")
        self._process.stdin.close()

    def wait(self, timeout_s: float) -> int:
        """The command's exit code, or RC_TIMED_OUT."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return RC_TIMED_OUT

    def kill(self) -> None:
        """End all of it: the first process of the namespaces takes the others along."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(KILL_WAIT_S)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()


def run_all(made: Images, arch: Arch, runs: Sequence[Run], timeout_s: float) -> list[int]:
    """Run commands side by side in one tree; their exit codes.

    Raises: Impossible where this host cannot do it at all.
    """
    if arch.machine not in _MAGIC and platform.machine() != arch.machine:
        raise Impossible(f"no user-mode emulation of {arch.name} here")
    check_kernel(platform.release())
    program = emulator(arch)
    with tree(made, arch) as root, contextlib.ExitStack() as stack:
        end_s = time.monotonic() + timeout_s
        found = [stack.enter_context(Process(root, arch, program, run)) for run in runs]
        return [process.wait(max(0.0, end_s - time.monotonic())) for process in found]
