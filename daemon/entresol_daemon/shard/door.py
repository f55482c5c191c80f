"""The door before the get path: so many gets are served at a time, the others wait briefly.

Without it every get that arrives is begun, and under more load than the shard can carry all of them
are served late. With it what is served is served in time; the rest is refused as BUSY, which a host
reads as a miss, before it cost more than its frame. Tenants enter in the order of `core.fairness`.

Invariants: at most `at_once` are inside; of each tenant at most twice as many are here, inside, on
their way or waiting, and where all have to wait only an eighth more; whoever entered leaves once.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from entresol_daemon.core.accounts import Account
from entresol_daemon.core.fairness import FairQueue
from entresol_daemon.core.patience import LONG_NS, Patience
from entresol_daemon.shard.meters import Meters
from entresol_proto.ids import TenantName
from entresol_proto.status import QuotaError, Status

T = TypeVar("T")

_ONE = 1  # every get costs the same here: blocks and bytes are bounded behind the door


class Visit:
    """One get inside. `leave` ends it."""

    __slots__ = ("_account", "_door", "_entering", "_inside", "_out", "_own")

    def __init__(self, door: Door, account: Account) -> None:
        self._door = door
        self._account = account
        self._inside = True
        self._entering = False
        self._out = 0  # parts of the get that wait outside
        self._own = False  # as the first of them said

    def leave(self) -> None:
        """The get is over. Idempotent."""
        if self._inside:
            self._inside = False
            self._door._left()

    async def outside(self, waiting: Coroutine[Any, Any, T], *, own: bool) -> T:
        """Wait in front of the door for memory, or for a host, so that other tenants may use the
        place; then come in again. It was begun, so it is not refused any more.

        `own`: only its own session is in its way. Then it does not count as one who is here.
        A get of which several parts wait is outside until the last of them is back.
        """
        door = self._door
        self._out += 1
        if self._out == 1:
            self._own = own
            door._go_out(self._account, own, 1)
        self.leave()
        try:
            found = await waiting
        finally:
            self._out -= 1
            if not self._out:
                door._go_out(self._account, self._own, -1)
        if not (self._out or self._inside or self._entering):
            self._entering = True
            try:
                await door._enter_again(self._account)
            finally:
                self._entering = False
            self._inside = True
            if self._out:  # another part went out meanwhile, and will come in itself
                self.leave()
        return found


class Door:
    """See the module. All calls belong to one event loop."""

    def __init__(self, at_once: int, meters: Meters, now_ns: Callable[[], int]) -> None:
        self.at_once = at_once
        self.inside = 0  # gets being served
        self.waiting = 0  # gets before the door
        self.outside = 0  # gets that were inside and wait for memory
        self._present: Counter[TenantName] = Counter()
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue()
        self._patience = Patience()
        self._meters = meters
        self._now_ns = now_ns

    @property
    def patience_ns(self) -> int:
        """How long a get that begins to wait now is let wait at most."""
        return self._patience.wait_ns(self._now_ns())

    def arrive(self, account: Account, blocks: int) -> None:
        """A get has come, and nothing of it is begun; `depart` is owed when it is over.

        Raises: QuotaError (BUSY) when so many of its tenant are here that it would wait in vain.
        """
        standing = self._patience.wait_ns(self._now_ns()) < LONG_NS
        more = max(1, self.at_once // 8) if standing else self.at_once
        if self._present[account.name] >= self.at_once + more:
            raise self._refusal(account, blocks)
        self._present[account.name] += 1

    def depart(self, account: Account) -> None:
        """A get that arrived is over, wherever it was."""
        self._present[account.name] -= 1
        assert self._present[account.name] >= 0, "a get departed twice"
        if not self._present[account.name]:
            del self._present[account.name]

    def _refusal(self, account: Account, blocks: int) -> QuotaError:
        self._meters.shed(account.name, blocks)
        return QuotaError(  # and not how many: they are others', too
            "as many gets wait as are served in time",
            hint="the shard is overloaded: take it as a miss",
            status=Status.BUSY,
        )

    async def enter(self, account: Account, left_ns: int, blocks: int) -> Visit:
        """Return when a get of so many blocks may be served. Waits as long as there is patience,
        and at most `left_ns`.

        Raises: QuotaError (BUSY) when too many are before it.
        """
        now_ns = self._now_ns()
        if self._at_once(account):
            if not self.outside:
                self._patience.seen_free(now_ns)
            return Visit(self, account)
        wait_ns = min(left_ns, self._patience.wait_ns(now_ns))
        try:
            async with asyncio.timeout(max(0, wait_ns) / 1e9):
                await self._turn(account)
        except TimeoutError:
            raise self._refusal(account, blocks) from None
        return Visit(self, account)

    def passes(self, account: Account) -> bool:
        """Whether a get that is over in this very moment may be served: nobody waits before it."""
        if self.waiting or self.inside >= self.at_once:
            return False
        if not len(self._queue):
            self._queue.charge(account.name, account.weight, _ONE)
        if not self.outside:
            self._patience.seen_free(self._now_ns())
        return True

    def _go_out(self, account: Account, own: bool, change: int) -> None:
        if own:
            self._present[account.name] -= change
        else:
            self.outside += change

    async def _enter_again(self, account: Account) -> None:
        if not self._at_once(account):
            await self._turn(account)

    def _at_once(self, account: Account) -> bool:
        if self.waiting or self.inside >= self.at_once:
            return False
        if not len(self._queue):  # those who gave up are still in it
            self._queue.charge(account.name, account.weight, _ONE)
        self.inside += 1
        return True

    async def _turn(self, account: Account) -> None:
        turn = asyncio.get_running_loop().create_future()
        unit = self._queue.push(account.name, account.weight, _ONE, turn)
        self.waiting += 1
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._left()  # it was our turn in this very moment
            else:
                unit.drop()
                self.waiting -= 1
            raise

    def _left(self) -> None:
        self.inside -= 1
        assert self.inside >= 0, "a get left twice"
        while self.inside < self.at_once and len(self._queue):
            unit = self._queue.pop()
            if not unit.dropped and not unit.item.done():
                self.inside += 1
                self.waiting -= 1
                unit.item.set_result(None)
        if self.inside < self.at_once and not self.outside:
            self._patience.seen_free(self._now_ns())
