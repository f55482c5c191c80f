"""An event loop on a thread of its own, for callers without one.

Invariant: a `call` that returns, raises or is interrupted has ended on the loop first. Not usable
after fork: the thread does not exist in the child, which gets an error instead of a hang.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import uvloop

from entresol_client.buffers import UsageError

R = TypeVar("R")

THREAD_NAME = "entresol-client"


class LoopThread:
    """An event loop on its own thread, and calls into it from others."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    @property
    def forked(self) -> bool:
        return os.getpid() != self._pid

    def call(self, make: Callable[[], Coroutine[Any, Any, R]]) -> R:
        """Run a coroutine to its end and give its result; an interrupt cancels it and waits, and a
        second one does not make this return sooner: buffers are still being written to."""
        if self.forked:
            raise UsageError(
                "the client was opened before fork", hint="open one in the child process"
            )
        if self._loop.is_closed() or threading.current_thread() is self._thread:
            raise UsageError("the client is closed, or called from its own thread")
        done = threading.Event()
        tasks: list[asyncio.Task[R]] = []

        async def run() -> R:
            return await make()

        def start() -> None:
            task = self._loop.create_task(run())
            task.add_done_callback(lambda _: done.set())
            tasks.append(task)

        def stop() -> None:
            if tasks:
                tasks[0].cancel()
            else:  # interrupted before it was handed over
                done.set()

        interrupt: BaseException | None = None
        steps: list[Callable[[], object]] = [start]  # to be handed over
        while not done.is_set():
            try:
                while steps:
                    self._loop.call_soon_threadsafe(steps.pop())
                done.wait()
            except BaseException as error:
                if self._loop.is_closed():  # by another thread: nothing runs there any more
                    raise
                if interrupt is None:
                    interrupt, steps = error, [stop]
        if interrupt is not None:
            raise interrupt
        return tasks[0].result()

    def submit(self, work: Coroutine[Any, Any, R]) -> Future[R]:
        """Start a coroutine and give its future at once; cancelling that cancels the coroutine.

        Raises: UsageError when the loop has ended, or after fork (the coroutine is closed then).
        """
        if self.forked or self._loop.is_closed():
            work.close()
            raise UsageError("the client is closed, or was opened before fork")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def stop(self) -> None:
        """End the loop and the thread. Idempotent; in a forked child only the memory is dropped."""
        if self.forked or self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
