"""An event loop on a thread of its own, for callers without one.

Invariants: a `call` that returns, raises or is interrupted has ended on the loop first; `stop`
leaves none waiting. Not usable after fork: the thread does not exist in the child, which gets an
error instead of a hang. A thread that nobody stopped is stopped when the interpreter ends: uvloop
calls into it from a timer or a socket, and where it is gone the process ends with SIGSEGV.
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
from concurrent.futures import Future
from typing import Any, TypeVar

import uvloop

from entresol_client.buffers import UsageError

R = TypeVar("R")

log = logging.getLogger("entresol.client")

THREAD_NAME = "entresol-client"
END_S = 1.0  # `stop` lets what is under way end by itself for so long, then cancels it
EXIT_S = 3.0  # how long the end of the interpreter waits for a loop that nobody stopped

_running: set[LoopThread] = set()


class LoopThread:
    """An event loop on its own thread, and calls into it from others."""

    def __init__(self) -> None:
        # Called on the loop first, where the interpreter ends and nobody stopped it before.
        self.at_exit: Callable[[], Coroutine[Any, Any, object]] | None = None
        self._pid = os.getpid()
        self._lock = threading.Lock()  # between what is handed over and `stop`
        self._stopping = False
        self._calls: set[asyncio.Task[Any]] = set()  # whose callers wait
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()
        _running.add(self)

    @property
    def forked(self) -> bool:
        return os.getpid() != self._pid

    @property
    def ended(self) -> bool:
        """It was told to end, perhaps by the end of the interpreter: no call is taken any more."""
        return self._stopping

    def call(self, make: Callable[[], Coroutine[Any, Any, R]]) -> R:
        """Run a coroutine to its end and give its result; an interrupt cancels it and waits, and a
        second one does not make this return sooner: buffers are still being written to.

        Raises: what the coroutine raises; UsageError when the loop has ended, or ends meanwhile.
        """
        if self.forked:
            raise UsageError(
                "the client was opened before fork", hint="open one in the child process"
            )
        if threading.current_thread() is self._thread:
            raise UsageError("the client is called from its own thread")
        done = threading.Event()
        tasks: list[asyncio.Task[R]] = []

        async def run() -> R:
            return await make()

        def start() -> None:
            task = self._loop.create_task(run())
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)
            task.add_done_callback(lambda _: done.set())
            tasks.append(task)

        def stop() -> None:
            if tasks:
                tasks[0].cancel()
            else:  # interrupted before it was handed over
                done.set()

        interrupt: BaseException | None = None
        step: Callable[[], object] | None = start  # to be handed over
        ending = False
        while not done.is_set():
            try:
                if step is not None:
                    chosen, step = step, None
                    ending = not self._hand_over(chosen)
                if ending:
                    if interrupt is not None:  # it may have begun, and ends with the thread
                        self._thread.join()
                    break
                done.wait()
            except BaseException as error:
                if interrupt is None:
                    interrupt, step = error, stop
        if interrupt is not None:
            raise interrupt
        if not tasks or tasks[0].cancelled():
            raise UsageError("the client is closed")
        return tasks[0].result()

    def _hand_over(self, step: Callable[[], object], *, last: bool = False) -> bool:
        """Have this called on the loop; False after the last one."""
        with self._lock:
            if self._stopping:
                return False
            self._loop.call_soon_threadsafe(step)
            self._stopping = last
            return True

    def submit(self, work: Coroutine[Any, Any, R]) -> Future[R]:
        """Start a coroutine and give its future at once; cancelling that cancels the coroutine.

        Raises: UsageError when the loop has ended, or after fork (the coroutine is closed then).
        """
        if not self.forked:  # there another thread may have held the lock
            with self._lock:
                if not self._stopping:
                    return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise UsageError("the client is closed, or was opened before fork")

    def stop(self) -> None:
        """End the loop and the thread, after everything that runs there: calls under way have END_S
        to end, then they raise UsageError. Idempotent; in a forked child only the memory is
        dropped."""
        if not self.forked:
            self._tell_end(self._end)
        self._join(None)

    def _tell_end(self, end: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._hand_over(lambda: self._loop.create_task(end()), last=True)

    def _join(self, wait_s: float | None) -> None:
        """Wait for the thread, also where another one has told it to end."""
        if not self.forked:
            self._thread.join(wait_s)
            if self._thread.is_alive():
                return
            self._loop.close()
        _running.discard(self)

    def _join_until(self, until: float) -> None:
        self._join(max(0.0, until - time.monotonic()))

    async def _end(self) -> None:
        """On the loop: nobody hands anything over any more."""
        try:
            await self._cancel(END_S)
            while self._calls:  # which write to buffers until they end
                await asyncio.wait(self._calls)
        finally:
            self._loop.stop()

    async def _exit(self) -> None:
        """On the loop: the interpreter ends, and waits no longer than EXIT_S, whatever goes on."""
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
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            with contextlib.suppress(RuntimeError):  # at the end no thread is begun, to end others
                self._loop.run_until_complete(self._loop.shutdown_default_executor())


@atexit.register
def _stop_all() -> None:
    """The interpreter ends: clients that nobody closed are closed, or what they do is cancelled.
    All at once, and whoever interrupts this is heard when no loop is left, or EXIT_S are over."""
    until = time.monotonic() + EXIT_S
    interrupt: BaseException | None = None
    threads = [thread for thread in list(_running) if not thread.forked]
    steps: list[Callable[[], None]] = []
    steps += [functools.partial(thread._tell_end, thread._exit) for thread in threads]
    steps += [functools.partial(thread._join_until, until) for thread in threads]
    for step in steps:
        again = True
        while again:
            try:
                step()
                again = False
            except BaseException as error:
                interrupt = interrupt or error
                again = time.monotonic() < until
    if interrupt is not None:
        raise interrupt
