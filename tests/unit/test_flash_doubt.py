"""Names of which an older block may be on flash: whichever segment is freed first, and whatever
fails meanwhile, what was stored last is what a crash brings back, or nothing."""

from __future__ import annotations

import asyncio

import pytest
import simloop
from flashlab import device_bytes, get, key_of, open_engine, put

from entresol_daemon.flash import space
from entresol_daemon.flash.device import BLOCK
from entresol_daemon.flash.engine import Engine, RemoveReason, SegmentState
from entresol_daemon.flash.model import GROUP_FAILURES_MAX, Removed
from entresol_daemon.flash.sim import Fault, FaultPlan, SimDevice
from entresol_proto.status import Status
from tests.unit.test_flash_evict import (
    COUNT,
    NS,
    A,
    all_there,
    data_of,
    filled,
    stored,
    writes_again,
)


async def failed_half_way(engine: Engine, plan: FaultPlan, kind: Fault) -> None:
    """Of the blocks of a segment the first went, and the others could not be copied; the device is
    well again."""
    slots, segment = await filled(engine)
    plan.at, plan.sticky = {kind: 1}, True
    (gone,) = await engine.evict(segment, slots[1:])
    assert gone.wire_key == key_of(0)
    plan.enabled = False
    await writes_again(engine)
    assert NS + key_of(0) in engine._table.doubtful


async def followed(engine: Engine) -> tuple[int, int, asyncio.Task[list[Removed]]]:
    """A block is durable under a name whose older one lies in a segment that is not free yet: both
    segments, and the eviction that goes on."""
    _, older = await filled(engine)
    never: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    engine._writer.free = lambda _segment: never  # type: ignore[method-assign]
    evicting = asyncio.ensure_future(engine.evict(older))
    while len(engine.index):
        await asyncio.sleep(0.0001)
    slot, future = put(engine, (NS, key_of(0)), b"new", stream=A)
    assert await future is Status.OK
    return older, int(engine.index.m_segment[slot]), evicting


@pytest.mark.parametrize("openings", [1, 3])
def test_an_older_block_of_the_name_is_not_back_when_the_newer_one_goes_first(
    openings: int,
) -> None:
    """The power fails before its segment is free, when the newer one is durable already."""

    async def life() -> None:
        device = SimDevice(device_bytes(10), sleep=asyncio.sleep)
        engine = await open_engine(device)
        older, newer, evicting = await followed(engine)
        assert newer != older
        for _ in range(openings):
            after = device.crash()
            evicting.cancel()
            await engine.close(clean=False)
            device, engine = after, await open_engine(after)
            assert engine.recovery.duplicates == 1
            assert await get(engine, (NS, key_of(0))) == (Status.OK, b"new")
        await engine.evict(newer)
        assert engine.segment_info(newer).state is SegmentState.FREE
        after = device.crash()
        await engine.close(clean=False)
        engine = await open_engine(after)
        assert (await get(engine, (NS, key_of(0))))[0] is Status.MISS
        for number in range(1, COUNT):
            assert await get(engine, (NS, key_of(number))) == (Status.OK, data_of(number))
        assert await engine.evict(older, lambda live: live) == []
        assert not engine._table.doubtful, "nothing is left of it"
        await engine.close()

    simloop.run(life())


def test_the_newer_ones_segment_is_not_free_before_it_is_written_down_that_it_goes() -> None:
    """Not in the same group either, of which a power failure may leave any part."""

    async def life(seed: int) -> None:
        device = SimDevice(device_bytes(10), sleep=asyncio.sleep, seed=seed)
        engine = await open_engine(device)
        _, newer, evicting = await followed(engine)
        after = device.crash()
        evicting.cancel()
        await engine.close(clean=False)
        device, engine = after, await open_engine(after)
        await engine._writer.drain()
        evicting = asyncio.ensure_future(engine.evict(newer))
        while not device._dirty and not evicting.done():
            await asyncio.sleep(0.000005)
        after = device.crash(seed=seed)
        evicting.cancel()
        await engine.close(clean=False)
        engine = await open_engine(after)
        found = await get(engine, (NS, key_of(0)))
        assert found in ((Status.OK, b"new"), (Status.MISS, b""))
        await engine.close()

    for seed in range(30):
        simloop.run(life(seed), seed)


@pytest.mark.parametrize("kind", [Fault.WRITE_EIO, Fault.FLUSH_FAIL])
def test_nor_is_it_back_where_an_eviction_of_its_segment_failed_half_way(kind: Fault) -> None:
    async def life() -> None:
        plan = FaultPlan()
        device = SimDevice(device_bytes(10), plan=plan, sleep=asyncio.sleep)
        engine = await open_engine(device)
        await failed_half_way(engine, plan, kind)
        slot, future = put(engine, (NS, key_of(0)), b"new", stream=A)
        assert await future is Status.OK
        newer = int(engine.index.m_segment[slot])
        await engine.evict(newer)
        assert engine.segment_info(newer).state is SegmentState.FREE
        after = device.crash()
        await engine.close(clean=False)
        other = await open_engine(after)
        assert (await get(other, (NS, key_of(0))))[0] is Status.MISS
        for number in range(1, COUNT):
            assert await get(other, (NS, key_of(number))) == (Status.OK, data_of(number))
        await other.close()

    simloop.run(life())


def test_nor_where_the_newer_one_was_to_be_kept_and_there_was_no_room_for_it() -> None:
    async def life() -> None:
        plan = FaultPlan()
        device = SimDevice(device_bytes(10), plan=plan, sleep=asyncio.sleep)
        engine = await open_engine(device)
        await failed_half_way(engine, plan, Fault.FLUSH_FAIL)
        slot, future = put(engine, (NS, key_of(0)), b"new", stream=A)
        assert await future is Status.OK
        newer = int(engine.index.m_segment[slot])
        engine._table.open_for_copy = lambda *_: None  # type: ignore[method-assign]
        (gone,) = await engine.evict(newer, [slot])
        assert gone.reason is RemoveReason.NO_SPACE
        assert engine.segment_info(newer).state is SegmentState.FREE
        after = device.crash()
        await engine.close(clean=False)
        other = await open_engine(after)
        assert (await get(other, (NS, key_of(0))))[0] is Status.MISS
        await other.close()

    simloop.run(life())


def test_nor_where_a_copy_of_it_failed_and_it_stayed_where_it_was() -> None:
    """The copy may be on flash, in a segment that the index knows nothing of."""

    async def life(seed: int) -> None:
        plan = FaultPlan()
        device = SimDevice(device_bytes(12), plan=plan, sleep=asyncio.sleep, seed=seed)
        engine = await open_engine(device)
        slots, older = await filled(engine)
        engine._writer._failures = GROUP_FAILURES_MAX - 1
        plan.at, plan.sticky = {Fault.FLUSH_FAIL: 1}, True
        assert await engine.evict(older, slots) == []
        plan.enabled = False
        await writes_again(engine)
        assert {NS + key_of(number) for number in range(COUNT)} <= engine._table.doubtful
        await engine.evict(older)  # now they go
        slot, future = put(engine, (NS, key_of(0)), b"new", stream=A)
        assert await future is Status.OK
        newer = int(engine.index.m_segment[slot])
        await engine.evict(newer)
        assert engine.segment_info(newer).state is SegmentState.FREE
        after = device.crash(seed=seed)
        await engine.close(clean=False)
        engine = await open_engine(after)
        assert (await get(engine, (NS, key_of(0))))[0] is Status.MISS
        await engine.close()

    for seed in range(12):
        simloop.run(life(seed), seed)


def test_nor_where_its_group_failed_and_it_was_placed_again() -> None:
    async def life(seed: int) -> None:
        plan = FaultPlan(at={Fault.FLUSH_FAIL: 1})
        device = SimDevice(device_bytes(12), sleep=asyncio.sleep, seed=seed)
        engine = await open_engine(device)
        device.plan = plan
        slot = await stored(engine, 0)
        assert engine.stats.failed_groups == 1
        assert NS + key_of(0) in engine._table.doubtful
        for data in (b"new", b""):
            await engine.evict(int(engine.index.m_segment[slot]))
            if data:
                slot, future = put(engine, (NS, key_of(0)), data, stream=A)
                assert await future is Status.OK
        after = device.crash(seed=seed)
        await engine.close(clean=False)
        engine = await open_engine(after)
        assert (await get(engine, (NS, key_of(0))))[0] is Status.MISS
        await engine.close()

    for seed in range(12):
        simloop.run(life(seed), seed)


def test_a_damaged_copy_takes_nothing_with_it_that_is_durable_elsewhere() -> None:
    """The power failed before the segment was free of which it is a copy."""

    async def life() -> None:
        device = SimDevice(device_bytes(10), sleep=asyncio.sleep)
        engine = await open_engine(device)
        slots, older = await filled(engine)
        never: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        engine._writer.free = lambda _segment: never  # type: ignore[method-assign]
        evicting = asyncio.ensure_future(engine.evict(older, slots))
        while engine.stats.copied_blocks < len(slots):
            await asyncio.sleep(0.0001)
        newer, offset = (
            int(column[slots[0]]) for column in (engine.index.m_segment, engine.index.m_offset)
        )
        after = device.crash()
        evicting.cancel()
        await engine.close(clean=False)
        device, engine = after, await open_engine(after)
        assert engine.recovery.duplicates == COUNT
        device.poke(engine._superblock.segment_at(newer) + offset * BLOCK + 200, b"\xff")
        (gone,) = await engine.evict(newer, lambda live: live)
        assert gone.reason is RemoveReason.CORRUPT
        after = device.crash()
        await engine.close(clean=False)
        engine = await open_engine(after)
        assert await all_there(engine)
        await engine.close()

    simloop.run(life())


def test_no_name_is_in_doubt_when_its_segment_is_free() -> None:
    async def life() -> None:
        plan = FaultPlan()
        device = SimDevice(device_bytes(10), plan=plan, sleep=asyncio.sleep)
        engine = await open_engine(device)
        await failed_half_way(engine, plan, Fault.FLUSH_FAIL)
        for number in sorted(engine._table.shadowing):
            await engine.evict(number, lambda live: live)
        assert not engine._table.shadowing
        assert not engine._table.doubtful
        await engine.close()

    simloop.run(life())


def test_names_in_doubt_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space, "DOUBTFUL_MAX", 3)

    async def life() -> None:
        engine = await open_engine(SimDevice(device_bytes(10), sleep=asyncio.sleep))
        for first in (0, 2, 9):
            engine._table.doubt(key_of(first + number) for number in range(2))
        assert engine._table.doubtful == {key_of(number) for number in range(3)}
        await engine.close()

    simloop.run(life())
