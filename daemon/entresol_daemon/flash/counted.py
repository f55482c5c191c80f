"""A device that counts what the real one refuses, and times its flushes.

Invariant: everything the engine asks of its device passes here once, so that the counters are the
device's own failures, neither more (a retry is asked again) nor fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from entresol_daemon.flash.device import Check, Device, IoOp
from entresol_daemon.flash.model import EngineStats
from entresol_proto.status import DeviceError, Status

FlushHook = Callable[[Status, int], None]  # how a flush ended, and after how many nanoseconds


def ignore_flush(_status: Status, _elapsed_ns: int) -> None:
    """The hook of an engine nobody listens to."""


class CountedDevice:
    """See the module. `on_flush` is told of every flush; it must not raise."""

    def __init__(self, device: Device, stats: EngineStats, now_ns: Callable[[], int]) -> None:
        self.size_bytes = device.size_bytes
        self.name = device.name
        self.direct = device.direct
        self.on_flush: FlushHook = ignore_flush
        self._device = device
        self._stats = stats
        self._now_ns = now_ns

    async def read(self, ops: Sequence[IoOp], check: Check | None = None) -> list[Status]:
        """See `Device.read`."""
        statuses = await self._device.read(ops, check)
        self._stats.refused_reads += sum(status is Status.IO_ERROR for status in statuses)
        return statuses

    async def write(self, ops: Sequence[IoOp]) -> None:
        """See `Device.write`."""
        try:
            await self._device.write(ops)
        except DeviceError:
            self._stats.refused_writes += 1
            raise

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
            self.on_flush(status, self._now_ns() - began_ns)

    async def close(self) -> None:
        """See `Device.close`."""
        await self._device.close()
