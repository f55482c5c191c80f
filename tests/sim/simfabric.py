"""The data path of a simulated session: batched reads that come late, twice, damaged or not at all.

Two kinds. `TCP` stands for a fabric that fences what is revoked; it is private (TLS, verbs) or not.
`SHM` maps the daemon's memory: nothing is fenced, blocks are opened in place.

Invariants of the contract that hold here too: a read never writes outside its views, writes nothing
any more once it has returned, and ends by its deadline. Bits flip only where bytes are sealed and
the path is not private: elsewhere a real fabric protects them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from entresol_proto.fabric.base import (
    Capabilities,
    ConnectOptions,
    Endpoint,
    Exposure,
    FabricKind,
    Offer,
    ReadOp,
    RemoteSpan,
)
from entresol_proto.fabric.base import span_error as contract_error
from entresol_proto.status import FabricError, Status
from tests.sim.simnet import NetFaults, SimNetwork
from tests.simloop import SimLoop

READ_S_MAX = 0.002  # one batch, without faults
LATE_S_MAX = 0.05
TICKET_BYTES = 8


class Wire:
    """Both ends of one session's data path. `hosts`: the host's name and the daemon's."""

    def __init__(
        self,
        rng: random.Random,
        faults: NetFaults,
        *,
        private: bool,
        maps: bool = False,
        network: SimNetwork | None = None,
        hosts: tuple[str, str] = ("", ""),
    ) -> None:
        self.rng = rng
        self.faults = faults
        self.up = True
        self.private = private
        self.network = network
        self.hosts = hosts
        self.exposed: tuple[dict[int, memoryview], dict[int, memoryview]] = ({}, {})
        kind = MappedSimEndpoint if maps else SimEndpoint
        self.daemon = kind(self, 0)
        self.host = kind(self, 1)


class SimEndpoint:
    """One end of a `Wire`. The daemon is side 0."""

    kind = FabricKind.TCP
    maps = False

    def __init__(self, wire: Wire, side: int) -> None:
        self._wire = wire
        self._side = side
        self.capabilities = Capabilities(
            revokes=not self.maps, private=wire.private, same_host=self.maps, maps=self.maps
        )

    @property
    def closed(self) -> bool:
        """True once the data path is gone."""
        return not self._wire.up

    async def expose(self, buffer: Any) -> Exposure:
        """Show a buffer to the other side."""
        await asyncio.sleep(0)
        if not self._wire.up:
            raise FabricError("the data path is gone", status=Status.DISCONNECTED)
        view = buffer if isinstance(buffer, memoryview) else buffer.view
        mine = self._wire.exposed[self._side]
        rkey = self._wire.rng.randrange(1, 2**32)
        mine[rkey] = view
        return Exposure(rkey, 0, view.nbytes)

    async def revoke(self, exposure: Exposure) -> None:
        """Hide it again."""
        self._wire.exposed[self._side].pop(exposure.rkey, None)

    async def read(self, ops: Sequence[ReadOp], deadline_ns: int) -> list[Status]:
        """Copy what the other side exposed; see the module for what may go wrong."""
        wire = self._wire
        rng, faults = wire.rng, wire.faults
        statuses: list[Status] = [Status.DEADLINE] * len(ops)
        late: list[int] = []
        if not await self._pass(rng.random() * READ_S_MAX, deadline_ns):
            return [self._why()] * len(ops)
        for place in range(len(ops)):
            if faults.draw("op_drops", rng):
                late.append(-1 - place)  # no answer
            elif faults.draw("op_late", rng):
                late.append(place)
            else:
                statuses[place] = self._copy(ops[place])
                if faults.draw("op_twice", rng):
                    late.append(place)
        if late:
            answered = [place for place in late if place >= 0]
            if answered and await self._pass(rng.random() * LATE_S_MAX, deadline_ns):
                for place in rng.sample(answered, len(answered)):
                    statuses[place] = self._copy(ops[place])
            if len(answered) < len(late):
                left_s = deadline_ns / 1e9 - asyncio.get_running_loop().time()
                await self._pass(left_s, deadline_ns)
                statuses = [self._why(s) for s in statuses]
        return statuses

    def _why(self, status: Status = Status.DEADLINE) -> Status:
        """A read without an answer ends as DEADLINE, or DISCONNECTED when the path is gone."""
        return Status.DISCONNECTED if status is Status.DEADLINE and not self._wire.up else status

    async def _pass(self, seconds: float, deadline_ns: int) -> bool:
        """Let time pass; True when the path still works and the deadline has not come."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        left_s = deadline_ns / 1e9 - loop.time()
        end_s = loop.time() + max(0.0, min(seconds, left_s))
        while self._wire.up and loop.time() < end_s:  # a path that ends is noticed soon
            await asyncio.sleep(min(0.02, max(end_s - loop.time(), 1e-9)))
        network = self._wire.network
        if network is not None and self._wire.up and not self.maps:
            await network.passable(self._wire.hosts, deadline_ns)
            if any(network.is_gone(host) for host in self._wire.hosts):
                return False
        return self._wire.up and loop.now_ns() < deadline_ns

    def _copy(self, op: ReadOp) -> Status:
        wire, rng = self._wire, self._wire.rng
        if not wire.up:
            return Status.DISCONNECTED
        peer = wire.exposed[1 - self._side].get(op.span.rkey)
        status = contract_error(op.span, None if peer is None else peer.nbytes)
        if status is not Status.OK:
            return status
        assert peer is not None
        assert op.into.nbytes == op.span.length_bytes, "a read of another length than its view"
        if wire.faults.draw("op_fails", rng):
            half = op.into.nbytes // 2
            op.into[:half] = rng.randbytes(half)
            return Status.FABRIC_ERROR
        op.into[:] = peer[op.span.address : op.span.address + op.span.length_bytes]
        if self._side == 1 and not wire.private and wire.faults.draw("flips", rng):
            op.into[rng.randrange(op.into.nbytes)] ^= 1 << rng.randrange(8)
        return Status.OK

    async def close(self) -> None:
        """The path ends for both."""
        self._wire.up = False
        self._wire.exposed[self._side].clear()


class MappedSimEndpoint(SimEndpoint):
    """Shared memory: the other side's bytes are seen in place."""

    kind = FabricKind.SHM
    maps = True

    def map_span(self, span: RemoteSpan) -> memoryview | Status:
        """A read-only view of what the other side exposed."""
        peer = self._wire.exposed[1 - self._side].get(span.rkey)
        if not self._wire.up:
            return Status.DISCONNECTED
        status = contract_error(span, None if peer is None else peer.nbytes)
        if status is not Status.OK or peer is None:
            return status
        return peer[span.address : span.address + span.length_bytes].toreadonly()

    def borrow(self, spans: Sequence[RemoteSpan]) -> SimBorrowed:
        """See `base.MappedEndpoint.borrow`."""
        return SimBorrowed(self, spans)


class SimBorrowed:
    """Spans of the other side in use in place; what became of them meanwhile shows at the end."""

    def __init__(self, endpoint: MappedSimEndpoint, spans: Sequence[RemoteSpan]) -> None:
        self._endpoint = endpoint
        self._spans = spans
        self.views = [endpoint.map_span(span) for span in spans]

    def give_back(self) -> list[Status]:
        """See `base.Borrowed.give_back`."""
        ended = []
        for span, view in zip(self._spans, self.views, strict=True):
            now = self._endpoint.map_span(span)
            found = view if isinstance(view, Status) else now
            ended.append(found if isinstance(found, Status) else Status.OK)
        return ended


class SimFabric:
    """The daemon's side of a simulated fabric; hosts come with `connect`, or `bring` a wire."""

    def __init__(
        self,
        name: str = "",
        *,
        kind: FabricKind = FabricKind.TCP,
        private: bool = False,
        network: SimNetwork | None = None,
    ) -> None:
        self.kind = kind
        self.name = name
        self.private = private or kind is FabricKind.SHM
        self._network = network
        self._wires: dict[bytes, Wire] = {}
        self._live: list[Wire] = []
        self._next = 0

    async def start(self) -> None:
        """Nothing to open."""

    def offer(self, *, peer: object | None = None) -> Offer:
        """A ticket, and where it is good: the daemon's name."""
        self._next += 1
        ticket = self._next.to_bytes(TICKET_BYTES, "little")
        return Offer(self.kind, ticket + self.name.encode())

    def bring(self, offer: Offer, wire: Wire) -> None:
        """A host shows its ticket."""
        self._wires[offer.params] = wire
        self._live = [each for each in self._live if each.up]
        self._live.append(wire)

    def wire(self, host: str, faults: NetFaults, rng: random.Random) -> Wire:
        """A new wire to a host, of this fabric's kind."""
        return Wire(
            rng, faults, private=self.private, maps=self.kind is FabricKind.SHM,
            network=self._network, hosts=(host, self.name),
        )  # fmt: skip

    async def accept(self, offer: Offer, reply: bytes, deadline_ns: int) -> Endpoint:
        """The daemon's end for a ticket that was shown."""
        wire = self._wires.pop(offer.params, None)
        if wire is None:
            raise FabricError("nobody came", status=Status.DEADLINE)
        return wire.daemon

    def withdraw(self, offer: Offer) -> None:
        """Forget a ticket."""
        wire = self._wires.pop(offer.params, None)
        if wire is not None:
            wire.up = False

    async def close(self) -> None:
        """Every path ends."""
        for wire in [*self._wires.values(), *self._live]:
            wire.up = False
        self._wires.clear()
        self._live.clear()


class Fabrics:
    """All fabrics of a simulation: what a client's `connect_fabric` is given."""

    def __init__(self, network: SimNetwork, seed: int) -> None:
        self._network = network
        self._rng = random.Random(f"{seed} fabrics")
        self._servers: dict[tuple[FabricKind, str], SimFabric] = {}

    def add(self, fabric: SimFabric) -> None:
        """A daemon opened a data path; a restart replaces it."""
        self._servers[(fabric.kind, fabric.name)] = fabric

    def connector(self, host: str) -> Any:
        """`registry.connect` of a simulated host."""

        async def connect(
            offer: Offer, deadline_ns: int, *, options: ConnectOptions
        ) -> tuple[Endpoint, bytes]:
            daemon = offer.params[TICKET_BYTES:].decode()
            await asyncio.sleep(self._rng.random() * 0.001)
            if not await self._network.passable((host, daemon), deadline_ns):
                raise FabricError("no answer", status=Status.DEADLINE)
            server = self._servers.get((offer.kind, daemon))
            faults = self._network.faults
            if server is None or faults.draw("refuse", self._rng):
                raise FabricError("refused", status=Status.DISCONNECTED)
            wire = server.wire(host, faults, random.Random(self._rng.getrandbits(64)))
            server.bring(offer, wire)
            return wire.host, b""

        return connect
