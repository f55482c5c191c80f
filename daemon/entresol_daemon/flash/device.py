"""The device seam: where flash reads, writes and flushes happen, and nothing else.

The engine sees a `Device`; production gives it a `file_device.FileDevice` (regular file or raw
block device), simulation a `sim.SimDevice`. Invariant of every device: a write that returned was
handed on in full, and nothing touches a caller's buffer after its call returned, cancelled or not.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from entresol_proto.status import DeviceError, Status

BLOCK = 4096  # alignment of offsets, lengths and (with O_DIRECT) buffer addresses

# Given the number of an op whose view was filled: whether that is what was meant to be there.
Check = Callable[[int], bool]


def round_up(length_bytes: int) -> int:
    """Smallest multiple of BLOCK that holds `length_bytes`."""
    return (length_bytes + BLOCK - 1) & -BLOCK


def aligned_buffer(length_bytes: int) -> memoryview:
    """Zeroed page-aligned private memory, rounded up to whole blocks; freed with its last view.

    Raises: DeviceError when there is none: what needs it fails as if the device had refused it.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    length = max(BLOCK, round_up(length_bytes))
    try:
        return memoryview(mmap.mmap(-1, length, flags=flags))
    except (OSError, MemoryError) as error:
        raise DeviceError(
            f"no memory for {length} bytes of I/O: {error}",
            hint="raise MemoryMax= or vm.max_map_count",
        ) from None


# Not frozen, because one is made per block: a frozen one takes several times as long.
@dataclass(slots=True)
class IoOp:
    """One transfer between `view` and the device at `offset_bytes`; both multiples of BLOCK.

    The view's address must be a multiple of BLOCK too when the device is direct. The caller owns
    the memory and leaves it alone until the call returns.
    """

    offset_bytes: int
    view: memoryview


class FlushError(DeviceError):
    """The flush failed; what was to be written before was. `flush_ns`: after how long, if known."""

    flush_ns = 0


class Device(Protocol):
    """Block storage of `size_bytes`. `direct` tells whether the page cache is bypassed."""

    size_bytes: int
    name: str
    direct: bool

    async def read(self, ops: Sequence[IoOp], check: Check | None = None) -> list[Status]:
        """Fill every view: OK, IO_ERROR or CORRUPT per op, in order. Never raises for media faults.

        `check` looks at each view once it is filled, in the thread that filled it: no other has to
        be woken for it. What it says no to is CORRUPT.
        """
        ...

    async def write(self, ops: Sequence[IoOp]) -> None:
        """Write every view. Raises: DeviceError when any byte may be missing (which is unknown)."""
        ...

    async def flush(self) -> None:
        """Make all writes that returned durable. Raises: DeviceError; then none of them is."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class CommittingDevice(Protocol):
    """A device that writes and flushes in one go, which is shorter than one after the other."""

    async def commit(self, ops: Sequence[IoOp]) -> tuple[int, int]:
        """`write`, then `flush`. Returns the nanoseconds both took. Raises: FlushError where all
        was written, else DeviceError."""
        ...


def checked(statuses: list[Status], check: Check | None) -> list[Status]:
    """The same, with what `check` says of every op that is OK; for devices without threads."""
    if check is not None:
        for number, status in enumerate(statuses):
            if status is Status.OK and not check(number):
                statuses[number] = Status.CORRUPT
    return statuses
