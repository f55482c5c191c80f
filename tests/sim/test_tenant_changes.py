"""What an operator does to a tenant while others change the same one: erase, add, rotate."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from entresol_daemon.control.admin import TenantQuota
from entresol_daemon.core.accounts import Account
from entresol_daemon.flash.model import Removed
from entresol_daemon.shard.admin import Addresses, ShardAdmin
from entresol_daemon.shard.turns import DROP_COST, LOOP_ROUND_COST, Stretches
from entresol_proto.ids import TenantName
from entresol_proto.status import DeviceError, EntresolError, Status
from entresol_proto.wire.data import OpenAt, Stage
from tests.sim.shardlab import SECOND_NS, Host, World
from tests.sim.test_shard_review import KEYS, joined, simulate, stored
from tests.simloop import SimLoop

ALPHA = TenantName("alpha")


def admin_of(world: World, until: Callable[[], Awaitable[Any]] | None = None) -> ShardAdmin:
    """`until` is waited for before the sessions of a tenant are ended."""

    async def not_asked(_kek_file: str) -> Any:
        raise AssertionError("nobody changes keys here")

    async def end_sessions(tenant: TenantName) -> int:
        if until is not None:
            await until()
        mine = [
            host for host in world.hosts
            if host.tenant == tenant and host._handler.session is not None
        ]  # fmt: skip
        for host in mine:
            await host.gone()
            world.hosts.remove(host)
        return len(mine)

    return ShardAdmin(
        world.shard, Addresses("here", ()), end_sessions=end_sessions, begin_drain=lambda: None,
        unlock=not_asked, change_kek=not_asked,
    )  # fmt: skip


async def refused(asked: Awaitable[Any]) -> Status:
    with pytest.raises(EntresolError) as caught:
        await asked
    return caught.value.status


# One after the other.


def test_nobody_begins_anew_under_the_name_of_a_tenant_that_is_being_erased(
    tmp_path: Path,
) -> None:
    async def story(world: World) -> None:
        old = await joined(world)
        await stored(old, KEYS[:8])
        go_on = asyncio.Event()
        admin = admin_of(world, go_on.wait)
        erasing = asyncio.ensure_future(admin.tenant_erase(ALPHA))
        await asyncio.sleep(1)
        assert await refused(admin.tenant_add(ALPHA, TenantQuota())) is Status.CONFLICT
        assert await refused(admin.tenant_rotate(ALPHA)) is Status.CONFLICT
        await refused(joined(world))
        assert len(world.shard.sessions) == 1
        again = asyncio.ensure_future(admin.tenant_erase(ALPHA))  # waits, and has nothing to do
        await asyncio.sleep(1)
        assert not erasing.done()
        assert not again.done()
        go_on.set()
        receipt = await erasing
        assert receipt.blocks_dropped == 8
        assert (await again).signed_receipt == receipt.signed_receipt
        await admin.tenant_add(ALPHA, TenantQuota())
        fresh = await joined(world)
        await stored(fresh, KEYS[:4])
        await world.crash()
        await world.open(("alpha", "beta"))
        back = await joined(world)
        assert await back.get(KEYS[:8], OpenAt.HOST) == [Status.OK] * 4 + [Status.MISS] * 4
        assert not world.shard.tenancy._turns

    simulate(tmp_path, story)


def test_an_erasure_that_was_given_up_is_finished_by_the_next(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await stored(await joined(world), KEYS[:8])
        erasing = asyncio.ensure_future(admin_of(world, asyncio.Event().wait).tenant_erase(ALPHA))
        await asyncio.sleep(1)
        erasing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await erasing
        admin = admin_of(world)
        assert await refused(admin.tenant_add(ALPHA, TenantQuota())) is Status.CONFLICT
        assert (await admin.tenant_erase(ALPHA)).blocks_dropped == 8
        await admin.tenant_add(ALPHA, TenantQuota())
        await stored(await joined(world), KEYS[:8])

    simulate(tmp_path, story)


def test_an_erasure_asked_for_again_tells_when_the_keys_were_destroyed(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        admin = admin_of(world)
        first = await admin.tenant_erase(ALPHA)
        await asyncio.sleep(100)
        again = await admin.tenant_erase(ALPHA)
        assert again.signed_receipt == first.signed_receipt
        assert again.erased_unix_ns // 10**9 == first.erased_unix_ns // 10**9

    simulate(tmp_path, story)


def test_an_erasure_waits_for_a_forced_rotation(tmp_path: Path) -> None:
    """The rotation wipes what was destroyed; the keys of sessions that go on are not among it."""

    async def story(world: World) -> None:
        await stored(await joined(world), KEYS[:8])
        (session,) = world.shard.sessions.values()
        engine, may_end, ended = world.shard.parts.engine, asyncio.Event(), asyncio.Event()
        barrier = engine.barrier

        async def held_back() -> None:
            await may_end.wait()
            await barrier()

        engine.barrier = held_back  # type: ignore[method-assign]
        admin = admin_of(world, ended.wait)
        rotating = asyncio.ensure_future(admin.tenant_rotate(ALPHA, force=True))
        await asyncio.sleep(1)
        erasing = asyncio.ensure_future(admin.tenant_erase(ALPHA))
        await asyncio.sleep(1)
        may_end.set()
        await asyncio.sleep(1)
        assert any(session.tenant.dek(session.tenant.info.active_version)), "wiped in its hands"
        ended.set()
        await asyncio.gather(rotating, return_exceptions=True)
        assert (await erasing).dek_versions_destroyed == (2,)

    simulate(tmp_path, story)


def test_a_tenant_that_is_erased_while_its_first_session_adds_it(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        parts, name = world.shard.parts, TenantName("gamma")
        parts.config = replace(parts.config, tenants=replace(parts.config.tenants, auto_add=True))
        run, added, go_on = parts.compute.run, asyncio.Event(), asyncio.Event()

        async def slow(work: Any, *args: Any) -> Any:
            result = await run(work, *args)
            if not added.is_set():
                added.set()
                await go_on.wait()  # the thread is done, the loop has not heard of it
            return result

        parts.compute.run = slow  # type: ignore[method-assign,assignment]
        joining = asyncio.ensure_future(joined(world, tenant="gamma"))
        await added.wait()
        erasing = asyncio.ensure_future(admin_of(world).tenant_erase(name))
        await asyncio.sleep(1)
        go_on.set()
        with contextlib.suppress(EntresolError):
            await joining
        await erasing
        parts.compute.run = run  # type: ignore[method-assign]
        assert name not in parts.accounts.by_name, "nobody's account"

    simulate(tmp_path, story)


# Many blocks.

MANY = [b"many-blocks-%05d" % number for number in range(400)]
AT_ONCE_MAX = 4 * LOOP_ROUND_COST // DROP_COST  # two milliseconds, about


class Watch:
    """The most blocks that left the index in one turn of the loop."""

    def __init__(self, world: World) -> None:
        self.most = 0
        engine = world.shard.parts.engine
        gone, loop = engine._table.on_removed, asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        seen = Counter[int]()

        def counted(removed: Sequence[Removed]) -> None:
            seen[loop.steps] += len(removed)
            self.most = max(self.most, seen[loop.steps])
            gone(removed)

        engine.listen(counted)


async def many_stored(host: Host) -> None:
    for at in range(0, len(MANY), 50):
        await stored(host, MANY[at : at + 50])


@contextlib.asynccontextmanager
async def moved_about(world: World, account: Account) -> AsyncIterator[None]:
    """A long removal takes its time, and evictions that keep everything are under way: copies are
    younger than the tombstone."""
    engine, removal = world.shard.parts.engine, world.shard.removal
    rest = removal.rest

    async def long(stretches: Stretches, cost: int) -> None:
        await rest(stretches, cost)
        await asyncio.sleep(0.002)

    async def moving() -> None:
        while True:
            for info in engine.segments():
                if info.stream == account.stream and info.live_blocks:
                    await engine.evict(info.segment, lambda slots: slots)
            await asyncio.sleep(0.001)

    removal.rest = long  # type: ignore[method-assign]
    task = asyncio.ensure_future(moving())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("moving", [False, True], ids=["quiet", "while evictions move them"])
def test_a_tenant_with_many_blocks_is_erased_in_many_steps(tmp_path: Path, moving: bool) -> None:
    async def story(world: World) -> None:
        other = await joined(world, tenant="beta")
        await stored(other, KEYS[:4])
        await many_stored(await joined(world))
        account = world.shard.parts.accounts.by_name[ALPHA]
        watch, stats = Watch(world), world.shard.parts.engine.stats
        async with moved_about(world, account) if moving else contextlib.nullcontext():
            receipt = await admin_of(world).tenant_erase(ALPHA)
        assert bool(stats.copied_blocks) is moving
        assert 0 < watch.most <= AT_ONCE_MAX
        assert receipt.blocks_dropped == len(MANY)
        assert (account.flash_bytes, account.flash_blocks) == (0, 0)
        assert len(world.shard.parts.engine.index) == 4
        await world.crash()
        await world.open(("beta",))
        assert len(world.shard.parts.engine.index) == 4, "some came back"
        back = await joined(world, tenant="beta")
        assert await back.get(KEYS[:4], OpenAt.HOST) == [Status.OK] * 4

    simulate(tmp_path, story)


def test_a_forced_rotation_of_many_blocks_lets_their_hosts_go_on(tmp_path: Path) -> None:
    """What is put meanwhile stays, also where an old block has not been dropped yet; what was there
    is given out no more."""

    async def story(world: World) -> None:
        host = await joined(world)
        await many_stored(host)
        parts = world.shard.parts
        watch, engine = Watch(world), parts.engine
        account = parts.accounts.by_name[ALPHA]
        again, fresh = MANY[-20:], KEYS[:20]
        async with moved_about(world, account):
            rotating = asyncio.ensure_future(admin_of(world).tenant_rotate(ALPHA, force=True))
            while len(engine.index) == len(MANY):
                await asyncio.sleep(0.0001)
            assert any(await host.present(again)), "too late to meet one of them"
            assert Status.OK not in await host.get(MANY[-40:-20], OpenAt.HOST)
            await stored(host, [*again, *fresh])
            assert not rotating.done()
            await rotating
        assert engine.stats.copied_blocks
        assert 0 < watch.most <= AT_ONCE_MAX
        assert await host.present([*again, *fresh]) == [True] * 40
        assert len(engine.index) == account.flash_blocks == 40
        info = world.keyring.info(ALPHA)
        assert info is not None
        assert world.shard.keycare.old_blocks(info) == 0
        await world.crash()
        await world.open(("alpha", "beta"))
        back = await joined(world)
        assert await back.get([*again, *fresh], OpenAt.HOST) == [Status.OK] * 40
        assert len(world.shard.parts.engine.index) == 40, "some came back"

    simulate(tmp_path, story)


@pytest.mark.parametrize("what", ["erase", "rotate"])
def test_keys_are_wiped_also_where_flash_takes_no_removals(tmp_path: Path, what: str) -> None:
    """A drive that has failed is when tenants are erased."""

    async def story(world: World) -> None:
        await stored(await joined(world), KEYS[:3])
        engine, name = world.shard.parts.engine, TenantName("alpha")
        held = world.keyring.get(name)
        deks = list(held.deks.values())
        honest = engine.barrier

        async def refused() -> None:
            raise DeviceError("the flash engine has stopped writing")

        engine.barrier = refused  # type: ignore[method-assign]
        before = world.shard.parts.events.position(name)
        admin, care = admin_of(world), world.shard.keycare
        change = admin.tenant_erase(name) if what == "erase" else care.rotate(name, force=True)
        with pytest.raises(DeviceError):
            await change
        assert not world.keyring._destroyed
        assert not any(any(dek) for dek in deks)
        assert what == "rotate" or world.shard.parts.events.position(name) != before
        engine.barrier = honest  # type: ignore[method-assign]
        if what == "erase":
            assert (await admin.tenant_erase(name)).blocks_dropped == 0

    simulate(tmp_path, story)


def test_who_waits_for_room_is_told_when_a_quota_is_raised(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        admin = admin_of(world)
        keeps, asks = await joined(world), await joined(world)
        await stored(keeps, KEYS[:2])
        await admin.tenant_set_quota(ALPHA, TenantQuota(get_bytes=1))
        keys = b"".join(keeps._names(KEYS[:1]))
        await keeps._call(Stage(keeps.handle, OpenAt.HOST, 5 * SECOND_NS, SECOND_NS, keys))
        getting = asyncio.create_task(asks.get(KEYS[1:2], OpenAt.HOST))
        await asyncio.sleep(0.2)
        assert not getting.done()
        await admin.tenant_set_quota(ALPHA, TenantQuota())
        await asyncio.sleep(0.1)
        assert getting.done(), "it waits for what it has"
        assert await getting == [Status.OK]

    simulate(tmp_path, story)


def test_who_waits_for_what_is_kept_for_others_is_told_when_there_are_none(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        keeps, asks = await joined(world), await joined(world)
        await stored(keeps, KEYS[:2])
        held = world.shard.parts.held.get_bytes
        held.total = sum(each.flash_bytes for each in world.shard.parts.accounts.by_name.values())
        keys = b"".join(keeps._names(KEYS[:1]))
        await keeps._call(Stage(keeps.handle, OpenAt.HOST, 5 * SECOND_NS, SECOND_NS, keys))
        getting = asyncio.create_task(asks.get(KEYS[1:2], OpenAt.HOST))
        await asyncio.sleep(0.2)
        assert not getting.done()
        await admin_of(world).tenant_erase(TenantName("beta"))
        await asyncio.sleep(0.1)
        assert getting.done(), "it is alone"
        assert await getting == [Status.OK]

    simulate(tmp_path, story)
