"""A shard whose opening did not find all that is on flash; one whose room is in open segments."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from entresol_daemon.shard import removal as removal_module
from entresol_proto.ids import TenantName
from entresol_proto.status import Status
from entresol_proto.wire import data
from entresol_proto.wire.data import Ack
from tests import simloop
from tests.sim.shardlab import Host, World
from tests.sim.test_shard_review import joined, simulate

NEVER = [b"never-%08d" % n for n in range(600)]


def hide(world: World) -> None:
    """One free segment counts as one that the opening could not read."""
    table = world.shard.parts.engine._table
    segment = table.segments[table.free[-1]]
    table.cast_shadows(segment)
    table.hiding.add(segment.index)


async def forget(host: Host, keys: list[bytes]) -> int:
    done = await host._call(data.Forget(host.handle, b"".join(host._names(keys))))
    assert isinstance(done, data.Done)
    return done.count


def test_forgetting_what_may_be_hidden_is_written_down_once(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        host = await joined(world)
        engine = world.shard.parts.engine
        await forget(host, NEVER[:3])
        assert engine.stats.tombstones == 0
        hide(world)
        await forget(host, NEVER)
        assert engine.stats.tombstones == len(NEVER)
        assert not engine.removals_queued
        await forget(host, NEVER[:5])
        assert engine.stats.tombstones == len(NEVER), "each is told once"

    simulate(tmp_path, story)


def test_a_tenant_has_its_share_of_such_removals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(world: World) -> None:
        host, other = await joined(world), await joined(world, tenant="beta")
        parts = world.shard.parts
        tenants = len(parts.accounts.by_name)
        monkeypatch.setattr(
            removal_module, "HIDDEN_SHARE", parts.engine.capacity_bytes // (56 * 10 * tenants)
        )
        hide(world)
        await forget(host, NEVER[:50])
        assert parts.engine.stats.tombstones == 10
        assert parts.engine.stats.tombstones_lost == 40
        await forget(other, NEVER[:5])
        assert parts.engine.stats.tombstones == 15

    simulate(tmp_path, story)
    told = [r.message for r in caplog.records if "removals_not_written" in r.message]
    assert 1 <= len(told) <= 3


def test_open_segments_of_which_nothing_is_left_are_room(tmp_path: Path) -> None:
    """Eight segments, seven tenants: each has one open, and all that was in it is forgotten."""
    tenants = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta")

    async def story() -> None:
        world = World(tmp_path / "state", 3, segments=8)
        await world.open(tenants)
        engine = world.shard.parts.engine
        for round_ in range(3):
            for tenant in tenants:
                host = Host(world, tenant, private=False)
                await host.open()
                keys = [b"%s-%04d-%04d" % (tenant.encode(), round_, n) for n in range(4)]
                assert set(await host.put(keys, Ack.DURABLE)) == {Status.OK}, (tenant, round_)
                await forget(host, keys)
                await host.gone()
        assert len(engine.index) == 0
        await world.shard.puts.drain()
        await asyncio.sleep(12)
        world.check_idle()
        await world.stop()

    simloop.run(story(), 3, loop=simloop.SimLoop(3, seconds_max=10_000))


def test_a_tenant_at_its_quota_gives_what_it_has_of_segments_not_read(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        host, parts = await joined(world), world.shard.parts
        assert set(await host.put(NEVER[:3], Ack.DURABLE)) == {Status.OK}
        table = parts.engine._table
        (segment,) = (each for each in table.open.values() if each.live_blocks)
        table.condemn(segment)
        segment.unread = segment.hides = True
        parts.engine.stock.put(segment)
        account = parts.accounts.by_name[TenantName("alpha")]
        account.flash_quota_bytes = account.flash_bytes
        assert set(await host.put(NEVER[3:5], Ack.DURABLE)) == {Status.OK}
        assert parts.engine.stats.unread_freed == 1
        account.flash_quota_bytes = 0

    simulate(tmp_path, story)


def test_room_is_not_looked_for_while_the_engine_closes(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        host, parts = await joined(world), world.shard.parts
        await host.put(NEVER[:3], Ack.DURABLE)
        account = parts.accounts.by_name[TenantName("alpha")]
        engine = parts.engine
        engine._closing = engine._evictor._finishing = True
        evictions = 0
        evict = engine.evict

        async def counted(*args: Any) -> Any:
            nonlocal evictions
            evictions += 1
            assert evictions < 10, "it tries again and again"
            return await evict(*args)

        engine.evict = counted  # type: ignore[method-assign]
        try:
            assert not await world.shard.removal.make_room(account, 4096)
        finally:
            engine._closing = engine._evictor._finishing = False

    simulate(tmp_path, story)
