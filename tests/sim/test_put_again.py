"""A block stored again where its name had one before: no crash brings that one back afterwards.

Whatever took the first out of the index, it lies on flash until its segment is free or its removal
is written down. The device is slow here, so that a put is answered, or not, in between.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from entresol_daemon.flash.engine import RemoveReason
from entresol_daemon.flash.segment import decode_record_header
from entresol_proto.status import Status
from entresol_proto.wire.data import Ack
from tests.sim.shardlab import SEGMENT_BYTES, Host, World
from tests.sim.test_shard_review import KEYS, joined, names, simulate, stored
from tests.unit import test_flash_unread

SLOW_NS = 50_000_000
TENANTS = ("alpha", "beta")


async def evicted(world: World) -> asyncio.Future[object]:
    """Everything has left the index, and is on flash."""
    engine = world.shard.parts.engine
    (segment,) = (each.index for each in engine._table.open.values())
    evicting = asyncio.ensure_future(engine.evict(segment))
    while len(engine.index):
        await asyncio.sleep(1e-6)
    return evicting


async def removed(world: World, reason: RemoveReason) -> asyncio.Future[object]:
    """The same, one by one."""
    engine = world.shard.parts.engine
    for slot in engine.index.live_slots().tolist():
        engine.remove(slot, reason)
    return asyncio.ensure_future(engine.barrier())


async def crash(world: World) -> None:
    """And come back."""
    await world.crash()
    await world.open(TENANTS)


async def lsns(world: World, host: Host, keys: list[bytes]) -> list[int | None]:
    """Of the records that are there now, None where there is none."""
    engine, found = world.shard.parts.engine, list[int | None]()
    for key in keys:
        slot = engine.index.find(host.namespace_id, names(host, [key]))
        if slot < 0:
            found.append(None)
            continue
        (head,) = await engine.read_heads([slot])
        header = decode_record_header(head, engine._superblock.check_key)
        assert header is not None
        found.append(header.lsn)
    return found


@pytest.mark.parametrize("how", ["evicted", "forgotten", "corrupt", "lost"])
@pytest.mark.parametrize("seed", range(4))
def test_what_was_accepted_is_what_is_there_after_a_crash(
    tmp_path: Path, how: str, seed: int
) -> None:
    async def story(world: World) -> None:
        host = await joined(world)
        await stored(host, KEYS[:3])
        old_lsn = world.shard.parts.engine._table.lsn
        world.device._latency_ns = (SLOW_NS, SLOW_NS)
        if how == "evicted":
            leaving = await evicted(world)
        else:
            reasons = {"corrupt": RemoveReason.CORRUPT, "lost": RemoveReason.IO_ERROR}
            leaving = await removed(world, reasons.get(how, RemoveReason.FORGOTTEN))
        assert await host.put(KEYS[:3], Ack.ACCEPTED) == [Status.OK] * 3
        await crash(world)
        await asyncio.gather(leaving, return_exceptions=True)
        for lsn in await lsns(world, host, KEYS[:3]):
            assert lsn is not None, "it was answered when it was durable"
            assert lsn > old_lsn, "what was there before is back"

    simulate(tmp_path, story, seed=seed)


@pytest.mark.parametrize("seed", range(4))
def test_nobody_is_told_that_it_exists_before(tmp_path: Path, seed: int) -> None:
    async def story(world: World) -> None:
        host, other = await joined(world), await joined(world)
        await stored(host, KEYS[:3])
        engine = world.shard.parts.engine
        old_lsn = engine._table.lsn
        world.device._latency_ns = (SLOW_NS, SLOW_NS)
        leaving = await evicted(world)
        first = asyncio.ensure_future(host.put(KEYS[:1], Ack.ACCEPTED))
        while not len(engine.index):
            await asyncio.sleep(1e-5)
        assert await other.put(KEYS[:1], Ack.ACCEPTED) == [Status.EXISTS]
        await crash(world)
        await asyncio.gather(leaving, first, return_exceptions=True)
        (lsn,) = await lsns(world, host, KEYS[:1])
        assert lsn is not None
        assert lsn > old_lsn

    simulate(tmp_path, story, seed=seed)


@pytest.mark.parametrize("seed", range(4))
def test_what_an_opening_could_not_read_is_not_back_after_a_put_either(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_flash_unread, "SEGMENT", SEGMENT_BYTES)

    async def story(world: World) -> None:
        host = await joined(world)
        await stored(host, KEYS[:3])
        old_lsn = world.shard.parts.engine._table.lsn
        (segment,) = (each.index for each in world.shard.parts.engine._table.open.values())
        await world.crash()
        bad = {segment}
        test_flash_unread.refuse(world.device, bad)
        await world.open(TENANTS)
        assert world.shard.parts.engine.hides_blocks
        host = await joined(world)
        world.device._latency_ns = (SLOW_NS, SLOW_NS)
        assert await host.put(KEYS[:1], Ack.ACCEPTED) == [Status.OK]
        await world.crash()
        bad.clear()  # it reads the rest now
        await world.open(TENANTS)
        (lsn,) = await lsns(world, host, KEYS[:1])
        assert lsn is not None
        assert lsn > old_lsn

    simulate(tmp_path, story, seed=seed)


def test_a_put_of_what_was_never_there_is_accepted_before_it_is_durable(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        host = await joined(world)
        await stored(host, KEYS[:3])
        world.device._latency_ns = (SLOW_NS, SLOW_NS)
        leaving = await evicted(world)
        begun = host._now()
        assert await host.put(KEYS[3:6], Ack.ACCEPTED) == [Status.OK] * 3
        assert host._now() - begun < SLOW_NS
        assert not leaving.done()
        await leaving
        begun = host._now()
        assert await host.put(KEYS[:3], Ack.ACCEPTED) == [Status.OK] * 3, "nothing is left of it"
        assert host._now() - begun < SLOW_NS

    simulate(tmp_path, story)
