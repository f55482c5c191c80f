"""The control stream's listener: TLS 1.3 with a client certificate, one `SessionHandler` each.

The tenant is read from the verified certificate before the first byte of the protocol. A connection
lives at most `session_age_max_ns`, so that a revoked certificate ends.

Invariant: nothing is answered to a peer whose identity did not verify.
"""

from __future__ import annotations

import asyncio
import logging
import select
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import cast

from entresol_daemon.control.accepting import CLOSE_SECONDS_MAX, FailedHandshakes, TlsServer
from entresol_daemon.shard.dispatch import SessionHandler
from entresol_daemon.shard.shard import Shard
from entresol_proto.identity import IdentityError, tenant_from_cert
from entresol_proto.status import ConfigError, Status
from entresol_proto.transports import abort

WRITE_BUFFER_BYTES_MAX = 8 * 1024 * 1024  # unsent answers; above it nothing more is read
HANDSHAKE_LOOK_NS_MIN = 1_000_000
PEER_LOOK_S = 1.0  # between looks at a peer that takes no answers
_GONE = select.POLLRDHUP | select.POLLHUP | select.POLLERR

log = logging.getLogger("entresol.control")


class _Connection(asyncio.Protocol):
    """One TLS connection of one host."""

    def __init__(self, listener: ControlListener) -> None:
        self._listener = listener
        self._transport: asyncio.Transport | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._full = False  # of answers the peer does not take
        self._behind = False  # with its requests
        self._reading = True
        self._looking: asyncio.TimerHandle | None = None
        self.handler: SessionHandler | None = None
        self.finished: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's is one, but does not say so
        self._transport = transport
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES_MAX)
        shard = self._listener.shard
        tls = transport.get_extra_info("ssl_object")
        try:
            tenant = tenant_from_cert(tls.getpeercert(True), self._listener.trust_domain)
        except IdentityError as error:
            address = transport.get_extra_info("peername")
            self._listener.refuse(address[0] if address else "", error)
            transport.abort()
            return
        self.handler = SessionHandler(
            shard, tenant, write=transport.write, close=self.close, read_on=self._handler_reads,
            queued_bytes=transport.get_write_buffer_size,
        )  # fmt: skip
        self._listener.connections.add(self)
        loop = asyncio.get_running_loop()
        self._watch_handshake()
        age = shard.parts.config.tls.session_age_max_ns / 1e9
        self._timers.append(loop.call_later(age, self._too_old))

    def _watch_handshake(self) -> None:
        """End a session that is not opened in time. Timers may fire early: then look again."""
        assert self.handler is not None
        self.handler.handle_timer()
        due_ns = self.handler.deadline_ns()
        if due_ns is not None:
            left_ns = max(HANDSHAKE_LOOK_NS_MIN, due_ns - self._listener.shard.parts.now_ns())
            loop = asyncio.get_running_loop()
            self._timers[:1] = [loop.call_later(left_ns / 1e9, self._watch_handshake)]

    def data_received(self, data: bytes) -> None:
        if self.handler is not None:
            self.handler.receive(data)

    def pause_writing(self) -> None:
        self._is_full(True)
        self._follow()

    def _look_for_peer(self) -> None:
        """End it if the peer has left. Nothing is read from one that takes no answers, so nobody
        else would notice."""
        link = self._transport.get_extra_info("socket") if self._transport is not None else None
        if link is None or link.fileno() < 0:
            return
        found = select.poll()
        found.register(link.fileno(), _GONE)
        if found.poll(0):
            self.abort()
        else:
            self._look_later()

    def _look_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._looking = loop.call_later(PEER_LOOK_S, self._look_for_peer)

    def resume_writing(self) -> None:
        self._is_full(False)
        self._follow()

    def _is_full(self, full: bool) -> None:
        """The peer takes no answers, or takes them again, or is gone."""
        depth = self._listener.shard.parts.metrics.queue_depth["send"]
        depth.inc(full - self._full)
        self._full = full
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
        if full:
            self._look_later()

    def _handler_reads(self, reading: bool) -> None:
        self._behind = not reading
        self._follow()

    def _follow(self) -> None:
        """Read while the peer takes its answers and its requests are not too far ahead."""
        reading = not (self._full or self._behind)
        if self._transport is None or self._transport.is_closing() or reading is self._reading:
            return
        self._reading = reading
        if reading:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def connection_lost(self, _error: Exception | None) -> None:
        self._is_full(False)
        for timer in self._timers:
            timer.cancel()
        if self.handler is not None and self.finished is None:
            self.finished = asyncio.get_running_loop().create_task(self.handler.finish())
            self._listener.finishing.add(self.finished)
            self.finished.add_done_callback(self._listener.finishing.discard)
        self._listener.connections.discard(self)
        self._transport = None  # which has this, and large buffers

    def close(self) -> None:
        """Send what is buffered, then end the connection."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.close()

    def abort(self) -> None:
        """End the connection now."""
        abort(self._transport)

    def _too_old(self) -> None:
        if self.handler is not None:
            self.handler.say_goodbye(Status.DRAINING, "session reached its maximum age")
        grace = 2 * self._listener.shard.parts.config.limits.lease_ns / 1e9
        self._timers.append(asyncio.get_running_loop().call_later(grace, self.close))


class ControlListener:
    """Listens for hosts. `start`, then `close`."""

    def __init__(
        self, shard: Shard, *, host: str, port: int, tls: ssl.SSLContext, trust_domain: str,
        sockets: Sequence[socket.socket] = (), server: Callable[..., TlsServer] = TlsServer,
    ) -> None:  # fmt: skip
        """`sockets` listen already, at this host, and are kept by whoever started the daemon."""
        self.shard = shard
        self.trust_domain = trust_domain
        self.host = host
        self.port = port
        self.connections: set[_Connection] = set()
        self.finishing: set[asyncio.Task[None]] = set()
        self._strangers = FailedHandshakes("identity_refused", logging.WARNING)
        self._kept = bool(sockets)
        self._server: TlsServer | None = server(
            lambda: _Connection(self), host=host, port=port, tls=tls,
            shake_hands=self._shake_hands, refused=self._refused, sockets=sockets,
        )  # fmt: skip

    async def start(self) -> None:
        """Bind; `port` is the real one afterwards. Raises: ConfigError when it is taken."""
        assert self._server is not None, "started after close"
        try:
            self.port = await self._server.start()
        except OSError as error:
            raise ConfigError(
                f"cannot listen at {self.host}:{self.port}: {error.strerror or error}",
                hint="is another daemon running? see [listen] control_host and control_port",
            ) from None

    async def _shake_hands(self, origin: str) -> None:
        parts = self.shard.parts
        await parts.turns.loop.shake_hands(origin, parts.now_ns())

    def refuse(self, host: str, error: IdentityError) -> None:
        """Count and log a peer whose certificate names nobody who may come."""
        self._refused(error.status)
        self._strangers.tell(host, error, asyncio.get_running_loop().time())

    def _refused(self, status: Status) -> None:
        self.shard.parts.metrics.sessions_refused[status].inc()

    def say_goodbye(self, status: Status, message: str) -> None:
        """Tell every host to take new work elsewhere."""
        for connection in list(self.connections):
            if connection.handler is not None:
                connection.handler.say_goodbye(status, message)

    def hand_over(self) -> None:
        """Leave whoever connects from now on to the next process, if its socket outlives this one.

        Otherwise they are accepted and told that this daemon drains.
        """
        if self._kept and self._server is not None:
            self._server.stop_accepting()

    async def close(self) -> None:
        """Stop listening, end every connection, wait for their sessions. Idempotent."""
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.close()
        await self._settle(CLOSE_SECONDS_MAX)
        for connection in list(self.connections):
            connection.abort()
        await self._settle(CLOSE_SECONDS_MAX)
        if self._server is not None:
            await self._server.wait_closed()
            self._server = None

    async def _settle(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                while self.connections or self.finishing:
                    await asyncio.sleep(0.01)
        except TimeoutError:
            return
