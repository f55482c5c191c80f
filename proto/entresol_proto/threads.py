"""Pools of threads that an event loop hands work to, and hears from at once.

Two things the library's pool does not do. It starts a thread when work is handed over; where that
fails (no memory, a limit on processes) it raises after it queued the work, which another thread may
still do: into a buffer that its owner believes to be his own again. And it tells the loop of every
result by a call of its own, a write to the loop's descriptor while the interpreter's lock is held:
in a flood of puts on a virtual machine that was two fifths of all the time the daemon held it.

Here all threads are there from the start, and one write wakes the loop for as many jobs as have
ended (`jobs`).

Invariants: handing work over never starts a thread, and raises only when the pool is closed, and
nothing of what raised is ever run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from entresol_proto.jobs import Home, Job, Outside, Posted, Shared, home_here, home_of
from entresol_proto.status import EntresolError, Status

__all__ = ["Job", "Outside", "Pool", "Shared", "all_outcomes"]

R = TypeVar("R")


class Pool:
    """So many running threads. May be used from several loops. `close` it.

    `nice`: how far the threads give way to the others of the process where processors are short
    (Linux has a priority per thread); left as it is where a sandbox forbids to change it.
    Raises: EntresolError (BUSY) when the threads cannot be had.
    """

    def __init__(self, threads: int, name: str, *, nice: int = 0) -> None:
        self._queue: queue.SimpleQueue[Job[Any] | Posted | None] = queue.SimpleQueue()
        self._closed = False
        self._dropped = False  # what is queued is given up
        self._lock = threading.Lock()  # between `submit` and `close`
        self._homes: set[Home] = set()  # of the loops that handed work over
        self._threads: list[threading.Thread] = []
        try:
            for number in range(threads):
                # One that nobody closed must not keep its process from ending.
                thread = threading.Thread(
                    target=self._work, args=(nice,), name=f"{name}_{number}", daemon=True
                )
                thread.start()
                self._threads.append(thread)
        except (RuntimeError, MemoryError) as error:
            self.close()
            raise EntresolError(
                f"cannot start {threads} threads: {error or 'no memory'}",
                hint="raise the limits on memory and processes, or configure fewer threads",
                status=Status.BUSY,
            ) from None

    def submit(self, fn: Callable[..., R], *args: Any) -> Job[R]:
        """Hand a call over. On an event loop. Raises: RuntimeError when the pool is closed."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool is closed")
            home = home_of(self)
            job = Job(home, fn, args)
            self._homes.add(home)
            self._queue.put(job)
        return job

    def submit_shared(self, fn: Callable[..., bool], *args: Any, threads: int) -> Shared:
        """Have `fn(*args)` called in up to so many threads at a time, as they have nothing else to
        do, until one call returns false: what there was to do together is done or under way. One
        that returns true gives others of the pool a turn and comes again. The loop hears once,
        when all calls have returned; the first error counts, and no call begins once it is known.

        On an event loop. Raises: RuntimeError when the pool is closed.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool is closed")
            home = home_of(self)
            job = Shared(home, fn, args)
            self._homes.add(home)
            self._queue.put(job)
            with contextlib.suppress(MemoryError):  # then fewer come
                for _ in range(min(threads, len(self._threads)) - 1):
                    self._queue.put(job)
        return job

    def expect(self, look: Callable[[], None] | None = None) -> Outside:
        """A job for what is done elsewhere, by posted calls of this pool: whoever is the last at it
        ends it. `look`, one for all, is called on the loop whenever that is woken: there may be
        jobs to end. On an event loop. Raises: RuntimeError when the pool is closed."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool is closed")
            home = home_of(self, look)
            try:
                self._homes.add(home)
                return Outside(home)
            except BaseException:
                home.jobs -= 1
                raise

    def post(self, fn: Callable[..., object], *args: Any) -> None:
        """Have this called in a thread; nobody is told, and what it raises is logged. Needs no
        loop. Raises: RuntimeError when the pool is closed."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool is closed")
            self._queue.put(Posted(fn, args))

    async def run(self, fn: Callable[..., R], *args: Any) -> R:
        """`fn(*args)` in a thread; see `Job.outcome`. Raises: RuntimeError when closed."""
        return await self.submit(fn, *args).outcome()

    def leave(self) -> None:
        """The running loop hands no more over for now, and may end: nothing of it is kept, once
        what it handed over has come back. For pools that outlive their loops."""
        home = home_here()
        if home is not None:
            with self._lock:
                self._homes.discard(home)
            home.leave(self)

    def close(self, *, wait: bool = True, drop: bool = False) -> None:
        """End the threads after what is queued; `drop` gives that up. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed, self._dropped = True, drop
                for _ in self._threads:
                    self._queue.put(None)
        if wait:
            for thread in self._threads:
                thread.join()
        with self._lock:
            homes, self._homes = self._homes, set()
        for home in homes:
            home.leave(self)

    def _work(self, nice: int) -> None:
        _give_way(nice)
        while (job := self._queue.get()) is not None:
            while True:
                if self._dropped:
                    job._give_up()
                elif job._run() and not self._put_back(job):
                    continue  # at once
                break
            del job  # and with it what it was given

    def _put_back(self, job: Job[Any] | Posted) -> bool:
        """Behind what else is queued; false if nothing is, or nobody will look there any more."""
        if self._queue.empty():
            return False
        with self._lock:
            if not self._closed:
                self._queue.put(job)
            return not self._closed


async def all_outcomes(jobs: Sequence[Job[R]]) -> list[R]:
    """What all of them returned, once all have ended; else the first error. A caller who is
    cancelled waits for those that had begun."""
    results: list[R] = []
    errors: list[Exception] = []
    cancelled: asyncio.CancelledError | None = None

    def cancel_all() -> None:
        for each in left:
            each.cancel()

    left = deque(jobs)
    jobs = ()
    while left:
        try:
            results.append(await left[0].outcome(cancel_all))
        except asyncio.CancelledError as error:
            cancelled = cancelled or error
            cancel_all()
        except Exception as error:
            errors.append(error)
        left.popleft()
    try:
        if cancelled is not None:
            raise cancelled
        if errors:
            raise errors[0]
    finally:
        # An error holds this frame, which must hold neither it nor its job: with them all that
        # the callers have, buffers among it, would wait for the garbage collector.
        cancelled = None
        errors.clear()
    return results


def _give_way(nice: int) -> None:
    if nice and sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + nice)
