"""Line R10: an index rebuilt from events equals the daemon's, whatever the consumers go through.

Most units walk the event log alone, with tiny rings, three consumers and books of their own about
which events must still be there: a gap comes exactly when it is due. One unit in ten follows a
whole shard in simulation, through power cuts and new incarnations. One in ten follows a real daemon
over gRPC as a relay does (`entresol_client.relay`), whose own mirror is compared, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "daemon"))

from daemon_lab import client_of, shape
from harness import Running, eventually, running_daemon

from entresol_client.relay import chain, feed
from entresol_client.results import PutBlock
from entresol_daemon.events.log import EventLog
from entresol_daemon.events.mirror import BlockName, Mirror, SequenceBrokenError
from entresol_daemon.events.stream import EventStream, snapshot_batches
from entresol_daemon.events.types import Event, Gap, Kind, Position
from entresol_daemon.shard.admin import ShardAdmin
from entresol_proto.ids import NamespaceDescriptor, TenantName
from entresol_proto.limits import KIB, MIB
from entresol_proto.status import EntresolError, Status
from entresol_proto.v1 import entresol_pb2 as pb
from entresol_proto.wire.data import Ack, OpenAt
from tests import eventlab, simloop
from tests.proof.line import Size, Slice, Tally
from tests.sim.shardlab import Host, World

WALK_STEPS = 25_000
SIM_ROUNDS = 3
SIM_PHASES = 2
SIM_STEPS = 30
SIM_KEYS = [b"key-%012d" % number for number in range(160)]
TENANTS = ("alpha", "beta")
GRPC_ROUNDS = 2
GRPC_STEPS = 40
DESCRIPTOR = NamespaceDescriptor(model="lab/events", block_tokens=16, page_layout="vllm:lab")
SEEN_SECONDS_MAX = 60.0


def walk_unit(tally: Tally, seed: int) -> None:
    """The log alone."""
    world = eventlab.EventWorld((eventlab.A, eventlab.A, eventlab.B))
    eventlab.walk(world, random.Random(seed), WALK_STEPS)
    world.finish()
    tally.tried += WALK_STEPS
    tally.survived += WALK_STEPS
    tally.figure("events", world.published)
    tally.figure("compared", world.compared)
    for reason, count in world.gaps.items():
        tally.figure(f"gaps_{reason.label}", count)


# A whole shard in simulation ----------------------------------------------------------------------


class Follower:
    """A consumer of one tenant of a simulated shard, which comes, goes and lags as it likes."""

    def __init__(self, world: World, tenant: str, rng: random.Random, tally: Tally) -> None:
        self.world = world
        self.tenant = TenantName(tenant)
        self.rng = rng
        self.tally = tally
        self.mirror = Mirror()

    @property
    def log(self) -> EventLog:
        return self.world.shard.parts.events

    def snapshot(self, tenant: TenantName) -> AsyncIterator[Event | None]:
        """As the daemon's gRPC service takes it: the walk needs the shard alone."""
        admin = ShardAdmin.__new__(ShardAdmin)
        admin._shard = self.world.shard
        return admin.snapshot(tenant)

    async def synchronise(self) -> None:
        """Snapshot, with or without what happens meanwhile. One that is cut short is none."""
        follow = self.rng.random() < 0.7
        batches = snapshot_batches(
            self.log, self.snapshot, self.tenant, batch_events=8, follow=follow
        )
        incarnation, whole = self.log.incarnation, False
        try:
            async with contextlib.aclosing(batches):
                async for batch in batches:
                    if isinstance(batch, Position):
                        self.mirror.restart(batch)
                    elif isinstance(batch, Gap):
                        self.tally.figure(f"gaps_{batch.reason.label}", 1)
                        return
                    else:
                        for event in batch:
                            if event.seq:
                                self.mirror.follow(incarnation, [event])
                            else:
                                self.mirror.load([event])
                        await asyncio.sleep(self.rng.uniform(0, 0.004))
            whole = True
        finally:
            if not whole:
                self.mirror.position = None
        self.tally.figure("snapshots_followed" if follow else "snapshots", 1)

    async def follow(self) -> None:
        """For ever, with disconnects; cancelled by whoever ends the world."""
        while True:
            if self.mirror.position is None:
                await self.synchronise()
            async with EventStream(self.log, self.tenant, after=self.mirror.position) as stream:
                for _ in range(self.rng.randrange(1, 40)):
                    try:
                        async with asyncio.timeout(self.rng.uniform(0.01, 0.5)):
                            batch = await anext(stream)
                    except TimeoutError:
                        break
                    if not self.take(batch):
                        break
                    if self.rng.random() < 0.05:  # too slow for a ring this small
                        await asyncio.sleep(self.rng.uniform(0, 0.4))
            await asyncio.sleep(self.rng.choice((0.0, 0.01, 0.3)))

    def take(self, batch: list[Event] | Gap) -> bool:
        """False after a gap."""
        if isinstance(batch, Gap):
            self.tally.figure(f"gaps_{batch.reason.label}", 1)
            self.mirror.position = None
            return False
        self.mirror.follow(self.log.incarnation, batch)
        self.tally.figure("events", len(batch))
        return True

    async def catch_up(self) -> None:
        """Read to the end and compare with the shard's index."""
        while self.mirror.position != self.log.position(self.tenant):
            if self.mirror.position is None:
                await self.synchronise()
                continue
            async with EventStream(self.log, self.tenant, after=self.mirror.position) as stream:
                self.take(await anext(stream))
        assert set(self.mirror.blocks) == self.stored(), "the picture is not the index"
        self.tally.figure("compared", 1)

    def stored(self) -> set[BlockName]:
        """What the shard's index has of this tenant."""
        parts = self.world.shard.parts
        index = parts.engine.index
        found: set[BlockName] = set()
        for namespace in parts.keyring.namespaces_of(self.tenant):
            found |= {(namespace, index.key_of(slot)) for slot in index.slots_of(namespace)}
        return found


async def host_work(host: Host, tally: Tally) -> None:
    """Puts, gets and forgets until the link breaks; more than fits, so that blocks are evicted."""
    try:
        await host.open()
    except EntresolError:
        return
    for _ in range(SIM_STEPS):
        start = host.rng.randrange(len(SIM_KEYS) - 8)
        keys = SIM_KEYS[start : start + host.rng.randint(1, 8)]
        choice = host.rng.random()
        tally.tried += len(keys)
        tally.survived += len(keys)
        if choice < 0.6:
            statuses = await host.put(keys, host.rng.choice((Ack.ACCEPTED, Ack.DURABLE)))
        elif choice < 0.8:
            statuses = await host.get(keys, OpenAt.HOST)
        else:
            await host.forget(keys[:2])
            continue
        if Status.DISCONNECTED in statuses:
            return


async def sim_unit(folder: Path, seed: int, tally: Tally) -> None:
    """Rounds of work, each ended by a stop or a power cut; consumers keep their positions."""
    rng = random.Random(seed)
    world = World(folder, seed, segments=6)
    ring = rng.choice((16, 64, 4_096))
    world.config = replace(
        world.config, events=replace(world.config.events, history_events_max=ring)
    )
    consumers = [
        Follower(world, tenant, random.Random(rng.getrandbits(64)), tally)
        for tenant in (*TENANTS, TENANTS[0])
    ]
    for _ in range(SIM_ROUNDS):
        await world.open(TENANTS)
        for _ in range(SIM_PHASES):
            tasks = [asyncio.ensure_future(one.follow()) for one in consumers]
            hosts = [Host(world, rng.choice(TENANTS)) for _ in range(3)]
            await asyncio.gather(*(host_work(host, tally) for host in hosts))
            await _end(tasks)
            if rng.random() < 0.2:
                break  # the power fails, or it is stopped, in the middle of evictions
            for host in hosts:
                await host.gone()
            world.hosts.clear()
            await world.shard.puts.drain()
            await asyncio.sleep(6)
            for one in consumers:
                await one.catch_up()
        await world.crash() if rng.random() < 0.6 else await world.stop()
    await world.open(TENANTS)
    for one in consumers:
        await one.catch_up()
    await world.stop()


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    for ended in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(ended, Exception):
            raise ended


# A real daemon over gRPC, followed by a relay -----------------------------------------------------


class Relayed:
    """What a relay's feed hands over, as a set of names and in the relay's own mirror."""

    def __init__(self, running: Running, tally: Tally) -> None:
        self.running = running
        self.tally = tally
        self.names: set[BlockName] = set()
        self.before: set[BlockName] = set()
        self.in_snapshot = True
        self.mirror = chain.Mirror(with_salted=True)
        self.inbox = feed.Inbox(lambda: None)
        self.feed = feed.ShardFeed(
            running.daemon.config.shard.name, lambda: self.running.client_config(), self.inbox
        )

    def pump(self) -> None:
        """Take what has come."""
        for item in self.inbox.take():
            if isinstance(item, feed.Spaces):
                for info in item.found:
                    self.mirror.add_space(info)
            elif isinstance(item, feed.Begin):
                self.in_snapshot, self.before, self.names = True, self.names, set()
                self.mirror.begin_snapshot(item.shard)
            elif isinstance(item, feed.End):
                self.in_snapshot = not item.complete
                self.mirror.end_snapshot(item.shard, complete=item.complete)
                self.tally.figure("snapshots", 1)
            elif isinstance(item, feed.Events):
                self.tally.figure("events", len(item.events))
                for event in item.events:
                    self._take(item.shard, event)

    def _take(self, shard: str, event: Any) -> None:
        names = {(event.namespace_id, key) for key in event.wire_keys}
        if event.kind == pb.KIND_STORED:
            self.names |= names
            self.mirror.stored(
                shard, event.namespace_id, event.wire_keys, event.engine_keys, event.parent,
                event.position, event.block_tokens, event.token_ids,
            )  # fmt: skip
        elif Kind(event.kind).ends_blocks:
            self.names -= names
            self.mirror.removed(shard, event.namespace_id, event.wire_keys)

    def mirrored(self) -> set[BlockName]:
        """What the relay believes to be stored."""
        return {
            (name[1], key) for name, space in self.mirror._spaces.items() for key in space.blocks
        }

    def caught_up(self) -> bool:
        """Everything is read and both pictures are the index."""
        self.pump()
        parts = self.running.daemon.shard.parts
        index = parts.engine.index
        wanted: set[BlockName] = set()
        for namespace in parts.keyring.namespaces_of(TenantName("dev")):
            wanted |= {(namespace, index.key_of(slot)) for slot in index.slots_of(namespace)}
        return not self.in_snapshot and self.names == wanted == self.mirrored()


def prompt(rng: random.Random, number: int) -> list[PutBlock]:
    """A few blocks of a chain, under keys as vLLM's tier has them."""
    made: list[PutBlock] = []
    for at in range(rng.randint(1, 8)):
        key = random.Random(f"{number}/{at}").randbytes(32) + bytes(4)
        tokens = tuple(100 * number + at for _ in range(16))
        parent = made[-1].key if made else None
        made.append(PutBlock(key, key * 200, at, parent, tokens))
    return made


async def grpc_unit(folder: Path, seed: int, tally: Tally) -> None:
    """A daemon is used, followed, cut off from its follower, and started again."""
    rng = random.Random(seed)
    ring = rng.choice((8, 64, 4_096))
    relayed: Relayed | None = None
    try:
        for _ in range(GRPC_ROUNDS):
            change = shape(fabrics=["shm"], flash=24 * MIB, segment=1 * MIB, block_max=64 * KIB)
            async with running_daemon(
                folder,
                lambda config, change=change: replace(
                    change(config), events=replace(config.events, history_events_max=ring)
                ),
            ) as running:
                if relayed is None:
                    relayed = Relayed(running, tally)
                    relayed.feed.start()
                relayed.running = running
                await _use(running, relayed, rng, tally)
                await eventually(
                    relayed.caught_up, seconds=SEEN_SECONDS_MAX, what=f"equality, seed={seed}"
                )
                tally.figure("compared", 1)
    finally:
        if relayed is not None:
            relayed.inbox.close()
            relayed.feed.stop()
            await asyncio.to_thread(relayed.feed.join, 30)


async def _use(running: Running, relayed: Relayed, rng: random.Random, tally: Tally) -> None:
    async with client_of(running) as client:
        space = await client.namespace(DESCRIPTOR)
        for _ in range(GRPC_STEPS):
            some = prompt(rng, rng.randrange(200))
            tally.tried += len(some)
            tally.survived += len(some)
            if rng.random() < 0.75:
                await space.put(some)
            else:
                await space.forget([block.key for block in some])
            if rng.random() < 0.12:
                relayed.feed._cancel()  # the stream breaks
                tally.figure("streams_cut", 1)
            if rng.random() < 0.5:
                relayed.pump()
            await asyncio.sleep(rng.choice((0, 0, 0.01)))


# The line -----------------------------------------------------------------------------------------


def run(slice_: Slice) -> Tally:
    """See the module."""
    tally = Tally()
    feed.BACKOFF_S_MIN, feed.BACKOFF_S_MAX = 0.02, 0.1  # a feed that is cut off comes back at once
    for seed in slice_.seeds:
        try:
            if seed % 10 == 5:
                loop = simloop.SimLoop(seed, seconds_max=100_000)
                folder = slice_.folder / f"sim-{seed}"
                simloop.run(sim_unit(folder, seed, tally), seed, loop=loop)
            elif seed % 10 == 0:
                asyncio.run(grpc_unit(slice_.folder / f"daemon-{seed}", seed, tally))
            else:
                walk_unit(tally, seed)
        except (AssertionError, SequenceBrokenError) as error:
            tally.tried += 1
            tally.found(seed, str(error))
    return tally


def canary() -> None:
    """A log that loses an event and does not say so; a block that goes and nobody is told."""
    read, publish = EventLog._read, EventLog.publish

    def forgetful(
        self: EventLog, tenant: TenantName, after_seq: int, count_max: int
    ) -> list[Event] | None:
        found = read(self, tenant, after_seq, count_max)
        return [] if found is None else found

    def silent(self: EventLog, kind: Kind, tenant: TenantName, **more: Any) -> Event | None:
        return None if kind is Kind.REMOVED else publish(self, kind, tenant, **more)

    for seed, name, bug, honest in ((1, "_read", forgetful, read), (5, "publish", silent, publish)):
        setattr(EventLog, name, bug)
        try:
            with tempfile.TemporaryDirectory(prefix="entresol-r10-") as folder:
                tally = run(Slice(seed, 1, Size.COMMIT, Path(folder)))
        finally:
            setattr(EventLog, name, honest)
        assert tally.findings, f"seed={seed}: an event was lost, and nobody saw it"
