"""A version of a data key ends only when nothing on flash can need it: not while a start has left
something unread, nor by what a block's place held before it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from entresol_daemon.core.census import NOT_COUNTED
from entresol_daemon.flash.engine import Engine
from entresol_daemon.keys import keyring
from entresol_daemon.keys.tenant import USAGE_FIRST_BLOCKS
from entresol_daemon.shard import keycare
from entresol_daemon.shard.listing import Listing
from entresol_proto import limits
from entresol_proto.ids import TenantName
from entresol_proto.status import Status
from entresol_proto.wire.data import OpenAt
from tests.sim import shardlab
from tests.sim.shardlab import SEGMENT_BYTES, World
from tests.sim.test_shard_review import KEYS, joined, names, simulate, stored
from tests.sim.test_tenant_changes import admin_of
from tests.unit import test_flash_unread

ALPHA = TenantName("alpha")
TENANTS = ("alpha", "beta")


def held_heads(engine: Engine) -> tuple[asyncio.Event, asyncio.Event]:
    """Heads that were read are given out only once the second event is set; the first tells when
    some were read."""
    read_heads, reading, go_on = engine.read_heads, asyncio.Event(), asyncio.Event()

    async def slow(slots: Sequence[int]) -> list[bytes]:
        heads = await read_heads(slots)
        reading.set()
        await go_on.wait()
        return heads

    engine.read_heads = slow  # type: ignore[method-assign]
    return reading, go_on


def versions(world: World) -> list[int]:
    info = world.keyring.info(ALPHA)
    assert info is not None
    return sorted(info.fingerprints)


async def again(world: World) -> None:
    """Crash, and come back."""
    await world.crash()
    await world.open(TENANTS)


def test_the_key_of_what_a_start_could_not_read_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_flash_unread, "SEGMENT", SEGMENT_BYTES)

    async def story(world: World) -> None:
        await stored(await joined(world), KEYS[:3])
        (segment,) = (each.index for each in world.shard.parts.engine._table.open.values())
        await world.shard.keycare.rotate(ALPHA)
        await world.crash()
        bad = {segment}
        test_flash_unread.refuse(world.device, bad)
        await world.open(TENANTS)
        assert world.shard.parts.engine.hides_blocks
        await asyncio.sleep(10)
        assert versions(world) == [1, 2]
        await world.crash()
        bad.clear()  # it reads the rest now
        await world.open(TENANTS)
        host = await joined(world)
        assert await host.get(KEYS[:3], OpenAt.HOST) == [Status.OK] * 3

    simulate(tmp_path, story)


@pytest.mark.parametrize("force", [False, True])
def test_a_block_is_not_taken_for_the_one_before_it(tmp_path: Path, force: bool) -> None:
    """Forgotten and put again while the head of the former is read, in the same slot."""

    async def story(world: World) -> None:
        await stored(await joined(world), KEYS[:3])
        await world.shard.keycare.rotate(ALPHA)
        await again(world)
        engine, care = world.shard.parts.engine, world.shard.keycare
        host = await joined(world)
        wire_keys = [names(host, [key]) for key in KEYS[:3]]
        reading, go_on = held_heads(engine)
        await reading.wait()
        before = [engine.index.find(host.namespace_id, key) for key in wire_keys]
        if force:
            await care.rotate(ALPHA, force=True)
        else:
            await host.forget(KEYS[:3])
        await stored(host, KEYS[2::-1])
        after = [engine.index.find(host.namespace_id, key) for key in wire_keys]
        assert set(before) & set(after), "nothing is tried: no slot has its key again"
        go_on.set()
        await asyncio.sleep(1)
        info = world.keyring.info(ALPHA)
        assert info is not None
        uses, _, _ = care.uses(info)
        assert uses[-1].blocks == 3
        await care.rotate(ALPHA)
        await asyncio.sleep(10)
        assert await host.get(KEYS[:3], OpenAt.HOST) == [Status.OK] * 3

    simulate(tmp_path, story)


def test_a_segment_that_became_anothers_is_not_counted_as_before(tmp_path: Path) -> None:
    """Between two looks of a count it was freed, and took blocks of another tenant's that were
    there before the start as well."""

    async def story(world: World) -> None:
        await world.shard.keycare.rotate(ALPHA, force=True)
        await stored(await joined(world), KEYS[:3])
        await again(world)
        await stored(await joined(world), KEYS[3:6])
        await stored(await joined(world, tenant="beta"), KEYS[:3])
        await again(world)
        engine = world.shard.parts.engine
        reading, go_on = held_heads(engine)
        await reading.wait()
        by_stream: dict[bytes, list[int]] = {}
        for each in engine.segments():
            if each.live_blocks:
                by_stream.setdefault(each.stream, []).append(each.segment)
        of_beta = by_stream.pop(world.shard.parts.accounts.by_name[TenantName("beta")].stream)
        ((_, doomed),) = by_stream.values()
        await engine.evict(doomed)
        engine._table.free.remove(doomed)
        engine._table.free.appendleft(doomed)
        for segment in of_beta:
            await engine.evict(segment, engine.segment_slots(segment).tolist())
        assert engine.segment_info(doomed).live_blocks == 3, "nothing is tried"
        go_on.set()
        await asyncio.sleep(10)
        beta = await joined(world, tenant="beta")
        assert await beta.get(KEYS[:3], OpenAt.HOST) == [Status.OK] * 3

    simulate(tmp_path, story)


def test_blocks_that_cannot_be_looked_at_do_not_keep_others_from_being_counted(
    tmp_path: Path,
) -> None:
    async def story(world: World) -> None:
        for name in TENANTS:
            await stored(await joined(world, tenant=name), KEYS[:3])
            await world.shard.keycare.rotate(TenantName(name))
        await again(world)
        parts = world.shard.parts
        alpha, beta = (parts.accounts.by_name[TenantName(name)].stream for name in TENANTS)
        read_heads, looked = parts.engine.read_heads, list[int]()

        async def refused(slots: Sequence[int]) -> list[bytes]:
            heads = await read_heads(slots)
            if parts.engine.stream_of(int(parts.engine.index.segment[slots[0]])) == alpha:
                looked.append(len(slots))
                return [b""] * len(heads)
            return heads

        parts.engine.read_heads = refused  # type: ignore[method-assign]
        await asyncio.sleep(30)
        assert parts.census.blocks(alpha, NOT_COUNTED) == 3
        assert parts.census.blocks(beta, NOT_COUNTED) == 0
        assert looked == [3]
        await asyncio.sleep(60)
        assert looked == [3, 3]

    simulate(tmp_path, story)


def test_many_tenants_that_cannot_be_counted_keep_no_other_from_being_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a look a second, those of a minute were looked at again and again."""
    monkeypatch.setattr(keycare, "RETRY_NS", keycare.LOOK_NS)

    async def story(world: World) -> None:
        three = (*TENANTS, "gamma")
        await world.crash()
        await world.open(three)
        for name in three:
            await stored(await joined(world, tenant=name), KEYS[:3])
            await world.shard.keycare.rotate(TenantName(name))
        await world.crash()
        await world.open(three)
        parts = world.shard.parts
        gamma = parts.accounts.by_name[TenantName("gamma")].stream
        read_heads = parts.engine.read_heads

        async def refused(slots: Sequence[int]) -> list[bytes]:
            heads = await read_heads(slots)
            of = parts.engine.stream_of(int(parts.engine.index.segment[slots[0]]))
            return heads if of == gamma else [b""] * len(heads)

        parts.engine.read_heads = refused  # type: ignore[method-assign]
        await asyncio.sleep(30)
        assert parts.census.blocks(gamma, NOT_COUNTED) == 0

    simulate(tmp_path, story)


def test_nothing_is_remembered_of_tenants_that_were_erased(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyring, "USAGE_AHEAD_BLOCKS", USAGE_FIRST_BLOCKS)

    async def story(world: World) -> None:
        await stored(await joined(world), KEYS[:3])
        await asyncio.sleep(3)
        care = world.shard.keycare
        assert ALPHA in care._note_after_ns
        care._not_before_ns[ALPHA] = 2**62
        await admin_of(world).tenant_erase(ALPHA)
        await asyncio.sleep(3)
        assert not care._note_after_ns
        assert not care._not_before_ns

    simulate(tmp_path, story)


def test_blocks_of_many_chunks_are_counted_and_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their sealed header is longer than a block of flash."""
    monkeypatch.setattr(shardlab, "SEGMENT_BYTES", 16 * limits.MIB)
    monkeypatch.setitem(World.__init__.__kwdefaults__, "segments", 8)
    plain = random.Random(1).randbytes(4 * limits.MIB)

    async def story(world: World) -> None:
        old = world.config
        world.config = replace(
            old,
            sealing=replace(old.sealing, chunk_bytes=limits.CHUNK_BYTES_MIN),
            memory=replace(old.memory, dram_bytes=64 * limits.MIB, slab_bytes=16 * limits.MIB),
            limits=replace(
                old.limits, block_bytes_max=len(plain), put_queue_bytes_max=32 * limits.MIB,
                inflight_bytes_per_session_max=16 * limits.MIB,
            ),
        )  # fmt: skip
        monkeypatch.setattr(shardlab.Oracle, "content", lambda *_: plain)
        await again(world)
        host = await joined(world, private=True)
        await stored(host, KEYS[:1])
        await world.shard.keycare.rotate(ALPHA)
        await again(world)
        info = world.keyring.info(ALPHA)
        assert info is not None
        assert world.shard.keycare.not_counted(info) == 1
        await asyncio.sleep(10)
        uses, unknown, _ = world.shard.keycare.uses(info)
        assert ([use.blocks for use in uses], unknown) == ([1, 0], 0)
        listed = [event async for event in Listing(world.shard.parts, ALPHA).events() if event]
        assert [event.engine_keys for event in listed] == [(KEYS[0],)]
        await (await joined(world)).forget(KEYS[:1])
        await asyncio.sleep(10)
        assert versions(world) == [2]

    simulate(tmp_path, story)


def test_no_count_nor_erasure_describes_every_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 128,000 it held the event loop for 0.3 s, each time."""

    async def story(world: World) -> None:
        for name in TENANTS:
            await stored(await joined(world, tenant=name), KEYS[:3])
        await world.shard.keycare.rotate(ALPHA)
        await again(world)
        engine = world.shard.parts.engine
        monkeypatch.setattr(engine, "segments", lambda: pytest.fail("all are described"))
        await asyncio.sleep(10)
        stream = world.shard.parts.accounts.by_name[ALPHA].stream
        assert world.shard.parts.census.blocks(stream, NOT_COUNTED) == 0
        receipt = await admin_of(world).tenant_erase(ALPHA)
        assert receipt.blocks_dropped == 3
        monkeypatch.undo()

    simulate(tmp_path, story)
