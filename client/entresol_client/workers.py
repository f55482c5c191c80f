"""Where blocks are opened, sealed and copied, so that the event loop only orchestrates.

Invariant: when `run` returns or raises, no thread touches the memory its function was given, also
when the caller was cancelled meanwhile: late bytes never land in a caller's buffer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, TypeVarTuple

from entresol_client.results import RequestFailedError
from entresol_proto.limits import MIB
from entresol_proto.status import Status
from entresol_proto.threads import Job, Pool

R = TypeVar("R")
Ts = TypeVarTuple("Ts")

THREAD_NAME = "entresol-open"
HAND_OVER_NS = 150_000  # to a thread that sleeps, and back to the loop; 90 to 160 us
PACES_REMEMBERED = 8


class Workers(Protocol):
    """Runs plain functions off the event loop (or inline). `threads` is how many at a time."""

    threads: int

    async def run_later(self, fn: Callable[[*Ts], R], *args: *Ts, until_ns: int = 0) -> R:
        """Like `run`, for puts: at most one per thread is queued, so that gets soon have a turn."""
        ...

    async def run(self, fn: Callable[[*Ts], R], *args: *Ts, until_ns: int = 0) -> R:
        """`fn(*args)`, unless no thread has begun it until `until_ns` (0: however long that takes).
        `fn` itself minds its deadline. Hand over milliseconds of work, not microseconds: one
        hand-over costs tens of microseconds.

        Raises: RequestFailedError: DISCONNECTED once closed, DEADLINE, BUSY where a loop's first
        hand-over finds no descriptor.
        """
        ...

    async def share(self, fn: Callable[[], bool], *, threads: int, until_ns: int = 0) -> bool:
        """Have up to so many threads call `fn` side by side, until it returns false in one of them
        (see `Pool.submit_shared`). At the deadline, and when the caller is cancelled or the workers
        are closed, calls that run come to their end and no other begins.

        Returns whether it was the deadline that ended it. Raises: as `run`, if no call has begun.
        """
        ...

    def took(self, length_bytes: int, took_ns: int) -> None:
        """A block so long was opened, by whatever thread, in this time."""
        ...

    def is_short(self, length_bytes: int) -> bool:
        """Whether to open a block so long takes no longer than to hand it over to a thread and to
        hear of it: then, with nothing else to do, it is opened sooner where the caller is."""
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
        self._ns_per_mib = 0  # 0: nothing was opened yet
        self._closed = False

    async def run_later(self, fn: Callable[[*Ts], R], *args: *Ts, until_ns: int = 0) -> R:
        """See `Workers.run_later`."""
        left_s = (until_ns - time.monotonic_ns()) / 1e9 if until_ns else None
        try:
            async with asyncio.timeout(left_s):
                await self._later.acquire()
        except TimeoutError:
            raise RequestFailedError(Status.DEADLINE) from None
        try:
            return await self.run(fn, *args, until_ns=until_ns)
        finally:
            self._later.release()

    async def run(self, fn: Callable[[*Ts], R], *args: *Ts, until_ns: int = 0) -> R:
        """See `Workers.run`."""
        try:
            job = self._pool.submit(fn, *args)
        except (RuntimeError, OSError) as error:
            raise _refused(error) from None
        return await self._outcome(job, until_ns)

    async def share(self, fn: Callable[[], bool], *, threads: int, until_ns: int = 0) -> bool:
        """See `Workers.share`."""
        late = False

        def stop_late() -> None:  # the clock at the end does not tell: a loop may be early
            nonlocal late
            late = True
            job.stop()

        try:
            job = self._pool.submit_shared(fn, threads=threads)
        except (RuntimeError, OSError) as error:
            raise _refused(error) from None
        await self._outcome(job, until_ns, on_cancel=job.stop, on_late=stop_late)
        return late

    def took(self, length_bytes: int, took_ns: int) -> None:
        """See `Workers.took`. One that was interrupted for long says little of the others."""
        found = took_ns * MIB // max(1, length_bytes)
        known = self._ns_per_mib
        self._ns_per_mib = known + (min(found, 2 * known) - known) // PACES_REMEMBERED or found

    def is_short(self, length_bytes: int) -> bool:
        """See `Workers.is_short`."""
        return 0 < self._ns_per_mib * length_bytes <= HAND_OVER_NS * MIB

    async def _outcome(
        self,
        job: Job[R],
        until_ns: int,
        *,
        on_cancel: Callable[[], None] | None = None,
        on_late: Callable[[], None] | None = None,
    ) -> R:
        """`on_late` is called at the deadline of a job that has begun. Raises: as `run`, and what
        the job raised."""
        timer: asyncio.TimerHandle | None = None
        caller = asyncio.current_task()
        before = caller.cancelling() if caller else 0  # in its clean-up it may call again
        if until_ns:
            left_s = (until_ns - time.monotonic_ns()) / 1e9
            timer = asyncio.get_running_loop().call_later(left_s, _too_late, job, on_late)
        try:
            return await job.outcome(on_cancel)
        except asyncio.CancelledError:
            if caller is None or caller.cancelling() > before:
                raise
            # Not the caller was cancelled, but the job, while it was queued.
            raise _closed_error() if self._closed else RequestFailedError(Status.DEADLINE) from None
        finally:
            if timer is not None:
                timer.cancel()

    def close(self) -> None:
        """See `Workers.close`."""
        self._closed = True
        self._pool.close(drop=True)


class InlineWorkers:
    """Runs everything on the calling task: no threads, for programs that must have none and for
    simulation. Gives the loop one turn first, as a thread would."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._closed = False

    async def run_later(self, fn: Callable[[*Ts], R], *args: *Ts, until_ns: int = 0) -> R:
        """See `Workers.run_later`."""
        return await self.run(fn, *args)

    async def run(self, fn: Callable[[*Ts], R], *args: *Ts, until_ns: int = 0) -> R:
        """See `Workers.run`."""
        await asyncio.sleep(0)
        if self._closed:
            raise _closed_error()
        return fn(*args)

    async def share(self, fn: Callable[[], bool], *, threads: int, until_ns: int = 0) -> bool:
        """See `Workers.share`; whoever calls looks at the clock himself."""
        while await self.run(fn):
            if self._closed:
                break
        return False

    def took(self, length_bytes: int, took_ns: int) -> None:
        """See `Workers.took`: there is nothing to choose."""

    def is_short(self, length_bytes: int) -> bool:
        """See `Workers.is_short`: no thread is ever asked."""
        return False

    def close(self) -> None:
        """See `Workers.close`."""
        self._closed = True


def _too_late(job: Job[Any], stop: Callable[[], None] | None) -> None:
    """The deadline: what has not begun does not begin, and what comes again from time to time no
    longer comes."""
    if not job.cancel() and stop is not None:
        stop()


def _refused(error: RuntimeError | OSError) -> RequestFailedError:
    """What a pool that takes no work gives for a reason."""
    if isinstance(error, OSError):
        return RequestFailedError(Status.BUSY, f"threads cannot be asked: {error.strerror}")
    return _closed_error()


def _closed_error() -> RequestFailedError:
    return RequestFailedError(Status.DISCONNECTED, "the client is closed")
