"""A network in memory: ordered byte streams between named hosts, that is late, stalls and breaks.

Who connects is told by the context (`as_host`), because a client does not tell a network who it
is. TLS is the two certificates shown to each other, nothing is encrypted: who may speak to whom is
decided by the real code from real certificates.

Invariants: what arrives is a prefix of what was sent, in order; a broken stream ends on both sides
within `NOTICE_S_MAX` unless a side is cut off silently (`vanish`), which nobody tells the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import errno
import functools
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.simloop import SimLoop

NOTICE_S_MAX = 0.05  # until the other side hears of an end
PIECES = (1, 7, 64, 1500)
_host: contextvars.ContextVar[str] = contextvars.ContextVar("host")


@contextlib.contextmanager
def as_host(name: str) -> Iterator[None]:
    """What is started inside runs on the host `name`."""
    token = _host.set(name)
    try:
        yield
    finally:
        _host.reset(token)


@dataclass(slots=True)
class NetFaults:
    """How bad the network is; chances per occasion. `injected` counts what happened, by name."""

    cut: float = 0.0  # a stream breaks, per piece
    stall: float = 0.0  # a direction delivers nothing for up to `stall_s_max`, per piece
    refuse: float = 0.0  # a connection attempt is refused
    split: float = 0.0  # what is written arrives in small pieces
    op_fails: float = 0.0  # one op of a fabric read ends in an error, half of it written
    op_drops: float = 0.0  # one op gets no answer until its deadline
    op_twice: float = 0.0  # one op's bytes arrive twice
    op_late: float = 0.0  # one op arrives after the others of its batch
    flips: float = 0.0  # one bit of one op's sealed bytes
    stall_s_max: float = 2.0
    injected: dict[str, int] = field(default_factory=dict)

    def draw(self, name: str, rng: random.Random) -> bool:
        """True when the fault of this name strikes now."""
        chance: float = getattr(self, name)
        if chance <= 0 or rng.random() >= chance:
            return False
        self.injected[name] = self.injected.get(name, 0) + 1
        return True

    def heal(self) -> None:
        """No more faults."""
        self.cut = self.stall = self.refuse = self.op_fails = self.op_drops = 0.0
        self.op_twice = self.op_late = self.flips = 0.0


class _Certificate:
    """What `ssl_object` gives of a peer."""

    def __init__(self, der: bytes) -> None:
        self._der = der

    def getpeercert(self, binary_form: bool = False) -> bytes:
        assert binary_form, "only the DER form is known here"
        return self._der


class SimNetwork:
    """All streams of a simulation. `certificates`: DER by host name."""

    def __init__(self, loop: SimLoop, seed: int, certificates: dict[str, bytes]) -> None:
        self.loop = loop
        self.rng = random.Random(f"{seed} network")
        self.faults = NetFaults()
        self.certificates = certificates
        self.bytes_carried = 0
        self.streams: list[Stream] = []
        self._servers: dict[tuple[str, int], SimServer] = {}
        self._frozen: dict[str, list[Callable[[], None]]] = {}  # host -> what waits for its thaw
        self._gone: set[str] = set()

    # Hosts.

    def is_frozen(self, host: str) -> bool:
        """True while nothing goes in or out of a host."""
        return host in self._frozen

    def freeze(self, host: str) -> None:
        """A host hangs: connections stay, nothing moves."""
        self._frozen.setdefault(host, [])

    def thaw(self, host: str) -> None:
        """It goes on where it was."""
        for wake in self._frozen.pop(host, []):
            self.loop.call_soon(wake)

    def when_thawed(self, host: str, wake: Callable[[], None]) -> None:
        """Call back once the (frozen) host goes on."""
        self._frozen[host].append(wake)

    async def passable(self, hosts: tuple[str, str], until_ns: int) -> bool:
        """Wait while one of the hosts is frozen; False when `until_ns` came first."""
        while True:
            frozen = next((host for host in hosts if host in self._frozen), None)
            if frozen is None:
                return not self._gone.intersection(hosts)
            left_s = until_ns / 1e9 - self.loop.time()
            if left_s <= 0:
                return False
            thawed = self.loop.create_future()
            self._frozen[frozen].append(functools.partial(_wake, thawed))
            try:
                async with asyncio.timeout(left_s):
                    await thawed
            except TimeoutError:
                return False

    def vanish(self, host: str) -> None:
        """A host loses its power: it says nothing any more and nobody is told."""
        self._gone.add(host)

    def bury(self, host: str) -> None:
        """The others notice at last that a host is gone."""
        for stream in list(self.streams):
            if host in stream.hosts:
                stream.cut()

    def break_all(self, host: str) -> None:
        """Every stream of a host ends now (its process died); its peers notice soon."""
        for stream in list(self.streams):
            if host in stream.hosts:
                stream.cut()
        for place in [place for place in self._servers if place[0] == host]:
            del self._servers[place]
        self.thaw(host)

    # What SimLoop asks for.

    async def connect(self, factory: Callable[[], Any], host: str, port: int) -> tuple[Any, Any]:
        """A client's end of a new stream. Raises: OSError."""
        mine = _host.get()
        await asyncio.sleep(self.rng.uniform(0.0001, 0.002))
        while host in self._frozen or mine in self._gone:
            await asyncio.sleep(0.05)  # the caller has a deadline
        server = self._servers.get((host, port))
        if server is None or self.faults.draw("refuse", self.rng):
            raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")
        stream = Stream(self, (mine, host))
        self.streams.append(stream)
        ends = stream.ends
        protocols = (factory(), server.factory())
        for end, protocol in zip(ends, protocols, strict=True):
            end.protocol = protocol
        with as_host(host):
            ends[1].begin()
        ends[0].begin()
        return ends[0], protocols[0]

    def listen(self, factory: Callable[[], Any], host: str, port: int) -> SimServer:
        """Accept streams at an address."""
        if (host, port) in self._servers:
            raise OSError(errno.EADDRINUSE, "in use")
        server = self._servers[(host, port)] = SimServer(self, factory, host, port)
        return server

    def unlisten(self, server: SimServer) -> None:
        """Idempotent."""
        if self._servers.get((server.host, server.port)) is server:
            del self._servers[(server.host, server.port)]

    def is_gone(self, host: str) -> bool:
        """True for a host that vanished."""
        return host in self._gone


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class SimServer:
    """What `create_server` returns: enough of `asyncio.Server`."""

    def __init__(
        self, network: SimNetwork, factory: Callable[[], Any], host: str, port: int
    ) -> None:
        self.factory = factory
        self.host = host
        self.port = port
        self.sockets = [self]
        self._network = network

    def getsockname(self) -> tuple[str, int]:
        """As a socket does."""
        return self.host, self.port

    def close(self) -> None:
        """Accept no more."""
        self._network.unlisten(self)

    async def wait_closed(self) -> None:
        """At once."""


class Stream:
    """A connection: two ends. `hosts`: the client's and the server's."""

    def __init__(self, network: SimNetwork, hosts: tuple[str, str]) -> None:
        self.network = network
        self.hosts = hosts
        self.ends = (SimTransport(self, 0), SimTransport(self, 1))

    def cut(self) -> None:
        """It breaks: what is on the way is lost, both sides notice, each in its time."""
        for end in self.ends:
            end.lose(ConnectionResetError(errno.ECONNRESET, "reset"))

    def ended(self) -> None:
        """One end is over; forget the stream once both are."""
        if all(end.over for end in self.ends) and self in self.network.streams:
            self.network.streams.remove(self)


class SimTransport(asyncio.Transport):
    """One end. Outgoing bytes wait in `_queue` until the other end takes them."""

    def __init__(self, stream: Stream, side: int) -> None:
        super().__init__()
        self.protocol: Any = None
        self.over = False  # connection_lost was called, or will be
        self._stream = stream
        self._side = side
        self._network = stream.network
        self._clock = 0.0  # of the last piece that was sent
        self._queued_bytes = 0
        self._high = 64 * 1024
        self._paused_writing = False
        self._reading = True
        self._closing = False
        self._backlog: deque[bytes | None] = deque()  # arrived, not taken; None: the end

    @property
    def _peer(self) -> SimTransport:
        return self._stream.ends[1 - self._side]

    @property
    def _mine(self) -> str:
        return self._stream.hosts[self._side]

    def begin(self) -> None:
        """The stream is there."""
        self.protocol.connection_made(self)

    # asyncio.Transport

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name != "ssl_object":
            return default
        peer = self._stream.hosts[1 - self._side]
        return _Certificate(self._network.certificates[peer])

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = 64 * 1024 if high is None else high

    def get_write_buffer_size(self) -> int:
        return self._queued_bytes

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        self._network.loop.call_soon(self._take)

    def is_reading(self) -> bool:
        return self._reading

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._closing or self.over or not data:
            return
        raw = bytes(data)
        self._queued_bytes += len(raw)
        network = self._network
        if len(raw) > 1 and network.faults.draw("split", network.rng):
            at = 0
            while at < len(raw):
                size = network.rng.choice(PIECES) if at < 4000 else len(raw)
                self._send(raw[at : at + size])
                at += size
        else:
            self._send(raw)
        if self._queued_bytes > self._high and not self._paused_writing:
            self._paused_writing = True
            self.protocol.pause_writing()

    def close(self) -> None:
        if self._closing or self.over:
            return
        self._closing = True
        self._send(None)

    def abort(self) -> None:
        if self.over:
            return
        self._closing = True
        self.lose(None)
        self._peer.lose(ConnectionResetError(errno.ECONNRESET, "reset by peer"))

    # The way to the other end.

    def _send(self, piece: bytes | None) -> None:
        network = self._network
        rng = network.rng
        if piece is not None and network.faults.draw("cut", rng):
            self._stream.cut()
            return
        delay = rng.random() * 0.0005
        if network.faults.draw("stall", rng):
            delay += rng.random() * network.faults.stall_s_max
        self._clock = max(self._clock, network.loop.time()) + delay
        network.loop.call_at(self._clock, self._peer._arrive, piece)

    def _arrive(self, piece: bytes | None) -> None:
        if self.over:
            return
        self._backlog.append(piece)
        if len(self._backlog) == 1:
            self._take()

    def _take(self) -> None:
        """Give the protocol what has arrived, unless a host hangs or nobody reads."""
        network = self._network
        while self._backlog and not self.over:
            if self._backlog[0] is not None and not self._reading:
                return
            for host in self._stream.hosts:
                if network.is_frozen(host):
                    network.when_thawed(host, self._take)
                    return
                if network.is_gone(host):
                    return
            piece = self._backlog.popleft()
            if piece is None:
                self._peer.lose(None, now=True)
                self.lose(None, now=True)
                return
            network.bytes_carried += len(piece)
            self._peer._taken(len(piece))
            self.protocol.data_received(piece)

    def _taken(self, length: int) -> None:
        self._queued_bytes -= length
        if self._paused_writing and self._queued_bytes <= self._high // 4 and not self.over:
            self._paused_writing = False
            self.protocol.resume_writing()

    def lose(self, error: Exception | None, *, now: bool = False) -> None:
        """This end is over; the protocol hears of it soon. Idempotent."""
        if self.over:
            return
        self.over = self._closing = True
        self._backlog.clear()
        self._queued_bytes = 0
        loop, rng = self._network.loop, self._network.rng
        delay = 0.0 if now or error is None else rng.random() * NOTICE_S_MAX
        loop.call_at(loop.time() + delay, self._tell, error)

    def _tell(self, error: Exception | None) -> None:
        if self._network.is_frozen(self._mine):
            self._network.when_thawed(self._mine, lambda: self._tell(error))
            return
        self.protocol.connection_lost(error)
        self._stream.ended()
