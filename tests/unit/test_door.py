"""The door before the get path: bounded inside, brief patience outside, fair between tenants."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest

from entresol_daemon.core.accounts import Account
from entresol_daemon.core.patience import LONG_NS, SHORT_NS, STANDING_NS, Patience
from entresol_daemon.metrics import Metrics
from entresol_daemon.shard.door import Door, Visit
from entresol_daemon.shard.meters import Meters
from entresol_proto.ids import TenantName
from entresol_proto.status import QuotaError, Status

FOREVER_NS = 60_000_000_000


class Clock:
    now_ns = 1_000

    def __call__(self) -> int:
        return self.now_ns


def account(name: str, weight: int = 1) -> Account:
    return Account(TenantName(name), name.encode().ljust(16), weight=weight)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


def door_of(at_once: int, metrics: Metrics, clock: Clock | None = None) -> Door:
    return Door(at_once, Meters(metrics, 1), clock or Clock())


ANNA, BERT, CARL = account("anna"), account("bert"), account("carl")


def test_patience_is_short_only_before_a_standing_queue() -> None:
    patience = Patience()
    assert patience.wait_ns(0) == LONG_NS
    assert patience.wait_ns(STANDING_NS) == LONG_NS
    assert patience.wait_ns(STANDING_NS + 1) == SHORT_NS
    patience.seen_free(STANDING_NS + 1)
    assert patience.wait_ns(2 * STANDING_NS + 1) == LONG_NS
    assert patience.wait_ns(2 * STANDING_NS + 2) == SHORT_NS


async def test_at_the_limit_and_one_more(metrics: Metrics) -> None:
    door = door_of(2, metrics)
    visits = [await door.enter(ANNA, FOREVER_NS, 1) for _ in range(2)]
    third = asyncio.create_task(door.enter(ANNA, FOREVER_NS, 1))
    await asyncio.sleep(0)
    assert (door.inside, door.waiting) == (2, 1)
    visits[0].leave()
    visits[0].leave()  # once counts
    visits.append(await third)
    assert (door.inside, door.waiting) == (2, 0)
    for visit in visits:
        visit.leave()
    assert (door.inside, door.waiting) == (0, 0)


async def test_a_standing_queue_is_refused_soon_and_counted(metrics: Metrics) -> None:
    clock = Clock()
    door = door_of(1, metrics, clock)
    inside = await door.enter(ANNA, FOREVER_NS, 1)
    waiting = [asyncio.create_task(door.enter(who, FOREVER_NS, 3)) for who in (BERT, CARL)]
    await asyncio.sleep(0.05)
    assert door.waiting == 2, "a burst waits"
    clock.now_ns += STANDING_NS + 1
    loop = asyncio.get_running_loop()
    begun = loop.time()
    with pytest.raises(QuotaError, match="gets wait") as caught:
        await door.enter(ANNA, FOREVER_NS, 7)
    assert caught.value.status is Status.BUSY
    assert caught.value.hint
    assert SHORT_NS / 2e9 < loop.time() - begun < LONG_NS / 1e9
    assert metrics.misses["anna", Status.BUSY]._value.get() == 7
    assert metrics.queue_shed["get"]._value.get() == 1
    inside.leave()
    for task in waiting:
        (await task).leave()
    assert (door.inside, door.waiting) == (0, 0)
    (await door.enter(ANNA, FOREVER_NS, 1)).leave()


async def test_so_many_of_a_tenant_and_no_more(metrics: Metrics) -> None:
    """At the limit and one more; nobody else is turned away for it."""
    door = door_of(2, metrics)
    for _ in range(4):
        door.arrive(ANNA, 1)
    with pytest.raises(QuotaError) as caught:
        door.arrive(ANNA, 5)
    assert caught.value.status is Status.BUSY
    assert metrics.misses["anna", Status.BUSY]._value.get() == 5
    door.arrive(BERT, 1)
    door.depart(ANNA)
    door.arrive(ANNA, 1)
    visit = await door.enter(ANNA, FOREVER_NS, 1)

    async def room() -> None:
        door.arrive(ANNA, 1)  # what waits outside takes nobody's place

    await visit.outside(room(), own=True)
    with pytest.raises(QuotaError):
        await visit.outside(room(), own=False)
    visit.leave()
    for _ in range(5):
        door.depart(ANNA)
    door.depart(BERT)
    assert not door._present
    assert (door.inside, door.outside) == (0, 0)


async def test_where_all_have_to_wait_fewer_are_let_come(metrics: Metrics) -> None:
    clock = Clock()
    door = door_of(8, metrics, clock)
    visits = []
    for _ in range(8):
        door.arrive(ANNA, 1)
        visits.append(await door.enter(ANNA, FOREVER_NS, 1))
    clock.now_ns += STANDING_NS + 1
    door.arrive(ANNA, 1)
    with pytest.raises(QuotaError):
        door.arrive(ANNA, 1)
    for visit in visits:
        visit.leave()
        door.depart(ANNA)
    for _ in range(15):
        door.arrive(ANNA, 1)


async def test_memory_that_all_wait_for_is_no_free_place(metrics: Metrics) -> None:
    clock = Clock()
    door = door_of(8, metrics, clock)
    door.arrive(ANNA, 1)
    visit = await door.enter(ANNA, FOREVER_NS, 1)

    async def memory() -> None:
        clock.now_ns += STANDING_NS + 1
        for _ in range(8):
            door.arrive(ANNA, 1)
            (await door.enter(ANNA, FOREVER_NS, 1)).leave()
        with pytest.raises(QuotaError):
            door.arrive(ANNA, 1)

    await visit.outside(memory(), own=False)
    visit.leave()
    for _ in range(7):
        door.arrive(ANNA, 1)


async def test_nobody_waits_past_its_own_deadline(metrics: Metrics) -> None:
    door = door_of(1, metrics)
    inside = await door.enter(ANNA, FOREVER_NS, 1)
    for left_ns in (-5, 0, 1_000_000):
        with pytest.raises(QuotaError):
            await asyncio.wait_for(door.enter(BERT, left_ns, 1), 10)
    inside.leave()
    assert (door.inside, door.waiting) == (0, 0)


async def test_a_refusal_does_not_tell_how_much_others_do(metrics: Metrics) -> None:
    told = set()
    for others in (0, 5):
        door = door_of(2, metrics)
        visits = [await door.enter(ANNA, FOREVER_NS, 1) for _ in range(2)]
        waiting = [asyncio.create_task(door.enter(BERT, FOREVER_NS, 1)) for _ in range(others)]
        await asyncio.sleep(0)
        with pytest.raises(QuotaError) as caught:
            await door.enter(ANNA, 1, 1)
        told.add(str(caught.value))
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for visit in visits:
            visit.leave()
    assert len(told) == 1, told


async def test_one_tenants_flood_does_not_keep_another_out(metrics: Metrics) -> None:
    door = door_of(8, metrics)
    order: list[str] = []
    inside = [await door.enter(ANNA, FOREVER_NS, 1) for _ in range(8)]

    async def get(who: Account) -> None:
        visit = await door.enter(who, FOREVER_NS, 1)
        order.append(who.name)
        inside.append(visit)

    tasks = [asyncio.create_task(get(who)) for who in (*[ANNA] * 8, BERT, BERT)]
    await asyncio.sleep(0)
    while inside:
        inside.pop(0).leave()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert order.index("bert") < 3
    assert order.count("anna") == 8
    assert (door.inside, door.waiting) == (0, 0)


async def test_whoever_waits_outside_holds_up_nobody(metrics: Metrics) -> None:
    door = door_of(1, metrics)
    mine = await door.enter(ANNA, FOREVER_NS, 1)
    free = asyncio.Event()

    async def room() -> bool:
        assert door.inside == 0
        other = await door.enter(BERT, FOREVER_NS, 1)
        free.set()
        asyncio.get_running_loop().call_later(0.01, other.leave)
        return True

    assert await mine.outside(room(), own=True)
    assert free.is_set()
    assert door.inside == 1
    mine.leave()
    assert (door.inside, door.waiting) == (0, 0)


async def test_cancelled_anywhere_nothing_is_held(metrics: Metrics) -> None:
    rng = random.Random(8)
    door = door_of(3, metrics)

    async def get(who: Account) -> None:
        visit: Visit | None = None
        try:
            visit = await door.enter(who, rng.choice([1_000_000, FOREVER_NS]), 1)
            await asyncio.sleep(rng.random() * 0.002)
            if rng.random() < 0.3:
                await visit.outside(asyncio.sleep(rng.random() * 0.002), own=rng.random() < 0.5)
        except QuotaError:
            return
        finally:
            if visit is not None:
                visit.leave()

    tasks = [asyncio.create_task(get(rng.choice([ANNA, BERT]))) for _ in range(400)]
    for task in tasks:
        await asyncio.sleep(0 if rng.random() < 0.8 else 0.001)
        if rng.random() < 0.4:
            task.cancel()
        assert door.inside <= door.at_once
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError):
            await task
    assert (door.inside, door.waiting) == (0, 0)


async def test_a_get_of_which_several_parts_wait_is_outside_until_the_last_is_back(
    metrics: Metrics,
) -> None:
    door = door_of(1, metrics)
    door.arrive(ANNA, 1)
    visit = await door.enter(ANNA, FOREVER_NS, 1)
    gates = [asyncio.Event() for _ in range(3)]
    parts = [asyncio.create_task(visit.outside(gate.wait(), own=True)) for gate in gates[:2]]
    await asyncio.sleep(0)
    assert (door.inside, door.outside, door._present[ANNA.name]) == (0, 0, 0)
    gates[0].set()
    await asyncio.sleep(0.01)
    assert door.inside == 0, "the other part still waits"
    other = await door.enter(BERT, FOREVER_NS, 1)
    gates[1].set()  # it wants to come in, and has to wait for its place
    await asyncio.sleep(0.01)
    assert (door.inside, door.waiting) == (1, 1)
    parts.append(asyncio.create_task(visit.outside(gates[2].wait(), own=False)))
    await asyncio.sleep(0)
    other.leave()
    await asyncio.sleep(0.01)
    assert (door.inside, door.waiting, door.outside) == (0, 0, 1), "a part went out meanwhile"
    gates[2].set()
    await asyncio.gather(*parts)
    assert (door.inside, door.waiting, door.outside) == (1, 0, 0)
    visit.leave()
    door.depart(ANNA)
    assert (door.inside, door.waiting) == (0, 0)
    assert not door._present


async def test_a_part_that_is_cancelled_outside_or_on_its_way_in_loses_no_place(
    metrics: Metrics,
) -> None:
    for step in range(6):
        door = door_of(1, metrics)
        door.arrive(ANNA, 1)
        visit = await door.enter(ANNA, FOREVER_NS, 1)
        gates = [asyncio.Event() for _ in range(2)]
        parts = [asyncio.create_task(visit.outside(gate.wait(), own=False)) for gate in gates]
        await asyncio.sleep(0)
        other = await door.enter(BERT, FOREVER_NS, 1) if step % 2 else None
        if step >= 2:
            gates[0].set()
        if step >= 4:
            gates[1].set()
        for _ in range(step):
            await asyncio.sleep(0)
        for part in parts:
            part.cancel()
        await asyncio.gather(*parts, return_exceptions=True)
        visit.leave()
        door.depart(ANNA)
        if other is not None:
            other.leave()
        await asyncio.sleep(0)
        assert (door.inside, door.waiting, door.outside) == (0, 0, 0), step
        assert not door._present
