"""Two machines in one simulation: hosts and a daemon, each with an event loop and a clock of its
own.

While the daemon's loop is busy, hosts go on, as they do in a data centre: on one loop every step of
a host would wait for the daemon's work, several times within each call, and the daemon would be
charged for it.

One loop is the main one, and runs the other inside (conservative simulation): before it goes on to
its next moment it lets the other do all that comes before that. What one tells the other is a timer
at a moment that is not over there yet: nothing reaches anybody before it was sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import math
import sys
from asyncio import events
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

from tests import simloop

T = TypeVar("T")


class BusyLoop(simloop.SimLoop):
    """A loop on which work takes time, and which may have another machine's beside it."""

    def __init__(self, seed: int = 0, *, beside: BusyLoop | None = None) -> None:
        """`beside` is run by this one, and by nobody else."""
        super().__init__(seed)
        self._beside = beside

    def busy(self, seconds: float) -> None:
        """The callback that runs now takes so much longer."""
        self._now += seconds

    @property
    def next_time(self) -> float:
        """When this machine does something next, if nobody tells it anything."""
        if self._ready:  # type: ignore[attr-defined]
            return self._now
        timers: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        while timers and timers[0].cancelled():
            heapq.heappop(timers)._scheduled = False  # type: ignore[attr-defined]
            self._timer_cancelled_count -= 1  # type: ignore[attr-defined]
        return max(self._now, timers[0].when()) if timers else math.inf

    def advance(self, timeout: float | None) -> None:
        other = self._beside
        if other is None or self._stopping:  # type: ignore[attr-defined]
            super().advance(timeout)
            return
        while (theirs := other.next_time) <= self.next_time and theirs < math.inf:
            other.step()
        mine = self.next_time
        super().advance(None if mine == math.inf else mine - self._now)

    def step(self) -> None:
        """One turn of this loop, from within the other's."""
        with self.running():
            self._run_once()  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Whoever asks for the running loop is told this one."""
        outer, hooks = asyncio.get_running_loop(), sys.get_asyncgen_hooks()
        events._set_running_loop(self)
        sys.set_asyncgen_hooks(self._asyncgen_firstiter_hook, self._asyncgen_finalizer_hook)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            sys.set_asyncgen_hooks(*hooks)
            events._set_running_loop(outer)


def busy(seconds: float) -> None:
    """The running callback takes so much longer."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, BusyLoop)
    loop.busy(seconds)


async def on(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns or raises on that loop; cancelled there when it is here."""
    here = asyncio.get_running_loop()
    if loop is here:
        return await work
    done: asyncio.Future[T] = here.create_future()
    task: asyncio.Task[T] | None = None

    def begin() -> None:
        nonlocal task
        task = loop.create_task(work)
        task.add_done_callback(lambda ended: here.call_at(loop.time(), end, ended))

    def end(ended: asyncio.Task[T]) -> None:
        error = None if ended.cancelled() else ended.exception()
        if done.done():
            return
        if ended.cancelled():
            done.cancel()
        elif error is not None:
            done.set_exception(error)
        else:
            done.set_result(ended.result())

    def stop() -> None:
        if task is not None:
            task.cancel()

    loop.call_at(here.time(), begin)
    try:
        return await done
    except asyncio.CancelledError:
        loop.call_at(here.time(), stop)
        raise


def run(story: Coroutine[Any, Any, T], seed: int, daemon: BusyLoop) -> T:
    """Run `story` to its end on the hosts' loop, with the daemon's beside it."""
    try:
        return simloop.run(story, seed, loop=BusyLoop(seed, beside=daemon))
    finally:
        simloop.end(daemon)
