"""A group is written at once where somebody waits for it and nothing comes that would join it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from entresol_proto.fabric.base import RemoteSpan
from entresol_proto.status import Status
from entresol_proto.wire import data
from entresol_proto.wire.data import Ack
from tests.sim.shardlab import SECOND_NS, Host, World
from tests.sim.test_shard_review import KEYS, joined, names, simulate


async def patient(world: World, host: Host) -> None:
    """From the next group on they wait for a second."""
    writer = world.shard.parts.engine._writer
    writer._options = replace(
        writer._options, group_commit_ns=SECOND_NS, group_commit_bytes=1 << 30
    )
    assert await host.put(KEYS[-1:], Ack.DURABLE) == [Status.OK]


async def took_ns(host: Host, keys: list[bytes], ack: Ack = Ack.DURABLE) -> int:
    begun = host._now()
    assert set(await host.put(keys, ack)) <= {Status.OK, Status.EXISTS}
    return host._now() - begun


def test_a_put_that_nobody_could_join_does_not_wait_for_its_group(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        host = await joined(world)
        await patient(world, host)
        assert await took_ns(host, KEYS[:3]) < SECOND_NS // 4
        groups = world.shard.parts.engine.stats.groups
        assert await took_ns(host, KEYS[3:6], Ack.ACCEPTED) < SECOND_NS // 4
        await asyncio.sleep(0.1)
        assert world.shard.parts.engine.stats.groups == groups, "nobody waits for those"
        # Now somebody does, who offers the same blocks.
        assert await took_ns(host, KEYS[3:6]) < SECOND_NS // 4
        assert world.shard.parts.engine.stats.groups > groups
        # And somebody who waits for blocks, and holds one that cannot come meanwhile.
        assert await took_ns(host, KEYS[6:9], Ack.ACCEPTED) < SECOND_NS // 4
        assert await took_ns(host, KEYS[6:10]) < SECOND_NS // 4

    simulate(tmp_path, story)


async def reserve(host: Host, key: bytes) -> int:
    """A put id, for which nothing is stored."""
    item = data.PutItem(names(host, [key])[:16], key, 4_096, 0, b"", b"")
    reserved = await host._call(data.Reserve(host.handle, Ack.ACCEPTED, 60 * SECOND_NS, (item,)))
    assert [answer.status for answer in reserved.items] == [Status.OK]
    return int(reserved.items[0].put_id)


def test_a_group_waits_for_what_its_session_reserved(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        host, other = await joined(world), await joined(world, tenant="beta")
        await patient(world, host)
        await reserve(other, KEYS[0])  # not for what others put
        assert await took_ns(host, KEYS[:3]) < SECOND_NS // 4
        put_id = await reserve(host, KEYS[9])
        assert SECOND_NS // 2 < await took_ns(host, KEYS[3:6]) < 2 * SECOND_NS

        async def give_up() -> None:
            await asyncio.sleep(0.1)
            await host._call(data.Commit(((put_id, RemoteSpan(0, 0, 0)),)))

        given_up = asyncio.ensure_future(give_up())
        assert SECOND_NS // 20 < await took_ns(host, KEYS[6:9]) < SECOND_NS // 2
        await given_up

    simulate(tmp_path, story)
