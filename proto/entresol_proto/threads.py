"""Pools of threads that an event loop hands work to, and hears from at once.

Two things the library's pool does not do. It starts a thread when work is handed over; where that
fails (no memory, a limit on processes) it raises after it queued the work, which another thread may
still do: into a buffer that its owner believes to be his own again. And it tells the loop of every
result by a call of its own, a write to the loop's descriptor while the interpreter's lock is held:
in a flood of puts on a virtual machine that was two fifths of all the time the daemon held it.

Here all threads are there from the start, results gather in a list of their loop, and one write,
without the lock, wakes the loop for as many as have come.

Invariants: handing work over never starts a thread, and raises only when the pool is closed, and
nothing of what raised is ever run; when `Job.outcome` returned or raised, no thread touches what
the job was given, cancelled or not; a job that was cancelled before a thread began it never runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, cast

from entresol_proto.status import EntresolError, Status

R = TypeVar("R")

log = logging.getLogger("entresol.threads")


class Job(Generic[R]):
    """A call handed over to a pool. Belongs to the loop it was handed over on."""

    __slots__ = (
        "_again", "_args", "_begin", "_begun", "_ended", "_error", "_fn", "_future", "_home",
        "_value",
    )  # fmt: skip

    def __init__(self, home: _Home, fn: Callable[..., R], args: tuple[Any, ...]) -> None:
        """Use `Pool.submit`."""
        self._home = home
        self._fn: Callable[..., R] | None = fn
        self._args = args
        self._begin = [True]  # whoever takes it decides: a thread, or `cancel`
        self._begun = False
        self._ended = False  # the loop knows that no thread is at it, nor will be
        self._value: Any = None
        self._error: BaseException | None = None
        self._future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._again: asyncio.Future[None] | None = None

    def cancel(self) -> bool:
        """On its loop: true when no thread had begun it; then none will."""
        if not self._taken():
            return False
        self._fn, self._args = None, ()
        self._ended = True
        self._future.cancel()
        return True

    @property
    def begun(self) -> bool:
        """On its loop, once it has ended: whether a thread was ever at it."""
        return self._begun

    async def outcome(self, on_cancel: Callable[[], None] | None = None) -> R:
        """What the call returned; raises what it raised. For one caller, once.

        When the caller is cancelled, so is the job if no thread has begun it; otherwise this waits
        for its end before it raises, however often it is cancelled meanwhile. `on_cancel` is called
        first then: it may tell the call to be quick.
        """
        try:
            return await self._future
        except asyncio.CancelledError:
            if not self.cancel() and not self._ended and on_cancel is not None:
                on_cancel()
            while not self._ended:
                self._again = asyncio.get_running_loop().create_future()
                with contextlib.suppress(asyncio.CancelledError):
                    await self._again
            raise
        finally:
            del self  # which has the error, which has this frame

    def _taken(self) -> bool:
        try:
            self._begin.pop()
        except IndexError:
            return False
        return True

    def _run(self) -> bool:
        """In a thread of the pool; whether it should come again."""
        if not self._taken():
            self._home.ended(self)  # cancelled meanwhile
            return False
        self._begun = True
        assert self._fn is not None
        try:
            self._value = self._fn(*self._args)
        except StopIteration as error:  # no future takes it
            self._error = RuntimeError(f"the call raised {error!r}")
        except BaseException as error:
            # Without this frame, which has the job, which has the error.
            self._error = error.with_traceback(getattr(error.__traceback__, "tb_next", None))
        self._fn, self._args = None, ()
        self._home.ended(self)
        return False

    def _give_up(self) -> None:
        """In a thread: its pool was closed."""
        self._home.ended(self)

    def _tell(self) -> None:
        """On the loop: the thread is done with it."""
        self._ended = True
        value, self._value = self._value, None
        error, self._error = self._error, None
        if self._again is not None:  # its caller was cancelled, and waits for this
            if not self._again.done():
                self._again.set_result(None)
        elif not self._begun:
            self._future.cancel()  # its pool was closed
        elif not self._future.done():
            if error is None:
                self._future.set_result(value)
            else:
                self._future.set_exception(error)


class Shared(Job[None]):
    """A call that several threads are in at a time; see `Pool.submit_shared`. It ends when no
    thread is in it and none will be, whether or not all that were asked for ever came."""

    __slots__ = ("_lock", "_open", "_over", "_running")

    def __init__(self, home: _Home, fn: Callable[..., bool], args: tuple[Any, ...]) -> None:
        """Use `Pool.submit_shared`."""
        super().__init__(home, cast(Any, fn), args)
        self._lock = threading.Lock()
        self._open = True  # a thread that comes has something to do
        self._running = 0
        self._over = False

    def cancel(self) -> bool:
        """See `Job.cancel`."""
        if not super().cancel():
            return False
        self._home.ended(self)  # now: no thread need come by
        return True

    def stop(self) -> None:
        """On its loop: no further thread begins it, and none comes again. It ends now, or with the
        calls that are running."""
        self._leave(came=False, more=False)

    def _taken(self) -> bool:
        with self._lock:
            if self._begun or self._over:
                return False
            self._open, self._over = False, True
            return True

    def _run(self) -> bool:
        """In a thread of the pool; whether it should come again."""
        with self._lock:
            if not self._open:
                return False
            assert self._fn is not None
            self._running += 1
            self._begun = True
            fn, args = cast(Callable[..., bool], self._fn), self._args
        more = False
        failed: BaseException | None = None
        try:
            more = fn(*args)
        except StopIteration as error:  # no future takes it
            failed = RuntimeError(f"the call raised {error!r}")
        except BaseException as error:
            # Without this frame, as in `Job._run`.
            failed = error.with_traceback(getattr(error.__traceback__, "tb_next", None))
        if failed is not None:
            with self._lock:
                self._error, failed = self._error or failed, None
        del fn, args
        return self._leave(came=True, more=more)

    def _give_up(self) -> None:
        self._leave(came=False, more=False)

    def _leave(self, *, came: bool, more: bool) -> bool:
        """One thread less is in it, or whoever says that there is no more; true if it goes on."""
        with self._lock:
            self._running -= came
            self._open = self._open and more
            going_on = self._open
            ended = not going_on and not self._running and not self._over
            if ended:
                self._over = True
                self._fn, self._args = None, ()
        if ended:
            self._home.ended(self)
        return going_on


class Outside(Job[None]):
    """What no thread takes from its pool's queue: it is under way as soon as it is made, and ends
    when somebody says so; see `Pool.expect`."""

    __slots__ = ()

    def __init__(self, home: _Home) -> None:
        """Use `Pool.expect`."""
        super().__init__(home, cast(Any, None), ())
        self._begun = True

    def cancel(self) -> bool:
        """False: it has begun."""
        return False

    def end(self, error: BaseException | None = None) -> None:
        """From any thread, once: no thread is at it, nor will be. `error` is what it raises."""
        self._error = error
        self._home.ended(self)


class _Posted:
    """A call that nobody waits for."""

    __slots__ = ("_args", "_fn")

    def __init__(self, fn: Callable[..., object], args: tuple[Any, ...]) -> None:
        self._fn = fn
        self._args = args

    def _run(self) -> bool:
        try:
            self._fn(*self._args)
        except Exception:
            log.exception("event=bug where=posted_call")
        return False

    def _give_up(self) -> None:
        """Its pool was closed."""


class _Home:
    """Where jobs of one loop come back to, from the first of its pools to the last."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.pools: set[Pool] = set()  # open ones that were handed work on this loop
        self.jobs = 0  # handed over and not come back
        self._ended: deque[Job[Any]] = deque()
        self._called = False  # the loop was woken and has not come yet
        self._lock = threading.Lock()  # of the descriptor
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._loop = weakref.ref(loop)
        loop.add_reader(self._fd, self._come)
        weakref.finalize(loop, self.close)

    def ended(self, job: Job[Any]) -> None:
        """From a thread: this one has ended."""
        self._ended.append(job)
        if not self._called:
            self._called = True
            with self._lock:
                if self._fd >= 0:
                    os.eventfd_write(self._fd, 1)

    def leave(self, pool: Pool) -> None:
        """From any thread: this pool is closed."""
        with _homes_lock:
            self.pools.discard(pool)
        loop = self._loop()
        if loop is None or self.pools:
            return
        try:
            if asyncio._get_running_loop() is loop:
                self._retire()
            else:
                loop.call_soon_threadsafe(self._retire)
        except RuntimeError:  # the loop is closed
            self.close()

    def close(self) -> None:
        """Whoever still works for this loop is not heard. Idempotent."""
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _come(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        self._called = False  # before the look: what ends after it calls again
        ended = self._ended
        while ended:
            self.jobs -= 1
            ended.popleft()._tell()
        if not self.pools:
            self._retire()

    def _retire(self) -> None:
        """On the loop: nobody comes back here any more."""
        loop = self._loop()
        if loop is None or self._fd < 0:
            return
        with _homes_lock:
            if self.pools or self.jobs:
                return
            if _homes.get(loop) is self:
                del _homes[loop]
        loop.remove_reader(self._fd)
        self.close()


_homes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Home] = weakref.WeakKeyDictionary()
_homes_lock = threading.Lock()


def _begin_anew() -> None:
    """In a forked child: another thread of the parent may have held it."""
    global _homes_lock
    _homes_lock = threading.Lock()


os.register_at_fork(after_in_child=_begin_anew)


def _home_of(pool: Pool) -> _Home:
    """Of the running loop, with one more job of this pool."""
    loop = asyncio.get_running_loop()
    with _homes_lock:
        found = _homes.get(loop)
        if found is None:
            found = _homes[loop] = _Home(loop)
        found.pools.add(pool)
        found.jobs += 1
    return found


class Pool:
    """So many running threads. May be used from several loops. `close` it.

    `nice`: how far the threads give way to the others of the process where processors are short
    (Linux has a priority per thread); left as it is where a sandbox forbids to change it.
    Raises: EntresolError (BUSY) when the threads cannot be had.
    """

    def __init__(self, threads: int, name: str, *, nice: int = 0) -> None:
        self._queue: queue.SimpleQueue[Job[Any] | _Posted | None] = queue.SimpleQueue()
        self._closed = False
        self._dropped = False  # what is queued is given up
        self._lock = threading.Lock()  # between `submit` and `close`
        self._homes: set[_Home] = set()  # of the loops that handed work over
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
            home = _home_of(self)
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
            home = _home_of(self)
            job = Shared(home, fn, args)
            self._homes.add(home)
            self._queue.put(job)
            with contextlib.suppress(MemoryError):  # then fewer come
                for _ in range(min(threads, len(self._threads)) - 1):
                    self._queue.put(job)
        return job

    def expect(self) -> Outside:
        """A job for what is done elsewhere, by posted calls of this pool: whoever is the last at it
        ends it. On an event loop. Raises: RuntimeError when the pool is closed."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool is closed")
            home = _home_of(self)
            self._homes.add(home)
        return Outside(home)

    def post(self, fn: Callable[..., object], *args: Any) -> None:
        """Have this called in a thread; nobody is told, and what it raises is logged. Needs no
        loop. Raises: RuntimeError when the pool is closed."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool is closed")
            self._queue.put(_Posted(fn, args))

    async def run(self, fn: Callable[..., R], *args: Any) -> R:
        """`fn(*args)` in a thread; see `Job.outcome`. Raises: RuntimeError when closed."""
        return await self.submit(fn, *args).outcome()

    def leave(self) -> None:
        """The running loop hands no more over for now, and may end: nothing of it is kept, once
        what it handed over has come back. For pools that outlive their loops."""
        loop = asyncio._get_running_loop()
        with _homes_lock:
            home = None if loop is None else _homes.get(loop)
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

    def _put_back(self, job: Job[Any] | _Posted) -> bool:
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
