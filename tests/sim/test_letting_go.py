"""What is let go on the way: what cannot be shown, was removed, or is of a tenant erased."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

from entresol_proto.status import Status
from entresol_proto.wire.data import Fetch, OpenAt, Release, Stage
from tests.sim.shardlab import SECOND_NS, World
from tests.sim.test_shard_review import KEYS, forget_memory, joined, simulate, stored


def test_opened_blocks_that_their_host_cannot_be_shown_are_busy_and_kept_by_nobody(
    tmp_path: Path,
) -> None:
    async def story(world: World) -> None:
        host = await joined(world, private=True)
        await stored(host, KEYS[:3])
        opened = world.shard.gets.granting.opened
        items = opened.items

        async def none(*_args: Any) -> list[Any]:
            return []

        opened.items = none  # type: ignore[method-assign]
        assert await host.get(KEYS[:3], OpenAt.DAEMON) == [Status.BUSY] * 3
        assert sum(each.pins for each in world.shard.parts.residency._by_slot.values()) == 0
        opened.items = items  # type: ignore[method-assign]
        assert await host.get(KEYS[:3], OpenAt.DAEMON) == [Status.OK] * 3

    simulate(tmp_path, story)


def test_of_an_erased_tenants_blocks_and_of_nobodys_no_event_is_told(tmp_path: Path) -> None:
    """TENANT_ERASED says it all."""

    async def story(world: World) -> None:
        host = await joined(world)
        await stored(host, KEYS[:3])
        parts, removal, told = world.shard.parts, world.shard.removal, list[Any]()
        account = parts.accounts.by_name[host.tenant]
        parts.events.publish = lambda kind, *_args, **_words: told.append(kind)  # type: ignore
        assert await removal.drop_stream(account) == 3
        assert not told
        await stored(host, KEYS[:3])
        await world.shard.puts.drain()
        told.clear()
        parts.accounts.remove(host.tenant)
        assert removal.forget(parts.engine.index.live_slots().tolist()) == 3
        assert not told
        account.flash_bytes = account.flash_blocks = 0
        parts.accounts.add(account)

    simulate(tmp_path, story)


def test_a_quota_is_reached_and_not_passed(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        host = await joined(world)
        await stored(host, KEYS[:3])
        within = world.shard.removal.within_quota
        account = world.shard.parts.accounts.by_name[host.tenant]
        account.flash_quota_bytes = account.flash_bytes + 4096
        assert [within(account, size) for size in (0, 4096, 4097)] == [True, True, False]
        account.flash_quota_bytes, account.index_quota_blocks = 0, account.flash_blocks + 1
        assert within(account, 4096)
        account.index_quota_blocks -= 1
        assert [within(account, size) for size in (0, 4096)] == [True, False]

    simulate(tmp_path, story)


def test_what_was_removed_before_its_read_had_its_turn_is_not_read(tmp_path: Path) -> None:
    """The others of its portion are."""

    async def story(world: World) -> None:
        host = await joined(world)
        await stored(host, KEYS[:3])
        forget_memory(world)
        parts, turn = world.shard.parts, asyncio.Event()
        take, read, asked = parts.turns.flash.take, parts.engine.read, list[int]()

        async def late(account: Any, cost: int) -> int:
            await turn.wait()
            return await take(account, cost)

        async def noted(ops: Any) -> list[Status]:
            asked.extend(slot for slot, _ in ops)
            return await read(ops)

        parts.turns.flash.take = late  # type: ignore[method-assign]
        parts.engine.read = noted  # type: ignore[method-assign]
        gone, *others = (
            parts.engine.index.find(host.namespace_id, n) for n in host._names(KEYS[:3])
        )
        asking = asyncio.ensure_future(host.get(KEYS[:3], OpenAt.HOST))
        while world.shard.gets.loading < 3:
            await asyncio.sleep(0.001)
        world.shard.removal.forget([gone])
        turn.set()
        assert await asking == [Status.MISS, Status.OK, Status.OK]
        assert asked == others
        await asyncio.sleep(0.1)
        assert world.shard.gets.loading == 0

    simulate(tmp_path, story)


def test_what_was_read_in_one_go_is_over_once_it_is_granted(tmp_path: Path) -> None:
    """Also where nothing becomes free for a while: it has nothing to wait for any more."""

    async def story(world: World) -> None:
        host = await joined(world)
        await stored(host, KEYS[:2])
        forget_memory(world)
        shard, keys = world.shard, host._names(KEYS[:2])
        begun_ns = host._now()
        staged = await host._call(
            Stage(host.handle, OpenAt.HOST, SECOND_NS, 4 * SECOND_NS, keys[0])
        )
        assert staged.statuses == (Status.OK,)
        assert host._now() - begun_ns < SECOND_NS // 10, "before its hold is over"
        fetch = Fetch(host.handle, OpenAt.HOST, False, 4 * SECOND_NS, keys[1])
        (grant,) = [grant async for grant in host._answers(fetch)]
        assert grant.final
        assert len(grant.items) == 1
        await asyncio.sleep(0)
        assert (shard.gets.serving, shard.gets.door.outside) == (0, 0)
        assert len(shard.parts.leases) == 2, "both are held"

    simulate(tmp_path, story)


def test_a_session_that_holds_all_it_may_hears_of_another_ones_lease_that_ends(
    tmp_path: Path,
) -> None:
    """It holds that for what it has read, and waits for one of its tenant's leases to grant it."""

    async def story(world: World) -> None:
        host, other = await joined(world), await joined(world)
        await stored(host, KEYS[:2])
        forget_memory(world)
        parts = world.shard.parts
        account = parts.accounts.by_name[host.tenant]
        account.leases_quota = 1
        bounds = replace(parts.config.limits, inflight_bytes_per_session_max=1)
        parts.config = replace(parts.config, limits=bounds)
        read, may_end = parts.engine.read, asyncio.Event()

        async def late(ops: Any) -> list[Status]:
            statuses = await read(ops)
            await may_end.wait()
            return statuses

        parts.engine.read = late  # type: ignore[method-assign]
        asking = asyncio.ensure_future(host.get(KEYS[:1], OpenAt.HOST))
        while not world.shard.gets.loading:
            await asyncio.sleep(0.001)
        parts.engine.read = read  # type: ignore[method-assign]
        keys = b"".join(other._names(KEYS[1:2]))
        staging = Stage(other.handle, OpenAt.HOST, SECOND_NS // 2, SECOND_NS, keys)
        assert (await other._call(staging)).statuses == (Status.OK,)
        may_end.set()
        await asyncio.sleep(0.1)
        assert account.leases == 1
        assert not asking.done()
        await asyncio.sleep(0.6)  # the other one's lease ends
        assert asking.done()
        assert await asking == [Status.OK]

    simulate(tmp_path, story)


def test_memory_that_a_report_alone_kept_is_told_of(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        host = await joined(world)
        await stored(host, KEYS[:2])
        forget_memory(world)
        parts, removal = world.shard.parts, world.shard.removal
        parts.accounts.by_name[host.tenant].dram_quota_bytes = 36_864  # one block at a time
        fetch = Fetch(host.handle, OpenAt.HOST, False, SECOND_NS, host._names(KEYS[:1])[0])
        (grant,) = [grant async for grant in host._answers(fetch)]
        (resident,) = parts.residency._by_slot.values()
        resident.host_sealed = True  # so that its host is believed

        async def long(*_args: Any) -> None:
            await asyncio.sleep(0.5)

        removal.rest = long  # type: ignore[method-assign]
        host._send(Release((grant.lease_id,), ((grant.lease_id, 0, Status.CORRUPT),)))
        asking = asyncio.ensure_future(host.get(KEYS[1:2], OpenAt.HOST))
        await asyncio.sleep(0.4)
        assert not asking.done()
        assert resident.pins == 1
        await asyncio.sleep(0.2)
        assert asking.done()
        assert await asking == [Status.OK]

    simulate(tmp_path, story)
