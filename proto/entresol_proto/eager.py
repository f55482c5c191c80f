"""Coroutines that begin at once, and not when the loop comes round to them.

What asyncio does for a task of `eager_start` from Python 3.12 on, for all versions: a coroutine
runs where it is begun until it has to wait. So what it asks for is asked for now; a task, which is
there before, takes it from there.

Invariant: a coroutine is stepped by one caller at a time, and what it ended with is told once. One
that could not be begun is begun by its task.
"""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from typing import Any, Generic, TypeVar

R = TypeVar("R")


class Eager(Generic[R]):
    """A coroutine that `begin` begins. Await it once, in a task of the same loop: `rest_of`.

    Until its task comes it must not need to know it: it is still the caller's.
    """

    __slots__ = ("_begun", "_coroutine", "_ended", "_error", "_result", "_step", "_waits_for")

    def __init__(self, coroutine: Coroutine[Any, Any, R]) -> None:
        self._coroutine = coroutine
        self._step = coroutine.send  # made here, so that `begin` needs no memory
        self._begun = False
        self._ended = False
        self._result: R | None = None
        self._error: BaseException | None = None
        self._waits_for: Any = None

    def begin(self) -> None:
        """Run it until it waits. Once, after its task was made and before that comes."""
        self._begun = True
        try:
            self._waits_for = self._step(None)
        except StopIteration as end:
            self._ended, self._result = True, end.value
        except BaseException as error:  # for whoever awaits it
            self._ended, self._error = True, error

    def __await__(self) -> Generator[Any, Any, R]:
        if not self._begun:
            self._begun = True
            return (yield from self._coroutine.__await__())
        if self._ended:
            result, self._result = self._result, None
            error, self._error = self._error, None
            if error is not None:
                try:
                    raise error
                finally:
                    del error  # which has this frame
            return result  # type: ignore[return-value]
        waits_for, self._waits_for = self._waits_for, None
        coroutine = self._coroutine
        try:
            while True:
                try:
                    sent = yield waits_for
                except GeneratorExit:
                    coroutine.close()
                    raise
                except BaseException as error:
                    waits_for = coroutine.throw(error)
                else:
                    waits_for = coroutine.send(sent)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


async def rest_of(eager: Eager[R]) -> R:
    """For `create_task`."""
    return await eager
