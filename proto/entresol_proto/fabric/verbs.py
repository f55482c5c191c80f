"""The verbs fabric: one-sided RDMA READ over reliable connections, set up by the control stream.

Invariant: an offer's queue pairs exist before it is sent and are destroyed when it ends unanswered;
an answered one becomes exactly one endpoint. There is no listening socket: the reply travels in the
authenticated control stream, so nobody but the session's host can answer.

Parts: verbs_api (pyverbs), verbs_device (what to use), verbs_wire (parameters and messages),
verbs_rail (a queue pair), verbs_memory and verbs_reader (reads), verbs_endpoint (a session's side).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence

from entresol_proto import limits
from entresol_proto.fabric.base import ConnectOptions, FabricKind, Offer, VerbsSettings
from entresol_proto.fabric.tickets import OfferTable
from entresol_proto.fabric.verbs_api import open_device
from entresol_proto.fabric.verbs_device import (
    Neighbour,
    Port,
    find_ports,
    memory_lock_bytes,
    pair_rails,
)
from entresol_proto.fabric.verbs_endpoint import VerbsEndpoint
from entresol_proto.fabric.verbs_rail import RailLink
from entresol_proto.fabric.verbs_windows import examine
from entresol_proto.fabric.verbs_wire import OfferParams, Rail, ReplyParams
from entresol_proto.status import FabricError, Status

_log = logging.getLogger("entresol.fabric")

_LOOK_S = 0.002  # between two looks at the neighbour table
_MEMLOCK_BYTES_MIN = 64 * limits.MIB


class _Prepared:
    """The queue pairs of an unanswered offer."""

    def __init__(self, links: Sequence[RailLink]) -> None:
        self.links = list(links)

    def discard(self) -> None:
        """Free them."""
        links, self.links = self.links, []
        _drop(links)


def _drop(links: Sequence[RailLink]) -> None:
    for link in links:
        link.destroy(Status.DISCONNECTED)
        link.release()


def _open_links(ports: Sequence[tuple[int, Port]], mtu_bytes: int | None) -> list[RailLink]:
    """A link on each (rail number, port). Raises: FabricError; nothing stays open then."""
    links: list[RailLink] = []
    try:
        for number, port in ports:
            links.append(RailLink(open_device(port.device), port, number, mtu_bytes))
    except BaseException:
        _drop(links)
        raise
    return links


async def _reachable(peer: Rail, deadline_ns: int) -> bool:
    """Whether the system knows how to reach a rail's other end, asking for it if need be."""
    neighbour = Neighbour(None if peer.infiniband else peer.ipv4)
    if not neighbour.prod():
        return True  # nothing to ask: the verbs call will tell
    while not neighbour.resolved():
        if time.monotonic_ns() >= deadline_ns:
            return False
        await asyncio.sleep(_LOOK_S)
    return True


class VerbsFabricServer:
    """The daemon's side (`base.FabricServer`).

    `private` says that nobody else is on the fabric's network or can read it there: only then is
    plaintext moved over it. RoCE does not encrypt. `windows`: None uses memory windows if every
    device passes the start-up test (`windows_verdict` says), False never does.
    """

    kind = FabricKind.VERBS

    def __init__(
        self,
        settings: VerbsSettings | None = None,
        *,
        private: bool = True,
        windows: bool | None = None,
        offer_lifetime_ns: int = limits.HANDSHAKE_DEADLINE_NS,
        offers_max: int = limits.OFFERS_OPEN_MAX,
    ) -> None:
        self.windows_verdict = "not examined"
        self._windows = windows
        self._settings = settings or VerbsSettings()
        self._private = private
        self._lifetime_ns = offer_lifetime_ns
        self._offers: OfferTable[_Prepared] = OfferTable(
            _Prepared.discard, offers_max=offers_max, lifetime_ns=offer_lifetime_ns
        )
        self._ports: list[Port] = []
        self._endpoints: set[VerbsEndpoint] = set()
        self._releasing: set[asyncio.Task[None]] = set()
        self._devices = contextlib.ExitStack()

    @property
    def ports(self) -> list[str]:
        """The ports in use, for logs and `entresol doctor`."""
        return [port.label for port in self._ports]

    async def start(self) -> None:
        """Find and open the devices. Raises: FabricError with a hint."""
        assert not self._ports, "started twice"
        ports = find_ports(self._settings)
        try:
            for port in ports:  # kept open, so that offers need not open them
                device = open_device(port.device)
                self._devices.callback(device.release)
                device.port_state(port.port)
            _drop(_open_links([(0, ports[0])], self._settings.mtu_bytes))  # tells what is missing
            await self._examine(ports)
        except FabricError:
            self._devices.close()
            raise
        self._ports = ports
        lock = memory_lock_bytes()
        if lock is not None and lock < _MEMLOCK_BYTES_MIN:
            _log.warning("event=memlock_low limit_bytes=%d hint='LimitMEMLOCK=infinity'", lock)
        _log.info("event=verbs_ready ports=%s private=%s", ",".join(self.ports), self._private)

    async def _examine(self, ports: Sequence[Port]) -> None:
        """Decide about memory windows: all ports must do them well, or none is used with them."""
        if self._windows is not None:
            self.windows_verdict = f"{'on' if self._windows else 'off'} by setting"
            return
        for port in ports:
            verdict = await examine(port)
            self._windows = verdict.usable
            self.windows_verdict = f"{port.label}: {verdict.reason}"
            if not verdict.usable:
                return

    def offer(self, *, peer: object | None = None) -> Offer:
        """See `base.FabricServer.offer`. Makes the queue pairs."""
        if not self._ports:
            raise FabricError("the verbs fabric is not open", status=Status.DRAINING)
        ticket = self._offers.issue()
        try:
            links = _open_links(list(enumerate(self._ports)), self._settings.mtu_bytes)
        except BaseException:
            self._offers.withdraw(ticket)
            raise
        found = self._offers.find(ticket)
        assert found is not None
        found.endpoint = _Prepared(links)
        params = OfferParams(
            self._private,
            max(1, self._lifetime_ns // 1_000_000),
            ticket,
            tuple(link.local for link in links),
        )
        return Offer(FabricKind.VERBS, params.encode())

    async def accept(self, offer: Offer, reply: bytes, deadline_ns: int) -> VerbsEndpoint:
        """See `base.FabricServer.accept`. `reply` has the host's queue pairs, so it comes after
        `connect`. Raises: FabricError."""
        ticket = OfferParams.parse(offer.params).ticket
        try:
            answer = ReplyParams.parse(reply)
            if answer.ticket != ticket:
                raise FabricError("the reply is to another offer", status=Status.BAD_REQUEST)
            found = self._offers.find(ticket)
            if found is None:
                raise FabricError("the fabric offer is unknown, spent or expired")
            for rail in answer.rails:
                if not await _reachable(rail, deadline_ns):
                    raise FabricError(f"{rail.gid_text} does not answer", status=Status.DEADLINE)
            if self._offers.find(ticket) is not found:
                raise FabricError("the fabric offer expired", status=Status.DEADLINE)
            self._offers.complete(found)
            prepared = await self._offers.wait(ticket, deadline_ns)
        finally:
            self._offers.withdraw(ticket)
        endpoint = await _join(prepared.links, answer.rails, private=self._private,
                         windows=bool(self._windows),
                         on_closed=self._endpoint_closed)  # fmt: skip
        self._endpoints.add(endpoint)
        endpoint.start(welcome=True)
        return endpoint

    def withdraw(self, offer: Offer) -> None:
        """See `base.FabricServer.withdraw`."""
        self._offers.withdraw(OfferParams.parse(offer.params).ticket)

    def _endpoint_closed(self, endpoint: VerbsEndpoint) -> None:
        self._endpoints.discard(endpoint)
        if endpoint.released is not None:
            self._releasing.add(endpoint.released)
            endpoint.released.add_done_callback(self._releasing.discard)

    async def close(self) -> None:
        """See `base.FabricServer.close`."""
        self._offers.close()
        await asyncio.gather(*(endpoint.close() for endpoint in list(self._endpoints)))
        if self._releasing:
            await asyncio.wait(self._releasing)
        self._ports = []
        self._devices.close()


async def _join(
    links: Sequence[RailLink], peers: Sequence[Rail], *, private: bool, windows: bool = False,
    on_closed: Callable[[VerbsEndpoint], None] | None = None,
) -> VerbsEndpoint:  # fmt: skip
    """Connect prepared links to their peers, by rail number; links without a peer are freed.

    Raises: FabricError; all links are freed then.
    """
    by_number = {link.number: link for link in links}
    if not all(peer.number in by_number for peer in peers):
        _drop(links)
        raise FabricError("the reply names a rail that was not offered", status=Status.BAD_REQUEST)
    chosen = [by_number[peer.number] for peer in peers]
    _drop([link for link in links if link not in chosen])
    endpoint: VerbsEndpoint | None = None
    try:
        endpoint = VerbsEndpoint(chosen, private=private, windows=windows, on_closed=on_closed)
        for link, peer in zip(chosen, peers, strict=True):
            link.connect(peer)
    except BaseException:
        if endpoint is None:
            _drop(chosen)
        else:
            await endpoint.close()
        raise
    return endpoint


async def connect(
    offer: Offer, deadline_ns: int, options: ConnectOptions
) -> tuple[VerbsEndpoint, bytes]:
    """Take a verbs offer: make queue pairs towards the daemon's. See `registry.connect`.

    The endpoint stands once the daemon accepted the reply; it ends by itself if that does not
    happen within the offer's lifetime.
    """
    params = OfferParams.parse(offer.params)
    settings = options.verbs
    pairs = pair_rails(params.rails, find_ports(settings))
    reachable = [(rail, port) for rail, port in pairs if await _reachable(rail, deadline_ns)]
    if not reachable:
        there = ", ".join(rail.gid_text for rail in params.rails)
        raise FabricError(
            f"no RDMA port here reaches the daemon's {there}",
            hint="are both on one network? see `entresol doctor`",
            status=Status.UNSUPPORTED,
        )
    links = _open_links([(rail.number, port) for rail, port in reachable], settings.mtu_bytes)
    reply = ReplyParams(params.ticket, tuple(link.local for link in links)).encode()
    endpoint = await _join(links, [rail for rail, _ in reachable], private=params.private)
    endpoint.start(welcome=False, lifetime_ns=params.lifetime_ms * 1_000_000)
    return endpoint, reply
