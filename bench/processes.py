"""Processes of the bench, which end with it.

Invariant: whatever is started here listens on loopback only, is killed when the bench's process is
gone, however that ended, and has written to no terminal: a server left behind by a bench that was
killed spoils every number that is measured after it.

Some peers' servers listen on every interface whatever they are told. Those run in a network
namespace that has nothing but a loopback, and a bridge that leads nowhere, since they do not start
without an address that is not loopback's.

    python bench/processes.py PARENT NETWORK COMMAND...    what `Child` runs: COMMAND, bound to its
        parent, in the parent's network (0), a new one (-1), or that of a process
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[1]
PR_SET_PDEATHSIG = 1  # prctl(2)
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000  # unshare(2)
SIOCGIFFLAGS, SIOCSIFFLAGS, SIOCSIFADDR, IFF_UP = 0x8913, 0x8914, 0x8916, 1  # netdevice(7)
SIOCBRADDBR = 0x89A0  # linux/sockios.h
NOWHERE = ("nowhere", "192.0.2.1")  # a bridge without ports; an address of RFC 5737
SAME_NETWORK, NEW_NETWORK = 0, -1
PORT_MIN, PORT_END = 10_000, 65_536  # those below have names more often than not
PORTS_OWN_MIN = 1_000  # where fewer are never given to connections, any will do
LISTENING = "0A"  # state in /proc/net/tcp
START_SECONDS_MAX = 60.0
STOP_SECONDS_MAX = 5.0
LOG_CHARS_SHOWN = 300


class NotRunError(Exception):
    """Something cannot run on this machine; the text says why, for one line of the report."""


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends; holds across exec.

    Leaves at once when the parent `parent` is gone already.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)


def enter_network(which: int) -> None:
    """A new network that leads nowhere, or that of the process `which`. Raises: OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if which == NEW_NETWORK:
        own_users = 0 if os.geteuid() == 0 else CLONE_NEWUSER
        if libc.unshare(own_users | CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "unshare: no network of its own")
        with socket.socket() as sock:
            name, address = NOWHERE
            fcntl.ioctl(sock, SIOCBRADDBR, name.encode() + b"\0")
            there = struct.pack("HH4s", socket.AF_INET, 0, socket.inet_aton(address))
            fcntl.ioctl(sock, SIOCSIFADDR, struct.pack("16s16s8x", name.encode(), there))
            for interface in ("lo", name):
                request = bytearray(struct.pack("16sh14x", interface.encode(), 0))
                fcntl.ioctl(sock, SIOCGIFFLAGS, request)
                (flags,) = struct.unpack_from("h", request, 16)
                struct.pack_into("h", request, 16, flags | IFF_UP)
                fcntl.ioctl(sock, SIOCSIFFLAGS, request)
        return
    spaces = ("net",) if os.geteuid() == 0 else ("user", "net")
    for name in spaces:
        with open(f"/proc/{which}/ns/{name}", "rb") as space:
            if libc.setns(space.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"setns: {name} of {which}")


def bound(command: Sequence[str], network: int = SAME_NETWORK) -> list[str]:
    """The command, so started that it dies with this process."""
    here = str(Path(__file__).resolve())
    return [sys.executable, "-E", here, str(os.getpid()), str(network), *command]


def free_ports(count: int) -> list[int]:
    """Loopback ports that nobody has at the moment, all different, IPv6's of that number free too.

    From below the range that the kernel gives to connections (ip(7), ip_local_port_range), where
    there is room: one that was free stays free until its server comes, or comes back, whatever
    else connects here. Raises: NotRunError if too few are free.
    """
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    end = first_given if first_given - PORT_MIN >= PORTS_OWN_MIN else PORT_END
    found: list[int] = []
    for port in random.SystemRandom().sample(range(PORT_MIN, end), end - PORT_MIN):
        if len(found) == count:
            break
        if all(_is_free(family, port) for family in (socket.AF_INET, socket.AF_INET6)):
            found.append(port)
    if len(found) < count:
        raise NotRunError(f"{count} free ports are wanted, {len(found)} are there")
    return found


def _is_free(family: socket.AddressFamily, port: int) -> bool:
    """Whether a server could listen at loopback's `port`; true where the family is not at hand."""
    try:
        with socket.socket(family) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("::1" if family == socket.AF_INET6 else "127.0.0.1", port))
            sock.listen()
    except OSError as error:
        return error.errno != errno.EADDRINUSE
    return True


class Child:
    """One process with its log. Ends with the `with` block, its whole session with it."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        folder: Path,
        *,
        environment: Mapping[str, str] | None = None,
        talks: bool = False,
        network: int = SAME_NETWORK,
    ) -> None:
        """`talks`: keep pipes to its standard input and output. `network`: see this module."""
        self.name = name
        self.log_path = folder / f"{name}.log"
        pipe = subprocess.PIPE if talks else None
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                bound(command, network),
                stdin=pipe or subprocess.DEVNULL, stdout=pipe or log, stderr=log,
                cwd=folder, env={**os.environ, **(environment or {})}, start_new_session=True,
            )  # fmt: skip

    def last_words(self) -> str:
        """Why it ended, by its log: its first error and its last, or its last lines, as one."""
        lines = self.log_path.read_text(errors="replace").split("\n")
        told = [line.strip() for line in lines if line.strip()]
        errors = [line for line in told if "error" in line.lower() or "fail" in line.lower()]
        shown = dict.fromkeys([errors[0], errors[-1]] if errors else told[-2:])
        return " / ".join(shown)[-LOG_CHARS_SHOWN:] or "nothing said"

    def wait_for(self, ready: Callable[[], bool], seconds: float = START_SECONDS_MAX) -> None:
        """Until `ready()`. Raises: NotRunError when it ends first, or does not come up."""
        until = time.monotonic() + seconds
        while not ready():
            status = self.process.poll()
            if status is not None:
                raise NotRunError(f"{self.name} ended with {status}: {self.last_words()}")
            if time.monotonic() > until:
                raise NotRunError(f"{self.name} not up in {seconds:.0f} s: {self.last_words()}")
            time.sleep(0.02)

    def wait_for_port(self, port: int) -> None:
        """Until something listens there. Raises: NotRunError."""
        self.wait_for(lambda: listens(self.process.pid, port))

    def freeze(self) -> None:
        """Stop all of its session where it is, so that it uses no processor meanwhile."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def close(self) -> None:
        """SIGTERM, then SIGKILL, to all of its session."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            self._signal(number)
            self.thaw()
            try:
                self.process.wait(STOP_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                continue
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def cpu_s(pid: int) -> float:
    """CPU seconds of a process, all of its threads (proc(5): utime and stime of stat)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def listens(pid: int, port: int) -> bool:
    """Whether somebody in the network of that process listens on a port, without a connection."""
    wanted = f"{port:04X}"
    for name in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if fields[3] == LISTENING and fields[1].rpartition(":")[2] == wanted:
                return True
    return False


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    if int(sys.argv[2]) != SAME_NETWORK:
        try:
            enter_network(int(sys.argv[2]))
        except OSError as error:
            sys.exit(f"error: {error.strerror}")
    os.execvp(sys.argv[3], sys.argv[3:])
