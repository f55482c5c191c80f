"""The engine's promises one by one, on a perfect or scripted device."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import simloop
from flashlab import (
    FORGOTTEN,
    NAMESPACES,
    OPTIONS,
    SEGMENT,
    STREAMS,
    device_bytes,
    drop_namespace,
    get,
    key_of,
    open_engine,
    put,
)

from entresol_daemon.flash import checkpoint
from entresol_daemon.flash.device import BLOCK, Check, aligned_buffer
from entresol_daemon.flash.engine import (
    RECORD_HEADER_BYTES,
    Engine,
    EngineOptions,
    Record,
    RecoveryKind,
    RemoveReason,
    SegmentState,
    extent_bytes,
)
from entresol_daemon.flash.index import ABSENT, PENDING
from entresol_daemon.flash.sim import Fault, FaultPlan, SimDevice
from entresol_proto.status import ConfigError, DeviceError, FormatError, Status

NS = NAMESPACES[0]
A, B = STREAMS


def play(life: Coroutine[Any, Any, None]) -> None:
    simloop.run(life)


async def fresh(segments: int = 10, **kwargs: Any) -> tuple[SimDevice, Engine]:
    device = SimDevice(device_bytes(segments), sleep=asyncio.sleep)
    return device, await open_engine(device, replace(OPTIONS, **kwargs))


async def stored(engine: Engine, number: int, data: bytes = b"data", stream: bytes = A) -> int:
    slot, future = put(engine, (NS, key_of(number)), data, stream=stream)
    assert await future is Status.OK
    return slot


def state(engine: Engine, segment: int) -> SegmentState:
    return engine.segment_info(segment).state


def test_a_put_is_visible_at_once_and_durable_later() -> None:
    async def life() -> None:
        _, engine = await fresh()
        slot, future = put(engine, (NS, key_of(1)), b"early")
        assert engine.index.find(NS, key_of(1)) == slot
        assert engine.index.m_flags[slot] & PENDING
        assert await get(engine, (NS, key_of(1))) == (Status.OK, b"early")
        assert not future.done()
        assert await future is Status.OK
        assert not engine.index.m_flags[slot] & PENDING
        assert await get(engine, (NS, key_of(1))) == (Status.OK, b"early")
        assert engine.index.m_position[slot] == 5
        assert engine.index.m_plain_bytes[slot] == 10
        await engine.close()

    play(life())


def test_the_engines_header_does_not_stay_in_the_callers_memory() -> None:
    async def life() -> None:
        _, engine = await fresh()
        extent = aligned_buffer(extent_bytes(9))
        extent[RECORD_HEADER_BYTES : RECORD_HEADER_BYTES + 9] = b"sealed..."
        slot, future = engine.append(A, Record(NS, key_of(1), extent, 9, 9, 0))
        assert await future is Status.OK
        assert not any(extent[:RECORD_HEADER_BYTES])
        into = aligned_buffer(extent_bytes(9))
        assert await engine.read([(slot, into)]) == [Status.OK]
        assert not any(into[:RECORD_HEADER_BYTES])
        assert bytes(into) == bytes(extent)
        await engine.close()

    play(life())


def test_many_appends_share_one_flush() -> None:
    async def life() -> None:
        _, engine = await fresh(group_commit_bytes=1 << 20)
        before = engine.stats.flushes
        await asyncio.gather(*(stored(engine, n) for n in range(10)))
        assert engine.stats.flushes == before + 1
        await engine.close()

    play(life())


def test_enough_bytes_do_not_wait_for_the_timer() -> None:
    async def life() -> None:
        _, engine = await fresh(group_commit_bytes=8192, group_commit_ns=10**12)
        began = asyncio.get_running_loop().time()
        await asyncio.gather(stored(engine, 1), stored(engine, 2))
        assert asyncio.get_running_loop().time() - began < 1
        await engine.close()

    play(life())


def test_refusals() -> None:
    async def life() -> None:
        _, engine = await fresh(segments=6, blocks_max=3)
        limit = engine.sealed_bytes_max
        for number, (size, expected) in enumerate(
            [(limit, Status.OK), (limit + 1, Status.TOO_LARGE), (100, Status.OK)]
        ):
            slot, future = put(engine, (NS, key_of(number)), bytes(size))
            assert await future is expected
            assert (slot == -1) == (expected is not Status.OK)
        assert not engine.room_for(A, extent_bytes(limit + 1))
        await stored(engine, 7)
        assert not engine.room_for(A, BLOCK), "the index is full"
        slot, future = put(engine, (NS, key_of(8)), b"x")
        assert (slot, await future) == (-1, Status.NO_SPACE)
        engine.remove(engine.index.find(NS, key_of(0)), FORGOTTEN)
        with pytest.raises(AssertionError, match="duplicate"):
            put(engine, (NS, key_of(7)), b"again")
        await engine.close()
        slot, future = put(engine, (NS, key_of(9)), b"x")
        assert (slot, await future) == (-1, Status.DRAINING)

    play(life())


def test_user_appends_leave_the_reserve_and_room_for_tells() -> None:
    async def life() -> None:
        _, engine = await fresh(segments=8, free_segments_min=3)
        number = 0
        while engine.room_for(A, extent_bytes(20_000)):
            await stored(engine, number, bytes(20_000))
            number += 1
        assert engine.free_segments == 3
        slot, future = put(engine, (NS, key_of(number)), bytes(20_000))
        assert (slot, await future) == (-1, Status.NO_SPACE)
        oldest = min(
            (i for i in engine.segments() if i.state is SegmentState.SEALED),
            key=lambda i: i.sequence,
        )
        await engine.evict(oldest.segment)
        assert engine.room_for(A, extent_bytes(20_000))
        await engine.close()

    play(life())


def test_streams_do_not_share_segments_and_the_idlest_is_closed() -> None:
    async def life() -> None:
        _, engine = await fresh(segments=12, open_segments_max=2)
        a = engine.index.m_segment[await stored(engine, 1, stream=A)]
        b = engine.index.m_segment[await stored(engine, 2, stream=B)]
        assert a != b
        assert engine.segment_info(a).stream == A
        await stored(engine, 3, stream=A)
        await stored(engine, 4, stream=b"third-tenant-str")
        assert (state(engine, a), state(engine, b)) == (SegmentState.OPEN, SegmentState.SEALED)
        await engine.close()

    play(life())


def test_evict_keeps_what_it_is_told_in_the_same_slots() -> None:
    async def life() -> None:
        _, engine = await fresh()
        slots = [await stored(engine, n, bytes([n]) * 5000) for n in range(6)]
        segment = engine.index.m_segment[slots[0]]
        touched = engine.index.m_last_touch[slots[4]]
        asked: list[int] = []

        def keep(live: Any) -> Any:
            asked.extend(live.tolist())
            return live[[1, 4]]

        removed = await engine.evict(segment, keep)
        assert asked == slots
        assert state(engine, segment) is SegmentState.FREE
        assert [r.wire_key for r in removed] == [key_of(n) for n in (0, 2, 3, 5)]
        assert {r.reason for r in removed} == {RemoveReason.EVICTED}
        for n in (1, 4):
            assert engine.index.find(NS, key_of(n)) == slots[n]
            assert await get(engine, (NS, key_of(n))) == (Status.OK, bytes([n]) * 5000)
        assert engine.index.m_last_touch[slots[4]] == touched
        assert engine.stats.copied_blocks == 2
        await engine.close()

    play(life())


def test_evicting_nothing_twice_and_unknown_slots() -> None:
    async def life() -> None:
        _, engine = await fresh()
        slot = await stored(engine, 1)
        segment = engine.index.m_segment[slot]
        assert len(await engine.evict(segment, [slot + 1, 99])) == 1
        assert await engine.evict(segment, []) == []
        await engine.close()

    play(life())


def test_an_eviction_waits_for_reads_in_flight() -> None:
    class SlowReads(SimDevice):
        gate: asyncio.Event | None = None

        async def read(self, ops: Any, check: Check | None = None) -> list[Status]:
            if self.gate is not None:
                await self.gate.wait()
            return await super().read(ops, check)

    async def life() -> None:
        device = SlowReads(device_bytes(10))
        engine = await open_engine(device)
        slot = await stored(engine, 1, b"slow")
        device.gate = asyncio.Event()
        reading = asyncio.ensure_future(get(engine, (NS, key_of(1))))
        await asyncio.sleep(0.001)
        evicting = asyncio.ensure_future(engine.evict(engine.index.m_segment[slot]))
        await asyncio.sleep(1)
        assert engine.index.find(NS, key_of(1)) == ABSENT
        assert not evicting.done(), "the segment may not be reused under a reader"
        device.gate.set()
        assert await reading == (Status.OK, b"slow")
        assert len(await evicting) == 1
        await engine.close()

    play(life())


def test_touch_orders_blocks_and_segments() -> None:
    async def life() -> None:
        _, engine = await fresh()
        first = await stored(engine, 1, stream=A)
        second = await stored(engine, 2, stream=B)
        engine.touch([second, first])
        engine.touch([])
        one, two = (engine.segment_info(engine.index.m_segment[s]) for s in (first, second))
        assert one.last_touch > two.last_touch
        infos = {i.segment: i for i in engine.segments()}
        assert infos[one.segment].oldest_touch == engine.index.m_last_touch[first]
        await engine.close()

    play(life())


def test_segment_accounts() -> None:
    async def life() -> None:
        _, engine = await fresh()
        slots = [await stored(engine, n, bytes(5000)) for n in range(3)]
        info = engine.segment_info(engine.index.m_segment[slots[0]])
        assert (info.blocks, info.live_blocks, info.live_bytes) == (3, 3, 3 * 8192)
        engine.remove(slots[1], FORGOTTEN)
        info = engine.segment_info(info.segment)
        assert (info.blocks, info.live_blocks, info.live_bytes) == (3, 2, 2 * 8192)
        assert engine.segment_slots(info.segment).tolist() == [slots[0], slots[2]]
        await engine.close()

    play(life())


def test_read_heads() -> None:
    async def life() -> None:
        device, engine = await fresh()
        a, b = await stored(engine, 1, b"one"), await stored(engine, 2, b"two" * 3000)
        slot, future = put(engine, (NS, key_of(3)), b"on its way")
        heads = await engine.read_heads([a, b, slot, 77])
        assert heads[0][RECORD_HEADER_BYTES : RECORD_HEADER_BYTES + 3] == b"one"
        assert heads[1][RECORD_HEADER_BYTES:].startswith(b"twotwo")
        assert heads[2][RECORD_HEADER_BYTES:].startswith(b"on its way")
        assert heads[3] == b""
        assert len(heads[0]) == BLOCK
        await future
        place = engine._superblock.segment_at(engine.index.m_segment[a])
        device.poke(place + engine.index.m_offset[a] * BLOCK + 20, b"\xee")
        assert await engine.read_heads([a]) == [b""]
        await engine.close()

    play(life())


def test_removed_blocks_are_misses_and_their_slots_are_not_confused() -> None:
    async def life() -> None:
        _, engine = await fresh()
        slot = await stored(engine, 1, b"aaaa")
        gone = engine.remove(slot, RemoveReason.CORRUPT)
        assert (gone.wire_key, gone.slot, gone.reason) == (key_of(1), slot, RemoveReason.CORRUPT)
        extent = aligned_buffer(BLOCK)
        assert await engine.read([(slot, extent), (55, extent)]) == [Status.MISS, Status.MISS]
        await engine.barrier()
        assert engine.stats.tombstones == 1
        await engine.close()

    play(life())


def test_a_block_removed_while_it_is_written_does_not_disturb() -> None:
    async def life() -> None:
        device, engine = await fresh()
        slot, future = put(engine, (NS, key_of(1)), b"v1")
        engine.remove(slot, FORGOTTEN)
        again, second = put(engine, (NS, key_of(1)), b"v2")
        assert again == slot
        assert await future is Status.OK
        assert await second is Status.OK
        assert await get(engine, (NS, key_of(1))) == (Status.OK, b"v2")
        after = await open_engine(device.crash())
        assert await get(after, (NS, key_of(1))) == (Status.OK, b"v2")
        await after.close()
        await engine.close(clean=False)

    play(life())


def test_dropping_a_namespace_spares_the_others_and_later_blocks() -> None:
    async def life() -> None:
        device, engine = await fresh()
        for number in range(5):
            _, future = put(engine, (NAMESPACES[0], key_of(number)), b"gone")
            _, future = put(engine, (NAMESPACES[1], key_of(number)), b"kept")
            assert await future is Status.OK
        removed = drop_namespace(engine, NAMESPACES[0])
        assert {r.reason for r in removed} == {RemoveReason.NAMESPACE_DROPPED}
        assert len(removed) == 5
        _, future = put(engine, (NAMESPACES[0], key_of(9)), b"later")
        await future
        await engine.barrier()
        after = await open_engine(device.crash())
        assert after.index.namespaces() == {NAMESPACES[1]: 5, NAMESPACES[0]: 1}
        assert await get(after, (NAMESPACES[0], key_of(9))) == (Status.OK, b"later")
        await after.close()
        await engine.close(clean=False)

    play(life())


def test_a_copy_left_by_an_interrupted_eviction_cannot_come_back() -> None:
    """The eviction copied a block and the power failed before its segment was free. Then the block
    is removed, the copy's segment freed, and the tombstone's segment freed."""

    async def life() -> None:
        device = SimDevice(device_bytes(10), keep_log=True)
        engine = await open_engine(device)
        slot = await stored(engine, 1, b"secret")
        old = engine.index.m_segment[slot]
        copied: list[bytes] = []

        async def snapshot() -> None:
            while engine.index.m_segment[slot] == old or engine.index.m_flags[slot] & PENDING:
                await asyncio.sleep(0)
            copied.append(device.image())

        watcher = asyncio.ensure_future(snapshot())
        await engine.evict(old, [slot])
        await watcher
        await engine.close(clean=False)

        after = SimDevice(device.size_bytes, image=copied[0])
        engine = await open_engine(after)
        assert engine.recovery.duplicates == 1
        slot = engine.index.find(NS, key_of(1))
        copy = engine.index.m_segment[slot]
        assert copy != old
        engine.remove(slot, FORGOTTEN)
        await stored(engine, 2, b"other", stream=B)
        await engine.barrier()
        homes = [i.segment for i in engine.segments() if i.state is SegmentState.OPEN]
        for segment in (copy, *homes):
            await engine.evict(segment)
        assert engine.stats.tombstones_carried >= 1
        reborn = await open_engine(after.crash())
        assert (await get(reborn, (NS, key_of(1))))[0] is Status.MISS
        await reborn.close()
        await engine.close(clean=False)

    play(life())


def test_a_copy_in_a_segment_that_is_being_evicted_cannot_come_back() -> None:
    """As above without a crash in between: a reader holds the old segment back meanwhile."""

    async def life() -> None:
        device = SimDevice(device_bytes(10))
        engine = await open_engine(device)
        slot = await stored(engine, 1, b"secret")
        old = engine._table.segments[engine.index.m_segment[slot]]
        old.readers += 1
        evicting = asyncio.ensure_future(engine.evict(old.index, [slot]))
        while engine.index.m_segment[slot] == old.index or engine.index.m_flags[slot] & PENDING:
            await asyncio.sleep(0.001)
        copy = engine.index.m_segment[slot]
        engine.remove(slot, FORGOTTEN)
        await stored(engine, 2, b"other", stream=B)
        await engine.barrier()
        homes = [i.segment for i in engine.segments() if i.state is SegmentState.OPEN]
        for segment in dict.fromkeys((copy, *homes)):
            await engine.evict(segment)
        reborn = await open_engine(device.crash())
        assert (await get(reborn, (NS, key_of(1))))[0] is Status.MISS
        await reborn.close()
        old.readers -= 1
        old.changed()
        await engine.close(clean=False)
        await evicting

    play(life())


def test_tombstones_are_dropped_when_nothing_needs_them() -> None:
    async def life() -> None:
        _, engine = await fresh()
        slot = await stored(engine, 1, stream=A)
        await stored(engine, 2, stream=B)
        covered = engine.index.m_segment[slot]
        engine.remove(slot, FORGOTTEN)
        await engine.barrier()
        home = next(s for s in engine._table.segments if s.tombstone_offsets)
        if home.index != covered:
            await engine.evict(covered)
        carried = engine.stats.tombstones_carried
        await engine.evict(home.index)
        assert engine.stats.tombstones_carried == carried
        assert state(engine, home.index) is SegmentState.FREE
        await engine.close()

    play(life())


def test_corrupt_kept_blocks_are_removed_by_name() -> None:
    async def life() -> None:
        device, engine = await fresh()
        slots = [await stored(engine, n, bytes([n + 1]) * 3000) for n in range(3)]
        segment = engine.index.m_segment[slots[0]]
        place = engine._superblock.segment_at(segment) + engine.index.m_offset[slots[1]] * BLOCK
        device.poke(place + 200, b"\xff")
        removed = await engine.evict(segment, slots)
        assert [(r.slot, r.reason) for r in removed] == [(slots[1], RemoveReason.CORRUPT)]
        await engine.close()

    play(life())


def test_a_transient_wrong_answer_is_asked_again() -> None:
    async def life() -> None:
        plan = FaultPlan()
        device = SimDevice(device_bytes(10), plan=plan)
        engine = await open_engine(device)
        await stored(engine, 1, b"right")
        plan.at = {Fault.MISDIRECTED_READ: 1}
        assert await get(engine, (NS, key_of(1))) == (Status.OK, b"right")
        assert engine.stats.read_retries == 1
        assert engine.stats.corrupt_reads == 0
        await engine.close()

    play(life())


def test_a_block_stored_anew_while_a_read_is_repeated_is_not_mistaken() -> None:
    """The first answer is wrong; before it is asked again somebody else has dropped the block, and
    its host has put it again, longer: into the very slot that became free."""

    class Between(SimDevice):
        meanwhile: Any = None

        async def read(self, ops: Any, check: Check | None = None) -> list[Status]:
            statuses = await super().read(ops, check)
            if self.meanwhile is not None:
                self.meanwhile, work = None, self.meanwhile
                await work()
            return statuses

    async def life() -> None:
        plan = FaultPlan()
        device = Between(device_bytes(10), plan=plan, sleep=asyncio.sleep)
        engine = await open_engine(device)
        slot = await stored(engine, 1, b"short")

        async def meanwhile() -> None:
            engine.remove(slot, FORGOTTEN)
            assert await stored(engine, 1, bytes(9000)) == slot

        device.meanwhile, plan.at = meanwhile, {Fault.MISDIRECTED_READ: 1}
        into = aligned_buffer(extent_bytes(5))
        assert await engine.read([(slot, into)]) == [Status.MISS]
        assert await get(engine, (NS, key_of(1))) == (Status.OK, bytes(9000))
        await engine.close()

    play(life())


def test_a_scrub_finds_every_planted_error_and_nothing_else() -> None:
    async def life() -> None:
        device, engine = await fresh(segments=20)
        slots = [await stored(engine, n, bytes([n]) * 4500) for n in range(60)]
        planted = set()
        for slot in slots[::3]:
            place = engine._superblock.segment_at(engine.index.m_segment[slot])
            place += engine.index.m_offset[slot] * BLOCK + 96 + slot * 70 % 4500
            device.poke(place, bytes([device.image_at(place, 1)[0] ^ 4]))
            planted.add((slot, Status.CORRUPT))
        found = []
        for info in engine.segments():
            found += await engine.scrub(engine.segment_slots(info.segment))
        assert len(found) == 20
        assert set(found) == planted
        await engine.close()

    play(life())


def test_closing_waits_for_an_eviction_and_counts_what_it_moved(tmp_path: Path) -> None:
    async def life() -> None:
        options = with_checkpoint(tmp_path / "index.arrow")
        device = SimDevice(device_bytes(10), sleep=asyncio.sleep)
        engine = await open_engine(device, options)
        slots = [await stored(engine, n, bytes([n]) * 5000) for n in range(6)]
        evicting = asyncio.ensure_future(engine.evict(0, slots[:3]))
        await asyncio.sleep(0)
        await engine.close()
        assert len(await evicting) == 3
        again = await open_engine(device, options)
        assert again.recovery.kind is RecoveryKind.CHECKPOINT
        for n in range(3):
            assert await get(again, (NS, key_of(n))) == (Status.OK, bytes([n]) * 5000)
        assert len(again.index) == 3
        await again.close()

    play(life())


def test_a_removal_during_the_close_spoils_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def life() -> None:
        options = with_checkpoint(tmp_path / "index.arrow")
        device = SimDevice(device_bytes(10))
        engine = await open_engine(device, options)
        slot = await stored(engine, 1)
        real = checkpoint.save

        def save(*args: Any) -> bytes:
            engine.remove(slot, FORGOTTEN)
            return real(*args)

        monkeypatch.setattr(checkpoint, "save", save)
        await engine.close()
        again = await open_engine(device, options)
        assert again.recovery.kind is RecoveryKind.FOOTERS
        await again.close(clean=False)

    play(life())


def test_a_stalled_barrier_says_so_and_an_eviction_helps() -> None:
    async def life() -> None:
        _, engine = await fresh(segments=6, free_segments_min=2)
        number = 0
        while engine.room_for(A, BLOCK):
            await stored(engine, number, bytes(3000))
            number += 1
        engine._table.free.clear()  # as after crashes at the worst moments
        slot = engine.index.find(NS, key_of(0))
        for segment in list(engine._table.open.values()):
            engine._table.close(segment)
        engine.remove(slot, FORGOTTEN)
        with pytest.raises(DeviceError) as caught:
            await engine.barrier()
        assert caught.value.status is Status.NO_SPACE
        await engine.evict(1)
        await engine.barrier()
        await engine.close(clean=False)

    play(life())


# -- opening and closing


def with_checkpoint(path: Path) -> EngineOptions:
    return replace(OPTIONS, checkpoint_path=path)


def test_a_clean_close_is_reopened_from_the_checkpoint(tmp_path: Path) -> None:
    async def life() -> None:
        options = with_checkpoint(tmp_path / "index.arrow")
        device = SimDevice(device_bytes(12))
        engine = await open_engine(device, options)
        slots = [await stored(engine, n, bytes([n]) * 4000) for n in range(30)]
        engine.touch([slots[3]])
        engine.remove(slots[5], FORGOTTEN)
        before = {i.segment: i for i in engine.segments() if i.live_blocks}
        await engine.close()
        again = await open_engine(device, options)
        assert again.recovery.kind is RecoveryKind.CHECKPOINT
        assert again.recovery.blocks == 29
        assert again.recovery.segments_scanned == 0
        for n in range(30):
            expected = (Status.MISS, b"") if n == 5 else (Status.OK, bytes([n]) * 4000)
            assert await get(again, (NS, key_of(n))) == expected
        latest = max(again.index.live_slots().tolist(), key=lambda s: again.index.m_last_touch[s])
        assert again.index.key_of(latest) == key_of(3)
        for number, info in before.items():
            now = again.segment_info(number)
            assert (now.stream, now.sequence, now.live_blocks, now.live_bytes) == (
                info.stream, info.sequence, info.live_blocks, info.live_bytes,
            )  # fmt: skip
        assert state(again, next(iter(before))) is SegmentState.SEALED
        written = {number: again.segment_info(number).used_bytes for number in before}
        await again.close(clean=False)
        third = await open_engine(device, options)
        assert third.recovery.kind is RecoveryKind.FOOTERS, "a stale checkpoint must not be used"
        assert third.recovery.checkpoint_refused
        assert len(third.index) == 29
        assert {number: third.segment_info(number).used_bytes for number in before} == written
        await third.close()

    play(life())


def test_an_empty_engine_makes_a_checkpoint_too(tmp_path: Path) -> None:
    async def life() -> None:
        options = with_checkpoint(tmp_path / "index.arrow")
        device = SimDevice(device_bytes(12))
        await (await open_engine(device, options)).close()
        engine = await open_engine(device, options)
        assert engine.recovery.kind is RecoveryKind.CHECKPOINT
        await stored(engine, 1)
        await engine.close()

    play(life())


@pytest.mark.parametrize("damage", ["missing", "short", "bit", "foreign", "old"])
def test_a_checkpoint_that_is_not_the_one_is_refused(tmp_path: Path, damage: str) -> None:
    async def life() -> None:
        path = tmp_path / "index.arrow"
        options = with_checkpoint(path)
        device = SimDevice(device_bytes(12))
        engine = await open_engine(device, options)
        await stored(engine, 1, b"one")
        await engine.close()
        old = path.read_bytes()
        engine = await open_engine(device, options)
        await stored(engine, 2, b"two")
        await engine.close()
        raw = bytearray(path.read_bytes())
        if damage == "missing":
            path.unlink()
        elif damage == "short":
            path.write_bytes(raw[:-1])
        elif damage == "bit":
            raw[len(raw) // 2] ^= 1
            path.write_bytes(raw)
        elif damage == "foreign":
            path.write_bytes(b"x" * len(raw))
        else:
            path.write_bytes(old)
        engine = await open_engine(device, options)
        assert engine.recovery.kind is RecoveryKind.FOOTERS
        assert engine.recovery.checkpoint_refused
        assert await get(engine, (NS, key_of(2))) == (Status.OK, b"two")
        await engine.close()

    play(life())


def test_a_checkpoint_is_refused_when_a_header_disagrees(tmp_path: Path) -> None:
    async def life() -> None:
        options = with_checkpoint(tmp_path / "index.arrow")
        device = SimDevice(device_bytes(12))
        engine = await open_engine(device, options)
        slot = await stored(engine, 1, b"one")
        at = engine._superblock.segment_at(engine.index.m_segment[slot])
        await engine.close()
        device.poke(at + 40, b"\x99")
        engine = await open_engine(device, options)
        assert "not the one of the checkpoint" in engine.recovery.checkpoint_refused
        assert await get(engine, (NS, key_of(1))) == (Status.OK, b"one")
        await engine.close()

    play(life())


def test_more_blocks_than_the_index_holds_keeps_the_newest() -> None:
    async def life() -> None:
        device, engine = await fresh()
        for n in range(20):
            await stored(engine, n)
        await engine.close()
        small = await open_engine(device, replace(OPTIONS, blocks_max=5))
        assert small.recovery.blocks_dropped == 15
        found = [n for n in range(20) if small.index.find(NS, key_of(n)) != ABSENT]
        assert found == list(range(15, 20))
        await small.close()

    play(life())


def test_reopening_with_other_segment_bytes_keeps_the_files() -> None:
    async def life() -> None:
        device, engine = await fresh()
        await stored(engine, 1)
        await engine.close()
        engine = await open_engine(device, replace(OPTIONS, segment_bytes=2 * SEGMENT))
        assert engine.segment_bytes == SEGMENT
        assert len(engine.index) == 1
        await engine.close()

    play(life())


def test_a_shorter_device_and_a_foreign_one_are_refused() -> None:
    async def life() -> None:
        device, engine = await fresh()
        await engine.close()
        size = device_bytes(6)
        with pytest.raises(FormatError, match="cut short"):
            await open_engine(SimDevice(size, image=device.image()[:size]))
        foreign = SimDevice(size, image=b"\x7fELF" * (size // 4))
        with pytest.raises(FormatError, match=rf"^{foreign.name}: not an Entresol data file"):
            await open_engine(foreign)
        assert foreign.image() == b"\x7fELF" * (size // 4), "a foreign device is never written"
        with pytest.raises(DeviceError, match="has room for 2 segments"):
            await open_engine(SimDevice(device_bytes(2)))
        with pytest.raises(DeviceError, match="smaller than"):
            await open_engine(SimDevice(BLOCK))

    play(life())


def test_a_device_that_grew_still_opens() -> None:
    async def life() -> None:
        device, engine = await fresh()
        await stored(engine, 1, b"kept")
        await engine.close()
        grown = SimDevice(
            device.size_bytes + 5 * SEGMENT, image=device.image() + bytes(5 * SEGMENT)
        )
        engine = await open_engine(grown)
        assert await get(engine, (NS, key_of(1))) == (Status.OK, b"kept")
        await engine.close()

    play(life())


def test_closing_uncleanly_ends_pending_futures() -> None:
    async def life() -> None:
        _, engine = await fresh(group_commit_ns=10**12)
        _, future = put(engine, (NS, key_of(1)), b"x")
        await engine.close(clean=False)
        assert await future is Status.IO_ERROR
        await engine.close()

    play(life())


def test_options_that_contradict_themselves_are_refused() -> None:
    for wrong in (
        {"segment_bytes": 1000},
        {"segment_bytes": 64 * 1024 + 1},
        {"segment_bytes": 2 << 30},
        {"blocks_max": 0},
        {"free_segments_min": 0},
        {"open_segments_max": 0},
        {"group_commit_bytes": 1},
        {"group_commit_ns": -1},
    ):
        with pytest.raises(ConfigError):
            replace(OPTIONS, **wrong)  # type: ignore[arg-type]
