"""What waits in a session: requests for their answers, and callers for a place among them.

Invariant: whoever waits here is woken by an answer, by the end of the session, or by a deadline.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from entresol_client.results import RequestFailedError, refusal
from entresol_proto.status import Status
from entresol_proto.wire.data import Grant
from entresol_proto.wire.opening import ErrorReply


class Call:
    """A request with one answer, or an error, which are both the future's result: what raises an
    error that is kept would be kept with it, and all its callers. `settled` runs when the answer
    comes, however late; never when the session is lost, because then nobody knows what the daemon
    still does."""

    __slots__ = ("future", "sent_ns", "settled")

    def __init__(self, settled: Callable[[], None] | None) -> None:
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.settled = settled
        self.sent_ns = time.monotonic_ns()

    def deliver(self, message: Any) -> bool:
        """Take an answer; True when it was the last. Abandoned calls only note that it came."""
        if not self.future.done():
            error = isinstance(message, ErrorReply)
            self.future.set_result(refusal(message) if error else message)
        self.settle()
        return True

    def fail(self, error: RequestFailedError) -> None:
        """No answer will come."""
        if not self.future.done():
            self.future.set_result(error)

    def settle(self) -> None:
        """The daemon is done with the request."""
        settled, self.settled = self.settled, None
        if settled is not None:
            settled()


class GrantSink:
    """Answers of one FETCH, in the order they came; read by one task."""

    __slots__ = ("_error", "_grants", "_waiter", "final", "sent_ns")

    def __init__(self) -> None:
        self.sent_ns = time.monotonic_ns()
        self.final = False
        self._grants: deque[tuple[Grant, int]] = deque()  # with the time of receipt
        self._error: RequestFailedError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def deliver(self, message: Any) -> bool:
        """Take a GRANT or ERROR; True when it was the last."""
        if isinstance(message, ErrorReply):
            self.fail(refusal(message))
            return True
        self._grants.append((message, time.monotonic_ns()))
        self.final = message.final
        self._wake()
        return self.final

    def fail(self, error: RequestFailedError) -> None:
        """No further grants will come."""
        self._error = error
        self._wake()

    async def next(self, deadline_ns: int) -> list[tuple[Grant, int]]:
        """All grants that came since the last call, at least one; [] after the final one.

        Raises: RequestFailedError, status DEADLINE included. Grants that came before are given out
        first.
        """
        while not self._grants:
            if self._error is not None:
                raise self._error.anew()
            if self.final:
                return []
            left_s = (deadline_ns - time.monotonic_ns()) / 1e9
            if left_s <= 0:
                raise RequestFailedError(Status.DEADLINE)
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_later(left_s, self._wake)
            try:
                await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        grants = list(self._grants)
        self._grants.clear()
        return grants

    def leftovers(self) -> list[Grant]:
        """Grants nobody took; for whoever gives the request up."""
        grants = [grant for grant, _ in self._grants]
        self._grants.clear()
        return grants

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Line:
    """Callers in the order they came; the first goes on once `free` says so. Whoever makes room
    calls `move`. It keeps no `free`, which belongs to whoever has the line."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Event] = deque()

    async def wait(self, free: Callable[[], bool], deadline_ns: int) -> bool:
        """Until it is the caller's turn, who then uses it at once; False at the deadline."""
        if not self._waiting and free():
            return True
        mine = asyncio.Event()
        self._waiting.append(mine)
        try:
            async with asyncio.timeout(max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9)):
                while self._waiting[0] is not mine or not free():
                    mine.clear()
                    await mine.wait()
        except TimeoutError:
            return False
        finally:
            self._waiting.remove(mine)
            self.move(free)
        return True

    def move(self, free: Callable[[], bool]) -> None:
        """There may be room: wake the first."""
        if self._waiting and free():
            self._waiting[0].set()
