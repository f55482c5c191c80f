"""The future of a job on the store's loop, for whoever waits for it elsewhere.

Invariant: the loop never waits for who asks. A future of `concurrent.futures` holds a lock while it
is asked, and must have it to be done: a signal handler that interrupts there and waits for anything
else of the loop would wait for ever. Here nothing is asked under a lock. What the library's own
`wait` and `as_completed` do is theirs: a handler that interrupts those must not wait for the store.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from entresol_client.loopthread import Gate

log = logging.getLogger("entresol.engine")

R = TypeVar("R")


class Answer(Future[R]):
    """Always comes, never raises, and cannot be cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self._gate = Gate()
        self._given: R
        self._calls: deque[Callable[[Future[R]], object]] = deque()

    def __repr__(self) -> str:
        return f"<Answer {'given' if self._gate.is_open else 'awaited'}>"

    def done(self) -> bool:
        return self._gate.is_open

    def running(self) -> bool:
        return not self._gate.is_open

    def cancel(self) -> bool:
        return False

    def cancelled(self) -> bool:
        return False

    def result(self, timeout: float | None = None) -> R:
        """Raises: TimeoutError."""
        if not self._gate.wait(timeout):
            raise TimeoutError
        return self._given

    def exception(self, timeout: float | None = None) -> None:
        """Raises: TimeoutError."""
        self.result(timeout)

    def add_done_callback(self, fn: Callable[[Future[R]], object]) -> None:
        self._calls.append(fn)
        if self._gate.is_open:
            self._call()

    def set_result(self, result: R) -> None:
        """By one thread, once."""
        self._given = result
        self._gate.open()
        super().set_result(result)  # for the library's own `wait`
        self._call()

    def _call(self) -> None:
        """Each once, whichever thread comes first."""
        while True:
            try:
                fn: Callable[[Any], object] = self._calls.popleft()
            except IndexError:
                return
            try:
                fn(self)
            except Exception:
                log.exception("event=engine_callback_failed")
