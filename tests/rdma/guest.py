"""Runs one command in one guest: stage, boot, stream, collect.

A guest that ends without an exit code of the command is the harness's failure, not the command's;
it is booted once more. A command that runs past its time is killed with its guest, for good.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.rdma import cpio
from tests.rdma.bytecode import compile_tree
from tests.rdma.images import Images
from tests.rdma.progress import say
from tests.rdma.qemu import MEMORY_MIB_DEFAULT, Machine, Running, Sink
from tests.rdma.spec import RC_NO_RESULT, RC_TIMED_OUT, Arch, HarnessError, UsageError
from tests.rdma.tools import tool

REPOSITORY = Path(__file__).resolve().parents[2]
GUEST_FILES = Path(__file__).resolve().parent / "inside"

ATTEMPTS_MAX = 2
TIMEOUT_S_DEFAULT = 600.0
BOOT_TIMEOUT_S = 180.0  # 4 s on a quiet machine; a loaded one needs ten times that
POLL_S = 0.05
LOGS = ("console.log", "qemu.log", "dmesg.txt", "net.txt")  # come to `out` after a failure


@dataclass(frozen=True, slots=True)
class Job:
    """One command for one guest."""

    arch: Arch
    images: Images
    command: tuple[str, ...]
    net: str
    out: Path
    env: dict[str, str] = field(default_factory=dict)
    timeout_s: float = TIMEOUT_S_DEFAULT
    memory_mib: int = MEMORY_MIB_DEFAULT
    name: str = "guest"
    wire: str | None = None
    mac: str = "52:54:00:00:00:01"
    common: Path | None = None  # a folder that several guests see as /pod


def to_stdout(data: bytes) -> None:
    """The guest's output as it comes."""
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def repository_files() -> list[str]:
    """What to take into the guest: what git tracks or would track, else all but build products."""
    tracked = ""
    with contextlib.suppress(FileNotFoundError):  # no git here
        tracked = subprocess.run(
            ["git", "ls-files", "-coz", "--exclude-standard"],
            cwd=REPOSITORY, capture_output=True, text=True, check=False,
        ).stdout  # fmt: skip
    if tracked:
        names = [name for name in tracked.split("\0") if name]
    else:
        hidden = (".git", ".venv", "__pycache__", "build", "dist")
        names = [
            path.relative_to(REPOSITORY).as_posix()
            for path in REPOSITORY.rglob("*")
            if not any(part in hidden for part in path.relative_to(REPOSITORY).parts)
        ]
    return sorted(name for name in names if (REPOSITORY / name).is_file())


@contextlib.contextmanager
def snapshot() -> Iterator[Path]:
    """The repository as one read-only image, frozen at this moment; gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="entresol-repo-") as scratch:
        tree = Path(scratch) / "tree"
        for name in repository_files():
            target = tree / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # it went away meanwhile
                shutil.copy2(REPOSITORY / name, target)
        compile_tree(tree, "", "/repo", checked=True)
        image = Path(scratch) / "repo.erofs"
        done = subprocess.run(
            [tool("mkfs.erofs"), "--all-root", str(image), str(tree)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise HarnessError(f"packing the repository failed: {done.stderr.strip()[-200:]}")
        yield image


def _initrd(job: Job, target: Path) -> None:
    """The cached archive of modules, and behind it one with what is particular to this boot."""
    env = {
        "GUEST_NAME": job.name,
        "GUEST_NET": job.net,
        "GUEST_NOW": str(int(time.time())),
        "GUEST_POD": "1" if job.common else "",
    } | job.env
    lines = [f"export {name}={shlex.quote(value)}\n" for name, value in sorted(env.items())]
    contents = {
        "init": (GUEST_FILES / "initramfs-init").read_bytes(),
        "guest/init": (GUEST_FILES / "init").read_bytes(),
        "guest/net.sh": (GUEST_FILES / "net.sh").read_bytes(),
        "guest/env": "".join(lines).encode(),
        "guest/cmd": f"#!/bin/bash\nexec {shlex.join(job.command)}\n".encode(),
    }
    base = (job.images.kernel / "initrd").read_bytes()
    target.write_bytes(base + cpio.archive(cpio.files(contents)))


class Attempt:
    """One boot of one job. Close it, or use it as a context manager; the machine is off then."""

    def __init__(self, job: Job, repo: Path, sink: Sink = to_stdout) -> None:
        """Boots at once; the command's output goes to `sink`."""
        self._stack = contextlib.ExitStack()
        self.job = job
        try:
            scratch = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="guest-")))
            self.console = scratch / "console.log"
            self._share = scratch / "share"
            (self._share / "out").mkdir(parents=True)
            _initrd(job, scratch / "initrd")
            machine = Machine(
                arch=job.arch,
                kernel=job.images.kernel / "kernel",
                initrd=scratch / "initrd",
                disks=(
                    ("root", job.images.root / "root.erofs"),
                    ("site", job.images.site / "site.erofs"),
                    ("repo", repo),
                ),
                share=self._share,
                console=self.console,
                memory_mib=job.memory_mib,
                wire=job.wire,
                mac=job.mac,
                common=job.common,
            )
            self.running = self._stack.enter_context(Running(machine, sink))
        except BaseException:
            self._stack.close()
            raise
        self.started_after_s: float | None = None
        self.cpu_s = 0.0

    def poll(self) -> int | None:
        """None while the guest works; the command's exit code, or one of ours, when it is over."""
        now = time.monotonic() - self.running.started_s
        if self.started_after_s is None and (self._share / "started").exists():
            self.started_after_s = now
        if not self.running.poll():
            self.cpu_s = self.running.cpu_seconds()
            if self.started_after_s is None and now > BOOT_TIMEOUT_S:
                return RC_NO_RESULT
            return RC_TIMED_OUT if now > self.job.timeout_s else None
        try:
            return int((self._share / "rc").read_text())
        except (OSError, ValueError):
            return RC_NO_RESULT

    def ask_to_stop(self) -> None:
        """Have the guest end its command with SIGTERM (only where guests share a folder)."""
        (self._share / "stop").touch()

    def collect(self, rc: int) -> None:
        """Copy what the command left in /out; after a failure of ours, all that may explain it."""
        self.running.kill()
        shutil.copytree(self._share / "out", self.job.out, dirs_exist_ok=True)
        for stale in LOGS:
            (self.job.out / f"{self.job.name}-{stale}").unlink(missing_ok=True)
        if rc == 0:
            return
        (self._share / "qemu.log").write_bytes(self.running.complaint)
        for path in (self.console, *(self._share / name for name in LOGS)):
            if path.exists() and path.stat().st_size:
                shutil.copyfile(path, self.job.out / f"{self.job.name}-{path.name}")

    def close(self) -> None:
        """End the machine, whatever it is doing, and forget its files."""
        self._stack.close()

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def why(attempt: Attempt, rc: int) -> str:
    """One line on an attempt that gave no result of the command's own."""
    if rc == RC_TIMED_OUT:
        return f"{attempt.job.name}: killed after its {attempt.job.timeout_s:.0f} s"
    last = attempt.running.complaint.decode(errors="replace").strip().splitlines()
    if attempt.console.exists():
        last += attempt.console.read_text(errors="replace").strip().splitlines()[-1:]
    return f"{attempt.job.name}: no result from the guest ({'; '.join(last) or 'it said nothing'})"


def _over(attempt: Attempt, rc: int) -> None:
    """Bring everything home and say how it went."""
    attempt.collect(rc)
    took_s = time.monotonic() - attempt.running.started_s
    if attempt.started_after_s is None or rc in (RC_NO_RESULT, RC_TIMED_OUT):
        say(why(attempt, rc))
    else:
        say(
            f"{attempt.job.name}: command started after {attempt.started_after_s:.1f} s, over "
            f"after {took_s:.1f} s ({attempt.cpu_s:.0f} s of processor time), exit code {rc}"
        )


def run_all(jobs: Sequence[Job], repo: Path, sinks: Sequence[Sink]) -> list[int]:
    """Run jobs side by side to their ends; each one's exit code, 124 or 125."""
    rcs = [RC_NO_RESULT] * len(jobs)
    left = [ATTEMPTS_MAX] * len(jobs)
    live: dict[int, Attempt] = {}
    try:
        for index, job in enumerate(jobs):
            live[index] = Attempt(job, repo, sinks[index])
        while live:
            for index, attempt in list(live.items()):
                rc = attempt.poll()
                if rc is None:
                    continue
                _over(attempt, rc)
                rcs[index] = rc
                del live[index]
                attempt.close()
                left[index] -= 1
                if rc == RC_NO_RESULT and left[index]:
                    say(f"{attempt.job.name}: booting once more")
                    live[index] = Attempt(attempt.job, repo, sinks[index])
            time.sleep(POLL_S)
    finally:
        for attempt in live.values():
            attempt.close()
    return rcs


def run(job: Job, repo: Path) -> int:
    """Run one job, its output to stdout; returns the command's exit code, 124 or 125."""
    return run_all([job], repo, [to_stdout])[0]


def command_of(words: Sequence[str]) -> tuple[str, ...]:
    """The command after the double dash.

    Raises: UsageError when there is none.
    """
    command = tuple(words[1:] if words[:1] == ["--"] else words)
    if not command:
        raise UsageError("no command; give one after --")
    return command
