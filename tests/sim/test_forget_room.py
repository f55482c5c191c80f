"""Removals are written down, which takes room: on a full store, too, none of them is refused."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from entresol_proto.ids import TenantName
from entresol_proto.status import Status
from entresol_proto.wire import data
from entresol_proto.wire.data import Ack
from tests import simloop
from tests.sim.shardlab import Host, World
from tests.sim.test_shard_review import admin_of

SEGMENTS = 16  # of 1 MiB: the reserve has room for some 500 records of removals
ROUND = 48
SMALL_BYTES = 6_000  # a record of removals takes 4 KiB


@pytest.mark.parametrize("erase", [False, True])
def test_forgetting_one_by_one_fills_the_reserve_and_goes_on(tmp_path: Path, erase: bool) -> None:
    async def story() -> None:
        world = World(tmp_path / "state", 3, segments=SEGMENTS)
        await world.open(("alpha", "beta"))
        host, other = Host(world, "alpha", private=False), Host(world, "beta", private=False)
        await host.open()
        await other.open()
        await other.put([b"other-%06d" % n for n in range(4)], Ack.DURABLE)
        engine = world.shard.parts.engine
        keys: list[bytes] = []
        numbers = itertools.count()
        while not engine.stats.evicted_segments:  # until it is full
            more = [b"mine-%08d" % next(numbers) for _ in range(8 * ROUND)]
            more = [k for k in more if len(world.oracle.content("alpha", k)) < SMALL_BYTES][:ROUND]
            await host.put(more, Ack.DURABLE)
            keys += more
        before = engine.stats.evicted_segments
        for key in reversed(keys):
            await host._call(data.Forget(host.handle, host._names([key])[0]))  # raises if refused
        assert engine.stats.evicted_segments > before, "the reserve was large enough"
        if erase:
            admin = admin_of(world)
            await other.gone()
            world.hosts.remove(other)
            await admin.tenant_erase(TenantName("beta"))
        more = [b"last-%08d" % n for n in range(4)]
        assert set(await host.put(more, Ack.DURABLE)) == {Status.OK}
        for each in world.hosts:
            await each.gone()
        world.hosts.clear()
        await world.shard.puts.drain()
        await asyncio.sleep(12)
        world.check_idle()
        await world.stop()

    simloop.run(story(), 3, loop=simloop.SimLoop(3, seconds_max=10_000))
