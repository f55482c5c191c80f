"""One emulated machine: its command line, its life as a process group, and what comes out of it.

Owns the invariant that no machine outlives the process that started it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.rdma import cost
from tests.rdma.spec import Arch
from tests.rdma.tools import tool

KVM_ENV = "ENTRESOL_KVM"
MEMORY_MIB_DEFAULT = 1536
KILL_WAIT_S = 10

Sink = Callable[[bytes], None]


@dataclass(frozen=True, slots=True)
class Machine:
    """What one machine is started with. Paths must stay in place while it runs."""

    arch: Arch
    kernel: Path
    initrd: Path
    disks: tuple[tuple[str, Path], ...]  # serial number, read-only image
    share: Path
    console: Path
    memory_mib: int = MEMORY_MIB_DEFAULT
    wire: str | None = None  # QEMU's -netdev without the id
    mac: str = "52:54:00:00:00:01"
    common: Path | None = None


def _quoted(path: Path) -> str:
    """QEMU's option values end at a comma; two commas are one."""
    return str(path).replace(",", ",,")


def command_line(machine: Machine) -> list[str]:
    """The whole command. KVM only on request: a /dev/kvm that opens may still be unusable."""
    kvm = os.environ.get(KVM_ENV) == "1"
    command = [
        tool(machine.arch.qemu), *machine.arch.machine_args,
        "-accel", "kvm" if kvm else "tcg",
        "-m", str(machine.memory_mib),
        "-nodefaults", "-nographic", "-no-reboot", "-no-user-config", "-monitor", "none",
        "-kernel", str(machine.kernel), "-initrd", str(machine.initrd),
        "-append",
        f"console={machine.arch.console} panic=-1 quiet net.ifnames=0 mitigations=off "
        "random.trust_cpu=on transparent_hugepage=always",
        "-serial", f"file:{machine.console}",
        "-device", "virtio-rng-pci",
        "-device", "virtio-serial-pci",
        "-chardev", "file,id=output,path=/dev/stdout",
        "-device", "virtserialport,chardev=output,name=output",
    ]  # fmt: skip
    for tag, folder in (("share", machine.share), ("pod", machine.common)):
        if folder:
            command += [
                "-fsdev",
                f"local,id={tag},path={_quoted(folder)},security_model=none,multidevs=remap",
                "-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}",
            ]  # fmt: skip
    for serial, image in machine.disks:
        command += [
            "-drive", f"file={_quoted(image)},if=none,id={serial},format=raw,readonly=on",
            "-device", f"virtio-blk-pci,drive={serial},serial={serial}",
        ]  # fmt: skip
    if machine.wire:
        command += [
            "-netdev", f"{machine.wire},id=wire",
            "-device", f"virtio-net-pci,netdev=wire,mac={machine.mac},romfile=",
        ]  # fmt: skip
    return command


class Running:
    """A started machine; use as a context manager, so that it ends however the block ends."""

    def __init__(self, machine: Machine, sink: Sink) -> None:
        """Starts at once. `sink` gets the command's output from a thread of its own."""
        self._process = subprocess.Popen(
            # The kernel kills it with us, should we be killed without a word.
            [tool("setpriv"), "--pdeathsig", "KILL", *command_line(machine)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        self.started_s = time.monotonic()
        self.complaint = b""
        self._pumps = [
            threading.Thread(target=self._pump_output, args=(sink,), daemon=True),
            threading.Thread(target=self._pump_complaint, daemon=True),
        ]
        for pump in self._pumps:
            pump.start()

    def _pump_output(self, sink: Sink) -> None:
        assert self._process.stdout is not None
        while data := os.read(self._process.stdout.fileno(), 1 << 16):
            sink(data)

    def _pump_complaint(self) -> None:
        assert self._process.stderr is not None
        while data := os.read(self._process.stderr.fileno(), 1 << 12):
            self.complaint = (self.complaint + data)[-4096:]

    def poll(self) -> bool:
        """Whether the machine is off."""
        return self._process.poll() is not None

    def cpu_seconds(self) -> float:
        """Processor time it took so far, which a busy host does not lengthen; 0 when it is off."""
        try:
            return cost.cpu_seconds(self._process.pid)
        except OSError:
            return 0.0

    def kill(self) -> None:
        """End the process group of this machine, whatever state it is in."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(KILL_WAIT_S)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()
        for pump in self._pumps:
            pump.join(KILL_WAIT_S)
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()
