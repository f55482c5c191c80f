"""A host that speaks the protocol and breaks its manners: forges, dawdles, lies, keeps what it got.

The host is `shardlab.Host`, which drives the real session machine without the real client. It has a
valid certificate of its tenant, so what it may do to its own tenant's blocks is only what any host
may; nothing it does may cost anybody a byte.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from entresol_proto.fabric.base import FabricKind, RemoteSpan
from entresol_proto.status import EntresolError, Status
from entresol_proto.wire import data
from entresol_proto.wire.session import State
from tests.sim.oracle import Name, Oracle
from tests.sim.plans import HostPlan, Op, key_of
from tests.sim.shardlab import Host, LinkFaults

if TYPE_CHECKING:
    from tests.sim.simdaemon import SimDaemon
    from tests.sim.story import Story

FORGED = (0, 1, 2, 3, 7, 2**31, 2**63, 2**64 - 1)


class _Distrust:
    """The oracle as a hostile host meets it: what it touches is certain for nobody for a while."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self.offered: set[Any] = set()
        self.durable: set[Any] = set()
        self.forgotten: set[Any] = set()

    def content(self, tenant: str, key: bytes) -> bytes:
        """See `Oracle.content`."""
        return self._oracle.content(tenant, key)

    def begin(self, tenant: str, keys: Sequence[bytes]) -> dict[Name, int]:
        """A put or a forget begins."""
        for key in keys:
            story = self._oracle.story((tenant, key))
            story.put_epoch += 1
            story.forget_epoch += 1
            story.durable = story.forgotten = False
            story.haunted = story.cursed = True
        return {}

    def alone(self, _begun: dict[Name, int], _key: Name) -> bool:
        """Nothing is learnt from a hostile host."""
        return False

    def note(self, *what: object) -> None:
        """See `Oracle.note`."""
        self._oracle.note("hostile", *what)

    def saw(self, tenant: str, key: bytes, raw: bytes) -> None:
        """See `Oracle.saw`."""
        self._oracle.saw(tenant, key, raw)


class _View:
    """What `shardlab.Host` wants of a world."""

    def __init__(self, story: Story, daemon: SimDaemon, rng: random.Random) -> None:
        self.rng = rng
        self.oracle = _Distrust(story.oracle)
        self.faults = LinkFaults()
        self.shard = daemon.shard
        self.fabric = daemon.shard.fabrics[FabricKind.TCP]
        self.hosts: list[Host] = []


class HostileHost:
    """One hostile host on one daemon, for a round."""

    def __init__(self, story: Story, plan: HostPlan) -> None:
        self.plan = plan
        self._story = story
        self._rng = random.Random(f"{story.plan.seed} hostile {plan.name}")
        self._hosts: list[Host] = []

    async def work(self, ops: Sequence[Op]) -> None:
        """One worker's calls, each with a chance of mischief, until the daemon has enough."""
        story, rng = self._story, self._rng
        daemon = story.daemons[rng.randrange(len(story.daemons))]
        if not daemon.up or FabricKind.TCP not in daemon.shard.fabrics:
            return
        fabric: Any = daemon.shard.fabrics[FabricKind.TCP]
        view: Any = _View(story, daemon, rng)
        host = Host(view, self.plan.tenant, private=fabric.private)
        self._hosts.append(host)
        daemon.guests.append(host)
        try:
            await host.open()
            for op in ops:
                story.oracle.tried += op.count
                story.hostile_ops += op.count
                await self._one(host, op)
                story.call_ended(op)
                if op.pause_s:
                    await asyncio.sleep(op.pause_s)
        except EntresolError as error:
            story.oracle.note(f"hostile {self.plan.name} ends: {error.status.label}")

    async def _one(self, host: Host, op: Op) -> None:
        rng = self._rng
        keys = [key_of(op.first + n) for n in range(op.count)]
        if rng.random() < 0.4:
            await self._mischief(host, op)
        if op.kind in ("put", "touch"):
            await host.put(keys, data.Ack.DURABLE if op.durable else data.Ack.ACCEPTED)
        elif op.kind == "forget":
            await host.forget(keys)
        elif op.kind == "exists":
            await host.present(keys)
        else:
            private = host.wire.private and op.at_daemon
            await host.get(keys, data.OpenAt.DAEMON if private else data.OpenAt.HOST)

    async def _mischief(self, host: Host, op: Op) -> None:
        """Forged leases and reservations, lies about corruption, memory that is not there."""
        rng = self._rng
        if host._machine.state is not State.OPEN:
            return
        act = rng.randrange(4)
        forged = rng.sample(FORGED, 3)
        if act == 0:
            host._send(data.Release(tuple(forged), ()))
        elif act == 1:
            lies = tuple(
                (lease, rng.randrange(40), rng.choice((Status.CORRUPT, Status.CONFLICT)))
                for lease in range(1, 40)
            )
            host._send(data.Release((), lies))
        elif act == 2:
            span = RemoteSpan(rng.randrange(2**32), rng.randrange(2**20), rng.randrange(1, 5000))
            await self._refused(host, data.Commit(tuple((put, span) for put in forged)))
        else:
            handle = rng.choice((0, 2, 65_535))
            await self._refused(host, data.Exists(handle, bytes(16 * op.count)))

    async def _refused(self, host: Host, message: Any) -> None:
        """What is forged is answered by an error."""
        try:
            await host._call(message)
        except EntresolError as error:
            if error.status in (Status.DISCONNECTED, Status.DRAINING):
                raise
            return
        self._story.oracle.accuse(f"a forged {type(message).__name__} was accepted")

    async def leave(self) -> None:
        """It is gone, with everything it kept."""
        for host in self._hosts:
            await host.gone()
