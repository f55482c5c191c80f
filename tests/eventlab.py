"""Shards that change and consumers that come and go, over the real event log, in one thread.

A world keeps, outside of the log, what is stored and what the log must still hold; its consumers
build their picture from events alone. Invariant checked: a consumer that has caught up sees exactly
what is stored, and gets a gap exactly when events it has not seen are gone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from entresol_daemon.events.log import EventLimits, EventLog, Subscription
from entresol_daemon.events.mirror import BlockName, Mirror
from entresol_daemon.events.types import Event, Gap, GapReason, Kind, Medium, Position, Reason
from entresol_proto.ids import TenantName

A, B = TenantName("a"), TenantName("b")
NAMESPACES = (bytes(range(16)), bytes(16))
KEYS = tuple(number.to_bytes(16, "little") for number in range(4))
LIMITS = EventLimits(tenant_events_max=6, keys_per_event_max=2, batch_events_max=3)
ENDS = (Kind.REMOVED, Kind.EXPIRED, Kind.CORRUPT)


class Held:
    """What the log must hold of one tenant, counted apart from it."""

    def __init__(self) -> None:
        self.first_seq = 1
        self.last_seq = 0

    def add(self, events: int) -> None:
        """So many more; the ring keeps the newest."""
        self.last_seq += events
        self.first_seq = max(self.first_seq, self.last_seq - LIMITS.tenant_events_max + 1)


class Consumer:
    """Follows one tenant; every step is one call. The ring is tiny, so that gaps are frequent."""

    def __init__(self, world: EventWorld, tenant: TenantName) -> None:
        self.world = world
        self.tenant = tenant
        self.mirror = Mirror()
        self.subscription: Subscription | None = None
        self.asked: Position | None = None  # not answered yet
        self.walk: list[BlockName] | None = None
        self.followed = 0

    def log_is_gone(self) -> None:
        """The daemon ended; the position is all that is left."""
        self.subscription = self.asked = self.walk = None

    def disconnect(self) -> None:
        """Leave, in the middle of a snapshot or of the tail."""
        if self.walk is not None:  # a snapshot that was cut short is none
            self.walk, self.mirror.position = None, None
        if self.subscription is not None:
            self.subscription.close()
            self.subscription = self.asked = None

    def connect(self) -> None:
        """Replay from the last position, or take a snapshot if there is none."""
        if self.mirror.position is None:
            self.begin_snapshot()
        else:
            self.subscribe(self.mirror.position)

    def subscribe(self, after: Position) -> None:
        """Follow from there."""
        self.asked = after
        self.subscription = self.world.log.subscribe(self.tenant, after=after)

    def due(self) -> GapReason | None:
        """Whether the next poll owes a gap, by the world's own books."""
        held = self.world.held[self.tenant]
        assert self.subscription is not None
        if self.asked is not None:
            if self.asked.incarnation != self.world.log.incarnation:
                return GapReason.INCARNATION
            if self.asked.seq > held.last_seq:
                return GapReason.AHEAD
            return GapReason.TRIMMED if self.asked.seq < held.first_seq - 1 else None
        place = self.subscription.position
        assert place is not None
        return GapReason.SLOW if place.seq < held.first_seq - 1 else None

    def follow(self) -> None:
        """Take one batch, or the gap that is due, and compare when nothing is left to read."""
        assert self.subscription is not None
        due = self.due()
        got = self.subscription.poll()
        self.asked = None
        self.followed += 1
        if isinstance(got, Gap):
            assert got.reason is due, f"a gap {got.reason.label}, due was {due}"
            self.world.gaps[got.reason] = self.world.gaps.get(got.reason, 0) + 1
            self.subscription = None
            self.begin_snapshot()
            return
        assert due is None, f"no gap, and {due} was due"
        assert all(event.tenant == self.tenant for event in got), "another tenant's event"
        self.mirror.follow(self.world.log.incarnation, got)
        if self.mirror.position == self.world.log.position(self.tenant):
            self.check()

    def check(self) -> None:
        """The picture is what is stored."""
        stored = self.world.index[self.tenant]
        wanted = {name: frozenset(media) for name, media in stored.items()}
        assert self.mirror.blocks == wanted, "the picture is not what is stored"
        self.world.compared += 1

    def begin_snapshot(self) -> None:
        """Position first, then the walk."""
        self.mirror.restart(self.world.log.position(self.tenant))
        self.walk = sorted(self.world.index[self.tenant])

    def snapshot_step(self) -> None:
        """A piece of the walk; the index changes between two of them."""
        assert self.walk is not None
        for name in self.walk[:2]:
            for medium in self.world.index[self.tenant].get(name, ()):  # gone meanwhile: not listed
                event = Event(
                    0, 1, self.tenant, Kind.STORED, name[0], (name[1],), medium=medium
                )  # fmt: skip
                self.mirror.load([event])
        self.walk = self.walk[2:]
        if not self.walk:
            self.walk = None
            assert self.mirror.position is not None
            self.subscribe(self.mirror.position)

    def step(self) -> None:
        """Whatever comes next."""
        if self.walk is not None:
            self.snapshot_step()
        elif self.subscription is None:
            self.connect()
        else:
            self.follow()

    def catch_up(self) -> None:
        """Read to the end, and compare."""
        while True:
            before = self.mirror.position
            busy = self.walk is not None or self.subscription is None
            self.step()
            if not busy and self.subscription is not None and self.mirror.position == before:
                break
        self.check()
        assert self.mirror.position == self.world.log.position(self.tenant)


class EventWorld:
    """A shard's index and its event log, with consumers. `index` is the truth."""

    def __init__(self, consumers: Sequence[TenantName] = (A,)) -> None:
        self.index: dict[TenantName, dict[BlockName, set[Medium]]] = {A: {}, B: {}}
        self.incarnation = 0
        self.gaps: dict[GapReason, int] = {}
        self.compared = 0
        self.published = 0
        self.consumers = [Consumer(self, tenant) for tenant in consumers]
        self.start_log()

    def start_log(self) -> None:
        """The daemon starts (again): its index is there, its log is empty."""
        self.incarnation += 1
        self.log = EventLog(self.incarnation, event_limits=LIMITS)
        self.held = {A: Held(), B: Held()}
        for consumer in self.consumers:
            consumer.log_is_gone()

    def note(self, tenant: TenantName, events: int = 1) -> None:
        """So many events were published."""
        self.published += events
        self.held[tenant].add(events)

    def publish(self, kind: Kind, tenant: TenantName, name: BlockName, **more: object) -> None:
        """One event of one block."""
        self.log.publish(
            kind, tenant, time_unix_ns=1, namespace_id=name[0], wire_keys=(name[1],),
            **more,  # type: ignore[arg-type]
        )  # fmt: skip
        self.note(tenant)

    def stored(
        self, tenant: TenantName, namespace: bytes, numbers: Sequence[int], medium: Medium
    ) -> None:
        """A chain of blocks is stored."""
        for number in numbers:
            self.index[tenant].setdefault((namespace, KEYS[number]), set()).add(medium)
        keys = tuple(KEYS[number] for number in numbers)
        self.log.publish(
            Kind.STORED, tenant, time_unix_ns=1, namespace_id=namespace, wire_keys=keys,
            medium=medium,
        )  # fmt: skip
        self.note(tenant, -(-len(keys) // LIMITS.keys_per_event_max))

    def ended(self, tenant: TenantName, name: BlockName, kind: Kind) -> None:
        """A block goes."""
        if self.index[tenant].pop(name, None) is not None:
            self.publish(kind, tenant, name, reason=Reason.EVICTED)

    def staged(self, tenant: TenantName, name: BlockName) -> None:
        """A block comes up."""
        if name in self.index[tenant]:
            self.index[tenant][name].add(Medium.MEMORY)
            self.publish(Kind.STAGED, tenant, name, medium=Medium.MEMORY)

    def demoted(self, tenant: TenantName, name: BlockName) -> None:
        """A block is on flash only."""
        if name in self.index[tenant]:
            self.index[tenant][name] = {Medium.FLASH}
            self.publish(Kind.DEMOTED, tenant, name, medium=Medium.FLASH)

    def pinned(self, tenant: TenantName, name: BlockName) -> None:
        """A block is kept."""
        if name in self.index[tenant]:
            self.publish(Kind.PINNED, tenant, name, until_unix_ns=5)

    def cleared(self, tenant: TenantName, namespace: bytes) -> None:
        """A namespace, or all of them, is emptied."""
        for name in list(self.index[tenant]):
            if not namespace or name[0] == namespace:
                del self.index[tenant][name]
        self.log.publish(Kind.CLEARED, tenant, time_unix_ns=1, namespace_id=namespace)
        self.note(tenant)

    def erased(self, tenant: TenantName) -> None:
        """A tenant is erased, and with it what the log held of it."""
        self.index[tenant].clear()
        self.log.publish(Kind.TENANT_ERASED, tenant, time_unix_ns=1)
        self.note(tenant)
        self.held[tenant].first_seq = self.held[tenant].last_seq

    def finish(self) -> None:
        """Everybody catches up and leaves."""
        for consumer in self.consumers:
            consumer.catch_up()
            consumer.disconnect()
        assert self.log.subscriptions_count == 0


def walk(world: EventWorld, rng: random.Random, steps: int) -> None:
    """Random operations in proportions under which consumers catch up, fall behind and lose it."""
    kinds = ("stored", "ended", "move", "read", "cut", "clear", "restart", "forge")
    weights = [20.0, 8.0, 16.0, 30.0, 2.0, 0.3, 0.1, 0.5]
    for start in range(0, steps, 200):
        weights[3] = rng.choice((0.0, 8.0, 30.0, 60.0))  # now and then nobody reads for a while
        for kind in rng.choices(kinds, weights, k=min(200, steps - start)):
            tenant = A if rng.random() < 0.7 else B
            if kind == "read":
                rng.choice(world.consumers).step()
            elif kind == "stored":
                numbers = rng.sample(range(4), rng.randint(1, 4))
                medium = Medium.MEMORY if rng.random() < 0.5 else Medium.FLASH
                world.stored(tenant, rng.choice(NAMESPACES), numbers, medium)
            else:
                _seldom(world, rng, kind, tenant)


def _seldom(world: EventWorld, rng: random.Random, kind: str, tenant: TenantName) -> None:
    name = (rng.choice(NAMESPACES), rng.choice(KEYS))
    consumer = rng.choice(world.consumers)
    if kind == "ended":
        world.ended(tenant, name, rng.choice(ENDS))
    elif kind == "move":
        rng.choice((world.staged, world.demoted, world.pinned))(tenant, name)
    elif kind == "cut":
        consumer.disconnect()
    elif kind == "clear":
        if rng.random() < 0.5:
            world.erased(tenant)
        else:
            world.cleared(tenant, rng.choice((NAMESPACES[0], b"")))
    elif kind == "restart":
        world.start_log()
    elif consumer.subscription is None and consumer.walk is None:
        # A position that nobody was given: made up, or of a log that is no more.
        incarnation = rng.choice((world.incarnation, world.incarnation + 1, rng.getrandbits(64)))
        last = world.held[consumer.tenant].last_seq
        consumer.subscribe(Position(incarnation, last + rng.randrange(1, 100)))
        consumer.follow()
