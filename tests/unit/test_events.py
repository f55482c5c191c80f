"""The event log: numbering, replay, gaps, slow consumers, isolation, indexes rebuilt from it."""

from __future__ import annotations

import asyncio
import pathlib
import random
from collections.abc import AsyncIterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from entresol_daemon.events.log import EventLimits, EventLog, Subscription
from entresol_daemon.events.mirror import Mirror, SequenceBrokenError
from entresol_daemon.events.stream import EventStream, snapshot_batches
from entresol_daemon.events.types import (
    Event,
    Gap,
    GapReason,
    Kind,
    Medium,
    Position,
    Reason,
    pack_token_ids,
)
from entresol_proto.ids import TenantName
from entresol_proto.status import EntresolError, QuotaError, Status

A, B = TenantName("a"), TenantName("b")
NS = bytes(range(16))


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def store(log: EventLog, tenant: TenantName, *numbers: int) -> Event:
    return log.publish(
        Kind.STORED,
        tenant,
        time_unix_ns=1,
        namespace_id=NS,
        wire_keys=tuple(map(key, numbers)),
        medium=Medium.FLASH,
    )


def drain(subscription: Subscription) -> tuple[list[Event], Gap | None]:
    events: list[Event] = []
    while not subscription.closed:
        got = subscription.poll()
        if isinstance(got, Gap):
            return events, got
        if not got:
            return events, None
        events += got
    return events, None


def test_each_tenant_counts_from_one_without_holes():
    log = EventLog(7)
    for number in range(5):
        store(log, A, number)
    assert store(log, B, 0).seq == 1, "B's number says nothing about A's activity"
    assert store(log, A, 9).seq == 6
    assert log.position(A) == Position(7, 6)
    assert log.position(TenantName("never")) == Position(7, 0)
    assert log.tenants() == [A, B]


@pytest.mark.parametrize("incarnation", [0, -1, 2**64])
def test_incarnation_outside_u64_is_refused(incarnation):
    with pytest.raises(ValueError, match="incarnation"):
        EventLog(incarnation)


def test_replay_then_tail_gives_everything_once():
    log = EventLog(1, event_limits=EventLimits(batch_events_max=3))
    for number in range(10):
        store(log, A, number)
    subscription = log.subscribe(A, after=Position(1, 4))
    events, gap = drain(subscription)
    assert gap is None
    assert [event.seq for event in events] == [5, 6, 7, 8, 9, 10]
    assert events[0].wire_keys == (key(4),)
    store(log, A, 10)
    store(log, B, 0)
    assert [event.seq for event in drain(subscription)[0]] == [11]
    assert subscription.position == Position(1, 11)


def test_without_a_position_a_subscription_begins_now():
    log = EventLog(1)
    store(log, A, 1)
    subscription = log.subscribe(A)
    assert subscription.poll() == []
    store(log, A, 2)
    assert [event.seq for event in drain(subscription)[0]] == [2]


@pytest.mark.parametrize(
    ("position", "reason"),
    [
        (Position(2, 12), GapReason.INCARNATION),
        (Position(1, 13), GapReason.AHEAD),
        (Position(1, 7), GapReason.TRIMMED),
        (Position(1, 0), GapReason.TRIMMED),
    ],
)
def test_positions_that_cannot_be_honoured_give_one_gap(position, reason):
    gaps: list[GapReason] = []
    log = EventLog(1, event_limits=EventLimits(tenant_events_max=4), on_gap=gaps.append)
    for number in range(12):
        store(log, A, number)
    assert log.held(A) == (9, 12)
    subscription = log.subscribe(A, after=position)
    assert subscription.poll() == Gap(A, reason, position.seq, 9, 12)
    assert gaps == [reason]
    assert subscription.closed
    assert log.subscriptions_count == 0


def test_the_oldest_position_that_can_be_honoured_is():
    log = EventLog(1, event_limits=EventLimits(tenant_events_max=4))
    for number in range(12):
        store(log, A, number)
    events, gap = drain(log.subscribe(A, after=Position(1, 8)))
    assert gap is None
    assert [event.seq for event in events] == [9, 10, 11, 12]


def test_a_slow_consumer_gets_a_gap_and_holds_nobody_up():
    log = EventLog(1, event_limits=EventLimits(tenant_events_max=4))
    slow, quick = log.subscribe(A), log.subscribe(A)
    seen = []
    for number in range(50):
        store(log, A, number)
        seen += drain(quick)[0]
    assert [event.seq for event in seen] == list(range(1, 51))
    assert slow.poll() == Gap(A, GapReason.SLOW, 0, 47, 50)
    assert slow.closed
    assert not quick.closed


def test_ring_is_bounded_in_bytes_and_keeps_the_newest():
    limits = EventLimits(tenant_ring_bytes_max=5_000)
    log = EventLog(1, event_limits=limits)
    for number in range(200):
        store(log, A, *range(number, number + 4))
        assert log.used_bytes <= 5_000
    first, last = log.held(A)
    assert last == 200
    assert 1 < first <= 200


def test_a_tenant_within_its_share_loses_nothing_to_a_noisy_one():
    log = EventLog(1, event_limits=EventLimits(total_ring_bytes_max=100_000))
    quiet = [store(log, B, number) for number in range(20)]
    quiet_bytes = sum(event.cost_bytes for event in quiet)
    assert quiet_bytes < 50_000
    for number in range(5_000):
        store(log, A, number)
        assert log.used_bytes <= 100_000
    assert log.held(B) == (1, 20)
    assert log.held(A)[0] > 1


def test_used_bytes_is_the_sum_of_what_is_held():
    log = EventLog(1, event_limits=EventLimits(total_ring_bytes_max=20_000, tenant_events_max=30))
    rng = random.Random(5)
    for _ in range(2_000):
        store(log, rng.choice((A, B, TenantName("c"))), *range(rng.randint(1, 9)))
    held = 0
    for tenant in log.tenants():
        first, _ = log.held(tenant)
        events, gap = drain(log.subscribe(tenant, after=Position(1, first - 1)))
        assert gap is None
        held += sum(event.cost_bytes for event in events)
    assert held == log.used_bytes


def test_one_tenant_never_sees_another():
    log = EventLog(1)
    mine = log.subscribe(A, after=Position(1, 0))
    for number in range(10):
        store(log, A if number % 2 else B, number)
    events, gap = drain(mine)
    assert gap is None
    assert {event.tenant for event in events} == {A}
    assert [event.seq for event in events] == [1, 2, 3, 4, 5]


def test_the_operator_sees_all_tenants_each_in_order():
    log = EventLog(1, event_limits=EventLimits(batch_events_max=4))
    store(log, A, 0)
    everything = log.subscribe(None)
    for number in range(20):
        store(log, (A, B, TenantName("new"))[number % 3], number)
    events, gap = drain(everything)
    assert gap is None
    assert len(events) == 20
    for tenant in (A, B, "new"):
        own = [event.seq for event in events if event.tenant == tenant]
        assert own == list(range(own[0], own[0] + len(own)))
    assert everything.position is None


def test_no_tenant_is_starved_in_the_operators_view():
    log = EventLog(1, event_limits=EventLimits(batch_events_max=2))
    everything = log.subscribe(None)
    store(log, B, 0)
    for number in range(100):
        store(log, A, number)
    tenants = []
    for _ in range(3):
        got = everything.poll()
        assert not isinstance(got, Gap)
        tenants += [event.tenant for event in got]
    assert B in tenants


def test_a_replay_over_all_tenants_is_refused():
    with pytest.raises(EntresolError, match="position") as caught:
        EventLog(1).subscribe(None, after=Position(1, 0))
    assert caught.value.status is Status.BAD_REQUEST


def test_subscriptions_at_the_limit_and_one_past_it():
    log = EventLog(1, event_limits=EventLimits(subscriptions_per_tenant_max=2, subscriptions_max=3))
    first = log.subscribe(A)
    log.subscribe(A)
    with pytest.raises(QuotaError, match="subscriptions are open"):
        log.subscribe(A)
    log.subscribe(B)
    with pytest.raises(QuotaError, match="no event subscription left") as caught:
        log.subscribe(B)
    assert caught.value.status is Status.BUSY
    first.close()
    first.close()
    assert log.subscriptions_count == 2
    log.subscribe(B)


def test_erasing_a_tenant_takes_its_earlier_events_along():
    log = EventLog(1)
    follower = log.subscribe(A)
    log.publish(
        Kind.STORED,
        A,
        time_unix_ns=1,
        namespace_id=NS,
        wire_keys=(key(1),),
        token_ids_u32le=pack_token_ids([1, 2]),
        block_tokens=2,
    )
    store(log, B, 1)
    log.publish(Kind.TENANT_ERASED, A, time_unix_ns=2)
    assert log.held(A) == (2, 2)
    assert log.held(B) == (1, 1)
    events, gap = drain(log.subscribe(A, after=Position(1, 1)))
    assert gap is None
    assert [event.kind for event in events] == [Kind.TENANT_ERASED]
    assert follower.poll() == Gap(A, GapReason.SLOW, 0, 2, 2)


def test_a_long_chain_is_split_and_stays_one_chain():
    log = EventLog(1, event_limits=EventLimits(keys_per_event_max=4))
    tokens = list(range(100, 120))
    last = log.publish(
        Kind.STORED,
        A,
        time_unix_ns=1,
        namespace_id=NS,
        wire_keys=tuple(key(number) for number in range(10)),
        engine_keys=tuple(bytes([number]) * 8 for number in range(10)),
        parent=b"p" * 8,
        position=5,
        block_tokens=2,
        token_ids_u32le=pack_token_ids(tokens),
        medium=Medium.MEMORY,
        size_bytes=1_003,
    )
    events, _ = drain(log.subscribe(A, after=Position(1, 0)))
    assert events[-1] is last
    assert [len(event.wire_keys) for event in events] == [4, 4, 2]
    assert [event.position for event in events] == [5, 9, 13]
    assert [event.parent for event in events] == [b"p" * 8, bytes([3]) * 8, bytes([7]) * 8]
    assert [token for event in events for token in event.token_ids] == tokens
    assert sum(event.size_bytes for event in events) == 1_003


def test_tokens_that_do_not_fit_are_left_out_of_the_pieces():
    log = EventLog(1, event_limits=EventLimits(keys_per_event_max=1))
    log.publish(
        Kind.STORED,
        A,
        time_unix_ns=1,
        namespace_id=NS,
        wire_keys=(key(1), key(2)),
        block_tokens=2,
        token_ids_u32le=pack_token_ids([1, 2, 3]),
    )
    events, _ = drain(log.subscribe(A, after=Position(1, 0)))
    assert [event.token_ids for event in events] == [(), ()]


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (Kind.STORED, {"namespace_id": NS}),
        (Kind.STORED, {"wire_keys": (key(1),)}),
        (Kind.STORED, {"namespace_id": NS, "wire_keys": (key(1),), "engine_keys": (b"", b"")}),
        (Kind.STORED, {"namespace_id": NS, "wire_keys": (key(1),), "token_ids_u32le": b"abc"}),
        (Kind.CLEARED, {"namespace_id": NS, "wire_keys": (key(1),)}),
    ],
)
def test_events_of_a_broken_shape_fail_loudly(kind, fields):
    log = EventLog(1)
    with pytest.raises(AssertionError):
        log.publish(kind, A, time_unix_ns=1, **fields)
    assert log.position(A).seq == 0


def test_mirror_notices_a_hole_and_another_incarnation():
    log = EventLog(1)
    events = [store(log, A, number) for number in range(3)]
    mirror = Mirror()
    with pytest.raises(SequenceBrokenError):
        mirror.follow(1, events)  # never synchronised
    mirror.restart(Position(1, 0))
    with pytest.raises(SequenceBrokenError):
        mirror.follow(1, [events[0], events[2]])
    assert set(mirror.blocks) == {(NS, key(0))}
    with pytest.raises(SequenceBrokenError):
        mirror.follow(2, [events[1]])


# ------------------------------------------------------------------------- the asyncio side


async def test_stream_wakes_for_news_and_ends_when_closed():
    log = EventLog(1)
    async with EventStream(log, A) as stream:
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        assert not waiting.done()
        store(log, B, 1)
        store(log, A, 1)
        batch = await waiting
        assert isinstance(batch, list)
        assert [event.seq for event in batch] == [1]
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        stream.close()
        with pytest.raises(StopAsyncIteration):
            await waiting
    assert log.subscriptions_count == 0


async def test_stream_ends_after_a_gap():
    log = EventLog(1)
    seen = [batch async for batch in EventStream(log, A, after=Position(9, 1))]
    assert seen == [Gap(A, GapReason.INCARNATION, 1, 0, 0)]
    assert log.subscriptions_count == 0


async def test_snapshot_position_is_taken_before_the_walk():
    log = EventLog(1)
    store(log, A, 1)

    async def provider(tenant: TenantName) -> AsyncIterator[Event]:
        store(log, A, 2)  # the index changes while it is walked
        for number in (1, 2):
            yield Event(0, 1, tenant, Kind.STORED, NS, (key(number),), medium=Medium.FLASH)

    mirror = Mirror()
    async for batch in snapshot_batches(log, provider, A, batch_events=1):
        if isinstance(batch, Position):
            mirror.restart(batch)
        else:
            mirror.load(batch)
    assert mirror.position == Position(1, 1)
    events, gap = drain(log.subscribe(A, after=mirror.position))
    assert gap is None
    mirror.follow(1, events)
    assert set(mirror.blocks) == {(NS, key(1)), (NS, key(2))}


async def test_a_snapshot_left_half_way_closes_its_provider():
    closed = []

    async def provider(tenant: TenantName) -> AsyncIterator[Event]:
        try:
            for number in range(10):
                yield Event(0, 1, tenant, Kind.STORED, NS, (key(number),), medium=Medium.FLASH)
        finally:
            closed.append(True)

    batches = snapshot_batches(EventLog(1), provider, A, batch_events=2)
    await anext(batches)
    await anext(batches)
    await batches.aclose()
    assert closed == [True]


# --------------------------------------------------- rebuilt from events == the shard's index


class Follower(RuleBasedStateMachine):
    """A shard's index changes and restarts; one consumer follows with disconnects and snapshots.

    The ring is tiny, so gaps are frequent; snapshots are walked while the index changes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.index: dict[TenantName, dict[tuple[bytes, bytes], set[Medium]]] = {A: {}, B: {}}
        self.incarnation = 0
        self.mirror = Mirror()
        self.subscription: Subscription | None = None
        self.walk: list[tuple[bytes, bytes]] | None = None
        self.start_log()

    def start_log(self) -> None:
        self.incarnation += 1
        limits = EventLimits(tenant_events_max=6, keys_per_event_max=2, batch_events_max=3)
        self.log = EventLog(self.incarnation, event_limits=limits)
        self.subscription = None
        self.walk = None

    tenants = st.sampled_from([A, A, A, B])
    names = st.tuples(st.sampled_from([NS, bytes(16)]), st.integers(0, 3).map(key))
    seldom = st.integers(0, 9).map(lambda number: number == 7)  # what empties everything is rare

    def publish(self, kind: Kind, tenant: TenantName, name: tuple[bytes, bytes], **more) -> None:
        self.log.publish(
            kind, tenant, time_unix_ns=1, namespace_id=name[0], wire_keys=(name[1],), **more
        )

    @rule(
        tenant=tenants,
        namespace=st.sampled_from([NS, bytes(16)]),
        numbers=st.lists(st.integers(0, 3), min_size=1, max_size=5, unique=True),
        medium=st.sampled_from([Medium.MEMORY, Medium.FLASH]),
    )
    def stored(self, tenant, namespace, numbers, medium):
        for number in numbers:
            self.index[tenant].setdefault((namespace, key(number)), set()).add(medium)
        self.log.publish(
            Kind.STORED,
            tenant,
            time_unix_ns=1,
            namespace_id=namespace,
            wire_keys=tuple(map(key, numbers)),
            medium=medium,
        )

    @rule(
        tenant=tenants,
        name=names,
        kind=st.sampled_from([Kind.REMOVED, Kind.EXPIRED, Kind.CORRUPT]),
    )
    def ended(self, tenant, name, kind):
        if self.index[tenant].pop(name, None) is not None:
            self.publish(kind, tenant, name, reason=Reason.EVICTED)

    @rule(tenant=tenants, name=names)
    def staged(self, tenant, name):
        if name in self.index[tenant]:
            self.index[tenant][name].add(Medium.MEMORY)
            self.publish(Kind.STAGED, tenant, name, medium=Medium.MEMORY)

    @rule(tenant=tenants, name=names)
    def demoted(self, tenant, name):
        if name in self.index[tenant]:
            self.index[tenant][name] = {Medium.FLASH}
            self.publish(Kind.DEMOTED, tenant, name, medium=Medium.FLASH)

    @rule(tenant=tenants, name=names)
    def pinned(self, tenant, name):
        if name in self.index[tenant]:
            self.publish(Kind.PINNED, tenant, name, until_unix_ns=5)

    @rule(tenant=tenants, namespace=st.sampled_from([NS, bytes(16), b""]), go=seldom)
    def cleared(self, tenant, namespace, go):
        if not go:
            return
        for name in list(self.index[tenant]):
            if not namespace or name[0] == namespace:
                del self.index[tenant][name]
        self.log.publish(Kind.CLEARED, tenant, time_unix_ns=1, namespace_id=namespace)

    @rule(tenant=tenants, go=seldom)
    def erased(self, tenant, go):
        if not go:
            return
        self.index[tenant].clear()
        self.log.publish(Kind.TENANT_ERASED, tenant, time_unix_ns=1)

    @rule(go=seldom)
    def daemon_restarts(self, go):
        if go:
            self.start_log()

    @precondition(lambda self: self.subscription is not None)
    @rule()
    def disconnect(self):
        self.subscription.close()
        self.subscription = None

    @precondition(lambda self: self.subscription is None and self.walk is None)
    @rule()
    def connect(self):
        if self.mirror.position is None:
            self.begin_snapshot()
        else:
            self.subscription = self.log.subscribe(A, after=self.mirror.position)

    @precondition(lambda self: self.subscription is not None)
    @rule()
    def follow(self):
        got = self.subscription.poll()
        if isinstance(got, Gap):
            assert got.tenant == A
            self.subscription = None
            self.begin_snapshot()
        else:
            assert all(event.tenant == A for event in got)
            self.mirror.follow(self.incarnation, got)
            if self.mirror.position == self.log.position(A):
                self.check_equal()

    def check_equal(self) -> None:
        assert self.mirror.blocks == {
            name: frozenset(media) for name, media in self.index[A].items()
        }

    def begin_snapshot(self) -> None:
        self.mirror.restart(self.log.position(A))
        self.walk = sorted(self.index[A])

    @precondition(lambda self: self.walk is not None)
    @rule()
    def snapshot_step(self):
        for name in self.walk[:2]:
            for medium in self.index[A].get(name, ()):  # gone meanwhile: not listed
                event = Event(0, 1, A, Kind.STORED, name[0], (name[1],), medium=medium)
                self.mirror.load([event])
        self.walk = self.walk[2:]
        if not self.walk:
            self.walk = None
            self.subscription = self.log.subscribe(A, after=self.mirror.position)

    @invariant()
    def ring_is_bounded(self):
        first, last = self.log.held(A)
        assert last == 0 or last - first < 6

    def teardown(self):
        while True:
            if self.walk is not None:
                self.snapshot_step()
            elif self.subscription is None:
                self.connect()
            else:
                before = self.mirror.position
                self.follow()
                if self.subscription is not None and self.mirror.position == before:
                    break
        self.check_equal()
        assert self.mirror.position == self.log.position(A)
        self.subscription.close()
        assert self.log.subscriptions_count == 0


Follower.TestCase.settings = settings(max_examples=80, stateful_step_count=60, deadline=None)
TestFollower = Follower.TestCase


@pytest.mark.parametrize("seed", range(12))
def test_index_rebuilt_from_events_over_a_long_walk(seed):
    """The same machine, driven far longer than hypothesis does, in proportions of our choosing."""
    rng = random.Random(seed)
    world = Follower()
    gaps = followed = 0
    for _ in range(3_000):
        tenant = rng.choice((A, A, A, B))
        name = (rng.choice((NS, bytes(16))), key(rng.randrange(4)))
        step = rng.choices(
            ("stored", "ended", "move", "read", "cut", "clear", "restart"),
            (20, 8, 16, 20 if rng.random() < 0.9 else 0, 2, 0.3, 0.1),
        )[0]
        if step == "stored":
            numbers = rng.sample(range(4), rng.randint(1, 4))
            medium = rng.choice((Medium.MEMORY, Medium.FLASH))
            world.stored(tenant, name[0], numbers, medium)
        elif step == "ended":
            world.ended(tenant, name, rng.choice((Kind.REMOVED, Kind.EXPIRED, Kind.CORRUPT)))
        elif step == "move":
            rng.choice((world.staged, world.demoted, world.pinned))(tenant, name)
        elif step == "cut" and world.subscription is not None:
            world.disconnect()
        elif step == "clear":
            if rng.random() < 0.5:
                world.erased(tenant, True)
            else:
                world.cleared(tenant, rng.choice((NS, b"")), True)
        elif step == "restart":
            world.daemon_restarts(True)
        elif step == "read":
            if world.walk is not None:
                world.snapshot_step()
            elif world.subscription is None:
                world.connect()
            else:
                world.follow()
                followed += 1
                gaps += world.subscription is None
    world.teardown()  # compares the mirror with the index
    assert followed > 100, f"seed {seed} hardly followed"
    assert gaps > 5, f"seed {seed} met {gaps} gaps"


# ------------------------------------------------------------------------------- EVENTS.md


def test_every_kind_reason_and_gap_is_in_the_document():
    text = (pathlib.Path(__file__).parents[2] / "daemon" / "EVENTS.md").read_text()
    for kind in Kind:
        assert f"| `{kind.label}` | {kind.value} | {kind.meaning} |" in text
    for reason in Reason:
        assert f"| `{reason.label}` | {reason.value} | {reason.meaning} |" in text
    for gap in GapReason:
        assert f"| `{gap.label}` | {gap.value} | {gap.meaning} |" in text
    for name in EventLimits.__slots__:
        assert f"| `{name}` | {getattr(EventLimits(), name)} |" in text
