"""A page that costs milliseconds of everybody's interpreter, made for all who ask at the same time.

Invariant: however many ask, it is made by one at a time, and beyond `AT_ONCE_MAX` in a row not more
often than `PER_SECOND`: then they are given the last one, which is half a second old at most. Who
asks now and then always gets a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

AT_ONCE_MAX = 8
PER_SECOND = 2
_EVERY_NS = 1_000_000_000 // PER_SECOND


class Rendered:
    """One page. `get`, then `close`; on one loop."""

    def __init__(self, render: Callable[[], Awaitable[bytes]], now_ns: Callable[[], int]) -> None:
        self._render = render
        self._now_ns = now_ns
        self._task: asyncio.Task[bytes] | None = None
        self._full_ns = 0  # when AT_ONCE_MAX may be made in a row again

    async def get(self) -> bytes:
        """The page. Raises: what making it raised."""
        task = self._task
        if task is None or (task.done() and self._may_render()):
            self._full_ns = max(self._full_ns, self._now_ns()) + _EVERY_NS
            task = self._task = asyncio.ensure_future(self._make())
        # Whoever goes away does not take it from the others.
        return await asyncio.shield(task)

    def _may_render(self) -> bool:
        return self._full_ns + _EVERY_NS - self._now_ns() <= AT_ONCE_MAX * _EVERY_NS

    async def _make(self) -> bytes:
        return await self._render()

    async def close(self) -> None:
        """Make none any more. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task
