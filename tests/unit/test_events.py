"""The event log: numbering, replay, gaps, slow consumers, isolation, indexes rebuilt from it."""

from __future__ import annotations

import asyncio
import pathlib
import random
from collections.abc import AsyncIterator

import eventlab
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from entresol_daemon.events import log as log_module
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
)
from entresol_proto.ids import TenantName, pack_token_ids
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


def test_an_event_costs_no_look_at_all_rings_where_all_have_their_share(monkeypatch):
    """With time every ring stands at its share, idle tenants' too."""
    tenants, looks = [TenantName(f"t{n}") for n in range(100)], 0
    log = EventLog(1, event_limits=EventLimits(total_ring_bytes_max=16_000_000))
    number = 0
    while log.position(tenants[0]).seq < 600:  # a share is 424 of these
        for tenant in tenants:
            number += 1
            store(log, tenant, number)
    used_bytes = log_module._used_bytes

    def counted(ring):
        nonlocal looks
        looks += 1
        return used_bytes(ring)

    monkeypatch.setattr(log_module, "_used_bytes", counted)
    for _ in range(50):
        for tenant in tenants:
            number += 1
            store(log, tenant, number)
    assert 0 < looks <= 2 * 50 * len(tenants), "it is full, and looked at now and then"


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


def test_the_newest_event_of_each_stays_where_there_is_room_for_none():
    log = EventLog(1, event_limits=EventLimits(total_ring_bytes_max=1))
    for number in range(1, 5):
        store(log, A, number)
        store(log, B, number)
        assert (log.held(A), log.held(B)) == ((number, number), (number, number))


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


def test_a_gap_in_the_operators_view_takes_no_events_of_others_along():
    log = EventLog(1, event_limits=EventLimits(tenant_events_max=3))
    everything = log.subscribe(None)
    store(log, A, 0)
    for number in range(10):
        store(log, B, number)
    events, gap = drain(everything)
    assert [(event.tenant, event.seq) for event in events] == [(A, 1)]
    assert gap == Gap(B, GapReason.SLOW, asked_seq=0, first_seq=8, last_seq=10)


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
    assert [list(event.token_ids) for event in events] == [tokens[:8], tokens[8:16], tokens[16:]]
    assert sum(event.size_bytes for event in events) == 1_003


def test_pieces_of_what_is_no_chain_have_no_parents():
    log = EventLog(1, event_limits=EventLimits(keys_per_event_max=2))
    log.publish(
        Kind.REMOVED,
        A,
        time_unix_ns=1,
        namespace_id=NS,
        wire_keys=tuple(map(key, range(3))),
        engine_keys=tuple(bytes([number]) * 8 for number in range(3)),
        reason=Reason.EVICTED,
    )
    events, _ = drain(log.subscribe(A, after=Position(1, 0)))
    assert [(event.parent, event.position) for event in events] == [(b"", 0)] * 2


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
    async with EventStream(log, A):
        assert log.subscriptions_count == 1
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
    got = [batch async for batch in snapshot_batches(EventLog(1), provider, A, batch_events=3)]
    assert [len(batch) for batch in got if isinstance(batch, list)] == [3, 3, 3, 1]


class Walked:
    """What is stored, walked while it changes; `per_step` changes with each block listed."""

    def __init__(self, log: EventLog, blocks: int, per_step: int) -> None:
        self.log, self.per_step = log, per_step
        self.names = {key(number) for number in range(blocks)}
        self.changes = 0

    def change(self) -> None:
        """One block comes, one goes: also such as were listed, or are to be."""
        self.changes += 1
        store(self.log, A, 10_000 + self.changes)
        self.names.add(key(10_000 + self.changes))
        gone = sorted(self.names)[self.changes * 7 % len(self.names)]
        self.names.remove(gone)
        self.log.publish(
            Kind.REMOVED, A, time_unix_ns=1, namespace_id=NS, wire_keys=(gone,),
        )  # fmt: skip

    async def walk(self, tenant: TenantName) -> AsyncIterator[Event | None]:
        for name in sorted(self.names):
            for _ in range(self.per_step):
                self.change()
            await asyncio.sleep(0)
            if name not in self.names:
                yield None
                continue
            yield Event(0, 1, tenant, Kind.STORED, NS, (name,), medium=Medium.FLASH)


async def followed(
    batches: AsyncIterator[Position | list[Event] | Gap], mirror: Mirror
) -> Gap | None:
    """A reader of a snapshot that is followed: takes everything in the order in which it came."""
    incarnation = 0
    async for batch in batches:
        if isinstance(batch, Position):
            mirror.restart(batch)
            incarnation = batch.incarnation
        elif isinstance(batch, Gap):
            return batch
        else:
            for event in batch:
                if event.seq:
                    mirror.follow(incarnation, [event])
                else:
                    mirror.load([event])
    return None


@pytest.mark.parametrize("batch_events", [1, 3, 256])
@pytest.mark.parametrize("per_step", [1, 7])
async def test_a_followed_snapshot_needs_none_of_what_the_log_lost(batch_events, per_step):
    """The log holds a hundredth of what happens during the walk."""
    log = EventLog(5, event_limits=EventLimits(tenant_events_max=2 * per_step))
    for number in range(200):
        store(log, A, number)
    walked, mirror = Walked(log, 200, per_step), Mirror()
    batches = snapshot_batches(log, walked.walk, A, batch_events=batch_events, follow=True)
    assert await followed(batches, mirror) is None
    assert walked.changes == 200 * per_step
    assert mirror.position == log.position(A)
    assert set(mirror.blocks) == {(NS, name) for name in walked.names}
    assert log.subscriptions_count == 0
    plain = [batch async for batch in snapshot_batches(log, walked.walk, A, batch_events=99)]
    assert all(not event.seq for batch in plain if isinstance(batch, list) for event in batch)


async def test_a_followed_snapshot_goes_on_while_more_happens_than_it_sends():
    """Whatever comes while a batch is sent waits for the next block: both make progress."""
    log = EventLog(5)
    walked, mirror = Walked(log, 20, 3), Mirror()

    async def busy() -> AsyncIterator[Position | list[Event] | Gap]:
        batches = snapshot_batches(log, walked.walk, A, batch_events=1, follow=True)
        async for batch in batches:
            if isinstance(batch, list):
                walked.change()  # two events while one is sent
            yield batch

    async with asyncio.timeout(30):
        assert await followed(busy(), mirror) is None
    events, _ = drain(log.subscribe(A, after=mirror.position))
    mirror.follow(5, events)
    assert set(mirror.blocks) == {(NS, name) for name in walked.names}


async def test_who_reads_a_followed_snapshot_too_slowly_gets_a_gap():
    log = EventLog(5, event_limits=EventLimits(tenant_events_max=4))
    walked = Walked(log, 20, 1)
    batches = snapshot_batches(log, walked.walk, A, batch_events=3, follow=True)
    got: list[Position | list[Event] | Gap] = [await anext(batches), await anext(batches)]
    for _ in range(5):
        walked.change()  # while it does not read
    got += [batch async for batch in batches]
    assert isinstance(got[-1], Gap)
    assert (got[-1].reason, got[-1].asked_seq, got[-1].last_seq) == (GapReason.SLOW, 2, 14)
    assert not any(isinstance(batch, Gap) for batch in got[:-1])


async def test_what_was_found_before_a_gap_is_told_before_it():
    log = EventLog(5, event_limits=EventLimits(tenant_events_max=4))

    async def provider(tenant: TenantName) -> AsyncIterator[Event]:
        for number in range(3):
            if number == 1:
                store(log, A, *range(100, 110))
                for more in range(9):
                    store(log, A, more)
            yield Event(0, 1, tenant, Kind.STORED, NS, (key(number),), medium=Medium.FLASH)

    batches = snapshot_batches(log, provider, A, batch_events=9, follow=True)
    _, found, gap = [batch async for batch in batches]
    assert isinstance(found, list)
    assert [event.wire_keys for event in found] == [(key(0),), (key(1),)]
    assert isinstance(gap, Gap)

    async def nothing_yet(_: TenantName) -> AsyncIterator[Event | None]:
        for number in range(9):
            store(log, A, number)
        yield None

    batches = snapshot_batches(log, nothing_yet, A, batch_events=9, follow=True)
    assert [type(batch) for batch in [batch async for batch in batches]] == [Position, Gap]


async def test_a_followed_snapshot_ends_with_the_tenant():
    log = EventLog(5)

    async def provider(tenant: TenantName) -> AsyncIterator[Event]:
        for number in range(6):  # whatever is still found then is not told
            yield Event(0, 1, tenant, Kind.STORED, NS, (key(number),), medium=Medium.FLASH)
            if number == 1:
                log.publish(Kind.TENANT_ERASED, A, time_unix_ns=1)

    mirror = Mirror()
    batches = snapshot_batches(log, provider, A, batch_events=9, follow=True)
    assert await followed(batches, mirror) is None
    assert (mirror.blocks, mirror.position) == ({}, log.position(A))


# --------------------------------------------------- rebuilt from events == the shard's index


class Follower(RuleBasedStateMachine):
    """A shard's index changes and restarts; one consumer follows with disconnects and snapshots."""

    def __init__(self) -> None:
        super().__init__()
        self.world = eventlab.EventWorld()
        (self.consumer,) = self.world.consumers

    tenants = st.sampled_from([A, A, A, B])
    spaces = st.sampled_from(eventlab.NAMESPACES)
    names = st.tuples(spaces, st.sampled_from(eventlab.KEYS))
    seldom = st.integers(0, 9).map(lambda number: number == 7)  # what empties everything is rare

    @rule(
        tenant=tenants,
        namespace=spaces,
        numbers=st.lists(st.integers(0, 3), min_size=1, max_size=5, unique=True),
        medium=st.sampled_from([Medium.MEMORY, Medium.FLASH]),
    )
    def stored(self, tenant, namespace, numbers, medium):
        self.world.stored(tenant, namespace, numbers, medium)

    @rule(tenant=tenants, name=names, kind=st.sampled_from(eventlab.ENDS))
    def ended(self, tenant, name, kind):
        self.world.ended(tenant, name, kind)

    @rule(tenant=tenants, name=names, how=st.sampled_from(["staged", "demoted", "pinned"]))
    def moved(self, tenant, name, how):
        getattr(self.world, how)(tenant, name)

    @rule(tenant=tenants, namespace=st.sampled_from([*eventlab.NAMESPACES, b""]), go=seldom)
    def cleared(self, tenant, namespace, go):
        if go:
            self.world.cleared(tenant, namespace)

    @rule(tenant=tenants, go=seldom)
    def erased(self, tenant, go):
        if go:
            self.world.erased(tenant)

    @rule(go=seldom)
    def daemon_restarts(self, go):
        if go:
            self.world.start_log()

    @rule()
    def disconnect(self):
        self.consumer.disconnect()

    @rule()
    def step(self):
        self.consumer.step()

    @invariant()
    def ring_is_bounded(self):
        for tenant, held in self.world.held.items():
            first, last = self.world.log.held(tenant)
            assert last == held.last_seq
            assert last == 0 or first == held.first_seq

    def teardown(self):
        self.world.finish()


Follower.TestCase.settings = settings(max_examples=80, stateful_step_count=60, deadline=None)
TestFollower = Follower.TestCase


@pytest.mark.parametrize("seed", range(3))
def test_index_rebuilt_from_events_over_a_long_walk(seed):
    """The same world, driven far longer than hypothesis does; in volume: `make proof`, line R10."""
    world = eventlab.EventWorld((A, A, B))
    eventlab.walk(world, random.Random(seed), 6_000)
    world.finish()
    assert set(world.gaps) == set(GapReason), f"seed {seed} met {world.gaps}"
    assert world.compared > 50, f"seed {seed} hardly followed"


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
