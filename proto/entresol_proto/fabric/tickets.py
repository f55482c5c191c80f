"""One-time tickets: how a data connection proves that it belongs to an authenticated session.

Invariant: a ticket is 16 random bytes, opens one endpoint, and is dead once that endpoint was
handed over, the offer was withdrawn or its time has passed, whichever comes first. Whatever was
built on a dead ticket is discarded. The table is bounded, so unanswered offers cost a fixed amount
of memory.

Tickets are looked up in a dict by value: the hash is keyed per process, so the time of a look-up
says nothing about how much of a guess was right.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from entresol_proto import limits
from entresol_proto.status import FabricError, Status

E = TypeVar("E")


class OpenOffer(Generic[E]):
    """An unanswered offer; `endpoint` may be set while it is still being built."""

    __slots__ = ("complete", "endpoint", "peer", "ticket", "timer", "waiter")

    def __init__(self, ticket: bytes, timer: asyncio.TimerHandle, peer: object | None) -> None:
        self.ticket = ticket
        self.peer = peer
        self.timer = timer
        self.endpoint: E | None = None
        self.complete = False
        self.waiter: asyncio.Future[None] | None = None


class OfferTable(Generic[E]):
    """The open offers of one server.

    `discard` releases what a dead ticket left behind; it is called at most once per endpoint and
    never for one that `wait` returned.
    """

    def __init__(
        self,
        discard: Callable[[E], None],
        *,
        offers_max: int = limits.OFFERS_OPEN_MAX,
        lifetime_ns: int = limits.HANDSHAKE_DEADLINE_NS,
    ) -> None:
        self._discard = discard
        self._offers_max = offers_max
        self._lifetime_ns = lifetime_ns
        self._open: dict[bytes, OpenOffer[E]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def issue(self, peer: object | None = None) -> bytes:
        """A new ticket, for that peer. Raises: FabricError (BUSY) when the table is full."""
        if len(self._open) >= self._offers_max:
            raise FabricError(f"{len(self._open)} fabric offers are open", status=Status.BUSY)
        ticket = secrets.token_bytes(limits.TICKET_BYTES)
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._lifetime_ns / 1e9, self.withdraw, ticket)
        self._open[ticket] = OpenOffer(ticket, timer, peer)
        return ticket

    def find(self, ticket: bytes) -> OpenOffer[E] | None:
        """The open, not yet completed offer of a ticket that somebody shows."""
        offer = self._open.get(ticket)
        return None if offer is None or offer.complete else offer

    def complete(self, offer: OpenOffer[E]) -> None:
        """The endpoint of an offer is whole: the ticket opens nothing more, `wait` returns."""
        assert offer.endpoint is not None
        offer.complete = True
        if offer.waiter is not None and not offer.waiter.done():
            offer.waiter.set_result(None)

    async def wait(self, ticket: bytes, deadline_ns: int) -> E:
        """The endpoint that was opened on `ticket`. Spends the ticket whatever happens.

        Raises: FabricError; status DEADLINE when it did not come in time.
        """
        offer = self._open.get(ticket)
        if offer is None or offer.waiter is not None:
            raise FabricError("the fabric offer is unknown, spent or expired")
        try:
            if not offer.complete:
                offer.waiter = asyncio.get_running_loop().create_future()
                async with asyncio.timeout(max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9)):
                    await offer.waiter
            endpoint, offer.endpoint = offer.endpoint, None
            assert endpoint is not None
            return endpoint
        except TimeoutError:
            raise FabricError("the peer did not connect", status=Status.DEADLINE) from None
        finally:
            self.withdraw(ticket)

    def withdraw(self, ticket: bytes) -> None:
        """Kill a ticket and discard what was built on it. Idempotent."""
        offer = self._open.pop(ticket, None)
        if offer is None:
            return
        offer.timer.cancel()
        endpoint, offer.endpoint = offer.endpoint, None
        if endpoint is not None:
            self._discard(endpoint)
        if offer.waiter is not None and not offer.waiter.done():
            offer.waiter.set_exception(
                FabricError("the fabric offer expired", status=Status.DEADLINE)
            )

    def close(self) -> None:
        """Withdraw every offer."""
        for ticket in list(self._open):
            self.withdraw(ticket)
