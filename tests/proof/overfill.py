"""Floods that are more than flash or the index hold: who loses blocks?

Invariant under proof: a tenant within its fair share of what is short keeps every block.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from entresol_proto.status import Status
from entresol_proto.wire import data
from tests.proof.fairlab import KIB, SEGMENT_BYTES, Guest, Place, key_of

TENANTS = {"ann": 1, "ben": 1, "mallory": 1}
BLOCK_BYTES = 64 * KIB
SEGMENTS = 24
TIMES = 5  # as much as there is


async def _stored(place: Place, tenant: str, blocks: int) -> tuple[Guest, bytes]:
    guest = Guest(place, tenant)
    await guest.open()
    keys = [key_of(tenant, number) for number in range(blocks)]
    for at in range(0, blocks, 32):
        statuses = await guest.put(keys[at : at + 32], BLOCK_BYTES)
        assert set(statuses) == {Status.OK}, statuses
    return guest, guest.names(keys)


async def _flood(place: Place, count: int, block_bytes: int, at_once: int) -> None:
    """Put so many new blocks."""
    guest = Guest(place, "mallory")
    await guest.open()
    numbers = iter(range(count))

    async def one() -> None:
        while keys := [key_of("mallory", n) for _, n in zip(range(64), numbers, strict=False)]:
            left = keys
            while left:
                statuses = await guest.put(left, block_bytes, ack=data.Ack.ACCEPTED)
                busy = (Status.BUSY, Status.NO_SPACE)
                left = [k for k, s in zip(left, statuses, strict=True) if s in busy]
                await asyncio.sleep(0.001 if left else 0)

    await asyncio.gather(*(one() for _ in range(at_once)))
    await guest.gone()


async def _kept(guest: Guest, names: bytes) -> int:
    reply = await guest.call(data.Exists(guest.handle, names))
    return sum(bin(each).count("1") for each in reply.bitmap)


async def puts_of_five_times_the_flash(folder: Path, seed: int) -> None:
    """Two tenants hold four fifths of their share each; the third writes five times everything."""
    place = await Place.open(folder, seed, TENANTS, flash_segments=SEGMENTS)
    capacity = place.shard.parts.engine.capacity_bytes
    mine = capacity // len(TENANTS) * 4 // 5 // (BLOCK_BYTES + 8 * KIB)
    holders = [await _stored(place, name, mine) for name in ("ann", "ben")]
    await _flood(place, TIMES * capacity // BLOCK_BYTES, BLOCK_BYTES, 4)
    await _judge(place, holders, mine)


async def tiny_blocks_that_fill_the_index(folder: Path, seed: int) -> None:
    """Two tenants hold bytes, the third wants all entries of the index, and five times that."""
    blocks_max = 1_200
    place = await Place.open(
        folder, seed, TENANTS, flash_segments=SEGMENTS, blocks_max=blocks_max
    )  # fmt: skip
    mine = blocks_max // len(TENANTS) * 4 // 5
    holders = [await _stored(place, name, mine) for name in ("ann", "ben")]
    await _flood(place, TIMES * blocks_max, 64, 4)
    await _judge(place, holders, mine)


async def _judge(place: Place, holders: list[tuple[Guest, bytes]], mine: int) -> None:
    kept = [await _kept(guest, names) for guest, names in holders]
    written = place.shard.parts.engine.stats.written_bytes
    await place.close()
    assert kept == [mine, mine], f"{mine} blocks each, kept {kept}"
    assert place.shard.parts.engine.stats.evicted_blocks > 0, "nothing had to go"
    assert written > SEGMENTS * SEGMENT_BYTES or place.shard.parts.engine.index.capacity < 2_000


STORIES = (puts_of_five_times_the_flash, tiny_blocks_that_fill_the_index)
