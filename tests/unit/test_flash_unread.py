"""What an opening could not read: kept for another opening, and nothing is done on its account."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from entresol_daemon.flash.device import BLOCK, IoOp
from entresol_daemon.flash.engine import Engine, RecoveryKind, RemoveReason
from entresol_daemon.flash.index import ABSENT
from entresol_daemon.flash.model import UNREAD_KEEP_NS
from entresol_daemon.flash.segment import DATA_OFFSET
from entresol_daemon.flash.sim import SimDevice
from entresol_proto.status import DeviceError, FormatError, Status
from tests import simloop
from tests.flashlab import (
    NAMESPACES,
    OPTIONS,
    SEGMENT,
    device_bytes,
    get,
    key_of,
    open_engine,
    put,
    stream_of,
)

NS = NAMESPACES[0]
SEGMENTS = 10
LARGE = 12_000
Reads = Callable[[IoOp], Status]


def data_of(number: int) -> bytes:
    return bytes([number % 251]) * LARGE


async def stored(engine: Engine, numbers: range) -> None:
    for number in numbers:
        assert await put(engine, (NS, key_of(number)), data_of(number))[1] is Status.OK


async def check(engine: Engine, numbers: range) -> None:
    for number in numbers:
        assert await get(engine, (NS, key_of(number))) == (Status.OK, data_of(number)), number


def refuse(device: SimDevice, segments: set[int]) -> None:
    """Reads of these segments fail from here on."""
    honest = device._read_one

    def read_one(op: IoOp) -> Status:
        status = honest(op)
        where = (op.offset_bytes - DATA_OFFSET) // SEGMENT
        return Status.IO_ERROR if where in segments else status

    device._read_one = read_one  # type: ignore[method-assign]


async def a_file(blocks: int = 12, path: Path | None = None) -> tuple[SimDevice, set[int]]:
    """Blocks in several segments, crashed; and the segments of the first of them."""
    device = SimDevice(device_bytes(SEGMENTS), sleep=asyncio.sleep)
    engine = await open_engine(device, replace(OPTIONS, checkpoint_path=path))
    await stored(engine, range(blocks))
    first = {int(engine.index.segment[engine.index.find(NS, key_of(n))]) for n in range(4)}
    await engine.close(clean=False)
    return device.crash(), first


async def churn(engine: Engine, rounds: int) -> None:
    """Store and evict, whatever there is to evict."""
    for number in range(100, 100 + rounds):
        while not engine.room_for(stream_of(NS), 16_384):
            stock = engine.stock
            homes = [stock.empty, *stock.sealed.values(), stock.condemned]
            await engine.evict(next(number for home in homes for number in home))
        await stored(engine, range(number, number + 1))


def test_what_the_device_refuses_at_opening_is_there_when_it_gives_it_again() -> None:
    async def whole() -> None:
        file, first = await a_file()
        device = file.crash()
        refuse(device, first)
        engine = await open_engine(device)
        assert engine.recovery.segments_unreadable == len(first)
        assert set(engine.stock.unread) == first
        assert engine.hides_blocks
        await churn(engine, 60)
        await engine.close(clean=True)
        again = await open_engine(device.crash())
        assert not again.stock.unread
        await check(again, range(4))
        await again.close(clean=False)

    simloop.run(whole())


def test_a_clean_close_does_not_hide_it_for_good(tmp_path: Path) -> None:
    """A checkpoint lists what was found; the next opening would look for nothing else."""

    async def whole() -> None:
        path = tmp_path / "checkpoint"
        file, first = await a_file(path=path)
        device = file.crash()
        refuse(device, first)
        options = replace(OPTIONS, checkpoint_path=path)
        engine = await open_engine(device, options)
        await engine.close(clean=True)
        engine = await open_engine(device.crash(), options)
        await check(engine, range(12))
        assert not engine.hides_blocks
        device = engine._device._device  # type: ignore[assignment]
        await engine.close(clean=True)
        engine = await open_engine(device.crash(), options)
        assert engine.recovery.kind is RecoveryKind.CHECKPOINT
        await engine.close(clean=False)

    simloop.run(whole())


def test_blocks_left_out_for_the_indexs_sake_are_found_by_a_larger_one(tmp_path: Path) -> None:
    async def whole() -> None:
        path = tmp_path / "checkpoint"
        file, _ = await a_file(path=path)
        small = replace(OPTIONS, blocks_max=5, checkpoint_path=path)
        device = file.crash()
        engine = await open_engine(device, small)
        assert engine.recovery.blocks_dropped == 7
        assert engine.hides_blocks
        await engine.close(clean=True)
        engine = await open_engine(device.crash(), replace(small, blocks_max=100))
        await check(engine, range(12))
        await engine.close(clean=False)

    simloop.run(whole())


def test_a_block_left_out_for_the_indexs_sake_is_not_back_after_a_newer_one_of_its_name() -> None:
    async def whole() -> None:
        file, _ = await a_file()
        device = file.crash()
        engine = await open_engine(device, replace(OPTIONS, blocks_max=5))
        assert engine.index.find(NS, key_of(0)) == ABSENT
        engine.remove(engine.index.find(NS, key_of(11)), RemoveReason.FORGOTTEN)
        slot, future = put(engine, (NS, key_of(0)), b"newer")
        assert await future is Status.OK
        (gone,) = await engine.evict(int(engine.index.segment[slot]))
        assert (gone.wire_key, gone.reason) == (key_of(0), RemoveReason.EVICTED)
        await engine.close(clean=False)
        engine = await open_engine(device.crash(), replace(OPTIONS, blocks_max=100))
        assert engine.index.find(NS, key_of(0)) == ABSENT
        await check(engine, range(1, 11))
        await engine.close(clean=False)

    simloop.run(whole())


def test_after_a_day_it_is_room_like_any_other_and_counted() -> None:
    async def whole() -> None:
        file, first = await a_file()
        device = file.crash()
        refuse(device, first)
        engine = await open_engine(device)
        await asyncio.sleep(UNREAD_KEEP_NS / 1e9 + 1)
        assert not engine.stock.unread
        assert set(engine.stock.condemned) == first
        for number in sorted(first):
            await engine.evict(number)
        assert engine.hides_blocks is False
        assert engine.stats.unread_freed == len(first)
        await engine.close(clean=False)

    simloop.run(whole(), loop=simloop.SimLoop(1, seconds_max=200_000))


def test_freeing_it_all_the_same_is_counted() -> None:
    async def whole() -> None:
        file, first = await a_file()
        device = file.crash()
        refuse(device, first)
        engine = await open_engine(device)
        for number in sorted(first):
            await engine.evict(number)
        assert engine.stats.unread_freed == len(first)
        assert not engine.hides_blocks
        assert not engine._table.shadowing
        await engine.close(clean=False)

    simloop.run(whole())


def test_what_is_removed_though_it_was_not_found_does_not_come_back() -> None:
    async def whole() -> None:
        file, first = await a_file()
        device = file.crash()
        refuse(device, first)
        engine = await open_engine(device)
        assert engine.index.find(NS, key_of(0)) == ABSENT
        engine.bury_absent(NS, [key_of(0)])
        await engine.barrier()
        await engine.close(clean=False)
        engine = await open_engine(device.crash())
        assert engine.index.find(NS, key_of(0)) == ABSENT
        await check(engine, range(1, 4))
        await engine.close(clean=False)

    simloop.run(whole())


def test_nothing_is_formatted_where_a_superblock_may_be() -> None:
    async def whole() -> None:
        file, _ = await a_file()
        device = file.crash()
        device.poke(0, bytes(BLOCK))
        last = device.size_bytes - BLOCK
        honest = device._read_one

        def read_one(op: IoOp) -> Status:
            status = honest(op)
            return Status.IO_ERROR if op.offset_bytes == last else status

        device._read_one = read_one  # type: ignore[method-assign]
        with pytest.raises(DeviceError, match="first block is blank and its last cannot be read"):
            await open_engine(device)
        del device._read_one  # type: ignore[attr-defined]
        engine = await open_engine(device)
        await check(engine, range(12))
        await engine.close(clean=False)

    simloop.run(whole())


def test_the_numbers_of_a_superblock_copy_that_is_lost_are_not_given_out_again() -> None:
    """The write of one copy went elsewhere, later the other is damaged: new blocks had the numbers
    of older ones, and what was acknowledged durable lost against removals of before."""

    async def whole() -> None:
        device = SimDevice(device_bytes(SEGMENTS), sleep=asyncio.sleep)
        await (await open_engine(device)).close(clean=False)
        last = device.size_bytes - BLOCK
        before = device.image_at(last, BLOCK)
        engine = await open_engine(device, seed=1)
        await stored(engine, range(6))
        for number in range(3):
            engine.remove(engine.index.find(NS, key_of(number)), RemoveReason.FORGOTTEN)
        await engine.barrier()
        await engine.close(clean=False)
        device.poke(last, before)
        device.poke(40, bytes([device.image_at(40, 1)[0] ^ 1]))
        device = device.crash()
        engine = await open_engine(device, seed=2)
        assert engine.recovery.superblock_copies == 1
        await stored(engine, range(3))
        await engine.close(clean=False)
        engine = await open_engine(device.crash(), seed=3)
        await check(engine, range(6))
        await engine.close()

    simloop.run(whole())


@pytest.mark.parametrize("refused", [0, 1])
def test_a_copy_that_is_refused_beside_a_damaged_one_is_no_reason_to_remove_the_file(
    refused: int,
) -> None:
    """The device may give it at another start; the hint was to start empty."""

    async def whole() -> None:
        file, _ = await a_file()
        device = file.crash()
        copies = (0, device.size_bytes - BLOCK)
        at = copies[1 - refused] + 40
        device.poke(at, bytes([device.image_at(at, 1)[0] ^ 1]))
        honest = device._read_one

        def read_one(op: IoOp) -> Status:
            status = honest(op)
            return Status.IO_ERROR if op.offset_bytes == copies[refused] else status

        device._read_one = read_one  # type: ignore[method-assign]
        with pytest.raises(DeviceError, match="one superblock copy cannot be read") as raised:
            await open_engine(device)
        assert not isinstance(raised.value, FormatError)
        assert "remove" not in str(raised.value)
        del device._read_one  # type: ignore[attr-defined]
        engine = await open_engine(device)
        await check(engine, range(12))
        await engine.close(clean=False)

    simloop.run(whole())


@pytest.mark.parametrize("more", [64 * BLOCK, -BLOCK])
def test_nothing_is_formatted_where_segments_are(more: int) -> None:
    """The first block is zeroed, and the second superblock is not where the file now ends."""

    async def whole() -> None:
        file, _ = await a_file()
        image = bytes(BLOCK) + file.image()[BLOCK:]
        size = len(image) + more
        device = SimDevice(size, image=image[:size].ljust(size, b"\0"))
        with pytest.raises(FormatError, match="has segments"):
            await open_engine(device)
        assert not device.writes
        device._latent.add(DATA_OFFSET // BLOCK)
        with pytest.raises(DeviceError, match="where segments may be"):
            await open_engine(device)
        assert not device.writes
        device = SimDevice(len(image), image=image)
        engine = await open_engine(device)
        await check(engine, range(12))
        await engine.close(clean=False)

    simloop.run(whole())


def test_a_damaged_copy_and_a_size_that_was_changed_are_told_from_a_foreign_file() -> None:
    """The hint was to check the path, or to remove the file."""

    async def whole() -> None:
        file, _ = await a_file()
        image = bytearray(file.image())
        image[40] ^= 1
        grown = bytes(image) + bytes(64 * BLOCK)
        with pytest.raises(FormatError, match=r"was its size changed\? restore it"):
            await open_engine(SimDevice(len(grown), image=grown))
        engine = await open_engine(SimDevice(len(image), image=image))
        await check(engine, range(12))
        await engine.close(clean=False)

    simloop.run(whole())


@pytest.mark.parametrize("lying", [0, 1])
def test_one_read_of_a_superblock_that_goes_wrong_beside_a_damaged_one_costs_nothing(
    lying: int,
) -> None:
    async def whole() -> None:
        file, _ = await a_file()
        device = file.crash()
        copies, lies = (0, device.size_bytes - BLOCK), list[int]()
        at = copies[1 - lying] + 40
        device.poke(at, bytes([device.image_at(at, 1)[0] ^ 1]))
        honest = device._read_one

        def read_one(op: IoOp) -> Status:
            status = honest(op)
            if op.offset_bytes == copies[lying] and not lies:
                lies.append(lying)
                op.view[:] = b"elsewhere" + bytes(BLOCK - 9)
            return status

        device._read_one = read_one  # type: ignore[method-assign]
        engine = await open_engine(device)
        assert lies
        await check(engine, range(12))
        await engine.close(clean=False)

    simloop.run(whole())


def test_two_reads_that_lose_different_records_lose_none() -> None:
    """A segment without footer: each of two scans of it misses another record."""

    async def whole() -> None:
        device = SimDevice(device_bytes(SEGMENTS), sleep=asyncio.sleep)
        engine = await open_engine(device)
        await stored(engine, range(3))
        engine.remove(engine.index.find(NS, key_of(2)), RemoveReason.FORGOTTEN)
        await engine.barrier()
        slot = engine.index.find(NS, key_of(0))
        number = int(engine.index.segment[slot])
        at = [int(engine.index.offset[engine.index.find(NS, key_of(n))]) * BLOCK for n in (0, 1)]
        await engine.close(clean=False)
        device = device.crash()
        base, honest, scans = DATA_OFFSET + number * SEGMENT, device._read_one, 0

        def read_one(op: IoOp) -> Status:
            nonlocal scans
            status = honest(op)
            if op.offset_bytes == base and op.view.nbytes == SEGMENT:
                place = at[scans % 2]
                op.view[place : place + BLOCK] = bytes(BLOCK)
                scans += 1
            return status

        device._read_one = read_one  # type: ignore[method-assign]
        engine = await open_engine(device)
        del device._read_one  # type: ignore[attr-defined]
        assert scans == 2
        await check(engine, range(2))
        assert engine.index.find(NS, key_of(2)) == ABSENT
        await engine.close(clean=True)
        engine = await open_engine(device.crash())
        await check(engine, range(2))
        assert engine.index.find(NS, key_of(2)) == ABSENT
        await engine.close(clean=False)

    simloop.run(whole())


def test_a_block_that_takes_the_place_of_a_damaged_one_is_not_judged_for_it() -> None:
    """The scrubber reads twice; between the readings one block leaves and another comes."""

    async def whole() -> None:
        device = SimDevice(device_bytes(SEGMENTS), sleep=asyncio.sleep)
        engine = await open_engine(device)
        await stored(engine, range(1))
        slot = engine.index.find(NS, key_of(0))
        segment = engine._table.segments[int(engine.index.segment[slot])]
        at = DATA_OFFSET + segment.index * SEGMENT + int(engine.index.offset[slot]) * BLOCK
        device.poke(at + 200, b"rotten")
        scrubbing = asyncio.ensure_future(engine.scrub([slot]))
        while not engine.stats.read_retries:
            await asyncio.sleep(1e-6)
        while not segment.readers:  # the second reading is under way
            await asyncio.sleep(1e-6)
        engine.remove(slot, RemoveReason.FORGOTTEN)
        taken, stored_now = put(engine, (NS, key_of(7)), data_of(7))
        assert taken == slot
        assert await scrubbing == []
        assert await stored_now is Status.OK
        await check(engine, range(7, 8))
        await engine.close(clean=False)

    simloop.run(whole())


def test_removals_of_a_group_that_failed_are_not_missed_where_they_were_to_be() -> None:
    async def whole() -> None:
        device = SimDevice(device_bytes(SEGMENTS), sleep=asyncio.sleep)
        engine = await open_engine(device)
        await stored(engine, range(3))
        honest, failures = device._write_one, 1

        def write_one(op: IoOp) -> None:
            nonlocal failures
            if failures:
                failures -= 1
                raise DeviceError("write failed")
            honest(op)

        device._write_one = write_one  # type: ignore[method-assign]
        engine.remove(engine.index.find(NS, key_of(0)), RemoveReason.FORGOTTEN)
        await engine.barrier()
        assert engine.stats.failed_groups == 1
        (condemned,) = engine.stock.condemned
        await engine.evict(condemned, lambda slots: slots)
        assert engine.stats.tombstones_lost == 0
        assert engine.segment_states()[condemned].value == "free"
        await check(engine, range(1, 3))
        await engine.close(clean=False)
        engine = await open_engine(device.crash())
        assert engine.index.find(NS, key_of(0)) == ABSENT
        await engine.close(clean=False)

    simloop.run(whole())


async def with_a_removal(after_blocks: int = 3) -> tuple[SimDevice, int, int]:
    """Crashed: the first of twelve blocks was removed; in which segment that is, and at what place
    of the device."""
    device = SimDevice(device_bytes(SEGMENTS), sleep=asyncio.sleep)
    engine = await open_engine(device)
    await stored(engine, range(after_blocks))
    engine.remove(engine.index.find(NS, key_of(0)), RemoveReason.FORGOTTEN)
    await engine.barrier()
    (where,) = (s for s in engine._table.used() if s.tombstone_offsets)
    at = DATA_OFFSET + where.index * SEGMENT + where.tombstone_offsets[0] * BLOCK
    await stored(engine, range(after_blocks, 12))  # so that it is sealed, and has a footer
    after = device.crash()
    await engine.close(clean=False)
    return after, where.index, at


def test_a_removal_that_the_device_refuses_at_opening_is_kept_for_another(tmp_path: Path) -> None:
    """A clean close made what it had removed a block for good."""
    options = replace(OPTIONS, checkpoint_path=tmp_path / "checkpoint")

    async def whole() -> None:
        device, number, at = await with_a_removal()
        honest = device._read_one

        def read_one(op: IoOp) -> Status:
            status = honest(op)
            return Status.IO_ERROR if op.offset_bytes == at else status

        device._read_one = read_one  # type: ignore[method-assign]
        engine = await open_engine(device, options)
        assert engine.recovery.tombstones_lost == engine.recovery.segments_unreadable == 1
        assert set(engine.stock.unread) == {number}
        await check(engine, range(1, 12))
        await churn(engine, 60)
        assert set(engine.stock.unread) == {number}
        await engine.close(clean=True)
        again = await open_engine(device.crash(), options)
        assert again.recovery.kind is RecoveryKind.FOOTERS
        assert again.index.find(NS, key_of(0)) == ABSENT
        assert again.recovery.tombstones_lost == 0
        assert not again.stock.unread
        await again.close()

    simloop.run(whole())


@pytest.mark.parametrize("failed_writes", [0, 1])
@pytest.mark.parametrize("readable", ["at the next opening", "when its segment is freed"])
def test_what_an_eviction_keeps_is_no_younger_than_a_removal_that_is_found_later(
    readable: str, failed_writes: int
) -> None:
    """The copy outdid the removal, and what had been forgotten was there for good."""

    async def whole() -> None:
        device, unread, at = await with_a_removal(6)
        honest, write_one = device._read_one, device._write_one
        refused, failures = True, failed_writes

        def read_one(op: IoOp) -> Status:
            status = honest(op)
            return Status.IO_ERROR if refused and op.offset_bytes == at else status

        def fail_once(op: IoOp) -> None:
            nonlocal failures
            if failures:
                failures -= 1
                raise DeviceError("write failed")
            write_one(op)

        device._read_one = read_one  # type: ignore[method-assign]
        engine = await open_engine(device)
        home = int(engine.index.segment[engine.index.find(NS, key_of(0))])
        assert home != unread
        device._write_one = fail_once  # type: ignore[method-assign]
        for _ in range(3):
            await engine.evict(home, lambda slots: slots)
            assert engine.stats.evicted_blocks == 0
            moved = int(engine.index.segment[engine.index.find(NS, key_of(0))])
            assert moved != home
            assert engine.segment_states()[home].value == "free"
            home = moved
        if readable == "when its segment is freed":
            refused = False
            await engine.evict(unread, lambda slots: slots)
            assert engine.segment_states()[unread].value == "free"
            await engine.evict(home, lambda slots: slots)
        await check(engine, range(12))
        await engine.close()
        refused = False
        again = await open_engine(device.crash())
        assert again.index.find(NS, key_of(0)) == ABSENT
        await check(again, range(1, 12))
        await again.close()

    simloop.run(whole())


def test_removals_that_are_read_wrongly_once_are_asked_for_again() -> None:
    """Without them the block would be back."""

    async def whole() -> None:
        after, _, at = await with_a_removal()
        honest, wrong = after._read_one, list[int]()

        def read_one(op: IoOp) -> Status:
            status = honest(op)
            if op.offset_bytes == at and not wrong:
                wrong.append(at)
                op.view[-BLOCK:] = bytes(BLOCK)
            return status

        after._read_one = read_one  # type: ignore[method-assign]
        engine = await open_engine(after)
        assert wrong, "nobody read it by itself"
        assert engine.index.find(NS, key_of(0)) == ABSENT
        assert engine.recovery.tombstones_lost == 0
        await check(engine, range(1, 12))
        await engine.close()

    simloop.run(whole())


def test_an_eviction_that_finds_writing_paused_drops_nothing() -> None:
    async def whole() -> None:
        device = SimDevice(device_bytes(SEGMENTS), sleep=asyncio.sleep)
        engine = await open_engine(device)
        await stored(engine, range(12))
        engine.remove(engine.index.find(NS, key_of(0)), RemoveReason.FORGOTTEN)
        await engine.barrier()
        number = next(s.index for s in engine._table.used() if s.tombstone_offsets)
        before = len(engine.index)
        evicting = asyncio.ensure_future(engine.evict(number))
        await asyncio.sleep(1e-6)  # it reads the removals first
        engine._writer.failed = True
        assert await evicting == []
        assert len(engine.index) == before
        engine._writer.failed = False
        await engine.close(clean=False)

    simloop.run(whole())
