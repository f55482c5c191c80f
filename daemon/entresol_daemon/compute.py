"""Where native work (sealing, opening, hashing) runs, so that the event loop never waits for it.

Invariant: when `run` or `map` returns or raises, no thread still touches the caller's buffers. A
cancelled caller therefore waits until its function has finished, because handing a buffer to the
next owner while a thread still writes into it would give wrong bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, TypeVarTuple

from entresol_proto.status import EntresolError, Status
from entresol_proto.threads import Job, Pool, all_outcomes

T = TypeVar("T")
R = TypeVar("R")
Ts = TypeVarTuple("Ts")

COMPUTE_PENDING_MAX = 4_096  # jobs submitted and not finished, in one pool
COMPUTE_THREADS_MAX = 256
CLOSING_LOOK_S = 0.001  # while jobs end
COMPUTE_NICE = 14  # where processors are short the event loop goes first


class ComputeError(EntresolError):
    """The pool takes no more work: it is full (BUSY) or closed (DRAINING)."""

    status = Status.BUSY


class Compute(Protocol):
    """Runs plain functions off the event loop (or inline, in the simulation)."""

    async def run(self, fn: Callable[[*Ts], R], *args: *Ts) -> R:
        """Return `fn(*args)`; whatever it raises is raised here.

        Raises: ComputeError when the pool is full or closed.
        """
        ...

    async def map(self, fn: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """`[fn(item) for item in items]`, each in a thread; as many at a time as there are threads.

        One of the exceptions is raised, after all have ended.

        Raises: ComputeError when the pool has no room for all of them, or is closed.
        """
        ...

    async def close(self) -> None:
        """Refuse new work, wait for what runs, end the threads. Idempotent."""
        ...


class ThreadCompute:
    """A pool of threads; the functions are expected to release the GIL for most of their time."""

    def __init__(self, threads: int, *, pending_max: int = COMPUTE_PENDING_MAX) -> None:
        if not 1 <= threads <= COMPUTE_THREADS_MAX:
            raise ValueError(f"threads is {threads}, not 1..{COMPUTE_THREADS_MAX}")
        self.threads = threads
        self._pending_max = pending_max
        self._pending: set[Job[Any]] = set()
        self._closed = False
        self._pool = Pool(threads, "entresol-compute", nice=COMPUTE_NICE)

    @property
    def pending(self) -> int:
        """Jobs submitted and not finished."""
        return len(self._pending)

    async def run(self, fn: Callable[[*Ts], R], *args: *Ts) -> R:
        """See `Compute.run`."""
        self._check_room(1)
        job = self._pool.submit(fn, *args)
        self._pending.add(job)
        try:
            return await job.outcome()
        finally:
            self._pending.discard(job)

    async def map(self, fn: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """See `Compute.map`."""
        self._check_room(len(items))
        jobs = [self._pool.submit(fn, item) for item in items]
        self._pending.update(jobs)
        try:
            return await all_outcomes(jobs)
        finally:
            self._pending.difference_update(jobs)

    def _check_room(self, count: int) -> None:
        if self._closed:
            raise ComputeError("the compute pool is closed", status=Status.DRAINING)
        if len(self._pending) + count > self._pending_max:
            raise ComputeError(f"{self._pending_max} compute jobs are pending already")

    async def close(self) -> None:
        """See `Compute.close`."""
        self._closed = True
        while self._pending:
            await asyncio.sleep(CLOSING_LOOK_S)
        self._pool.close()  # the threads are idle: this only joins them


class InlineCompute:
    """Runs everything at once on the calling task: deterministic, for the simulation and tests.

    Gives the loop one turn first, so that a schedule with a thread in it has the same await points.
    """

    def __init__(self) -> None:
        self._closed = False

    async def run(self, fn: Callable[[*Ts], R], *args: *Ts) -> R:
        """See `Compute.run`."""
        if self._closed:
            raise ComputeError("the compute pool is closed", status=Status.DRAINING)
        await asyncio.sleep(0)
        return fn(*args)

    async def map(self, fn: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """See `Compute.map`."""
        return await self.run(lambda: [fn(item) for item in items])

    async def close(self) -> None:
        """See `Compute.close`."""
        self._closed = True
