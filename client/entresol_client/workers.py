"""Where blocks are opened, sealed and copied, so that the event loop only orchestrates.

Invariant: when `run` returns or raises, no thread touches the memory its function was given, also
when the caller was cancelled meanwhile: late bytes never land in a caller's buffer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeVar, TypeVarTuple

from entresol_client.results import RequestFailedError
from entresol_proto.status import Status
from entresol_proto.threads import Pool

R = TypeVar("R")
Ts = TypeVarTuple("Ts")

THREAD_NAME = "entresol-open"


class Workers(Protocol):
    """Runs plain functions off the event loop (or inline). `threads` is how many at a time."""

    threads: int

    async def run_later(self, fn: Callable[[*Ts], R], *args: *Ts) -> R:
        """Like `run`, for puts: at most one per thread is queued, so that gets soon have a turn."""
        ...

    async def run(self, fn: Callable[[*Ts], R], *args: *Ts) -> R:
        """`fn(*args)`. `fn` minds its own deadline; hand over milliseconds of work, not
        microseconds: one hand-over costs tens of microseconds.

        Raises: RequestFailedError (DISCONNECTED) once closed.
        """
        ...

    def close(self) -> None:
        """Wait for what runs and end the threads. Idempotent."""
        ...


class ThreadWorkers:
    """A bounded pool, shared by all shards of a client. Work is bounded by the staging memory and
    the groups in flight of each shard, so the queue needs no limit of its own."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._later = asyncio.Semaphore(threads)
        self._pool = Pool(threads, THREAD_NAME)

    async def run_later(self, fn: Callable[[*Ts], R], *args: *Ts) -> R:
        """See `Workers.run_later`."""
        async with self._later:
            return await self.run(fn, *args)

    async def run(self, fn: Callable[[*Ts], R], *args: *Ts) -> R:
        """See `Workers.run`."""
        try:
            job = self._pool.submit(fn, *args)
        except RuntimeError:
            raise RequestFailedError(Status.DISCONNECTED, "the client is closed") from None
        return await job.outcome()

    def close(self) -> None:
        """See `Workers.close`."""
        self._pool.close(drop=True)


class InlineWorkers:
    """Runs everything on the calling task: no threads, for programs that must have none and for
    simulation. Gives the loop one turn first, as a thread would."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._closed = False

    async def run_later(self, fn: Callable[[*Ts], R], *args: *Ts) -> R:
        """See `Workers.run_later`."""
        return await self.run(fn, *args)

    async def run(self, fn: Callable[[*Ts], R], *args: *Ts) -> R:
        """See `Workers.run`."""
        await asyncio.sleep(0)
        if self._closed:
            raise RequestFailedError(Status.DISCONNECTED, "the client is closed")
        return fn(*args)

    def close(self) -> None:
        """See `Workers.close`."""
        self._closed = True
