"""A device that counts what the real one takes and refuses, and times its flushes.

Invariant: everything the engine asks of its device passes here once, so that the counters are the
device's own wear and failures, neither more (a retry is asked again) nor fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from entresol_daemon.flash.device import Check, CommittingDevice, Device, FlushError, IoOp
from entresol_daemon.flash.model import EngineStats
from entresol_proto.status import DeviceError, Status

# Where a flush takes longer the steps in between weigh little, and reads are not to leave room for
# it, as they do for a write: so many groups are flushed apart then, until the next look.
IN_ONE_GO_FLUSH_NS_MAX = 1_000_000
APART = 64


def _ignore(*_: object) -> None:
    """The hook of an engine nobody listens to."""


@dataclass(slots=True)
class DeviceHooks:
    """Told of what a device is asked; they must not raise.

    Attributes:
        on_flush: how a flush ended, and after how many nanoseconds.
        on_write: a write of so many bytes begins, or, below 0, has ended.
    """

    on_flush: Callable[[Status, int], None] = _ignore
    on_write: Callable[[int], None] = _ignore


class CountedDevice:
    """See the module."""

    def __init__(self, device: Device, stats: EngineStats, now_ns: Callable[[], int]) -> None:
        self.size_bytes = device.size_bytes
        self.name = device.name
        self.direct = device.direct
        self.hooks = DeviceHooks()
        self._device = device
        self._stats = stats
        self._now_ns = now_ns
        self._apart = 0  # groups that are to be written, then flushed, before one is in one go
        self._in_one_go = device if isinstance(device, CommittingDevice) else None

    async def read(self, ops: Sequence[IoOp], check: Check | None = None) -> list[Status]:
        """See `Device.read`."""
        statuses = await self._device.read(ops, check)
        self._stats.refused_reads += statuses.count(Status.IO_ERROR)
        return statuses

    async def write(self, ops: Sequence[IoOp]) -> None:
        """See `Device.write`."""
        length_bytes, tell = sum(op.view.nbytes for op in ops), self.hooks.on_write
        tell(length_bytes)
        try:
            await self._device.write(ops)
        except DeviceError:
            self._stats.refused_writes += 1
            raise
        finally:
            tell(-length_bytes)
        self._stats.written_bytes += length_bytes

    async def flush(self) -> None:
        """See `Device.flush`."""
        began_ns = self._now_ns()
        status = Status.OK
        try:
            await self._device.flush()
        except DeviceError as error:
            self._stats.refused_flushes += 1
            status = error.status
            raise
        finally:
            self.hooks.on_flush(status, self._now_ns() - began_ns)

    async def commit(self, ops: Sequence[IoOp]) -> tuple[int, int]:
        """Write, then flush. Returns the nanoseconds both took. Raises: DeviceError."""
        if self._in_one_go is None or self._apart > 0:
            self._apart = max(0, self._apart - 1)
            began_ns = self._now_ns()
            await self.write(ops)
            written_ns = self._now_ns()
            self._stats.flushes += 1
            await self.flush()
            return written_ns - began_ns, self._now_ns() - written_ns
        length_bytes, tell = sum(op.view.nbytes for op in ops), self.hooks.on_write
        tell(length_bytes)
        try:
            write_ns, flush_ns = await self._in_one_go.commit(ops)
        except FlushError as error:
            self._stats.written_bytes += length_bytes
            self._stats.flushes += 1
            self._stats.refused_flushes += 1
            self.hooks.on_flush(error.status, error.flush_ns)
            raise
        except DeviceError:
            self._stats.refused_writes += 1
            raise
        finally:
            tell(-length_bytes)
        self._stats.written_bytes += length_bytes
        self._stats.flushes += 1
        self.hooks.on_flush(Status.OK, flush_ns)
        if flush_ns > IN_ONE_GO_FLUSH_NS_MAX:
            self._apart = APART
        return write_ns, flush_ns

    async def close(self) -> None:
        """See `Device.close`."""
        await self._device.close()
