"""What a failed flush left readable, and a restart found, is on flash for good, or was not found.

The device is one that drops what a failed flush did not write, and shows it all the same until the
power fails: no later flush saves it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import simloop
from flashlab import NAMESPACES, OPTIONS, STREAMS, device_bytes, get, key_of, open_engine, put

from entresol_daemon.flash.device import BLOCK, IoOp, aligned_buffer
from entresol_daemon.flash.engine import Engine, RecoveryKind, RemoveReason, SegmentState
from entresol_daemon.flash.group import takes_writes
from entresol_daemon.flash.renewing import TRIES_MAX, renew_records
from entresol_daemon.flash.segment import HeaderState, SegmentHeader, decode_header, encode_header
from entresol_daemon.flash.sim import Fault, FaultPlan, SimDevice
from entresol_proto.status import Status

NS = NAMESPACES[0]
KEYS = [key_of(n) for n in range(6)]


class Forgetful(SimDevice):
    """Drops all of what a flush was to save when it fails, not half of it."""

    async def flush(self) -> None:
        failed = self.plan.injected.get(Fault.FLUSH_FAIL, 0)
        try:
            await super().flush()
        finally:
            if self.plan.injected.get(Fault.FLUSH_FAIL, 0) > failed:
                self._dropped |= self._dirty


def play(life: Coroutine[Any, Any, None]) -> None:
    simloop.run(life)


def fail_next(device: SimDevice, fault: Fault) -> None:
    device.plan = FaultPlan(at={fault: 1})


async def written_and_dropped(device: SimDevice) -> None:
    """A life whose only flush of blocks fails, and which ends there."""
    engine = await open_engine(device)
    futures = [put(engine, (NS, key), b"content of " + key)[1] for key in KEYS]
    fail_next(device, Fault.FLUSH_FAIL)
    while not engine.stats.failed_groups:
        await asyncio.sleep(0.0005)
    await engine.close(clean=False)
    assert {await future for future in futures} == {Status.IO_ERROR}
    device.plan = FaultPlan()


async def believed(engine: Engine) -> list[bytes]:
    found = [key for key in KEYS if engine.index.find(NS, key) >= 0]
    for key in found:
        assert await get(engine, (NS, key)) == (Status.OK, b"content of " + key)
    return found


@pytest.mark.parametrize("pause_s", [0.0, 1.0])
def test_blocks_that_a_restart_found_outlive_a_power_failure(pause_s: float) -> None:
    async def life() -> None:
        device = Forgetful(device_bytes(10), sleep=asyncio.sleep)
        await written_and_dropped(device)
        engine = await open_engine(device, seed=1)
        found = await believed(engine)
        assert found, "nothing was readable: this test shows nothing"
        await asyncio.sleep(pause_s)  # 0: before there is a footer
        await engine.close(clean=False)
        again = await open_engine(device.crash(), seed=2)
        assert await believed(again) == found
        assert again.recovery.records_damaged == 0
        await again.close()

    play(life())


def test_a_segment_that_a_restart_found_free_stays_so() -> None:
    async def life() -> None:
        device = Forgetful(device_bytes(10), sleep=asyncio.sleep)
        engine = await open_engine(device)
        slot, future = put(engine, (NS, KEYS[0]), b"content of " + KEYS[0])
        assert await future is Status.OK
        number = engine.index.m_segment[slot]
        engine.remove(slot, RemoveReason.FORGOTTEN)
        await engine.barrier()
        fail_next(device, Fault.FLUSH_FAIL)
        eviction = asyncio.ensure_future(engine.evict(number, ()))
        while engine.segment_info(number).state is not SegmentState.FREEING:
            await asyncio.sleep(0.0005)
        while Fault.FLUSH_FAIL not in device.plan.injected:
            await asyncio.sleep(0.0005)
        await engine.close(clean=False)
        eviction.cancel()
        await asyncio.wait({eviction})
        device.plan = FaultPlan()
        again = await open_engine(device, seed=1)
        assert again.segment_info(number).state is SegmentState.FREE, "nothing is shown here"
        await again.close(clean=False)
        last = await open_engine(device.crash(), seed=2)
        assert last.segment_info(number).state is SegmentState.FREE
        await last.close()

    play(life())


def test_a_segment_that_a_restart_found_free_is_so_at_both_ends() -> None:
    """Else its old trailer is there again after a power failure, and one lost bit of the header
    makes it the truth, when what was forgotten in it was let go with the segment."""

    async def life() -> None:
        device = Forgetful(device_bytes(12), sleep=asyncio.sleep)
        engine = await open_engine(device)
        for key in KEYS:
            assert await put(engine, (NS, key), b"x" * 10_000)[1] is Status.OK
        number = engine.index.m_segment[engine.index.find(NS, KEYS[0])]
        start = engine._superblock.segment_at(number)
        await asyncio.sleep(0.1)
        slots = engine.segment_slots(number).tolist()
        forgotten = {engine.index.key_of(slot) for slot in slots}
        for slot in slots:
            engine.remove(slot, RemoveReason.FORGOTTEN)
        await engine.barrier()
        fail_next(device, Fault.FLUSH_FAIL)
        eviction = asyncio.ensure_future(engine.evict(number, ()))
        while Fault.FLUSH_FAIL not in device.plan.injected:
            await asyncio.sleep(0.0001)
        await engine.close(clean=False)
        eviction.cancel()
        await asyncio.wait({eviction})
        device.plan = FaultPlan()
        again = await open_engine(device, seed=1)
        assert again.segment_info(number).state is SegmentState.FREE, "nothing is shown here"
        (other,) = {s.segment for s in again.segments() if s.live_blocks}
        await again.evict(other)  # with the removals, which nobody needs any more
        assert again.stats.tombstones_carried == 0
        await again.close(clean=False)
        device.poke(start + 100, bytes([device.image_at(start + 100, 1)[0] ^ 1]))
        last = await open_engine(device.crash(), seed=2)
        assert not [key for key in forgotten if last.index.find(NS, key) >= 0]
        await last.close()

    simloop.run(life())


def test_a_device_that_refuses_to_take_it_again_gets_no_footer() -> None:
    async def life() -> None:
        device = Forgetful(device_bytes(10), sleep=asyncio.sleep)
        await written_and_dropped(device)
        device.plan = Refusing()
        engine = await open_engine(device, seed=1)
        assert await believed(engine), "what can be read is served"
        held = {engine.index.m_segment[engine.index.find(NS, k)] for k in await believed(engine)}
        assert {engine.segment_info(n).state for n in held} == {SegmentState.CONDEMNED}
        assert engine.recovery.segments_unreadable == len(held)
        await engine.close()

    play(life())


class Refusing(FaultPlan):
    """Fails as many writes as are tried of one segment."""

    def __init__(self) -> None:
        super().__init__()
        self.left = TRIES_MAX

    def draw(self, kinds: Any, rng: Any) -> Fault | None:
        if Fault.WRITE_EIO in kinds and self.left:
            self.left -= 1
            return Fault.WRITE_EIO
        return None


def test_only_what_was_verified_is_written() -> None:
    async def life() -> None:
        device = SimDevice(device_bytes(4), sleep=asyncio.sleep)
        engine = await open_engine(device)
        for n, key in enumerate(KEYS[:4]):  # they fit into one segment, which stays open
            assert await put(engine, (NS, key), bytes([n]) * 9_000)[1] is Status.OK
        number = engine.index.m_segment[engine.index.find(NS, KEYS[0])]
        superblock, segment = engine._superblock, engine._table.segments[number]
        table = bytes(segment.rows)
        await engine.close(clean=False)
        life, raw = (number, segment.sequence), aligned_buffer(superblock.segment_bytes)
        start = superblock.segment_at(number)
        raw[:] = device.image_at(start, superblock.segment_bytes)
        assert (segment.stream, segment.row_count) == (STREAMS[0], 4)
        row = len(table) // segment.row_count
        kept = table[:row] + table[2 * row :]  # the second record was not found
        first_after = 1 + 3  # blocks: a header, and three of the first record
        raw[first_after * BLOCK : (first_after + 3) * BLOCK] = b"?" * (3 * BLOCK)
        before, writes = device.image(), device.writes
        assert await renew_records(device, superblock, life, raw, kept)
        assert device.writes == writes + 2, "two runs, around the gap"
        assert device.image() == before

    play(life())


def test_what_a_start_writes_is_counted_as_wear() -> None:
    """It writes again all that is in segments without a footer, which may be many: uncounted."""

    def written(device: SimDevice) -> int:
        return sum(len(entry.data) for entry in device.log or () if entry.kind == "write")

    async def life() -> None:
        device = SimDevice(device_bytes(10), sleep=asyncio.sleep, keep_log=True)
        engine = await open_engine(device)
        for key in KEYS:
            assert await put(engine, (NS, key), bytes(9_000))[1] is Status.OK
        fail_next(device, Fault.FLUSH_FAIL)
        engine.remove(engine.index.find(NS, KEYS[0]), RemoveReason.FORGOTTEN)
        await engine.barrier()
        assert engine.stats.written_bytes == written(device)
        await engine.close(clean=False)
        after = device.crash(plan=FaultPlan())
        again = await open_engine(after, seed=1)
        assert again.recovery.segments_scanned
        assert again.stats.written_bytes == written(after) > 9_000 * (len(KEYS) - 1)
        await again.close()

    play(life())


def test_a_probe_of_a_failed_device_leaves_a_free_segments_number_as_it_was(tmp_path: Path) -> None:
    """It was 0 after a start: then no last block told any more which lives had ended."""
    options = replace(OPTIONS, checkpoint_path=tmp_path / "checkpoint")

    def ends_of(device: SimDevice, engine: Engine, number: int) -> list[SegmentHeader | None]:
        start, superblock = engine._superblock.segment_at(number), engine._superblock
        places = (start, start + superblock.segment_bytes - BLOCK)
        return [decode_header(superblock, number, device.image_at(at, BLOCK)) for at in places]

    async def life(*, clean: bool) -> None:
        device = SimDevice(device_bytes(6), sleep=asyncio.sleep)
        engine = await open_engine(device, options)
        slot, future = put(engine, (NS, KEYS[0]), bytes(9_000))
        assert await future is Status.OK
        number = engine.index.m_segment[slot]
        await engine.evict(number)
        await engine.close(clean=clean)
        engine = await open_engine(device, options, seed=1)
        assert (engine.recovery.kind is RecoveryKind.CHECKPOINT) == clean
        before = ends_of(device, engine, number)
        engine._table.free.rotate(-engine._table.free.index(number))
        assert await takes_writes(device, engine._table)
        after = ends_of(device, engine, number)
        assert before[0] is not None
        assert [head and head.sequence for head in after] == [before[0].sequence] * 2
        await engine.close(clean=False)

    play(life(clean=False))
    play(life(clean=True))


def test_a_header_that_one_read_gives_as_it_was_before_is_not_written() -> None:
    """The second scan of an open segment: the next start took the segment for a free one."""

    async def life() -> None:
        device = SimDevice(device_bytes(10), sleep=asyncio.sleep)
        engine = await open_engine(device)
        assert await put(engine, (NS, KEYS[0]), b"content of " + KEYS[0])[1] is Status.OK
        superblock, number = engine._superblock, engine.index.m_segment[0]
        free = encode_header(superblock, SegmentHeader(HeaderState.FREE, number, 1, bytes(16)))
        await engine.close(clean=False)
        device, scans = device.crash(), list[int]()
        honest = device._read_one

        def read_one(op: IoOp) -> Status:
            status = honest(op)
            if op.view.nbytes == superblock.segment_bytes:
                scans.append(op.offset_bytes)
                if len(scans) == 2:
                    op.view[:BLOCK] = free
            return status

        device._read_one = read_one  # type: ignore[method-assign]
        engine = await open_engine(device, seed=1)
        assert scans == [superblock.segment_at(number)] * 2
        await engine.close(clean=False)
        engine = await open_engine(device.crash(), seed=2)
        assert await believed(engine) == KEYS[:1]
        await engine.close()

    play(life())
