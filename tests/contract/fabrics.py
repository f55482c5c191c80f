"""The fabrics under contract, and what the suite may do to them beyond the interface.

A new fabric joins the suite by one entry in `FABRICS`. Helpers reach into private parts only to
break things (`hang`, `kill`), never to make a test pass.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import certs
import leaks
import pytest
import uvloop

from entresol_proto import limits
from entresol_proto.fabric import registry
from entresol_proto.fabric.base import (
    ConnectOptions,
    Endpoint,
    FabricServer,
    Offer,
    VerbsSettings,
)
from entresol_proto.fabric.memory import MemfdBuffer
from entresol_proto.fabric.shm import ShmFabricServer
from entresol_proto.fabric.shmendpoint import ShmEndpoint
from entresol_proto.fabric.tcp import TcpEndpoint, TcpFabricServer
from entresol_proto.fabric.verbs import VerbsFabricServer
from entresol_proto.fabric.verbs_api import device_names
from entresol_proto.fabric.verbs_device import ROCE_PORT
from entresol_proto.fabric.verbs_endpoint import VerbsEndpoint
from entresol_proto.fabric.verbs_wire import OfferParams
from entresol_proto.status import FabricError

SECOND_NS = 1_000_000_000
LIFETIME_NS = 5 * SECOND_NS

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "uvloop": uvloop.new_event_loop,
    "asyncio": asyncio.new_event_loop,
}


def soon(seconds: float = 5.0) -> int:
    """A deadline so far ahead."""
    return time.monotonic_ns() + int(seconds * 1e9)


def on_loops(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an async test on uvloop and on stock asyncio, and fail it for anything it leaks."""

    async def checked(call: Awaitable[None]) -> None:
        before = leaks.snapshot()
        await call
        await leaks.settle(before, ignore_threads=["asyncio_"])
        leaks.assert_no_leaks(before, ignore_threads=["asyncio_"])

    def run(*, loop_name: str, **arguments: object) -> None:
        with asyncio.Runner(loop_factory=LOOPS[loop_name]) as runner:
            runner.run(checked(test(**arguments)))

    functools.update_wrapper(run, test)
    del run.__wrapped__  # type: ignore[attr-defined]
    signature = inspect.signature(test)
    loop = inspect.Parameter("loop_name", inspect.Parameter.KEYWORD_ONLY)
    parameters = [*signature.parameters.values(), loop]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return cast("Callable[..., None]", pytest.mark.parametrize("loop_name", list(LOOPS))(run))


class Fabric(Protocol):
    """One fabric and how to break it."""

    name: str
    reads_can_hang: bool  # a stopped peer holds up reads (not where reads are one-sided)
    opens_by_reply: bool  # the daemon learns of the host by its reply alone (verbs)
    offers_max: int  # of the servers made here

    @property
    def missing(self) -> str | None:
        """Why it cannot run on this machine."""
        ...

    def server(self, folder: Path, *, lifetime_ns: int = LIFETIME_NS) -> FabricServer: ...
    def options(self) -> ConnectOptions: ...
    def hang(self, endpoint: Endpoint) -> None:
        """Make an endpoint stop noticing its peer."""
        ...

    def unhang(self, endpoint: Endpoint) -> None: ...
    def kill(self, endpoint: Endpoint) -> None:
        """What the peer sees when the process of this endpoint dies."""
        ...

    def with_ticket(self, offer: Offer, ticket: bytes) -> Offer:
        """The offer with another ticket."""
        ...

    async def throw(self, offer: Offer, junk: bytes) -> None:
        """Connect where the offer says, send bytes, wait until the server has had enough."""
        ...


class _Tcp:
    reads_can_hang = True
    opens_by_reply = False
    offers_max = limits.OFFERS_OPEN_MAX
    missing = None

    def __init__(self, name: str, *, tls: bool) -> None:
        self.name = name
        self._tls = tls

    @functools.cached_property
    def _certs(self) -> tuple[certs.TestCA, certs.CertPair, certs.CertPair]:
        ca = certs.make_ca()
        daemon = ca.issue("daemon", spiffe_uri="spiffe://test/daemon")
        return ca, daemon, ca.issue("host", spiffe_uri="spiffe://test/tenant/a")

    def server(self, folder: Path, *, lifetime_ns: int = LIFETIME_NS) -> FabricServer:
        if not self._tls:
            return TcpFabricServer("127.0.0.1", offer_lifetime_ns=lifetime_ns)
        ca, daemon, _ = self._certs
        return TcpFabricServer(
            "127.0.0.1",
            ssl=certs.server_context(daemon, ca),
            certificate_sha256=lambda: daemon.sha256,
            offer_lifetime_ns=lifetime_ns,
        )

    def options(self) -> ConnectOptions:
        if not self._tls:
            return ConnectOptions()
        ca, _, host = self._certs
        return ConnectOptions(ssl=certs.client_context(host, ca))

    def _transports(self, endpoint: Endpoint) -> list[asyncio.Transport]:
        assert isinstance(endpoint, TcpEndpoint)
        return [s.transport for s in endpoint._streams if s is not None and s.transport is not None]

    def hang(self, endpoint: Endpoint) -> None:
        for transport in self._transports(endpoint):
            transport.pause_reading()

    def unhang(self, endpoint: Endpoint) -> None:
        for transport in self._transports(endpoint):
            transport.resume_reading()

    def kill(self, endpoint: Endpoint) -> None:
        for transport in self._transports(endpoint):
            number = transport.get_extra_info("socket").fileno()
            with socket.socket(fileno=os.dup(number)) as sock:
                sock.shutdown(socket.SHUT_RDWR)

    def with_ticket(self, offer: Offer, ticket: bytes) -> Offer:
        return Offer(offer.kind, offer.params[:6] + ticket + offer.params[22:])

    async def throw(self, offer: Offer, junk: bytes) -> None:
        port = int.from_bytes(offer.params[4:6], "little")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(junk)
        with contextlib.suppress(OSError):
            await writer.drain()
            writer.write_eof()
        with contextlib.suppress(OSError):
            await reader.read()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


class _Shm:
    name = "shm"
    reads_can_hang = False
    opens_by_reply = False
    offers_max = limits.OFFERS_OPEN_MAX
    missing = None

    def server(self, folder: Path, *, lifetime_ns: int = LIFETIME_NS) -> FabricServer:
        return ShmFabricServer(folder, offer_lifetime_ns=lifetime_ns)

    def options(self) -> ConnectOptions:
        return ConnectOptions()

    def _socket(self, endpoint: Endpoint) -> socket.socket:
        assert isinstance(endpoint, ShmEndpoint)
        assert endpoint._link is not None
        return endpoint._link._sock

    def hang(self, endpoint: Endpoint) -> None:
        asyncio.get_running_loop().remove_reader(self._socket(endpoint))

    def unhang(self, endpoint: Endpoint) -> None:
        assert isinstance(endpoint, ShmEndpoint)
        assert endpoint._link is not None
        loop = asyncio.get_running_loop()
        loop.add_reader(self._socket(endpoint), endpoint._link._readable)

    def kill(self, endpoint: Endpoint) -> None:
        self._socket(endpoint).shutdown(socket.SHUT_RDWR)

    def with_ticket(self, offer: Offer, ticket: bytes) -> Offer:
        return Offer(offer.kind, offer.params[:17] + ticket + offer.params[33:])

    async def throw(self, offer: Offer, junk: bytes) -> None:
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.setblocking(False)
            await loop.sock_connect(sock, offer.params[33:].decode())
            with contextlib.suppress(OSError):
                await loop.sock_sendall(sock, junk[:60_000])
                await loop.sock_recv(sock, 100)


class _Verbs:
    """On the devices of ENTRESOL_RDMA_DEVICE, or all there are: with two, each end has its own."""

    reads_can_hang = False
    opens_by_reply = True
    offers_max = 48  # each holds a queue pair

    def __init__(self, name: str, *, rails: int) -> None:
        self.name = name
        self._rails = rails

    @functools.cached_property
    def _devices(self) -> list[str]:
        names = os.environ.get("ENTRESOL_RDMA_DEVICE", "").replace(",", " ").split()
        if not names and Path("/sys/class/infiniband").is_dir():
            names = sorted(os.listdir("/sys/class/infiniband"))
        return names

    @functools.cached_property
    def missing(self) -> str | None:
        if not self._devices:
            return "no RDMA device"
        if len(self._devices) < self._rails:
            return f"fewer than {self._rails} RDMA devices"
        try:
            device_names()
        except FabricError as error:
            return str(error)
        return None

    def server(self, folder: Path, *, lifetime_ns: int = LIFETIME_NS) -> FabricServer:
        mine = self._devices[::-1][: self._rails]
        return VerbsFabricServer(
            VerbsSettings(devices=tuple(mine)),
            offer_lifetime_ns=lifetime_ns,
            offers_max=self.offers_max,
        )

    def options(self) -> ConnectOptions:
        return ConnectOptions(verbs=VerbsSettings(devices=tuple(self._devices[: self._rails])))

    def hang(self, endpoint: Endpoint) -> None:
        assert isinstance(endpoint, VerbsEndpoint)
        for link in endpoint._links:
            asyncio.get_running_loop().remove_reader(link._completions.fd)

    def unhang(self, endpoint: Endpoint) -> None:
        assert isinstance(endpoint, VerbsEndpoint)
        for link in endpoint._links:
            asyncio.get_running_loop().add_reader(link._completions.fd, link._readable)

    def kill(self, endpoint: Endpoint) -> None:
        assert isinstance(endpoint, VerbsEndpoint)
        for link in endpoint._links:  # what the kernel does to a dead process's queue pairs
            link.queue_pair.close()

    def with_ticket(self, offer: Offer, ticket: bytes) -> Offer:
        return Offer(offer.kind, offer.params[:8] + ticket + offer.params[24:])

    async def throw(self, offer: Offer, junk: bytes) -> None:
        rail = OfferParams.parse(offer.params).rails[0]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            for at in range(0, min(len(junk), 20_000), 1_000):
                with contextlib.suppress(OSError):
                    sock.sendto(junk[at : at + 1_000], (rail.ipv4 or "127.0.0.1", ROCE_PORT))
                await asyncio.sleep(0)


FABRICS: dict[str, Fabric] = {
    "tcp-plain": _Tcp("tcp-plain", tls=False),
    "tcp-tls": _Tcp("tcp-tls", tls=True),
    "shm": _Shm(),
    "verbs": _Verbs("verbs", rails=1),
    "verbs-2-rails": _Verbs("verbs-2-rails", rails=2),
}


@dataclass(frozen=True, slots=True)
class Pair:
    """Both ends of one session, in one process."""

    fabric: Fabric
    server: FabricServer
    daemon: Endpoint
    host: Endpoint

    def ways(self) -> list[tuple[Endpoint, Endpoint]]:
        """(owner, reader) in both directions."""
        return [(self.daemon, self.host), (self.host, self.daemon)]


@contextlib.asynccontextmanager
async def serving(
    fabric: Fabric, folder: Path, *, lifetime_ns: int = LIFETIME_NS
) -> AsyncIterator[FabricServer]:
    """A started server."""
    server = fabric.server(folder, lifetime_ns=lifetime_ns)
    await server.start()
    try:
        yield server
    finally:
        await server.close()


async def join(fabric: Fabric, server: FabricServer) -> Pair:
    """A session with a running server."""
    offer = server.offer()
    host, reply = await registry.connect(offer, soon(), options=fabric.options())
    daemon = await server.accept(offer, reply, soon())
    return Pair(fabric, server, daemon, host)


async def refused(fabric: Fabric, server: FabricServer, offer: Offer, reply: bytes = b"") -> None:
    """Nobody gets a data path by this offer: connecting fails, or else accepting does."""
    try:
        host, answer = await registry.connect(offer, soon(), options=fabric.options())
    except FabricError:
        return
    try:
        assert fabric.opens_by_reply
        with pytest.raises(FabricError):
            await server.accept(offer, reply or answer, soon())
    finally:
        await host.close()


@contextlib.asynccontextmanager
async def session(fabric: Fabric, folder: Path) -> AsyncIterator[Pair]:
    """A server with one session; everything is closed at the end."""
    async with serving(fabric, folder) as server:
        pair = await join(fabric, server)
        try:
            yield pair
        finally:
            await pair.host.close()
            await pair.daemon.close()


@contextlib.contextmanager
def filled(content: bytes) -> Iterator[MemfdBuffer]:
    """A sealed shared buffer with this content."""
    with MemfdBuffer(len(content)) as buffer:
        buffer.view[:] = content
        assert buffer.seal_for_readers()
        yield buffer
