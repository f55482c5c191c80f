"""What the end of the interpreter does with event loops that clients run on.

uvloop calls into the interpreter from timers and sockets, also from a thread that outlives it, and
there the process ends with SIGSEGV. So what nobody closed is closed first.

Invariants: once the end has begun nothing is kept any more, so nothing is begun that it would
miss; it waits for all that is kept at once, EXIT_S at most; in a forked child what its parent keeps
is nobody's, and no lock of the parent's is waited for.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from entresol_client.buffers import UsageError

log = logging.getLogger("entresol.client")

EXIT_S = 3.0  # how long the end of the interpreter waits for what nobody closed


class Ending(Protocol):
    """What must end before the interpreter does."""

    @property
    def forked(self) -> bool:
        """It is of the parent of this process."""
        ...

    @property
    def gone(self) -> bool:
        """It cannot do harm any more, though nobody let it go."""
        ...

    def tell_end(self) -> None:
        """Have it end; returns at once."""
        ...

    def await_end(self, until: float) -> None:
        """Wait for that, on `time.monotonic`'s clock."""
        ...


_lock = threading.RLock()  # over what follows; a signal handler may come in between
_kept: set[Ending] = set()
_over = False
_tended = threading.local()


def check() -> None:
    """Raises: UsageError when the interpreter ends."""
    if _over:
        raise UsageError("the interpreter ends", hint="open and close clients before that")


def keep(one: Ending, begin: Callable[[], object] | None = None) -> None:
    """Begin it, unless the interpreter ends, and end it then, unless it is let go before.

    Raises: UsageError when the interpreter ends, and nothing has begun; what `begin` raises, and
    then it is kept all the same: the caller knows whether it has begun.
    """
    with _lock:
        check()
        _kept.difference_update([each for each in list(_kept) if each.gone])
        _kept.add(one)  # first: whatever interrupts what follows, it may have begun
        if begin is not None:
            begin()


def let_go(one: Ending) -> None:
    """It has ended. Idempotent."""
    _kept.discard(one)


def tend_this_thread() -> None:
    """Its loop is kept by its owner: clients on it need nothing of their own."""
    _tended.here = True


class Guest:
    """A client on an event loop of somebody else. If that still runs when the interpreter ends, in
    a thread that nobody waits for, the client is closed there: then it has no timers any more. What
    else runs on that loop is its owner's."""

    def __init__(self, close: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """On the loop."""
        self._pid = os.getpid()
        self._loop = asyncio.get_running_loop()
        self._close = close
        self._ended = threading.Event()
        self._task: asyncio.Task[object] | None = None

    def keep(self) -> None:
        """Raises: UsageError when the interpreter ends; the main thread, which is what ends it, may
        still open clients, as it closes its loops itself."""
        main = threading.current_thread() is threading.main_thread()
        if not getattr(_tended, "here", False) and not (_over and main):
            keep(self)

    @property
    def forked(self) -> bool:
        return os.getpid() != self._pid

    @property
    def gone(self) -> bool:
        return self._loop.is_closed()

    def tell_end(self) -> None:
        if not self._loop.is_running():
            self._ended.set()
            return
        try:
            self._loop.call_soon_threadsafe(self._begin)
        except RuntimeError:  # closed meanwhile
            self._ended.set()

    def await_end(self, until: float) -> None:
        if not self._ended.wait(max(0.0, until - time.monotonic())):
            log.info("event=closing_at_exit_failed task=%r", self._task)

    def _begin(self) -> None:
        self._task = self._loop.create_task(self._close())
        self._task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[object]) -> None:
        if task.cancelled() or task.exception() is not None:
            log.info("event=closing_at_exit_failed task=%r", task)
        self._ended.set()


@atexit.register
def _end_all() -> None:
    """All at once; whoever interrupts this is heard when nothing is left, or EXIT_S are over."""
    until = time.monotonic() + EXIT_S
    left: list[Ending] = []

    def begin() -> None:
        global _over
        with _lock:
            _over = True
            left[:] = [one for one in list(_kept) if not one.forked]

    interrupt = _insist(begin, until)
    for one in left:
        interrupt = _insist(one.tell_end, until) or interrupt
    for one in left:
        interrupt = _insist(functools.partial(one.await_end, until), until) or interrupt
    if interrupt is not None:
        raise interrupt


def _insist(step: Callable[[], None], until: float) -> BaseException | None:
    """Do it, again where it is interrupted, and give what interrupted it."""
    interrupt: BaseException | None = None
    while True:
        try:
            step()
            return interrupt
        except BaseException as error:
            interrupt = interrupt or error
            if time.monotonic() >= until:
                return interrupt


def _renew() -> None:
    """In a forked child: another thread of the parent's may have held it."""
    global _lock
    _lock = threading.RLock()


with contextlib.suppress(AttributeError):  # where there is no fork
    os.register_at_fork(after_in_child=_renew)
