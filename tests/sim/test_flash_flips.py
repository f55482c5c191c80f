"""Flip bits, zero and swap sectors of everything on flash: detected always, served never.

A sample of line R5 of the proof suite (`tests/fliplab.py`), and what needs a case of its own: one
damaged structure at a time through an opening, both superblocks gone, stale places.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from entresol_daemon.flash.device import BLOCK
from entresol_daemon.flash.engine import Engine, extent_bytes
from entresol_daemon.flash.segment import (
    ROW_BYTES,
    decode_trailer,
)
from entresol_daemon.flash.sim import SimDevice
from entresol_daemon.flash.superblock import Superblock
from entresol_proto.status import FormatError, Status
from tests import simloop
from tests.flashlab import (
    NAMESPACES,
    SEGMENT,
    Name,
    device_bytes,
    get,
    get_all,
    key_of,
    open_engine,
    put,
)
from tests.proof.lines import flips

SEGMENTS = 8
OPENINGS_PER_STRUCTURE = 12


class World:
    """An image with two sealed segments (0 and 1) and one that a crash left open (2)."""

    def __init__(self) -> None:
        self.blocks: dict[Name, bytes] = {}
        self.device = SimDevice(device_bytes(SEGMENTS), seed=9)
        self.superblock: Superblock
        self.where: dict[Name, int] = {}  # device offset of the record
        simloop.run(self.fill())
        self.image = self.device.image()

    async def fill(self) -> None:
        engine = await open_engine(self.device, seed=9)
        self.superblock = engine._superblock
        rng = random.Random(9)
        number = 0
        while engine.segment_info(2).blocks < 4:
            name = (NAMESPACES[0], key_of(number))
            data = rng.randbytes(rng.randrange(2000, 12_000))
            slot, future = put(engine, name, data)
            assert await future is Status.OK
            self.blocks[name] = data
            place = self.superblock.segment_at(engine.index.m_segment[slot])
            self.where[name] = place + engine.index.m_offset[slot] * BLOCK
            number += 1
        await engine._writer.drain()
        await engine.close(clean=False)

    def segment_of(self, name: Name) -> int:
        return (self.where[name] - self.superblock.data_offset) // SEGMENT


@pytest.fixture(scope="module")
def world() -> World:
    return World()


def test_a_sample_of_all_damage_is_noticed(tmp_path: Path) -> None:
    """Every bit of every field, some of the rest; line R5 of the proof suite tries many more."""
    damage = flips.one_world(1, tmp_path, share=0.1)
    print(f"flips={damage.tried} served={damage.wrong}")
    assert damage.detected == damage.tried > 20_000, damage.notes
    assert damage.lost == 0, damage.notes


def test_unverified_payloads_would_be_noticed() -> None:
    flips.canary()


async def reopen(image: bytearray) -> tuple[Engine, dict[Name, tuple[Status, bytes]]]:
    engine = await open_engine(SimDevice(len(image), image=image))
    return engine, await get_all(engine)


def judge(world: World, image: bytearray, *, may_miss: set[Name], why: str) -> Engine:
    """Open the damaged image; only `may_miss` may be gone, and nothing may be wrong."""
    engine, found = simloop.run(reopen(image))
    for name, (status, data) in found.items():
        assert status is not Status.OK or data == world.blocks[name], f"{why}: wrong bytes"
    for name, data in world.blocks.items():
        if name not in may_miss:
            assert found.get(name) == (Status.OK, data), f"{why}: {name} is gone"
    return engine


def structures(world: World) -> dict[str, tuple[int, int, set[Name]]]:
    """name -> (offset, length, blocks that may be lost with it)."""
    sb = world.superblock
    sealed, crashed = sb.segment_at(0), sb.segment_at(2)
    trailer = decode_trailer(sb, 0, world.image[sealed + SEGMENT - BLOCK : sealed + SEGMENT])
    assert trailer is not None
    rows = trailer.rows * ROW_BYTES
    return {
        "superblock": (0, BLOCK, set()),
        "mirror": (sb.mirror_offset, BLOCK, set()),
        "sealed header": (sealed, BLOCK, set()),
        "open header": (crashed, BLOCK, {n for n in world.blocks if world.segment_of(n) == 2}),
        "footer": (sealed + trailer.table_offset, rows, set()),
        "trailer": (sealed + SEGMENT - BLOCK, BLOCK, set()),
    }


@pytest.mark.parametrize(
    "what", ["superblock", "mirror", "sealed header", "open header", "footer", "trailer"]
)
def test_damaged_structures_through_an_opening(world: World, what: str) -> None:
    offset, length, may_miss = structures(world)[what]
    rng = random.Random(what)
    fields = min(length, 144)  # where the fields are, and the check
    places = [rng.randrange(fields) for _ in range(OPENINGS_PER_STRUCTURE)]
    for at in [*places, *(range(496, 512) if length == BLOCK else [])]:
        image = bytearray(world.image)
        image[offset + at] ^= 1 << rng.randrange(8)
        engine = judge(world, image, may_miss=may_miss, why=f"{what} byte {at}")
        assert engine.recovery.superblock_copies == (1 if what in ("superblock", "mirror") else 2)
    for filler in (b"\0", b"\xff"):
        image = bytearray(world.image)
        image[offset : offset + length] = filler * length
        judge(world, image, may_miss=may_miss, why=f"{what} overwritten")


def test_both_superblocks_gone_is_refused_and_never_formatted(world: World) -> None:
    image = bytearray(world.image)
    image[100] ^= 1
    image[world.superblock.mirror_offset + 100] ^= 1
    device = SimDevice(len(image), image=image)
    with pytest.raises(FormatError, match="both superblock copies"):
        simloop.run(open_engine(device))
    assert device.image() == bytes(image)


def test_another_version_is_refused_by_name(world: World) -> None:
    image = bytearray(world.image)
    for offset in (0, world.superblock.mirror_offset):
        image[offset + 8] = 2
    with pytest.raises(FormatError, match="format version 2, this build reads version 1"):
        simloop.run(open_engine(SimDevice(len(image), image=image)))


def test_a_whole_valid_record_in_the_wrong_place_is_not_served(world: World) -> None:
    """Two records of equal length change places; both are intact and neither is what is asked."""

    async def life() -> None:
        device = SimDevice(device_bytes(SEGMENTS))
        engine = await open_engine(device)
        names = [(NAMESPACES[0], key_of(1)), (NAMESPACES[1], key_of(1))]
        places = []
        for name, letter in zip(names, (b"a", b"b"), strict=True):
            slot, future = put(engine, name, letter * 5000, stream=bytes(16))
            assert await future is Status.OK
            base = engine._superblock.segment_at(engine.index.m_segment[slot])
            places.append(base + engine.index.m_offset[slot] * BLOCK)
        size = extent_bytes(5000)
        first, second = (device.image_at(place, size) for place in places)
        device.poke(places[0], second)
        device.poke(places[1], first)
        for name in names:
            assert (await get(engine, name))[0] is Status.CORRUPT
        await engine.close(clean=False)
        again = await open_engine(SimDevice(device.size_bytes, image=device.image()))
        assert len(again.index) == 0, "a scan must not take records from another place"
        await again.close(clean=False)

    simloop.run(life())


def test_an_older_life_of_the_same_place_is_not_served() -> None:
    """The medium gives back what the segment held before it was freed (a stale read for ever)."""

    async def life() -> None:
        device = SimDevice(device_bytes(SEGMENTS))
        engine = await open_engine(device)
        name = (NAMESPACES[0], key_of(1))
        slot, future = put(engine, name, b"old" * 1000)
        assert await future is Status.OK
        segment = engine.index.m_segment[slot]
        base = engine._superblock.segment_at(segment)
        old = device.image_at(base, SEGMENT)
        await engine.evict(segment)
        while True:  # until the same segment is used again
            slot, future = put(engine, name, b"new" * 1000)
            assert await future is Status.OK
            if engine.index.m_segment[slot] == segment:
                break
            await engine.evict(engine.index.m_segment[slot])
        assert await get(engine, name) == (Status.OK, b"new" * 1000)
        device.poke(base, old)
        assert (await get(engine, name))[0] is Status.CORRUPT
        await engine.close(clean=False)

    simloop.run(life())


def test_a_freed_segment_stays_free_when_its_header_is_damaged() -> None:
    """The FREE header is also written over the trailer, so the old footer cannot come back."""

    async def life() -> None:
        device = SimDevice(device_bytes(SEGMENTS))
        engine = await open_engine(device)
        name = (NAMESPACES[0], key_of(0))
        number = 0
        while engine.segment_info(0).state.value != "sealed":
            _, future = put(engine, (NAMESPACES[0], key_of(number)), bytes(9000))
            assert await future is Status.OK
            number += 1
        await engine._writer.drain()
        await engine.evict(0)
        await engine.close(clean=False)
        device.poke(engine._superblock.segment_at(0) + 40, b"\x55")
        again = await open_engine(SimDevice(device.size_bytes, image=device.image()))
        assert again.recovery.segments_damaged == 1
        assert (await get(again, name))[0] is Status.MISS
        await again._writer.drain()
        assert again.segment_info(0).state.value == "free"
        await again.close(clean=False)

    simloop.run(life())
