"""What the servers of socket-based fabrics share: accepting, greeting, tickets, closing.

Invariant: a connection that has not shown a valid ticket costs one task, is one of at most
DATA_STREAMS_PENDING_MAX, and is gone after the handshake deadline, or before when others need its
place and most are of its address. Closing the server ends every
task and endpoint it started.
"""

from __future__ import annotations

import abc
import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, Protocol, TypeVar

from entresol_proto import limits
from entresol_proto.fabric.base import FabricKind, Offer
from entresol_proto.fabric.tickets import OfferTable
from entresol_proto.origins import Crowd, origin_of
from entresol_proto.status import EntresolError, FabricError, Status

_log = logging.getLogger("entresol.fabric")
_ACCEPT_RETRY_S = 0.1


def owning(
    sock: socket.socket,
    work: Coroutine[Any, Any, None],
    drop: Callable[[socket.socket], None] = socket.socket.close,
) -> asyncio.Task[None]:
    """A task of `work`, which owns the socket once it begins; it is dropped if it never does."""
    begun = False

    async def whole() -> None:
        nonlocal begun
        begun = True
        await work

    def ended(_task: object) -> None:
        if not begun:
            work.close()
            drop(sock)

    task = asyncio.get_running_loop().create_task(whole())
    task.add_done_callback(ended)
    return task


class Closable(Protocol):
    """What the server needs of its endpoints."""

    async def close(self) -> None: ...
    def discard(self) -> None:
        """`close` without waiting, for an endpoint that nobody took."""
        ...


E = TypeVar("E", bound=Closable)


class ListeningServer(abc.ABC, Generic[E]):
    """A `base.FabricServer` around a listening socket."""

    kind: FabricKind

    def __init__(self, *, offer_lifetime_ns: int = limits.HANDSHAKE_DEADLINE_NS) -> None:
        self._lifetime_ns = offer_lifetime_ns
        self._offers: OfferTable[E] = OfferTable(
            lambda endpoint: endpoint.discard(), lifetime_ns=offer_lifetime_ns
        )
        self._endpoints: set[E] = set()
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._greeting: Crowd[asyncio.Task[None]] = Crowd(limits.DATA_STREAMS_PENDING_MAX)
        # `shake_hands(origin)`, where there is TLS, returns when it is an address's turn to be
        # greeted, or raises EntresolError. Nothing is read from a connection before.
        self.shake_hands: Callable[[str], Awaitable[None]] | None = None
        self.refused = 0  # connections turned away: no valid ticket, too slow, too many

    @abc.abstractmethod
    def _ticket_of(self, offer: Offer) -> bytes:
        """The ticket in an offer. Raises: FabricError."""

    @abc.abstractmethod
    async def _greet(self, sock: socket.socket) -> bool:
        """Serve a new connection until its ticket is checked; whether it was valid.

        Owns the socket from the call on, also when it is cancelled.
        """

    def _has_room(self) -> bool:
        """Whether a new connection may be accepted now."""
        return True

    def _drop(self, sock: socket.socket) -> None:
        """Close a socket of ours, accepted or listening."""
        sock.close()

    def _listen(self, listener: socket.socket) -> None:
        """Begin to accept on a bound socket, which the server owns from here on.

        One that listens already keeps its queue as it is: it is another's, too.
        """
        assert self._listener is None, "started twice"
        listener.setblocking(False)
        if not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            listener.listen(limits.DATA_STREAMS_PENDING_MAX)
        self._listener = listener
        self._accepting = asyncio.get_running_loop().create_task(self._accept_all(listener))

    def _issue(self, peer: object | None = None) -> bytes:
        if self._listener is None:
            raise FabricError(
                f"the {self.kind.label} fabric is not listening", status=Status.DRAINING
            )
        return self._offers.issue(peer)

    async def accept(self, offer: Offer, reply: bytes, deadline_ns: int) -> E:
        """See `base.FabricServer.accept`. `reply` must be empty."""
        ticket = self._ticket_of(offer)
        if reply:
            self._offers.withdraw(ticket)
            raise FabricError(
                f"a {self.kind.label} reply has no content", status=Status.BAD_REQUEST
            )
        return await self._offers.wait(ticket, deadline_ns)

    def withdraw(self, offer: Offer) -> None:
        """See `base.FabricServer.withdraw`."""
        self._offers.withdraw(self._ticket_of(offer))

    async def close(self) -> None:
        """See `base.FabricServer.close`."""
        listener, self._listener = self._listener, None
        tasks = [task for task in (self._accepting, *self._greeting) if task is not None]
        self._accepting = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if listener is not None:
            self._drop(listener)
        self._offers.close()
        for endpoint in list(self._endpoints):
            await endpoint.close()

    async def _accept_all(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if not self._has_room():
                await asyncio.sleep(_ACCEPT_RETRY_S)
                continue
            try:
                sock, address = await loop.sock_accept(listener)
            except (OSError, MemoryError) as error:  # no descriptors, or the peer gave up already
                _log.warning("event=accept_failed fabric=%s error=%s", self.kind.label, str(error))
                await asyncio.sleep(_ACCEPT_RETRY_S)
                continue
            try:
                self._begin_greeting(sock, origin_of(address[0]) if type(address) is tuple else "")
            except MemoryError as error:
                _log.warning("event=accept_failed fabric=%s error=%s", self.kind.label, str(error))
                self._drop(sock)

    def _begin_greeting(self, sock: socket.socket, origin: str) -> None:
        task = owning(sock, self._greet_one(sock, origin), self._drop)
        task.add_done_callback(self._greeting.discard)
        leaves = self._greeting.add(task, origin)
        if leaves is not None:
            leaves.cancel()

    async def _greet_one(self, sock: socket.socket, origin: str) -> None:
        begun = known = False
        try:
            async with asyncio.timeout(self._lifetime_ns / 1e9):
                if self.shake_hands is not None:
                    await self.shake_hands(origin)
                begun = True
                known = await self._greet(sock)
        except (OSError, TimeoutError, EntresolError) as error:
            reason = str(error) or "too slow"
            _log.info("event=connection_refused fabric=%s error=%s", self.kind.label, reason)
        finally:
            if not begun:
                self._drop(sock)
            if not known:
                self.refused += 1
