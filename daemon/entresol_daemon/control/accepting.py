"""Accepts control connections and shakes hands with them, one address's turn at a time.

A TLS handshake takes the event loop more than a millisecond before anybody is known, so it waits
for a turn of the address it comes from. Nothing is read from a connection before its turn.

Invariants: at most WAITING_MAX connections are between accept and the end of their handshake; for
one that comes beyond that the oldest of the address that has most is closed; none of them stays
longer than its turn's wait and HANDSHAKE_SECONDS_MAX. A peer that vanished without a word is
noticed within PEER_GONE_S.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence

from entresol_proto.fabric.listening import owning
from entresol_proto.origins import Crowd, origin_of
from entresol_proto.status import EntresolError, Status

BACKLOG = 512
WAITING_MAX = 1_024
ACCEPT_AT_ONCE = 32  # before the loop looks at other sockets
OUT_OF_DESCRIPTORS_S = 0.5  # without accepting, after the system refused to
HANDSHAKE_SECONDS_MAX = 5.0
CLOSE_SECONDS_MAX = 2.0
PEER_GONE_S = 30  # without an acknowledgement, or without taking what waits for it
_PROBE_AFTER_S, _PROBE_EVERY_S = 10, 5
_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_AFTER_S),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_EVERY_S),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, (PEER_GONE_S - _PROBE_AFTER_S) // _PROBE_EVERY_S),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, PEER_GONE_S * 1000),
)
TOLD_AGAIN_S = 60.0  # after an address's failed handshake was logged
TOLD_MAX = 256  # addresses that are remembered for it

log = logging.getLogger("entresol.control")


class FailedHandshakes:
    """Logs them, those of one address once in TOLD_AGAIN_S and then how many there were."""

    def __init__(self, event: str = "handshake_failed", level: int = logging.INFO) -> None:
        self._event = event
        self._level = level
        self._told: OrderedDict[str, tuple[float, int]] = OrderedDict()  # when, unsaid since

    def tell(self, host: str, error: OSError | EntresolError, now_s: float) -> None:
        """One has failed. Who only came and went again (a port check) is for `debug`."""
        if isinstance(error, OSError) and not isinstance(error, ssl.SSLError):
            log.debug("event=handshake_left address=%s reason=%s", host, error)
            return
        origin = origin_of(host)
        told_s, unsaid = self._told.pop(origin, (-TOLD_AGAIN_S, 0))
        if now_s - told_s < TOLD_AGAIN_S:
            self._told[origin] = (told_s, unsaid + 1)
            return
        self._told[origin] = (now_s, 0)
        if len(self._told) > TOLD_MAX:
            self._told.popitem(last=False)
        log.log(
            self._level, "event=%s address=%s unsaid=%d reason=%s", self._event, host, unsaid, error
        )


class TlsServer:
    """Listens at an address; `factory` makes the protocol of a connection that shook hands."""

    def __init__(
        self, factory: Callable[[], asyncio.Protocol], *, host: str, port: int,
        tls: ssl.SSLContext, shake_hands: Callable[[str], Awaitable[None]],
        refused: Callable[[Status], None], sockets: Sequence[socket.socket] = (),
    ) -> None:  # fmt: skip
        """`shake_hands(origin)` returns when it is an address's turn, or raises EntresolError;
        `refused(status)` is told of each connection that ended before its protocol began.
        `sockets` listen already and are used instead of new ones; the server owns them."""
        self._factory = factory
        self._host = host
        self._port = port
        self._tls = tls
        self._shake_hands = shake_hands
        self._refused = refused
        self._sockets = list(sockets)
        self._welcomes: Crowd[asyncio.Task[None]] = Crowd(WAITING_MAX)
        self._failed = FailedHandshakes()
        self._again: asyncio.TimerHandle | None = None

    async def start(self) -> int:
        """Bind and accept; returns the port. Raises: OSError."""
        if not self._sockets:
            await self._bind()
        self._accept_all()
        return int(self._sockets[0].getsockname()[1])

    async def _bind(self) -> None:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(
            self._host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        try:
            for family, _, _, _, address in dict.fromkeys(found):
                self._sockets.append(_listening(family, address))
        except OSError:
            self.close()
            raise

    def stop_accepting(self) -> None:
        """Close the sockets; handshakes under way go on. A socket that the manager of this process
        keeps as well gathers whoever comes now for the next process. Idempotent."""
        if self._again is not None:
            self._again.cancel()
            self._again = None
        loop = asyncio.get_running_loop()
        for each in self._sockets:
            loop.remove_reader(each.fileno())
            each.close()
        self._sockets.clear()

    def close(self) -> None:
        """Accept no more, and give up handshakes. Idempotent."""
        self.stop_accepting()
        for task in self._welcomes:
            task.cancel()

    async def wait_closed(self) -> None:
        """Return when no handshake is under way any more."""
        while welcomes := list(self._welcomes):
            await asyncio.wait(welcomes)

    def _accept_all(self) -> None:
        self._again = None
        for each in self._sockets:
            asyncio.get_running_loop().add_reader(each.fileno(), self._accept, each)

    def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(ACCEPT_AT_ONCE):
            try:
                connection, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # Out of descriptors or memory: it stays readable, so look away for a while.
                log.error("event=accept_failed reason=%s", error)
                for each in self._sockets:
                    loop.remove_reader(each.fileno())
                if self._again is None:
                    self._again = loop.call_later(OUT_OF_DESCRIPTORS_S, self._accept_all)
                return
            task = owning(connection, self._welcome(connection, address[0]))
            task.add_done_callback(self._welcomes.discard)
            leaves = self._welcomes.add(task, origin_of(address[0]))
            if leaves is not None:
                self._refused(Status.BUSY)
                leaves.cancel()

    async def _welcome(self, connection: socket.socket, host: str) -> None:
        """Shake hands when it is the address's turn. The transport owns the socket afterwards."""
        try:
            connection.setblocking(False)
            for level, option, value in _OPTIONS:
                connection.setsockopt(level, option, value)
            await self._shake_hands(origin_of(host))
            await asyncio.get_running_loop().connect_accepted_socket(
                self._factory, connection, ssl=self._tls,
                ssl_handshake_timeout=HANDSHAKE_SECONDS_MAX,
                ssl_shutdown_timeout=CLOSE_SECONDS_MAX,
            )  # fmt: skip
        except EntresolError as error:
            connection.close()
            self._refused(error.status)
        except OSError as error:
            connection.close()
            wrong = isinstance(error, ssl.SSLError)  # a certificate, as a rule; else it went away
            self._refused(Status.FORBIDDEN if wrong else Status.DISCONNECTED)
            self._failed.tell(host, error, asyncio.get_running_loop().time())
        except BaseException:
            connection.close()
            raise


def _listening(family: int, address: tuple[object, ...]) -> socket.socket:
    """A bound socket that accepts without blocking."""
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.setblocking(False)
        made.bind(address)
        made.listen(BACKLOG)
    except OSError:
        made.close()
        raise
    return made
