"""Evictions that do not come to their end: what was durable before stays so, and served."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import simloop
from flashlab import (
    NAMESPACES,
    OPTIONS,
    SEGMENT,
    STREAMS,
    device_bytes,
    get,
    key_of,
    open_engine,
    put,
    stock_faults,
)

from entresol_daemon.flash import evict
from entresol_daemon.flash.device import BLOCK, Check, IoOp
from entresol_daemon.flash.engine import Engine, RemoveReason, SegmentState
from entresol_daemon.flash.evict import CARRIED_AT_ONCE_MAX, DROPPED_AT_ONCE_MAX
from entresol_daemon.flash.index import PENDING, Slots
from entresol_daemon.flash.model import APPEND_TRIES_MAX, EVICT_TRIES_MAX, Removed
from entresol_daemon.flash.sim import Fault, FaultPlan, SimDevice
from entresol_daemon.flash.tombstones import Tombstone, TombstoneKind
from entresol_proto.status import DeviceError, Status

NS, A = NAMESPACES[0], STREAMS[0]
COUNT = 5  # blocks; with a header and a footer less than a segment


def data_of(number: int) -> bytes:
    return bytes([number + 1]) * 5000


async def stored(engine: Engine, number: int) -> int:
    slot, future = put(engine, (NS, key_of(number)), data_of(number), stream=A)
    assert await future is Status.OK
    return slot


async def filled(engine: Engine) -> tuple[list[int], int]:
    """Durable blocks, and the one segment they are in."""
    slots = [await stored(engine, number) for number in range(COUNT)]
    (segment,) = {int(engine.index.m_segment[slot]) for slot in slots}
    return slots, segment


async def writes_again(engine: Engine) -> None:
    """By itself, after the device is well again."""
    async with asyncio.timeout(60):
        while engine.failed:
            await asyncio.sleep(0.1)


async def all_there(engine: Engine) -> bool:
    found = [await get(engine, (NS, key_of(number))) for number in range(COUNT)]
    return found == [(Status.OK, data_of(number)) for number in range(COUNT)]


def test_what_was_being_copied_when_writing_stopped_is_not_lost() -> None:
    """The device refuses writes in the middle of an eviction: the blocks that were to be kept are
    durable where they are, and stay there; they leave when it writes again."""

    async def life(kind: Fault) -> None:
        plan = FaultPlan()
        device = SimDevice(device_bytes(10), plan=plan, sleep=asyncio.sleep)
        engine = await open_engine(device)
        slots, segment = await filled(engine)
        tombstones = engine.stats.tombstones
        plan.at, plan.sticky = {kind: 1}, True
        for _ in range(3):
            assert await engine.evict(segment, slots) == []
            assert await all_there(engine)
            assert not stock_faults(engine), stock_faults(engine)
        assert engine.failed
        assert engine.segment_info(segment).live_blocks == COUNT
        plan.enabled = False
        await writes_again(engine)
        assert engine.stats.tombstones == tombstones
        assert await engine.evict(segment, slots) == []
        assert engine.segment_info(segment).state is SegmentState.FREE
        assert await all_there(engine)
        after = device.crash()
        await engine.close(clean=False)
        engine = await open_engine(after)
        assert await all_there(engine)
        await engine.close()

    for kind in (Fault.WRITE_EIO, Fault.ENOSPC, Fault.FLUSH_FAIL):
        simloop.run(life(kind))


def test_a_block_forgotten_after_its_copy_failed_stays_forgotten() -> None:
    """The failed copy may be on flash all the same, and it is the newer one."""

    async def life() -> None:
        plan = FaultPlan()
        device = SimDevice(device_bytes(10), plan=plan, sleep=asyncio.sleep)
        engine = await open_engine(device)
        slots, segment = await filled(engine)
        plan.at, plan.sticky = {Fault.FLUSH_FAIL: 1}, True
        assert await engine.evict(segment, slots) == []
        plan.enabled = False
        engine.remove(slots[0], RemoveReason.FORGOTTEN)
        await engine.barrier()
        engine.remove(slots[1], RemoveReason.FORGOTTEN)
        await stored(engine, 1)
        assert await engine.evict(segment, slots[2:]) == []
        after = device.crash()
        await engine.close(clean=False)
        engine = await open_engine(after)
        assert (await get(engine, (NS, key_of(0))))[0] is Status.MISS
        for number in range(1, COUNT):
            assert await get(engine, (NS, key_of(number))) == (Status.OK, data_of(number))
        await engine.close()

    simloop.run(life())


@pytest.mark.parametrize("forgotten", [False, True])
def test_an_evicted_block_that_is_forgotten_does_not_come_back(forgotten: bool) -> None:
    """Its record lies on flash until the segment is free, which may take as long as the device
    refuses copies. Without the forget it may come back: it is the block that was stored."""

    async def life() -> None:
        plan = FaultPlan()
        device = SimDevice(device_bytes(10), plan=plan, sleep=asyncio.sleep)
        engine = await open_engine(device)
        slots, segment = await filled(engine)
        plan.at, plan.sticky = {Fault.WRITE_EIO: 1}, True
        (gone,) = await engine.evict(segment, slots[1:])
        plan.enabled = False
        if forgotten:
            engine.bury_absent(NS, [gone.wire_key])
        await engine.barrier()
        after = device.crash()
        await engine.close(clean=False)
        engine = await open_engine(after)
        found = await get(engine, (NS, key_of(0)))
        assert found == ((Status.MISS, b"") if forgotten else (Status.OK, data_of(0)))
        # It stays away as long as the record may lie there, and no longer.
        assert await engine.evict(segment, lambda live: live) == []
        assert engine.segment_info(segment).state is SegmentState.FREE
        if forgotten:
            await stored(engine, 0)
        after = after.crash()
        await engine.close(clean=False)
        engine = await open_engine(after)
        assert await all_there(engine)
        before = engine.stats.tombstones
        engine.bury_absent(NS, [key_of(77)])
        assert engine.stats.tombstones == before
        await engine.close()

    simloop.run(life())


class FreedTooSoon(SimDevice):
    """Fails the first write of copies; looks whether FREE is written over blocks that are durable
    nowhere else."""

    engine: Engine
    slots: Sequence[int] = ()
    watched = -1  # offset of the segment they were in
    fails = 0
    too_soon = False

    async def write(self, ops: Sequence[IoOp]) -> None:
        if self.watched >= 0:
            index = self.engine.index
            away = any(index.m_flags[slot] & PENDING for slot in self.slots)
            self.too_soon |= away and any(op.offset_bytes == self.watched for op in ops)
            if self.fails:
                self.fails -= 1
                raise DeviceError("write fails", status=Status.IO_ERROR)
        await super().write(ops)


def test_a_segment_is_not_freed_before_the_copies_of_a_cancelled_eviction_are_durable() -> None:
    """A put makes room and its session ends in the middle of it. The next one finds a segment with
    nothing alive in it: but its blocks are not durable elsewhere yet."""

    async def life(fails: int) -> None:
        device = FreedTooSoon(device_bytes(10), sleep=asyncio.sleep)
        engine = device.engine = await open_engine(device)
        slots, segment = await filled(engine)
        device.slots, device.fails = slots, fails
        device.watched = engine._superblock.segment_at(segment)
        first = asyncio.ensure_future(engine.evict(segment, slots))
        while not all(engine.index.m_flags[slot] & PENDING for slot in slots):
            await asyncio.sleep(1e-6)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert first.cancelled()
        assert engine.segment_info(segment).live_blocks == 0
        await engine.evict(segment, slots)
        assert not device.too_soon
        assert await all_there(engine)
        assert engine.segment_info(segment).state is SegmentState.FREE
        after = device.crash()
        await engine.close(clean=False)
        engine = await open_engine(after)
        assert await all_there(engine)
        await engine.close()

    for fails in range(APPEND_TRIES_MAX + 1):
        simloop.run(life(fails))


def test_a_copy_does_not_make_damage_look_sound() -> None:
    """Gets that leave the hash to the host's tag must not be how damage gets a hash that fits."""

    async def life() -> None:
        device = SimDevice(device_bytes(10), sleep=asyncio.sleep)
        engine = await open_engine(device, replace(OPTIONS, verify_reads=False))
        slots, segment = await filled(engine)
        place = engine._superblock.segment_at(segment) + engine.index.m_offset[slots[1]] * BLOCK
        device.poke(place + 200, b"\xff")
        removed = await engine.evict(segment, slots)
        assert [(r.slot, r.reason) for r in removed] == [(slots[1], RemoveReason.CORRUPT)]
        assert await engine.scrub(slots) == []
        await engine.close()

    simloop.run(life())


def test_an_eviction_ends_although_copies_are_refused_for_ever() -> None:
    """Only copies are: then so many evictions later the segment is freed, and they are gone."""

    class NoCopies(SimDevice):
        refuses = b"\0"

        async def write(self, ops: Sequence[IoOp]) -> None:
            if any(self.refuses in bytes(op.view) for op in ops if op.view.nbytes > BLOCK):
                raise DeviceError("write fails", status=Status.IO_ERROR)
            await super().write(ops)

    async def life() -> None:
        device = NoCopies(device_bytes(30), sleep=asyncio.sleep)
        device.refuses = bytes(SEGMENT)  # of nothing yet
        engine = await open_engine(device)
        slots, segment = await filled(engine)
        device.refuses = data_of(0)
        told: list[Any] = []
        engine.listen(told.extend)
        for attempt in range(1, EVICT_TRIES_MAX + 1):
            assert not engine.failed
            removed = await engine.evict(segment, slots[:1])
            await stored(engine, 100 + attempt)  # which the device takes
            if attempt < EVICT_TRIES_MAX:
                assert (await get(engine, (NS, key_of(0))))[0] is Status.OK
        assert [(r.slot, r.reason) for r in removed] == [(slots[0], RemoveReason.IO_ERROR)]
        assert sum(r.wire_key == key_of(0) for r in told) == 1
        assert engine.segment_info(segment).state is SegmentState.FREE
        await engine.barrier()
        after = device.crash()
        await engine.close(clean=False)
        engine = await open_engine(after)
        assert (await get(engine, (NS, key_of(0))))[0] is Status.MISS
        await engine.close()

    simloop.run(life())


class Away(SimDevice):
    """A device that refuses all reads while it is told to."""

    away = False

    async def read(self, ops: Sequence[IoOp], check: Check | None = None) -> list[Status]:
        if self.away:
            await asyncio.sleep(1e-4)
            return [Status.IO_ERROR] * len(ops)
        return await super().read(ops, check)


async def with_tombstones(engine: Engine) -> int:
    """A sealed segment with live blocks and a removal that an older segment still needs."""
    slots, first = await filled(engine)
    engine._table.close(engine._table.segments[first])
    await stored(engine, 20)
    engine.remove(slots[0], RemoveReason.FORGOTTEN)
    await engine.barrier()
    (second,) = {n for n in range(30) if engine._table.segments[n].tombstone_offsets}
    assert second != first
    engine._table.close(engine._table.segments[second])
    return second


def test_a_short_outage_of_reads_costs_no_removal() -> None:
    async def life() -> None:
        device = Away(device_bytes(30), sleep=asyncio.sleep)
        engine = await open_engine(device)
        segment = await with_tombstones(engine)
        device.away = True
        for _ in range(3 * EVICT_TRIES_MAX):
            assert not await engine.evict(segment)
            await asyncio.sleep(0.01)
        assert segment in engine.stock.resting, "others are chosen first"
        assert not any(segment in shelf for shelf in engine.stock.sealed.values())
        assert (await get(engine, (NS, key_of(20))))[0] is Status.IO_ERROR, "nothing was dropped"
        device.away = False
        await asyncio.sleep(1)
        assert segment not in engine.stock.resting
        assert not stock_faults(engine)
        await engine.evict(segment)
        assert engine.segment_info(segment).state is SegmentState.FREE
        assert engine.stats.tombstones_lost == 0
        after = device.crash()
        await engine.close(clean=False)
        engine = await open_engine(after)
        assert (await get(engine, (NS, key_of(0))))[0] is Status.MISS
        assert (await get(engine, (NS, key_of(1))))[0] is Status.OK
        await engine.close()

    simloop.run(life())


def test_a_segment_whose_reads_are_refused_for_ever_is_freed_in_the_end() -> None:
    async def life() -> None:
        device = Away(device_bytes(30), sleep=asyncio.sleep)
        engine = await open_engine(device)
        segment = await with_tombstones(engine)
        device.away = True
        began = asyncio.get_running_loop().time()
        while engine.segment_info(segment).state is not SegmentState.FREE:
            await engine.evict(segment)
            await asyncio.sleep(0.05)
        assert 20 < asyncio.get_running_loop().time() - began < 60
        assert engine.stats.tombstones_lost == 1
        assert segment not in engine.stock.resting
        assert not stock_faults(engine)
        await engine.close(clean=False)

    simloop.run(life())


@pytest.mark.parametrize(("segments", "apart"), [(10, False), (40, True)])
def test_what_evictions_keep_lies_apart_where_there_are_segments(
    segments: int, apart: bool
) -> None:
    async def life() -> None:
        engine = await open_engine(SimDevice(device_bytes(segments), sleep=asyncio.sleep))
        index = engine.index

        async def sized(number: int, length: int) -> int:
            slot, future = put(engine, (NS, key_of(number)), bytes(length))
            assert await future is Status.OK
            return slot

        olds = []
        for victim in range(2):  # two full segments, of which a block each is kept
            slot = await sized(10 * victim, 20_000)
            await sized(10 * victim + 1, 30_000)
            olds.append((index.m_segment[slot], slot))
        new = await sized(99, 9_000)
        for number, slot in olds:
            await engine.evict(number, (slot,))
            assert engine.segment_info(number).state is SegmentState.FREE
        homes = {index.m_segment[slot] for _, slot in olds}
        assert (index.m_segment[new] in homes) is not apart
        assert len(homes) == 1 or not apart
        for slot in (*(slot for _, slot in olds), new):
            assert await get(engine, (NS, index.key_of(slot))) == (
                Status.OK, bytes(index.m_sealed_bytes[slot]),
            )  # fmt: skip
        await engine.close()

    simloop.run(life())


def test_others_use_the_loop_while_a_full_segment_is_let_go() -> None:
    """A thousand blocks were dropped in one go, which took 7 ms of everybody's loop. Until its turn
    each is served, and one that its owner forgets meanwhile is told of once."""
    count = 3 * DROPPED_AT_ONCE_MAX + 7
    options = replace(OPTIONS, segment_bytes=16 * SEGMENT)

    async def life() -> None:
        device = SimDevice(device_bytes(4, 16 * SEGMENT), sleep=asyncio.sleep)
        engine = await open_engine(device, options)
        slots = [put(engine, (NS, key_of(n)), b"x", stream=A)[0] for n in range(count)]
        await engine.barrier()
        (segment,) = {int(engine.index.m_segment[slot]) for slot in slots}
        begun = asyncio.Event()
        goes: list[int] = []
        gone: list[tuple[int, RemoveReason]] = []
        turned = asyncio.Event()

        def nothing(_live: Slots) -> list[int]:
            asyncio.get_running_loop().call_soon(turned.set)
            return []

        def told(removed: Sequence[Removed]) -> None:
            assert turned.is_set(), "others come between the choice of what goes and the first"
            begun.set()
            goes.append(len(removed))
            gone.extend((row.slot, row.reason) for row in removed)

        engine.listen(told)
        evicting = asyncio.ensure_future(engine.evict(segment, nothing))
        await begun.wait()
        last = slots[-1]
        assert engine.index.find(NS, key_of(count - 1)) == last, "others come in between"
        engine.remove(last, RemoveReason.FORGOTTEN)
        evicted = await evicting
        assert max(goes) <= DROPPED_AT_ONCE_MAX
        assert sorted(slot for slot, _ in gone) == sorted(slots)
        assert dict(gone)[last] is RemoveReason.FORGOTTEN
        assert {row.slot for row in evicted} == set(slots) - {last}
        assert engine.stats.evicted_blocks == count - 1
        assert engine.segment_info(segment).state is SegmentState.FREE
        await engine.close()

    simloop.run(life())


def test_others_use_the_loop_while_removals_are_carried_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A segment may hold a million: made ready in one go they kept the loop for ten seconds, and
    all of them waited in memory."""
    count = 10 * CARRIED_AT_ONCE_MAX
    monkeypatch.setattr(evict, "CARRIED_MAX", 4 * CARRIED_AT_ONCE_MAX)

    async def life() -> None:
        device = SimDevice(device_bytes(8), sleep=asyncio.sleep)
        engine = await open_engine(device)
        _, home = await filled(engine)
        engine._table.close(engine._table.segments[home])
        number, cover = engine._table.next_lsn, engine._table.segments[home].sequence
        names = [(NAMESPACES[1], key_of(n)) for n in range(count)]
        engine._writer.bury([Tombstone(TombstoneKind.BLOCK, *n, number(), cover) for n in names])
        await engine.barrier()
        (segment,) = [s.segment for s in engine.segments() if s.state is SegmentState.OPEN]
        at_once: list[int] = []
        waiting: list[int] = []
        bury = engine._writer.bury

        def told(tombstones: list[Tombstone]) -> None:
            at_once.append(len(tombstones))
            bury(tombstones)
            waiting.append(len(engine._writer.burying))

        monkeypatch.setattr(engine._writer, "bury", told)
        await engine.evict(segment)
        assert engine.segment_info(segment).state is SegmentState.FREE
        assert sum(at_once) == engine.stats.tombstones_carried == count
        assert max(at_once) <= CARRIED_AT_ONCE_MAX
        assert max(waiting) <= 4 * CARRIED_AT_ONCE_MAX
        assert await all_there(engine)
        await engine.close(clean=False)
        again = await open_engine(device.crash())
        assert again.recovery.tombstones == count
        await again.close()

    simloop.run(life())


def test_a_segments_blocks_are_told_in_the_order_of_their_places() -> None:
    """Also where a slot was freed and had another block of the same segment afterwards, whose
    place comes after that of younger slots."""
    options = replace(OPTIONS, segment_bytes=16 * SEGMENT)

    async def life() -> None:
        device = SimDevice(device_bytes(4, 16 * SEGMENT), sleep=asyncio.sleep)
        engine = await open_engine(device, options)
        slots = [put(engine, (NS, key_of(n)), b"x", stream=A)[0] for n in range(6)]
        await engine.barrier()
        (segment,) = {int(engine.index.m_segment[slot]) for slot in slots}
        assert engine.segment_slots(segment).tolist() == slots
        engine.remove(slots[1], RemoveReason.FORGOTTEN)
        engine.remove(slots[4], RemoveReason.FORGOTTEN)
        again = [put(engine, (NS, key_of(n)), b"y", stream=A)[0] for n in (6, 7)]
        assert sorted(again) == [slots[1], slots[4]], "their slots came back"
        found = engine.segment_slots(segment).tolist()
        assert found == [slots[0], slots[2], slots[3], slots[5], *again]
        places = [int(engine.index.m_offset[slot]) for slot in found]
        assert places == sorted(places)
        await engine.close()

    simloop.run(life())


def test_an_eviction_does_not_wait_for_reads_that_never_cease() -> None:
    """Of a segment with a record on its way it waited for them, and they go on until it is done."""

    async def life() -> None:
        engine = await open_engine(SimDevice(device_bytes(10), sleep=asyncio.sleep))
        slots, segment = await filled(engine)

        async def read_on(after_s: float) -> None:
            await asyncio.sleep(after_s)
            while engine.index.is_live(slots[0]):
                await get(engine, (NS, key_of(0)))

        readers = [asyncio.ensure_future(read_on(n * 0.00005)) for n in range(8)]
        await asyncio.sleep(0.01)
        put(engine, (NS, key_of(COUNT)), b"on its way", stream=A)
        assert engine._table.segments[segment].unflushed
        async with asyncio.timeout(1):
            await engine.evict(segment)
        assert engine.segment_info(segment).state is SegmentState.FREE
        await asyncio.gather(*readers)
        await engine.close(clean=False)

    simloop.run(life())
