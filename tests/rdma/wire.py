"""Faults of the wire, for suites inside a guest: cut it, heal it, lose packets on it.

Each function takes an RDMA device (`rxe_host`, `rxe_dpu`, `rxe0`) and acts on the network device
under it, in the namespace where that lives. Every fault is undone by `heal`, whatever came before.

What they do to a transfer, as measured on rxe: cutting the local end flushes everything at once;
cutting or losing at the far end ends in RETRY_EXC_ERR after about
(retry_cnt + 1) x 4.096 us x 2^timeout. The loopback device has no wire: packets between two queue
pairs on it never pass it, so only `cut` means something there.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COMMAND_TIMEOUT_S = 30
_SYSFS = Path("/sys/class/infiniband")


@dataclass(frozen=True, slots=True)
class End:
    """One end of a wire: an RDMA device and what is under it."""

    device: str
    netdev: str
    namespace: str | None
    address: str


# As inside/net.sh sets them up.
PAIR = {
    "rxe_host": End("rxe_host", "veth_host", "host", "10.7.0.1"),
    "rxe_dpu": End("rxe_dpu", "veth_dpu", "dpu", "10.7.0.2"),
}
LOOPBACK_ADDRESS = "10.8.0.1"


def in_guest() -> bool:
    """Whether this process runs inside one of our guests: elsewhere nothing here may be called."""
    return os.environ.get("ENTRESOL_RDMA_GUEST") == "1"


def end(device: str) -> End:
    """The end of the wire that a device is on.

    Raises: KeyError when this guest has no such device.
    """
    if device in PAIR and (_SYSFS / device).exists():
        return PAIR[device]
    try:
        netdev = (_SYSFS / device / "parent").read_text().strip()
    except OSError:
        raise KeyError(f"no RDMA device {device} in this guest") from None
    return End(device, netdev, None, os.environ.get("ENTRESOL_RDMA_ADDRESS", LOOPBACK_ADDRESS))


_CLONE_NEWNET = 0x40000000
_NAMESPACES = (Path("/run/netns"), Path("/var/run/netns"))


@contextlib.contextmanager
def sockets_of(namespace: str) -> Iterator[None]:
    """Sockets that this thread makes within the block live in that namespace, and stay there.

    The thread has one namespace: whatever else runs on it meanwhile makes its sockets there too.
    Raises: OSError when this guest has no such namespace.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def enter(descriptor: int) -> None:
        if libc.setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")

    path = next((each / namespace for each in _NAMESPACES if (each / namespace).exists()), None)
    if path is None:
        raise OSError(f"no namespace {namespace} in this guest")
    with open("/proc/thread-self/ns/net", "rb") as before, open(path, "rb") as there:
        enter(there.fileno())
        try:
            yield
        finally:
            enter(before.fileno())


def inside(namespace: str | None) -> list[str]:
    """The words that, before a command, run it in a namespace."""
    return ["ip", "netns", "exec", namespace] if namespace else []


def _command(at: End, *words: str) -> None:
    done = subprocess.run(
        [*inside(at.namespace), *words],
        capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise OSError(f"{' '.join(words)} on {at.device}: {done.stderr.strip()}")


def _up(at: End) -> bool:
    done = subprocess.run(
        [*inside(at.namespace), "cat", f"/sys/class/net/{at.netdev}/flags"],
        capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=True,
    )  # fmt: skip
    return bool(int(done.stdout, 16) & 1)


def cut(device: str) -> None:
    """Take the device's end of the wire down, now.

    Raises: KeyError for an unknown device; OSError when the guest's tools refuse.
    """
    at = end(device)
    _command(at, "ip", "link", "set", at.netdev, "down")


def heal(device: str) -> None:
    """Take the end up again if it is down, and lose nothing any more. Harmless when all is well.

    Raises: as `cut`.
    """
    at = end(device)
    with contextlib.suppress(OSError):  # there was no loss to end
        _command(at, "tc", "qdisc", "del", "dev", at.netdev, "root")
    if not _up(at):
        _command(at, "ip", "link", "set", at.netdev, "up")


def loss(device: str, percent: float) -> None:
    """Lose that share of the packets that leave this end; 100 is a silent cut, 0 ends it.

    Raises: ValueError outside 0 to 100; else as `cut`.
    """
    if not 0 <= percent <= 100:
        raise ValueError(f"loss of {percent} percent")
    netem(device, "loss", f"{percent}%")


def netem(device: str, *words: str) -> None:
    """Have the kernel's emulator of bad networks do that to what leaves this end, until `heal`.

    The words are tc-netem's: `netem("rxe_dpu", "delay", "5ms", "reorder", "25%")`.
    Raises: as `cut`.
    """
    at = end(device)
    _command(at, "tc", "qdisc", "replace", "dev", at.netdev, "root", "netem", *words)


@contextlib.contextmanager
def whole_afterwards(*devices: str) -> Iterator[None]:
    """Heal the devices when the block ends, however it ends."""
    try:
        yield
    finally:
        for device in devices:
            heal(device)
