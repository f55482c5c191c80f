"""Coroutines that begin at once, and not when the loop comes round to them.

What asyncio does for a task of `eager_start` from Python 3.12 on, for all versions: a coroutine
runs where it is begun until it has to wait. So what it asks for is asked for now; a task, which is
there before, takes it from there.

Invariant: a coroutine is stepped by one caller at a time, and what it ended with is told once. One
that could not be begun is begun by its task. A task that is cancelled before its first step cancels
what was begun where it waits, as any other does: it cancels what that waits for, and waits on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

R = TypeVar("R")


class Eager(Coroutine[Any, Any, R]):
    """A coroutine that `begin` begins, for `create_task`."""

    __slots__ = ("_begun", "_coroutine", "_ended", "_error", "_held", "_result", "_step", "_waits")

    def __init__(self, coroutine: Coroutine[Any, Any, R]) -> None:
        self._coroutine = coroutine
        self._step = coroutine.send  # made here, so that `begin` needs no memory
        self._begun = False
        self._held = False  # what `begin` came to is here, for the next step
        self._ended = False
        self._result: R | None = None
        self._error: BaseException | None = None
        self._waits: Any = None

    def begin(self, task: asyncio.Task[R] | None = None) -> None:
        """Run it until it waits. Once, after its task was made and before that comes.

        It may ask for the current task only if `task` is given, and then this must be called where
        no task is, as from a callback.
        """
        self._begun = self._held = True
        if task is None:
            self._run()
            return
        loop = task.get_loop()
        asyncio._enter_task(loop, task)  # of "Extending" asyncio
        try:
            self._run()
        finally:
            asyncio._leave_task(loop, task)

    def _run(self) -> None:
        try:
            self._waits = self._step(None)
        except StopIteration as end:
            self._ended, self._result = True, end.value
        except BaseException as error:  # for whoever steps it next
            self._ended, self._error = True, error

    def send(self, value: Any) -> Any:
        """What its task calls; the first time with what it waits for since `begin`, if it was."""
        if not self._held:
            self._begun = True
            return self._step(value)
        self._held = False
        waits, self._waits = self._waits, None
        if not self._ended:
            return waits
        result, self._result = self._result, None
        error, self._error = self._error, None
        if error is None:
            raise StopIteration(result)
        try:
            raise error
        finally:
            del error  # which has this frame

    def throw(self, error: Any, value: Any = None, traceback: Any = None) -> Any:
        """Raise something where it waits; what it ended with before nobody hears."""
        waits, self._waits = self._waits, None
        thrown = error if value is None else value
        if self._held and getattr(waits, "_asyncio_future_blocking", False):
            if isinstance(thrown, asyncio.CancelledError) and waits.cancel(*thrown.args[:1]):
                self._held = False
                return waits  # whose end its task waits for now, and tells
            waits._asyncio_future_blocking = False  # no task waits for it any more
        self._held, self._error, self._result = False, None, None
        if self._ended:
            raise thrown
        return self._coroutine.throw(thrown)

    def close(self) -> None:
        """End it where it waits."""
        self._held, self._waits, self._error, self._result = False, None, None, None
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, R]:
        return _steps(self)


def task_of(coroutine: Coroutine[Any, Any, R], *, name: str, now: bool) -> asyncio.Task[R]:
    """A task of the running loop; `now`: begun here, unless this is in a task itself."""
    loop = asyncio.get_running_loop()
    if not now or asyncio.current_task() is not None:
        return loop.create_task(coroutine, name=name)
    eager = Eager(coroutine)
    task = loop.create_task(eager, name=name)
    eager.begin(task)
    return task


def _steps(eager: Eager[R]) -> Generator[Any, Any, R]:
    """For who awaits it, and makes no task of it."""
    try:
        waits = eager.send(None)
        while True:
            try:
                sent = yield waits
            except GeneratorExit:
                eager.close()
                raise
            except BaseException as error:
                waits = eager.throw(error)
            else:
                waits = eager.send(sent)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
