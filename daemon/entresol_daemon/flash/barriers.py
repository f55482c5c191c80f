"""Who waits until the tombstones queued so far are durable.

Tombstones become durable in the order in which they were queued, so that two counts tell it all.
"""

from __future__ import annotations

import asyncio

from entresol_proto.status import DeviceError, Status


class Barriers:
    """Two counts, and a future for whoever waits for the one to reach the other."""

    def __init__(self) -> None:
        self._queued = self._durable = 0
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    @property
    def reached(self) -> bool:
        """True when everything queued so far is durable."""
        return self._durable >= self._queued

    def queued(self, count: int) -> None:
        """So many more wait to be written."""
        self._queued += count

    def durable(self, count: int) -> None:
        """So many more are written and flushed; `settle` tells who waited."""
        self._durable += count

    def wait(self) -> asyncio.Future[None]:
        """Done when all that are queued now are durable; or as `fail` ends it."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.reached:
            future.set_result(None)
        else:
            self._waiting.append((self._queued, future))
        return future

    def settle(self) -> bool:
        """Tell those who have waited for enough; returns whether others still wait."""
        waiting, self._waiting = self._waiting, []
        for count, future in waiting:
            if future.done():
                continue
            if count <= self._durable:
                future.set_result(None)
            else:
                self._waiting.append((count, future))
        return bool(self._waiting)

    def fail(self, text: str, status: Status = Status.IO_ERROR) -> None:
        """Nobody waits any longer: it does not come about; each hears it as a DeviceError."""
        waiting, self._waiting = self._waiting, []
        for _, future in waiting:
            if not future.done():
                future.set_exception(DeviceError(text, status=status))
