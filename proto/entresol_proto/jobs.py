"""Jobs of thread pools, and how a loop hears of their end; see `threads`.

Results gather in a list of their loop, and one write, without the interpreter's lock, wakes the
loop for as many as have come.

Invariants: when `Job.outcome` returned or raised, no thread touches what the job was given,
cancelled or not; a job that was cancelled before a thread began it never runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

R = TypeVar("R")

log = logging.getLogger("entresol.threads")

# eventfd_read(3) of a descriptor that never blocks, with the interpreter's lock held: whoever gives
# it up for so little gets it again behind a thread that computes.
_eventfd_read = ctypes.PyDLL(None).eventfd_read
_eventfd_read.argtypes = (ctypes.c_int, ctypes.POINTER(ctypes.c_uint64))
_ignored = ctypes.c_uint64()


class Job(Generic[R]):
    """A call handed over to a pool. Belongs to the loop it was handed over on."""

    __slots__ = (
        "_again", "_args", "_begin", "_begun", "_ended", "_error", "_fn", "_future", "_home",
        "_value",
    )  # fmt: skip

    def __init__(self, home: Home, fn: Callable[..., R], args: tuple[Any, ...]) -> None:
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
        except GeneratorExit:  # nobody runs this any more
            raise
        except BaseException:
            # Cancelled, or without memory to wait; else it has ended, and this is its own error.
            if not self._ended and not self.cancel():
                try:
                    if on_cancel is not None:
                        on_cancel()
                except Exception:
                    log.exception("event=bug where=on_cancel")  # then it takes its time
                while not self._ended:
                    await self._until_told()
            raise
        finally:
            del self  # which has the error, which has this frame

    async def _until_told(self) -> None:
        with contextlib.suppress(asyncio.CancelledError, MemoryError):
            self._again = asyncio.get_running_loop().create_future()
            await self._again

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
        try:
            self._fn, self._args = None, ()
            self._home.ended(self)
            return False
        finally:
            del self  # from 3.12 on the error's frames have the one that called them

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

    def __init__(self, home: Home, fn: Callable[..., bool], args: tuple[Any, ...]) -> None:
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
        try:
            return self._leave(came=True, more=more)
        finally:
            del fn, args, self  # as in `Job._run`

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

    def __init__(self, home: Home) -> None:
        """Use `Pool.expect`."""
        super().__init__(home, cast(Any, None), ())
        self._begun = True

    def cancel(self) -> bool:
        """False: it has begun."""
        return False

    @property
    def home(self) -> Home:
        """Of the loop that waits for it."""
        return self._home

    def give_back(self) -> None:
        """On its loop, before anybody awaits it: there is nothing to wait for, after all."""
        self._ended = True
        self._future.cancel()
        self._home.jobs -= 1

    def end(self, error: BaseException | None = None) -> None:
        """From any thread, once: no thread is at it, nor will be. `error` is what it raises."""
        self._error = error
        self._home.ended(self)


class Posted:
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


class Home:
    """Where jobs of one loop come back to, from the first of its pools to the last."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        # Open ones that were handed work on this loop, and who looks for what has ended of it.
        self.pools: dict[object, Callable[[], None] | None] = {}
        self.jobs = 0  # handed over and not come back
        self._ended: deque[Job[Any]] = deque()
        self._called = False  # the loop was woken and has not come yet
        self._lock = threading.Lock()  # of the descriptor
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._loop = weakref.ref(loop)
        loop.add_reader(self._fd, self._come)
        # Not at the end of the interpreter, which calls all that are left: a loop may run on.
        weakref.finalize(loop, self.close).atexit = False

    def ended(self, job: Job[Any]) -> None:
        """From a thread: this one has ended."""
        self._ended.append(job)
        if not self._called:
            self._called = True
            with self._lock:
                if self._fd >= 0:
                    os.eventfd_write(self._fd, 1)

    def leave(self, pool: object) -> None:
        """From any thread: this pool is closed."""
        with _homes_lock:
            self.pools.pop(pool, None)
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

    def duplicate(self) -> int:
        """On the loop: a descriptor of what wakes it, for the caller to close. Raises: OSError."""
        return os.dup(self._fd)

    def close(self) -> None:
        """Whoever still works for this loop is not heard. Idempotent."""
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _come(self) -> None:
        _eventfd_read(self._fd, _ignored)
        self._called = True  # what is found ended here need not call
        try:
            for look in list(self.pools.values()):
                if look is not None:
                    look()
        except MemoryError:
            os.eventfd_write(self._fd, 1)  # so that this is tried again
        except Exception:
            log.exception("event=bug where=look")
        finally:
            self._called = False  # before what follows: what ends after it calls again
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


_homes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Home] = weakref.WeakKeyDictionary()
_homes_lock = threading.Lock()


def _begin_anew() -> None:
    """In a forked child: another thread of the parent may have held it."""
    global _homes_lock
    _homes_lock = threading.Lock()


os.register_at_fork(after_in_child=_begin_anew)


def home_of(pool: object, look: Callable[[], None] | None = None) -> Home:
    """Of the running loop, with one more job of this pool; see `Pool.expect` for `look`."""
    loop = asyncio.get_running_loop()
    with _homes_lock:
        found = _homes.get(loop)
        if found is None:
            found = _homes[loop] = Home(loop)
        found.pools[pool] = look or found.pools.get(pool)
        found.jobs += 1
    return found


def home_here() -> Home | None:
    """Of the running loop, if there is one that has a home."""
    loop = asyncio._get_running_loop()
    with _homes_lock:
        return None if loop is None else _homes.get(loop)
