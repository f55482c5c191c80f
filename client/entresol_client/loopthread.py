"""An event loop on a thread of its own, for callers without one.

Invariants: a `call` that returns, raises or is interrupted has ended on the loop first; `stop`
leaves none waiting. Not usable after fork: the thread does not exist in the child, which gets an
error instead of a hang; no lock is asked for there, as a thread of the parent's may have held it. A
signal handler may call and stop what it interrupts. A thread that nobody stopped is stopped when
the interpreter ends (`exits`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import uvloop

from entresol_client import exits
from entresol_client.buffers import UsageError

R = TypeVar("R")

log = logging.getLogger("entresol.client")

THREAD_NAME = "entresol-client"
LOOK_S = 0.5  # who waits looks so often whether it missed something
END_S = 1.0  # `stop` lets what is under way end by itself for so long, then cancels it


class Gate:
    """What one thread opens, once, and others wait for. Unlike an Event it has no lock that whoever
    waits may hold while a signal handler runs, and whoever opens would wait for."""

    def __init__(self) -> None:
        self.is_open = False
        self._closed = threading.Lock()
        self._closed.acquire()

    def open(self) -> None:
        """By one thread. Idempotent."""
        if not self.is_open:
            self.is_open = True
            self._closed.release()

    def wait(self, wait_s: float | None = None) -> bool:
        """Until it is open, or for so long; whether it is."""
        until = None if wait_s is None else time.monotonic() + wait_s
        while not self.is_open:
            # In slices: who is interrupted between these two keeps it from the others.
            left_s = LOOK_S if until is None else min(LOOK_S, until - time.monotonic())
            if left_s <= 0:
                break
            if self._closed.acquire(timeout=left_s):
                self._closed.release()
        return self.is_open


class LoopThread:
    """An event loop on its own thread, and calls into it from others.

    Raises: UsageError when the interpreter ends.
    """

    def __init__(self) -> None:
        # Called on the loop first, once this is to end.
        self.at_exit: Callable[[], Coroutine[Any, Any, object]] | None = None
        self._pid = os.getpid()
        self._lock = threading.RLock()  # between what is handed over and `stop`
        self._stopping = False
        self._ending: asyncio.Task[None] | None = None
        self._exiting = False
        self._ended = Gate()  # nothing runs on the loop any more
        self._calls: set[asyncio.Task[Any]] = set()  # whose callers wait
        exits.check()
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        try:
            exits.keep(self, self._thread.start)
        except (RuntimeError, UsageError):  # it did not start
            exits.let_go(self)
            self._loop.close()
            raise
        except BaseException:  # interrupted, and it may have: it ends by itself
            self._tell(self._end)
            raise

    @property
    def forked(self) -> bool:
        return os.getpid() != self._pid

    @property
    def is_current(self) -> bool:
        """Whether this is called on its loop."""
        return threading.current_thread() is self._thread

    @property
    def gone(self) -> bool:
        """Nothing runs on its loop any more, and nothing will."""
        return self._ended.is_open

    def call(self, make: Callable[[], Coroutine[Any, Any, R]]) -> R:
        """Run a coroutine to its end and give its result; an interrupt cancels it and waits, and a
        second one does not make this return sooner: buffers are still being written to.

        Raises: what the coroutine raises; UsageError when the loop has ended, or ends meanwhile.
        """
        if self.forked:
            raise UsageError(
                "the client was opened before fork", hint="open one in the child process"
            )
        if self.is_current:
            raise UsageError("the client is called from its own thread")
        done = Gate()
        tasks: list[asyncio.Task[R]] = []

        async def run() -> R:
            return await make()

        def start() -> None:
            task = self._loop.create_task(run())
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)
            task.add_done_callback(lambda _: done.open())
            tasks.append(task)

        def stop() -> None:
            if tasks:
                tasks[0].cancel()
            else:  # interrupted before it was handed over
                done.open()

        interrupt: BaseException | None = None
        step: Callable[[], object] | None = start  # to be handed over
        ending = False
        while not done.is_open:
            try:
                if step is not None:
                    chosen, step = step, None
                    ending = not self._hand_over(chosen)
                if ending:
                    if interrupt is not None:  # it may have begun, and ends with the thread
                        self._ended.wait()
                    break
                done.wait()
            except BaseException as error:
                if interrupt is None:
                    interrupt, step = error, stop
        try:
            if interrupt is not None:
                raise interrupt
            if not tasks or tasks[0].cancelled():
                raise UsageError("the client is closed")
            return tasks[0].result()
        finally:  # what is raised has this frame, which must not have it as well
            interrupt = None
            tasks.clear()

    def _hand_over(self, step: Callable[[], object], *, last: bool = False) -> bool:
        """Have this called on the loop; False after the last one."""
        # What is handed over on the loop comes before the end, and there nobody may wait: who holds
        # the lock may have been interrupted by a handler that waits for the loop.
        with contextlib.nullcontext() if self.is_current else self._lock:
            if self._stopping:
                return False
            try:
                self._loop.call_soon_threadsafe(step)
            except RuntimeError:  # a signal handler came in between, and the loop is closed
                return False
            self._stopping = last
            return True

    def begin(
        self, work: Coroutine[Any, Any, R], ended: Callable[[asyncio.Task[R]], object]
    ) -> None:
        """Start a coroutine; `ended` is called on the loop with its task, also where that was
        cancelled before its first step. Waits for nothing that the loop may have to wait for.

        Raises: UsageError when the loop has ended, or after fork (the coroutine is closed then).
        """

        def start() -> None:
            self._loop.create_task(work).add_done_callback(ended)

        if self.forked or not self._hand_over(start):
            work.close()
            raise UsageError("the client is closed, or was opened before fork")

    def stop(self) -> None:
        """End the loop and the thread, after everything that runs there: first `at_exit`, then
        calls under way have END_S to end, then they raise UsageError. Idempotent, and every caller
        waits, but for a second interrupt; in a forked child only the memory is dropped.

        Raises: UsageError on the loop, which would wait for itself.
        """
        if self.forked:
            exits.let_go(self)
            return
        if self.is_current:
            raise UsageError("the client is closed from its own thread")
        try:
            self._stop()
        except BaseException:  # the thread ends all the same, and buffers are in use until then
            self._stop()
            raise

    def _stop(self) -> None:
        self._tell(self._end)
        self._ended.wait()
        self._thread.join(END_S)  # its last steps; bounded, as a handler's may be within another

    def tell_end(self) -> None:
        """See `exits.Ending`."""
        self._exiting = True
        self._tell(self._exit)

    def await_end(self, until: float) -> None:
        """See `exits.Ending`."""
        if self._ended.wait(max(0.0, until - time.monotonic())):
            self._thread.join(END_S)

    def _tell(self, end: Callable[[], Coroutine[Any, Any, None]]) -> None:
        def begin() -> None:
            if self._ending is None:  # who is interrupted here may come twice
                self._ending = self._loop.create_task(end())

        self._hand_over(begin, last=True)

    async def _end(self) -> None:
        """On the loop: nobody hands anything over any more."""
        try:
            if self.at_exit is not None:
                try:
                    await self.at_exit()
                except Exception as error:
                    log.error("event=closing_failed", exc_info=error)
            await self._cancel(END_S)
            while self._calls:  # which write to buffers until they end
                await asyncio.wait(self._calls)
        finally:
            self._loop.stop()

    async def _exit(self) -> None:
        """On the loop: the interpreter ends, and waits no longer than `exits.EXIT_S`, whatever goes
        on."""
        try:
            if self.at_exit is not None:
                closing = self._loop.create_task(self.at_exit())
                await asyncio.wait({closing}, timeout=END_S)
                if not closing.done() or closing.cancelled() or closing.exception():
                    log.info("event=closing_at_exit_failed task=%r", closing)
            await self._cancel(0)
        finally:
            self._loop.stop()

    async def _cancel(self, grace_s: float) -> None:
        """Let everything end by itself for so long, then cancel it, and what that begins."""
        me = asyncio.current_task()
        if others := asyncio.all_tasks() - {me}:
            await asyncio.wait(others, timeout=grace_s)
        until, told = self._loop.time() + END_S, set[asyncio.Task[Any]]()
        while (left := asyncio.all_tasks() - {me}) and (wait_s := until - self._loop.time()) > 0:
            for task in left - told:  # once each: what it does then may take its time
                task.cancel()
            told |= left
            await asyncio.wait(left, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)

    def _run(self) -> None:
        exits.tend_this_thread()
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            with contextlib.suppress(RuntimeError):  # at the end no thread is begun, to end others
                self._loop.run_until_complete(self._loop.shutdown_default_executor())
            if self._exiting:
                # Closing waits for names that are being resolved, and would hear of them when the
                # interpreter is gone. Neither closed nor ever freed it hears of nothing.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._loop))
            else:
                self._loop.close()
            exits.let_go(self)
            self._ended.open()
