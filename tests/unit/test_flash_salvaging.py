"""A segment loses its header before it has a footer: what was forgotten in it stays forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import simloop
from flashlab import NAMESPACES, OPTIONS, device_bytes, get, key_of, open_engine, put

from entresol_daemon.examine import examine
from entresol_daemon.flash.device import BLOCK, IoOp, aligned_buffer
from entresol_daemon.flash.engine import Engine, RecoveryKind, RemoveReason, SegmentState
from entresol_daemon.flash.salvaging import salvage
from entresol_daemon.flash.segment import HeaderState, SegmentHeader, encode_header
from entresol_daemon.flash.sim import FaultPlan, SimDevice
from entresol_proto.status import Status

NS = NAMESPACES[0]
KEYS = [key_of(n) for n in range(8)]


def flip(block: bytes) -> bytes:
    return block[:100] + bytes([block[100] ^ 1]) + block[101:]


def zeros(block: bytes) -> bytes:
    return bytes(len(block))


def play(life: Coroutine[Any, Any, None]) -> None:
    simloop.run(life)


async def forgotten_beside(device: SimDevice) -> tuple[Engine, int]:
    """Blocks in a sealed and in an open segment, and the removal of the first one in the open one,
    of which the number."""
    engine = await open_engine(device)
    for key in KEYS:
        assert await put(engine, (NS, key), b"x" + key * 500)[1] is Status.OK
    engine.remove(engine.index.find(NS, KEYS[0]), RemoveReason.FORGOTTEN)
    await engine.barrier()
    (number,) = [s.segment for s in engine.segments() if s.state is SegmentState.OPEN]
    return engine, number


async def after_damage(
    damage: Callable[[bytes], bytes],
) -> tuple[SimDevice, int, list[bytes]]:
    """The device after a kill and this damage to the header, and the keys that are elsewhere."""
    device = SimDevice(device_bytes(12), sleep=asyncio.sleep)
    engine, number = await forgotten_beside(device)
    index = engine.index
    others = [k for k in KEYS[1:] if index.m_segment[index.find(NS, k)] != number]
    at = engine._superblock.segment_at(number)
    await engine.close(clean=False)
    device.poke(at, damage(device.image_at(at, BLOCK)))
    return device.crash(plan=FaultPlan()), number, others


def keys_of(engine: Engine) -> list[bytes]:
    return sorted(engine.index.key_of(slot) for slot in engine.index.live_slots().tolist())


@pytest.mark.parametrize("damage", [flip, zeros])
def test_what_was_forgotten_stays_forgotten_without_the_header(
    damage: Callable[[bytes], bytes],
) -> None:
    async def life() -> None:
        device, number, others = await after_damage(damage)
        for start in range(2):
            engine = await open_engine(device, seed=start)
            assert keys_of(engine) == others
            assert engine.recovery.segments_damaged == (damage is flip)
            assert engine.segment_info(number).state is SegmentState.CONDEMNED
            await engine.close(clean=False)
            device = device.crash()
        engine = await open_engine(device, seed=2)
        await engine.evict(number)
        assert engine.stats.tombstones_carried == 1
        assert engine.segment_info(number).state is SegmentState.FREE
        await engine.close()
        last = await open_engine(device.crash(), seed=3)
        assert keys_of(last) == others
        assert all([(await get(last, (NS, key)))[0] is Status.OK for key in others])
        await last.close()

    play(life())


@pytest.mark.parametrize("damage", [flip, zeros])
@pytest.mark.parametrize("wrong", [0, 1])
def test_one_read_that_goes_wrong_brings_nothing_back(
    damage: Callable[[bytes], bytes], wrong: int
) -> None:
    """The device says that all is well, and gives zeros for the removal, once."""

    async def life() -> None:
        device, number, others = await after_damage(damage)
        size = 64 * 1024
        start = device.size_bytes - BLOCK - (12 - number) * size
        honest, reads = device._read_one, 0

        def read_one(op: IoOp) -> Status:
            nonlocal reads
            status = honest(op)
            if (op.offset_bytes, op.view.nbytes) == (start, size):
                if reads == wrong:
                    op.view[BLOCK:] = bytes(size - BLOCK)
                reads += 1
            return status

        device._read_one = read_one  # type: ignore[method-assign]
        engine = await open_engine(device, seed=1)
        assert keys_of(engine) == others
        await engine.close(clean=False)

    play(life())


@pytest.mark.parametrize("damage", [flip, zeros])
def test_a_clean_stop_with_it_is_followed_by_a_quick_start(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    """Until it was evicted, every start read all segments again, whatever the checkpoint said."""
    options = replace(OPTIONS, checkpoint_path=tmp_path / "checkpoint")

    async def life() -> None:
        device, number, others = await after_damage(damage)
        engine = await open_engine(device, options, seed=1)
        await engine.close()
        engine = await open_engine(device.crash(), options, seed=2)
        assert engine.recovery.kind is RecoveryKind.CHECKPOINT, engine.recovery.checkpoint_refused
        assert keys_of(engine) == others
        await engine.evict(number)
        assert engine.stats.tombstones_carried == 1
        assert engine.segment_info(number).state is SegmentState.FREE
        await engine.close(clean=False)

    play(life())


@pytest.mark.parametrize("damage", [flip, zeros])
def test_inspect_says_the_same(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    found: list[tuple[SimDevice, int, list[bytes]]] = []

    async def life() -> None:
        found.append(await after_damage(damage))

    play(life())
    ((device, number, others),) = found
    path = tmp_path / "data"
    path.write_bytes(device.image())
    seen = examine(path, quick=True)  # their payloads are not sealed blocks
    assert int(seen.alive.sum()) == len(others)
    assert seen.damaged == (damage is flip)
    assert seen.segments[number].state == ("damaged" if damage is flip else "no header")


@pytest.mark.parametrize("damage", [flip, zeros])
def test_a_segment_that_the_device_does_not_give_is_kept(
    damage: Callable[[bytes], bytes],
) -> None:
    async def life() -> None:
        device, number, _ = await after_damage(damage)
        start = device.size_bytes - BLOCK - (12 - number) * 64 * 1024
        device._latent.add(start // BLOCK + 5)
        engine = await open_engine(device, seed=1)
        assert engine.segment_info(number).unread
        assert engine.hides_blocks
        await engine.close()

    play(life())


async def killed_with_one_block() -> tuple[SimDevice, int, int]:
    """A device with one durable block, in a segment without a footer: its number and its place."""
    device = SimDevice(device_bytes(12), sleep=asyncio.sleep)
    engine = await open_engine(device)
    slot, durable = put(engine, (NS, KEYS[0]), b"x" * 3000)
    assert await durable is Status.OK
    number = engine.index.m_segment[slot]
    at = engine._superblock.segment_at(number)
    await engine.close(clean=False)
    return device, number, at


def test_a_segment_without_removals_is_freed() -> None:
    async def life() -> None:
        device, number, at = await killed_with_one_block()
        device.poke(at, flip(device.image_at(at, BLOCK)))
        again = await open_engine(device.crash(plan=FaultPlan()), seed=1)
        await asyncio.sleep(0.1)
        assert again.segment_info(number).state is SegmentState.FREE
        assert keys_of(again) == []
        await again.close()

    play(life())


def test_removals_of_a_life_that_ended_do_not_count() -> None:
    """They were carried on when their segment was freed, those that were still needed."""

    async def life() -> None:
        device = SimDevice(device_bytes(12), sleep=asyncio.sleep)
        engine, number = await forgotten_beside(device)
        superblock = engine._superblock
        raw = aligned_buffer(superblock.segment_bytes)
        start = superblock.segment_at(number)

        def found() -> list[int]:
            raw[:] = device.image_at(start, superblock.segment_bytes)
            return salvage(superblock, number, raw).offsets

        assert len(found()) == 1
        raw[found()[0] * BLOCK + 100] ^= 1  # of the removal
        assert salvage(superblock, number, raw).offsets == []
        assert salvage(superblock, number + 1, raw).offsets == []
        await engine.evict(number)
        assert engine.segment_info(number).state is SegmentState.FREE
        assert found() == []
        await engine.close(clean=False)

    play(life())


async def half_freed(device: SimDevice) -> tuple[int, int]:
    """A device on which a segment of forgotten blocks was freed, and of what that wrote the power
    took the last block: the number of the segment, and its place."""
    engine, _ = await forgotten_beside(device)
    number = engine.index.m_segment[engine.index.find(NS, KEYS[1])]
    at, size = engine._superblock.segment_at(number), engine._superblock.segment_bytes
    while engine.segment_info(number).state is SegmentState.OPEN or engine._writer._footers:
        await asyncio.sleep(0.01)
    for slot in engine.segment_slots(number).tolist():
        engine.remove(slot, RemoveReason.FORGOTTEN)
    await engine.barrier()
    trailer = device.image_at(at + size - BLOCK, BLOCK)
    assert trailer[:8] == b"ENTRTRLR"
    await engine.evict(number)
    await engine.close(clean=False)
    device.poke(at + size - BLOCK, trailer)
    return number, at


def test_the_trailer_of_a_life_that_ended_is_not_believed_without_the_next_header() -> None:
    """Its removals were let go once the segment was free: what they removed was served again."""

    async def life() -> None:
        device = SimDevice(device_bytes(12), sleep=asyncio.sleep)
        number, at = await half_freed(device)
        device = device.crash(plan=FaultPlan())
        engine = await open_engine(device, seed=1)
        assert engine.segment_info(number).state is SegmentState.FREE
        left = keys_of(engine)
        (other,) = {engine.index.m_segment[engine.index.find(NS, key)] for key in left}
        await engine.evict(other, lambda slots: slots)  # into the first free one; removals go
        assert {engine.index.m_segment[engine.index.find(NS, key)] for key in left} == {number}
        assert engine.stats.tombstones_carried == 0
        await engine.close(clean=False)
        device.poke(at, flip(device.image_at(at, BLOCK)))
        again = await open_engine(device.crash(plan=FaultPlan()), seed=2)
        assert keys_of(again) == []
        assert again.recovery.segments_damaged == 1
        await again.close()

    play(life())


def test_a_free_header_does_not_go_over_the_trailer_of_a_later_life() -> None:
    async def life() -> None:
        device = SimDevice(device_bytes(12), sleep=asyncio.sleep)
        engine, _ = await forgotten_beside(device)
        number = engine.index.m_segment[engine.index.find(NS, KEYS[1])]
        at, size = engine._superblock.segment_at(number), engine._superblock.segment_bytes
        await engine.close()
        before = SegmentHeader(HeaderState.FREE, number, 0, bytes(16))
        device.poke(at, encode_header(engine._superblock, before))
        trailer = device.image_at(at + size - BLOCK, BLOCK)
        device = device.crash(plan=FaultPlan())
        again = await open_engine(device, seed=1)
        await again.close()
        assert device.image_at(at + size - BLOCK, BLOCK) == trailer

    play(life())


def test_a_header_that_the_power_took_with_its_group_is_no_damage() -> None:
    """The first group of a segment was never flushed: nothing in it was said to be there."""

    async def life() -> None:
        device, number, at = await killed_with_one_block()
        device.poke(at, bytes(BLOCK))
        again = await open_engine(device.crash(plan=FaultPlan()), seed=1)
        assert again.segment_info(number).state is SegmentState.FREE
        assert again.recovery.segments_damaged == 0
        await again.close()

    play(life())


def test_damaged_removals_in_a_segment_without_a_footer_are_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def life() -> None:
        device = SimDevice(device_bytes(12), sleep=asyncio.sleep)
        engine, number = await forgotten_beside(device)
        (offset,) = engine._table.segments[number].tombstone_offsets
        at = engine._superblock.segment_at(number) + offset * BLOCK + 100
        await engine.close(clean=False)
        device.poke(at, bytes([device.image_at(at, 1)[0] ^ 1]))
        again = await open_engine(device.crash(plan=FaultPlan()), seed=1)
        report = again.recovery
        assert (report.records_damaged, report.tombstones_lost) == (1, 1)
        assert "event=tombstones_lost" in caplog.text
        await again.close()

    play(life())
