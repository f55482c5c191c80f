"""Hosts that are waited for, each made on purpose in simulation: they are late for their own
requests and nobody else's.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from entresol_daemon.shard import opened, turns
from entresol_proto import limits
from entresol_proto.fabric.base import Exposure, ReadOp, RemoteSpan
from entresol_proto.status import FabricError, QuotaError, Status
from entresol_proto.wire import data
from entresol_proto.wire.data import Ack, OpenAt
from tests.sim.shardlab import SECOND_NS, World
from tests.sim.test_shard_review import KEYS, joined, names, simulate, stored


def test_a_host_that_looks_at_nothing_refuses_nobody_elses_gets(tmp_path: Path) -> None:
    """shm: a slab is shown when the host has mapped it, and this one does not."""

    async def story(world: World) -> None:
        hog, other = await joined(world), await joined(world, tenant="beta")
        door = world.shard.gets.door
        door.at_once = 4
        await stored(hog, KEYS)
        await stored(other, KEYS)
        asked = 0

        async def expose(_buffer: Any) -> Exposure:
            nonlocal asked
            asked += 1
            await asyncio.sleep(5)
            raise FabricError("the peer does not answer", status=Status.DEADLINE)

        hog.wire.daemon.expose = expose  # type: ignore[method-assign]
        fetches = [asyncio.ensure_future(hog.get([key], OpenAt.HOST)) for key in KEYS[:12]]
        await asyncio.sleep(0.1)
        slabs = len({r.extent.slab for r in world.shard.parts.residency._by_slot.values()})
        assert 0 < asked <= slabs, "asked again while it is being shown"
        for _ in range(20):
            begun = other._now()
            assert await other.get(KEYS[:2], OpenAt.HOST) == [Status.OK, Status.OK]
            assert other._now() - begun < SECOND_NS // 10
        await asyncio.gather(*fetches)
        assert door.inside == door.outside == 0
        assert not door._present

    simulate(tmp_path, story)


def test_a_session_without_exposures_left_refuses_nobody_elses_gets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opened, "EXPOSED_BLOCKS_MAX", 4)

    async def story(world: World) -> None:
        hog = await joined(world, private=True)
        other = await joined(world, tenant="beta", private=True)
        door = world.shard.gets.door
        door.at_once = 4
        await stored(hog, KEYS)
        await stored(other, KEYS)
        held = data.Stage(
            hog.handle, OpenAt.DAEMON, SECOND_NS, 100 * SECOND_NS, names(hog, KEYS[:4])
        )
        assert set((await hog._call(held)).statuses) == {Status.OK}
        asks = [
            data.Fetch(hog.handle, OpenAt.DAEMON, False, limits.DEADLINE_NS_MAX, names(hog, [key]))
            for key in KEYS[:12]
        ]
        fetches = [asyncio.ensure_future(hog._call(ask)) for ask in asks]
        await asyncio.sleep(0.1)
        assert not any(fetch.done() for fetch in fetches)
        for _ in range(20):
            begun = other._now()
            assert await other.get(KEYS[:2], OpenAt.DAEMON) == [Status.OK, Status.OK]
            assert other._now() - begun < SECOND_NS // 10
        await asyncio.gather(*fetches)  # when the hold has ended
        await asyncio.sleep(0)
        assert door.inside == door.outside == 0
        assert not door._present

    simulate(tmp_path, story)


def test_a_slab_whose_only_reader_left_is_not_shown(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        host = await joined(world)
        await stored(host, KEYS[:1])
        session = next(iter(world.shard.sessions.values()))
        endpoint, parts = host.wire.daemon, world.shard.parts
        honest, going, cancelled = endpoint.expose, asyncio.Event(), asyncio.Event()

        async def slow(buffer: Any) -> Exposure:
            going.set()
            try:
                await asyncio.sleep(1)
            except asyncio.CancelledError:
                cancelled.set()
                raise
            return await honest(buffer)

        endpoint.expose = slow  # type: ignore[method-assign]
        ask = data.Fetch(host.handle, OpenAt.HOST, False, SECOND_NS, names(host, KEYS[:1]))
        fetch = asyncio.ensure_future(world.shard.gets.fetch(session, ask, lambda _grant: None))
        await going.wait()
        fetch.cancel()
        await asyncio.gather(fetch, return_exceptions=True)
        parts.residency.clear()
        parts.residency.pool.release_owner(session.account.stream)
        await asyncio.wait_for(cancelled.wait(), 0.1)
        assert not session.exposures
        assert not session._showing

    simulate(tmp_path, story)


@pytest.mark.parametrize("deadline_ns", [5 * SECOND_NS, limits.DEADLINE_NS_MAX])
def test_a_host_that_does_not_answer_stops_nobody_elses_puts(
    deadline_ns: int, tmp_path: Path
) -> None:
    async def story(world: World) -> None:
        hog, other = await joined(world), await joined(world, tenant="beta")
        size = world.config.limits.block_bytes_max
        pulls = world.shard.parts.turns.pulls
        pulls._gate.cost_max = size // 2  # as on a machine where pulls are slow
        pulls._pace = None

        async def silent(ops: list[ReadOp], deadline_ns: int) -> list[Status]:
            await asyncio.sleep(max(0, deadline_ns - hog._now()) / 1e9)
            return [Status.DEADLINE] * len(ops)

        hog.wire.daemon.read = silent  # type: ignore[method-assign]
        commits = []
        for at in range(4):
            item = data.PutItem(hog._names(KEYS)[at], KEYS[at], size, 0, b"", b"")
            taken = await hog._call(data.Reserve(hog.handle, Ack.ACCEPTED, deadline_ns, (item,)))
            put_id = taken.items[0].put_id
            commit = data.Commit(((put_id, RemoteSpan(1, 0, size)),))
            commits.append(asyncio.ensure_future(hog._call(commit)))
        await asyncio.sleep(0.001)
        begun = other._now()
        for number in range(8):
            keys = [b"%d%s" % (number, key) for key in KEYS]
            await stored(other, keys)
        assert other._now() - begun < SECOND_NS
        await asyncio.sleep(31)  # and a host is not waited for without end
        assert all(commit.done() for commit in commits)
        assert pulls.in_service == 0
        assert {session.slow_reads for session in world.shard.sessions.values()} == {0}

    simulate(tmp_path, story)


def test_a_put_whose_turn_does_not_come_ends_by_its_deadline(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        host = await joined(world)
        account = world.shard.parts.accounts.by_name["alpha"]
        pulls = world.shard.parts.turns.pulls
        costs = [await pulls.take(account, 1) and 1 for _ in range(2)]
        pulls._gate.cost_max = 1
        begun = host._now()
        assert set(await host.put(KEYS[:3], Ack.ACCEPTED)) == {Status.DEADLINE}
        assert host._now() - begun < 60 * SECOND_NS
        for cost in costs:
            pulls.give(cost)
        await stored(host, KEYS[:3])

    simulate(tmp_path, story)


def test_a_reserve_that_is_given_up_half_way_leaves_nothing_reserved(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        host = await joined(world)
        parts, take = world.shard.parts, world.shard.parts.turns.loop.take
        refusals = 0

        async def refused(*args: Any) -> None:
            nonlocal refusals
            if args[1] == turns.LOOP_TURN_COST and world.shard.puts._reserving.open:
                refusals += 1
                raise QuotaError("so many wait", status=Status.BUSY)
            await take(*args)

        parts.turns.loop.take = refused  # type: ignore[method-assign]
        assert Status.OK not in await host.put(KEYS, Ack.ACCEPTED)
        assert refusals == 1
        assert world.shard.puts.under_way == 0
        parts.turns.loop.take = take  # type: ignore[method-assign]
        await stored(host, KEYS)

    simulate(tmp_path, story)
