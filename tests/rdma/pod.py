"""Two machines and one wire: a DPU serving, a host using it, each its own kernel and architecture.

The DPU's command is a server: when the host's command is over, the DPU's is asked to end and its
exit code then counts as well. Both see one folder as /pod, to tell each other what no wire should.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

from tests.rdma.guest import ATTEMPTS_MAX, POLL_S, Attempt, Job, snapshot, why
from tests.rdma.images import images
from tests.rdma.progress import say
from tests.rdma.qemu import Sink
from tests.rdma.spec import RC_NO_RESULT, Arch, HarnessError, Kernel, UsageError

HOST_ADDRESS, DPU_ADDRESS = "10.7.0.1", "10.7.0.2"
STOP_TIMEOUT_S = 60.0
SOCKET_PATH_MAX = 100  # the kernel's limit is 107
STOPPED_RCS = (0, 143)  # ended by itself, or by the SIGTERM it was sent


@dataclass(frozen=True, slots=True)
class Pod:
    """What to run on which machine."""

    dpu: Arch
    host: Arch
    kernel: Kernel
    dpu_command: tuple[str, ...]
    host_command: tuple[str, ...]
    out: Path
    timeout_s: float
    memory_mib: int


@dataclass(frozen=True, slots=True)
class Ended:
    """How both machines ended. `dpu` is 0 when it was stopped and obeyed."""

    host: int
    dpu: int

    @property
    def rc(self) -> int:
        """The pod's exit code: the first of the two that is not success."""
        return self.host or self.dpu


def prefixed(name: str) -> Sink:
    """A sink that marks every line with its machine, one whole line at a time."""
    pending = b""

    def sink(data: bytes) -> None:
        nonlocal pending
        *lines, pending = (pending + data).split(b"\n")
        with _OUTPUT:
            for line in lines:
                sys.stdout.buffer.write(name.encode() + b"| " + line + b"\n")
            sys.stdout.buffer.flush()

    return sink


_OUTPUT = threading.Lock()


def wires(folder: Path) -> tuple[str, str]:
    """QEMU's -netdev of either end of one L2 link through two sockets in a folder.

    Raises: HarnessError when the folder's path is too long for a socket.
    """
    ends = [str(folder / name).replace(",", ",,") for name in ("dpu.sock", "host.sock")]
    if max(map(len, ends)) > SOCKET_PATH_MAX:
        raise HarnessError(f"the path of the temporary folder is too long for a socket: {folder}")
    one, other = (
        f"dgram,local.type=unix,local.path={mine},remote.type=unix,remote.path={theirs}"
        for mine, theirs in (ends, reversed(ends))
    )
    return one, other


def _jobs(pod: Pod, scratch: Path) -> tuple[Job, Job]:
    common = scratch / "common"
    common.mkdir()
    dpu_wire, host_wire = wires(scratch)
    dpu = Job(
        arch=pod.dpu,
        images=images(pod.dpu, pod.kernel),
        command=pod.dpu_command,
        net="wire",
        out=pod.out / "dpu",
        env={"GUEST_ADDRESS": DPU_ADDRESS, "GUEST_PEER": HOST_ADDRESS},
        timeout_s=pod.timeout_s + STOP_TIMEOUT_S,
        memory_mib=pod.memory_mib,
        name="dpu",
        wire=dpu_wire,
        mac="52:54:00:00:00:02",
        common=common,
    )
    host = replace(
        dpu,
        arch=pod.host,
        images=images(pod.host, pod.kernel),
        command=pod.host_command,
        out=pod.out / "host",
        env={"GUEST_ADDRESS": HOST_ADDRESS, "GUEST_PEER": DPU_ADDRESS},
        timeout_s=pod.timeout_s,
        name="host",
        wire=host_wire,
        mac="52:54:00:00:00:01",
    )
    return dpu, host


def _both(dpu: Attempt, host: Attempt) -> Ended:
    """Wait for the host's end, stop the DPU, wait for that."""
    dpu_rc: int | None = None
    while (host_rc := host.poll()) is None:
        dpu_rc = dpu.poll() if dpu_rc is None else dpu_rc
        if dpu_rc == RC_NO_RESULT:
            return Ended(RC_NO_RESULT, RC_NO_RESULT)  # no sense in waiting for the host
        time.sleep(POLL_S)
    if dpu_rc is not None:  # it ended on its own; what it says counts as it is
        return Ended(host_rc, dpu_rc)
    dpu.ask_to_stop()
    deadline_s = time.monotonic() + STOP_TIMEOUT_S
    while (dpu_rc := dpu.poll()) is None and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    if dpu_rc is None:
        say("dpu: did not end when asked to")
        return Ended(host_rc, RC_NO_RESULT)
    return Ended(host_rc, 0 if dpu_rc in STOPPED_RCS else dpu_rc)


def _attempt(pod: Pod, repo: Path) -> Ended:
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pod-")))
        dpu_job, host_job = _jobs(pod, scratch)
        begun_s = time.monotonic()
        dpu = stack.enter_context(Attempt(dpu_job, repo, prefixed("dpu")))
        host = stack.enter_context(Attempt(host_job, repo, prefixed("host")))
        ended = _both(dpu, host)
        for attempt, rc in ((dpu, ended.dpu), (host, ended.host)):
            attempt.collect(rc)
            name, after_s = attempt.job.name, attempt.started_after_s
            if after_s is None:
                say(why(attempt, rc))
            else:
                say(f"{name}: command started after {after_s:.1f} s, exit code {rc}")
        say(f"pod over after {time.monotonic() - begun_s:.1f} s")
        return ended


def run(pod: Pod) -> Ended:
    """Boot both machines, run both commands; once more when a machine gave no result."""
    for number in range(1, ATTEMPTS_MAX + 1):
        with snapshot() as repo:
            ended = _attempt(pod, repo)
        if RC_NO_RESULT not in (ended.host, ended.dpu) or number == ATTEMPTS_MAX:
            break
        say("pod: booting once more")
    return ended


def words(text: str) -> tuple[str, ...]:
    """A command given as one argument.

    Raises: UsageError when it is empty or its quotes do not match.
    """
    try:
        split = tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"cannot read the command {text!r}: {error}") from None
    if not split:
        raise UsageError("an empty command for the DPU")
    return split
