"""The tcp fabric: several TCP (or TLS) connections per session, each carrying reads both ways.

Invariant: `TcpEndpoint` keeps the contract of `base.Endpoint` with `revokes` true. It is `private`
only over TLS; over plain TCP the caller sends sealed bytes and nothing else. Losing any one of its
streams ends the whole data path, so a batch is never half on a dead connection.

The connection is authenticated by the one-time ticket of the offer, which came through the
authenticated control stream. A TLS offer may pin the digest of the server's certificate, so that no
other holder of a certificate of the same CA can stand in for it. Message layout: proto/FABRICS.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import secrets
import socket
import ssl as ssl_module
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from entresol_proto import limits
from entresol_proto.fabric.asking import Batch, Part
from entresol_proto.fabric.base import (
    Capabilities,
    ConnectOptions,
    Exposure,
    FabricKind,
    Offer,
    ReadOp,
    RemoteSpan,
    SharedBuffer,
    check_ops,
    may_be_span,
)
from entresol_proto.fabric.datastream import DataStream
from entresol_proto.fabric.landing import SPAN_BYTES_MAX, OnLanded
from entresol_proto.fabric.listening import ListeningServer
from entresol_proto.fabric.serving import ServingTurns
from entresol_proto.fabric.tcp_wire import TcpParams
from entresol_proto.status import FabricError, ProtocolError, Status

_log = logging.getLogger("entresol.fabric")

_WILDCARDS = ("0.0.0.0", "::")
_STRIPE_BYTES = 4 * limits.MIB  # a longer span is spread over the streams
_ABORT_NS = 1_000_000_000  # how long `close` waits for the loop to confirm an abort
_POLL_S = 0.001


class TcpEndpoint:
    """One side of one session over tcp. Made by `TcpFabricServer.accept` or `connect`."""

    kind = FabricKind.TCP

    def __init__(
        self, streams: int, *, tls: bool, on_closed: Callable[[TcpEndpoint], None] | None = None,
        turns: ServingTurns | None = None, peer: Hashable = None,
    ) -> None:  # fmt: skip
        """`turns` are those of all sessions of a daemon, where `peer` has its part."""
        self.capabilities = Capabilities(
            revokes=True, private=tls, same_host=False, maps=False, lands=True
        )
        self._streams: list[DataStream | None] = [None] * streams
        self._on_closed = on_closed
        self.turns = turns or ServingTurns()
        self.peer = peer
        self._exposed: dict[int, memoryview] = {}
        self._batches: set[Batch] = set()
        self._room = asyncio.Event()
        self._waiting = 0  # for it: requests that could not be sent yet
        self._closed = False

    @property
    def closed(self) -> bool:
        """See `base.Endpoint.closed`."""
        return self._closed

    @property
    def complete(self) -> bool:
        """Whether all streams have been attached."""
        return None not in self._streams

    def attach(self, number: int, stream: DataStream) -> None:
        """Make `stream` number `number` of this session. Raises: ProtocolError if it is taken."""
        if self._closed or number >= len(self._streams) or self._streams[number] is not None:
            raise ProtocolError(f"no place for a data stream number {number}")
        self._streams[number] = stream

    # -- exposing -----------------------------------------------------------------------------

    async def expose(self, buffer: memoryview | SharedBuffer) -> Exposure:
        """See `base.Endpoint.expose`."""
        if self._closed:
            raise FabricError("the session is gone", status=Status.DISCONNECTED)
        if len(self._exposed) >= limits.REGIONS_PER_SESSION_MAX:
            raise FabricError("too many exposed regions", status=Status.BUSY)
        view = buffer if isinstance(buffer, memoryview) else buffer.view
        if not view.nbytes or not view.c_contiguous:
            raise FabricError("only contiguous bytes can be exposed", status=Status.BAD_REQUEST)
        rkey = secrets.randbits(32)
        while rkey in self._exposed:
            rkey = secrets.randbits(32)
        self._exposed[rkey] = view.toreadonly().cast("B")
        return Exposure(rkey, 0, view.nbytes)

    async def revoke(self, exposure: Exposure) -> None:
        """See `base.Endpoint.revoke`. Queued bytes get REVOKE_DEADLINE_NS to leave."""
        view = self._exposed.pop(exposure.rkey, None)
        if view is None:
            return
        try:
            end_ns = time.monotonic_ns() + limits.REVOKE_DEADLINE_NS
            while any(s is not None and s.flushing(exposure.rkey) for s in self._streams):
                if time.monotonic_ns() > end_ns:
                    _log.warning("event=revoke_cut fabric=tcp reason='the peer does not receive'")
                    break
                await asyncio.sleep(_POLL_S)
            else:
                return
            await self._abort()
        except asyncio.CancelledError:
            self._fail(Status.DISCONNECTED)  # nobody waits for the queue any more: drop it
            raise
        finally:
            view.release()

    def exposed(self, rkey: int) -> memoryview | None:
        """For the streams: what the peer may read under `rkey` now."""
        return self._exposed.get(rkey)

    # -- reading ------------------------------------------------------------------------------

    async def read(self, ops: Sequence[ReadOp], deadline_ns: int) -> list[Status]:
        """See `base.Endpoint.read`."""
        check_ops(ops)
        if self._closed:
            return [Status.DISCONNECTED] * len(ops)
        delay_ns = deadline_ns - time.monotonic_ns()
        if delay_ns <= 0:
            return [Status.DEADLINE] * len(ops)
        loop = asyncio.get_running_loop()
        batch = Batch(loop, len(ops))
        plan = self._plan(batch, ops)
        if not plan:
            return batch.statuses
        self._batches.add(batch)
        timer = loop.call_later(delay_ns / 1e9, batch.end, Status.DEADLINE)
        try:
            for stream, parts in plan:
                for at in range(0, len(parts), limits.SPANS_PER_READ_MAX):
                    some = parts[at : at + limits.SPANS_PER_READ_MAX]
                    await self._ask(batch, stream, some)
            await batch.done
        finally:
            timer.cancel()
            self._batches.discard(batch)
            batch.end(Status.DISCONNECTED)
        return batch.statuses

    def can_land(self, spans: Sequence[RemoteSpan]) -> bool:
        """See `landing.LandingEndpoint.can_land`: not over TLS, not while `read` uses a stream, or
        waits for one: what lands could go on for ever, one request before the other."""
        return (
            not (self._closed or self._waiting)
            and 0 < len(spans) <= limits.SPANS_PER_READ_MAX
            and all(may_be_span(span) and span.length_bytes <= SPAN_BYTES_MAX for span in spans)
            and all(stream is not None and stream.can_land(len(spans)) for stream in self._streams)
        )

    async def land(
        self, spans: Sequence[RemoteSpan], on_landed: OnLanded, deadline_ns: int
    ) -> list[Status]:
        """See `landing.LandingEndpoint.land`."""
        assert self.can_land(spans)
        delay_ns = deadline_ns - time.monotonic_ns()
        if delay_ns <= 0:
            return [Status.DEADLINE] * len(spans)
        loop = asyncio.get_running_loop()
        batch = Batch(loop, len(spans))
        streams = [stream for stream in self._streams if stream is not None]
        loads = [stream.bytes_outstanding for stream in streams]
        plan: list[list[Part]] = [[] for _ in streams]
        for number, span in enumerate(spans):
            least = loads.index(min(loads))
            loads[least] += span.length_bytes
            plan[least].append(Part(number, span, None))
            batch.add_part(number)
        self._batches.add(batch)
        timer = loop.call_later(delay_ns / 1e9, batch.end, Status.DEADLINE)
        try:
            for stream, parts in zip(streams, plan, strict=True):
                if parts:
                    stream.ask_landing(batch, parts, on_landed)
            await batch.done
        finally:
            timer.cancel()
            self._batches.discard(batch)
            batch.end(Status.DISCONNECTED)
        return batch.statuses

    async def _ask(self, batch: Batch, stream: DataStream, parts: Sequence[Part]) -> None:
        """Send one request as soon as the stream has room, unless the batch ends before."""
        while not batch.done.done() and not stream.has_room(len(parts)):
            self._room.clear()
            room = asyncio.ensure_future(self._room.wait())
            self._waiting += 1
            try:
                await asyncio.wait((room, batch.done), return_when=asyncio.FIRST_COMPLETED)
            finally:
                self._waiting -= 1
                room.cancel()
        if not batch.done.done():
            stream.ask(batch, parts)

    def _plan(self, batch: Batch, ops: Sequence[ReadOp]) -> list[tuple[DataStream, list[Part]]]:
        """Spread the ops over the streams, each to the one with the fewest bytes to bring."""
        streams = [stream for stream in self._streams if stream is not None]
        loads = [stream.bytes_outstanding for stream in streams]
        plan: list[list[Part]] = [[] for _ in streams]
        for number, op in enumerate(ops):
            span, view = op.span, op.into
            if not may_be_span(span):
                batch.statuses[number] = Status.BAD_REQUEST
                continue
            if view.format != "B" or view.ndim != 1:
                view = view.cast("B")
            size = span.length_bytes if len(streams) == 1 else _STRIPE_BYTES
            for at in range(0, span.length_bytes, size):
                take = min(size, span.length_bytes - at)
                whole = take == span.length_bytes
                part = RemoteSpan(span.rkey, span.address + at, take) if not whole else span
                least = loads.index(min(loads))
                loads[least] += take
                plan[least].append(Part(number, part, view if whole else view[at : at + take]))
                batch.add_part(number)
        return [(stream, parts) for stream, parts in zip(streams, plan, strict=True) if parts]

    # -- ending -------------------------------------------------------------------------------

    def stream_room(self) -> None:
        """For the streams: a request ended."""
        self._room.set()

    def stream_lost(self, stream: DataStream, error: Exception | None) -> None:
        """For the streams: one is gone, so the data path is."""
        if not self._closed and error is not None:
            _log.warning("event=data_stream_lost fabric=%s error=%s", "tcp", str(error))
        broken = isinstance(error, ProtocolError)
        self._fail(Status.FABRIC_ERROR if broken else Status.DISCONNECTED)

    def _fail(self, status: Status) -> None:
        """End the data path now: pending reads finish, queued bytes are dropped."""
        if self._closed:
            return
        self._closed = True
        for stream in self._streams:
            if stream is not None:
                stream.abort()
        for batch in list(self._batches):
            batch.end(status)
        self._exposed.clear()
        if self._on_closed is not None:
            self._on_closed(self)

    async def _abort(self) -> None:
        self._fail(Status.DISCONNECTED)
        lost = [s.lost for s in self._streams if s is not None and s.transport is not None]
        if lost:
            await asyncio.wait(lost, timeout=_ABORT_NS / 1e9)

    async def close(self) -> None:
        """See `base.Endpoint.close`."""
        await self._abort()

    def discard(self) -> None:
        """`close` without waiting, for an endpoint that nobody took."""
        self._fail(Status.DISCONNECTED)


class TcpFabricServer(ListeningServer[TcpEndpoint]):
    """Listens for data streams and gives those with a ticket to their session.

    `host` is what to bind; it has no default. `advertise_host` is what offers name, by default the
    bound address; for a wildcard address the client uses the host of its control stream. `ssl`
    turns TLS on; `certificate_sha256` gives the digest of the DER form of the certificate in force,
    which each offer makes its client insist on. `listening` is a bound socket to use instead of a
    new one; the server owns it.
    """

    kind = FabricKind.TCP

    def __init__(
        self,
        host: str,
        port: int = 0,
        *,
        streams: int = limits.DATA_STREAMS_DEFAULT,
        ssl: ssl_module.SSLContext | None = None,
        certificate_sha256: Callable[[], bytes] | None = None,
        advertise_host: str | None = None,
        listening: socket.socket | None = None,
        offer_lifetime_ns: int = limits.HANDSHAKE_DEADLINE_NS,
    ) -> None:
        super().__init__(offer_lifetime_ns=offer_lifetime_ns)
        if not 0 < streams <= limits.DATA_STREAMS_PER_SESSION_MAX:
            raise FabricError(
                f"{streams} data streams per session",
                hint=f"use 1 to {limits.DATA_STREAMS_PER_SESSION_MAX}",
                status=Status.BAD_REQUEST,
            )
        self._host = host
        self._port = port
        self._streams = streams
        self._ssl = ssl
        self._pin = certificate_sha256 if ssl is not None else None
        self._advertise = advertise_host
        self._given = listening
        self._turns = ServingTurns()

    @property
    def port(self) -> int:
        """The port it listens on, once started."""
        return self._port

    async def start(self) -> None:
        """Bind and listen. Raises: FabricError."""
        given, self._given = self._given, None
        listener = await self._bound() if given is None else given
        try:
            self._listen(listener)
        except OSError as error:
            listener.close()
            raise self._cannot_listen(error) from None
        bound_host, self._port = listener.getsockname()[:2]
        if self._advertise is None:
            self._advertise = "" if bound_host in _WILDCARDS else bound_host

    async def _bound(self) -> socket.socket:
        """A new socket at the configured address. Raises: FabricError."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(
                self._host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            family, kind, protocol, _, address = found[0]
            listener = socket.socket(family, kind, protocol)
        except OSError as error:
            raise FabricError(f"cannot listen on {self._host!r}: {error}") from None
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError as error:
            listener.close()
            raise self._cannot_listen(error) from None
        return listener

    def _cannot_listen(self, error: OSError) -> FabricError:
        return FabricError(
            f"cannot listen on {self._host}:{self._port}: {error}",
            hint="is another daemon running? see [listen] data_host and data_port",
        )

    def offer(self, *, peer: object | None = None) -> Offer:
        """See `base.FabricServer.offer`."""
        ticket = self._issue(peer)
        params = TcpParams(
            self._advertise or "",
            self._port,
            self._streams,
            self._ssl is not None,
            ticket,
            None if self._pin is None else self._pin(),
        )
        return Offer(FabricKind.TCP, params.encode())

    def greet(self, stream: DataStream, number: int, streams: int, ticket: bytes) -> TcpEndpoint:
        """For the streams: the session a ticket belongs to. Raises: ProtocolError."""
        offer = self._offers.find(ticket)
        if offer is None or streams != self._streams:
            raise ProtocolError("no valid ticket")
        if offer.endpoint is None:
            offer.endpoint = TcpEndpoint(
                streams, tls=self._ssl is not None, on_closed=self._endpoints.discard,
                turns=self._turns, peer=offer.peer,
            )  # fmt: skip
            self._endpoints.add(offer.endpoint)
        endpoint = offer.endpoint
        endpoint.attach(number, stream)
        if endpoint.complete:
            self._offers.complete(offer)
        return endpoint

    def _ticket_of(self, offer: Offer) -> bytes:
        return TcpParams.parse(offer.params).ticket

    async def _greet(self, sock: socket.socket) -> bool:
        stream = DataStream(greeter=self)
        opened = False
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(lambda: stream, sock, ssl=self._ssl)
            opened = await stream.opened
        finally:
            if not opened:
                stream.abort()
                if stream.transport is None:
                    sock.close()
        return opened


async def connect(
    offer: Offer, deadline_ns: int, options: ConnectOptions
) -> tuple[TcpEndpoint, bytes]:
    """Take a tcp offer: open its streams. See `registry.connect`."""
    params = TcpParams.parse(offer.params)
    host = params.host or options.host
    if not host:
        raise FabricError("the tcp offer names no address", status=Status.BAD_REQUEST)
    if params.tls and options.ssl is None:
        raise FabricError("the tcp offer asks for TLS and there is no certificate here")
    found = await _addresses(host, params.port, deadline_ns, options)
    error = FabricError(f"{host!r} has no address")
    for left, where in zip(range(len(found), 0, -1), found, strict=True):
        now_ns = time.monotonic_ns()
        until_ns = now_ns + (deadline_ns - now_ns) // left  # one that is silent is not all there is
        try:
            return await _open_streams(host, where, until_ns, params, options), b""
        except FabricError as cause:
            error = cause
    raise error


async def _addresses(
    host: str, port: int, deadline_ns: int, options: ConnectOptions
) -> Sequence[str]:
    """Where to try, in order. Raises: FabricError."""
    if options.resolve is None:
        return [host]
    try:
        async with asyncio.timeout(max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9)):
            return await options.resolve(host, port)
    except TimeoutError:
        raise FabricError(f"{host!r} did not resolve in time", status=Status.DEADLINE) from None
    except (OSError, ValueError) as error:  # no address, or nothing that can be a name
        raise FabricError(f"{host!r} does not resolve: {error}") from None


async def _open_streams(
    host: str, where: str, until_ns: int, params: TcpParams, options: ConnectOptions
) -> TcpEndpoint:
    """All streams to one address of the host. Raises: FabricError."""
    endpoint = TcpEndpoint(params.streams, tls=params.tls)
    if options.server_hostname is None:
        options = replace(options, server_hostname=host)
    try:
        async with asyncio.timeout(max(0.0, (until_ns - time.monotonic_ns()) / 1e9)):
            for number in range(params.streams):
                await _open_stream(endpoint, number, where, params, options)
    except TimeoutError:
        await endpoint.close()
        raise FabricError("the data streams did not open in time", status=Status.DEADLINE) from None
    except OSError as error:
        await endpoint.close()
        raise FabricError(f"cannot open data streams to {where}:{params.port}: {error}") from None
    except BaseException:
        with contextlib.suppress(asyncio.CancelledError):
            await endpoint.close()
        raise
    return endpoint


async def _open_stream(
    endpoint: TcpEndpoint, number: int, host: str, params: TcpParams, options: ConnectOptions
) -> None:
    stream = DataStream(owner=endpoint)
    endpoint.attach(number, stream)
    try:
        transport, _ = await asyncio.get_running_loop().create_connection(
            lambda: stream,
            host,
            params.port,
            ssl=options.ssl if params.tls else None,
            server_hostname=options.server_hostname if params.tls else None,
        )
    except BaseException:
        stream.lost.cancel()  # uvloop never tells it when whoever opened it was cancelled
        raise
    if params.pin is not None:
        certificate = transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
        if hashlib.sha256(certificate or b"").digest() != params.pin:
            raise FabricError("the data stream shows another certificate than was offered")
    stream.send_hello(number, params.streams, params.ticket)
    if not await stream.opened:
        raise FabricError("the daemon refused the data stream", hint="the ticket may have expired")
