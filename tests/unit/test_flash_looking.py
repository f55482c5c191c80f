"""One read that goes wrong while a file is opened costs nothing: the k-th, for every k there is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from entresol_daemon.examine import examine
from entresol_daemon.flash.device import BLOCK, IoOp
from entresol_daemon.flash.engine import Engine, RemoveReason
from entresol_daemon.flash.index import ABSENT
from entresol_daemon.flash.sim import SimDevice
from entresol_proto.status import Status
from tests import simloop
from tests.flashlab import NAMESPACES, OPTIONS, device_bytes, get, key_of, open_engine, put

NS = NAMESPACES[0]
SEGMENTS = 10
Lie = Callable[[IoOp, bytes], Status]
LARGE = 12_000


def data_of(number: int) -> bytes:
    return bytes([number]) * LARGE


async def stored(engine: Engine, numbers: range) -> None:
    futures = [put(engine, (NS, key_of(number)), data_of(number))[1] for number in numbers]
    assert set(await asyncio.gather(*futures)) == {Status.OK}


async def forgotten(engine: Engine, numbers: range) -> None:
    for number in numbers:
        slot = engine.index.find(NS, key_of(number))
        assert slot != ABSENT
        engine.remove(slot, RemoveReason.FORGOTTEN)
    await engine.barrier()


async def a_life() -> tuple[SimDevice, bytes]:
    """A file in which a free segment was used again, with sealed and open segments, and removals
    that are written in a sealed and in an open one; and what it was when that segment was free."""
    device = SimDevice(device_bytes(SEGMENTS), sleep=asyncio.sleep)
    engine = await open_engine(device)
    await stored(engine, range(10))
    await forgotten(engine, range(10))
    for info in engine.segments():
        if info.live_blocks == 0 and info.state.value == "sealed":
            await engine.evict(info.segment)
    before = bytes(device._data)
    await stored(engine, range(20, 30))
    await forgotten(engine, range(20, 22))
    await stored(engine, range(30, 42))
    await forgotten(engine, range(30, 31))
    await engine.close(clean=False)
    return device.crash(), before


KEPT = [*range(22, 30), *range(31, 42)]
GONE = [*range(10), 20, 21, 30]


def zeros(op: IoOp, _before: bytes) -> Status:
    op.view[:BLOCK] = bytes(BLOCK)
    return Status.OK


def stale(op: IoOp, before: bytes) -> Status:
    op.view[:] = before[op.offset_bytes : op.offset_bytes + op.view.nbytes]
    return Status.OK


def damaged(op: IoOp, _before: bytes) -> Status:
    op.view[7] ^= 0x40
    op.view[op.view.nbytes // 2] ^= 1
    return Status.OK


def refused(_op: IoOp, _before: bytes) -> Status:
    return Status.IO_ERROR


def lying(device: SimDevice, lie: Lie, number: int, before: bytes) -> Callable[[], bool]:
    """Have the device lie at its read of this number; returns whether it did."""
    honest, seen = device._read_one, 0

    def read_one(op: IoOp) -> Status:
        nonlocal seen
        seen += 1
        status = honest(op)
        return lie(op, before) if seen == number else status

    device._read_one = read_one  # type: ignore[method-assign]
    return lambda: seen >= number


async def check(engine: Engine, when: str) -> None:
    for number in KEPT:
        found = await get(engine, (NS, key_of(number)))
        assert found == (Status.OK, data_of(number)), (when, number, found[0])
    for number in GONE:
        assert engine.index.find(NS, key_of(number)) == ABSENT, (when, number)


@pytest.mark.parametrize("lie", [zeros, stale, damaged, refused])
def test_one_read_that_goes_wrong_at_opening_costs_nothing(lie: Lie) -> None:
    async def whole() -> None:
        file, before = await a_life()
        number = 0
        while True:
            number += 1
            device = file.crash()
            lied = lying(device, lie, number, before)
            engine = await open_engine(device, OPTIONS)
            reached = lied()
            del device._read_one  # type: ignore[attr-defined]
            await check(engine, f"{lie.__name__} at read {number}")
            await stored(engine, range(60, 64))  # what was taken for free would be written over
            await check(engine, f"{lie.__name__} at read {number}, after puts")
            await engine.close(clean=False)
            engine = await open_engine(device.crash(), replace(OPTIONS))
            await check(engine, f"{lie.__name__} at read {number}, opened again")
            await engine.close(clean=False)
            if not reached:
                break
        assert number > 2 * SEGMENTS

    simloop.run(whole())


def test_a_header_of_before_its_segment_was_freed_brings_nothing_back(tmp_path: Path) -> None:
    """The device gives what was there before; or the write of the FREE header went elsewhere."""

    path, images = tmp_path / "data", list[tuple[int, bytes]]()

    async def whole() -> None:
        device = SimDevice(device_bytes(SEGMENTS), sleep=asyncio.sleep)
        engine = await open_engine(device)
        await stored(engine, range(10))
        await forgotten(engine, range(10))
        before = device.image()
        used = [info.segment for info in engine.segments() if info.blocks]
        for number in used:
            await engine.evict(number)
        await stored(engine, range(22, 30))
        await engine.close(clean=False)
        file = device.crash()
        for number in used:
            device, at = file.crash(), engine._superblock.segment_at(number)
            device.poke(at, before[at : at + BLOCK])
            images.append((number, device.image()))
            opened = await open_engine(device)
            assert all(opened.index.find(NS, key_of(n)) == ABSENT for n in range(10)), number
            await stored(opened, range(30, 31))
            assert opened.segment_states()[number].value == "free"
            await opened.close(clean=False)
            device = device.crash()
            again = await open_engine(device)
            for n in range(22, 31):
                assert await get(again, (NS, key_of(n))) == (Status.OK, data_of(n))
            await again.close(clean=False)

    simloop.run(whole())
    for number, image in images:
        path.write_bytes(image)
        assert examine(path, quick=True).segments[number].state == "free"
