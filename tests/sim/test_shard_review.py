"""Rare orders of events in a shard, each made on purpose in simulation: what is pinned is let go,
what is opened belongs to the block that was asked for, and no request waits for what cannot come.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from entresol_daemon.control.listener import _Connection
from entresol_daemon.shard import gets, lookups, opened
from entresol_daemon.shard.admin import Addresses, ShardAdmin
from entresol_daemon.shard.dispatch import (
    SessionHandler,
)
from entresol_daemon.shard.reports import REPORTED_MAX
from entresol_proto import limits
from entresol_proto.fabric.base import Exposure, ReadOp
from entresol_proto.ids import NamespaceDescriptor, TenantName, engine_key_digest, pack_token_ids
from entresol_proto.status import EntresolError, FabricError, Status
from entresol_proto.wire import data, opening
from entresol_proto.wire.data import Ack, OpenAt
from tests import simloop
from tests.sim.shardlab import SECOND_NS, Host, Oracle, World

KEYS = [b"review-%09d" % number for number in range(64)]
Story = Callable[[World], Coroutine[Any, Any, None]]


def simulate(folder: Path, story: Story, *, seed: int = 1, opened_bytes: int = 0) -> None:
    """Run a story on a fresh world; nothing may be held when it and its hosts are gone."""

    async def whole() -> None:
        world = World(folder / "state", seed)
        memory = replace(world.config.memory, opened_bytes=opened_bytes)
        world.config = replace(world.config, memory=memory)
        await world.open(("alpha", "beta"))
        await story(world)
        for host in world.hosts:
            await host.gone()
        world.hosts.clear()
        await world.shard.puts.drain()
        await asyncio.sleep(12)
        world.check_idle()
        await world.stop()

    simloop.run(whole(), seed, loop=simloop.SimLoop(seed, seconds_max=10_000))


async def joined(world: World, *, private: bool = False, tenant: str = "alpha") -> Host:
    host = Host(world, tenant, private=private, careful=True)
    await host.open()
    return host


async def stored(host: Host, keys: list[bytes]) -> None:
    assert set(await host.put(keys, Ack.DURABLE)) == {Status.OK}


def forget_memory(world: World) -> None:
    """Drop every copy in memory: what follows comes from flash."""
    world.shard.parts.residency.clear()


def names(host: Host, keys: list[bytes]) -> bytes:
    return b"".join(host._names(keys))


async def read(host: Host, item: data.GrantItem) -> bytes:
    into = memoryview(bytearray(item.span.length_bytes))
    statuses = await host.wire.host.read([ReadOp(item.span, into)], host._now() + SECOND_NS)
    assert statuses == [Status.OK]
    return bytes(into)


async def stage(host: Host, keys: list[bytes], open_at: OpenAt) -> list[Status]:
    message = data.Stage(host.handle, open_at, 4 * SECOND_NS, SECOND_NS, names(host, keys))
    return list((await host._call(message)).statuses)


# Gets.


def test_a_stage_that_waits_outside_the_door_had_arrived_there(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        host, other = await joined(world), await joined(world)
        await stored(host, KEYS[:2])
        first = next(iter(world.shard.sessions.values()))
        first.held_bytes += 4 << 20  # no room for another block: the STAGE waits
        asking = asyncio.ensure_future(stage(host, KEYS[:1], OpenAt.HOST))
        await asyncio.sleep(0.1)
        present = world.shard.gets.door._present
        assert min(present.values(), default=0) >= 0, present
        assert await other.get(KEYS[:2], OpenAt.HOST) == [Status.OK, Status.OK]
        first.held_bytes -= 4 << 20
        world.shard.parts.room.notify()
        await asking
        await asyncio.sleep(0)
        assert not present

    simulate(tmp_path, story)


def test_a_key_twice_in_a_fetch_and_removed_meanwhile_leaves_no_pin(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        host = await joined(world)
        await stored(host, KEYS[:2])
        forget_memory(world)
        engine, residency = world.shard.parts.engine, world.shard.parts.residency
        first, second = (engine.index.find(host.namespace_id, n) for n in host._names(KEYS[:2]))
        honest = engine.read
        held: dict[int, asyncio.Event] = {second: asyncio.Event()}

        async def slow(ops: Any) -> list[Status]:
            statuses = await honest(ops)
            for slot, _ in ops:
                if slot in held:
                    await held[slot].wait()
            return statuses

        engine.read = slow  # type: ignore[method-assign]
        # The first block is up before the request that names it twice, around one that is not.
        warm = asyncio.ensure_future(host.get(KEYS[1:2], OpenAt.HOST))
        await asyncio.sleep(0.1)
        ask = asyncio.ensure_future(host.get([KEYS[0], KEYS[1], KEYS[0]], OpenAt.HOST))
        for _ in range(1000):
            await asyncio.sleep(0.0005)
            resident = residency.get(first)
            if resident is not None and resident.state.value == "ready":
                break
        await asyncio.sleep(0.05)
        assert resident is not None
        world.shard.removal.forget([first])
        held[second].set()
        statuses = await ask
        await warm
        assert statuses[1] is Status.OK
        await asyncio.sleep(0.1)  # the last release arrives
        assert resident.pins == 0, f"pins={resident.pins}"

    simulate(tmp_path, story)


def test_a_grant_that_fails_at_once_leaves_no_pin_of_what_is_landing(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        host = await joined(world, private=True)
        await stored(host, KEYS[:2])
        forget_memory(world)
        assert await host.get(KEYS[:1], OpenAt.DAEMON) == [Status.OK]
        assert await stage(host, KEYS[:1], OpenAt.DAEMON) == [Status.OK]

        async def full(_buffer: Any) -> Exposure:
            raise FabricError("gone", status=Status.DISCONNECTED)

        host.wire.daemon.expose = full  # type: ignore[method-assign]
        fetch = data.Fetch(host.handle, OpenAt.DAEMON, False, SECOND_NS, names(host, KEYS[:2]))
        with pytest.raises(EntresolError):
            async for _ in host._answers(fetch):
                pass
        await asyncio.sleep(5)
        (session,) = world.shard.sessions.values()
        assert session.held_bytes == 0
        residents = world.shard.parts.residency._by_slot.values()
        assert [each.pins for each in residents] == [0] * len(residents)

    simulate(tmp_path, story)


def test_plaintext_of_a_block_is_not_served_for_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(world: World) -> None:
        host = await joined(world, private=True)
        await stored(host, KEYS[:1])
        assert await stage(host, KEYS[:1], OpenAt.DAEMON) == [Status.OK]  # plaintext is held
        await host.forget(KEYS[:1])
        monkeypatch.setattr(Oracle, "content", lambda *_: b"another content")
        await stored(host, KEYS[:1])
        assert await host.get(KEYS[:1], OpenAt.DAEMON) == [Status.OK]
        assert world.oracle.wrong_bytes == 0

    simulate(tmp_path, story)


def test_a_daemon_opened_grant_names_the_engine_key(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        host = await joined(world, private=True)
        await stored(host, KEYS[:1])
        fetch = data.Fetch(host.handle, OpenAt.DAEMON, False, SECOND_NS, names(host, KEYS[:1]))
        for _ in range(2):  # opened now, then shared with the first lease
            grants = [grant async for grant in host._answers(fetch)]
            (item,) = grants[0].items
            assert item.key == engine_key_digest(KEYS[0])
            assert await read(host, item) == world.oracle.content("alpha", KEYS[0])

    simulate(tmp_path, story)


@pytest.mark.parametrize("opened_bytes", [0, 4 << 20])
def test_opened_blocks_of_all_sessions_have_one_budget(tmp_path: Path, opened_bytes: int) -> None:
    """Each session kept its pool until its end: idle ones had all of the machine's memory."""

    async def story(world: World) -> None:
        writer = await joined(world)
        await stored(writer, KEYS[:4])
        memory = world.shard.gets.opened.memory
        most = opened_bytes or world.config.memory.dram_bytes
        for _ in range(2 * most // world.config.memory.slab_bytes):
            host = await joined(world, private=True)
            assert set(await stage(host, KEYS[:4], OpenAt.DAEMON)) == {Status.OK}
            assert 0 < memory.mapped_bytes <= most
            await asyncio.sleep(5)  # it is held no longer, and the session stays
        for host in world.hosts:
            await host.gone()
        assert memory.mapped_bytes == 0

    simulate(tmp_path, story, opened_bytes=opened_bytes)


def test_one_tenants_opened_blocks_leave_room_for_anothers(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        for tenant in ("alpha", "beta"):
            writer = await joined(world, tenant=tenant)
            await stored(writer, KEYS[:2])
        most = world.config.memory.dram_bytes // world.config.memory.slab_bytes
        hosts = [await joined(world, private=True) for _ in range(most)]
        found = [set(await stage(host, KEYS[:2], OpenAt.DAEMON)) for host in hosts]
        assert found[0] == {Status.OK}
        assert found[-1] == {Status.BUSY}, "held in the others"
        other = await joined(world, private=True, tenant="beta")
        assert set(await stage(other, KEYS[:2], OpenAt.DAEMON)) == {Status.OK}
        await asyncio.sleep(10)
        assert set(await stage(hosts[-1], KEYS[:2], OpenAt.DAEMON)) == {Status.OK}

    simulate(tmp_path, story)


def test_a_fetch_waits_for_exposures_of_its_earlier_leases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(world: World) -> None:
        host = await joined(world, private=True)
        await stored(host, KEYS)
        endpoint = host.wire.daemon
        honest = endpoint.expose

        async def bounded(buffer: Any) -> Exposure:
            if len(host.wire.exposed[0]) >= 16:
                raise FabricError("too many exposed regions", status=Status.BUSY)
            return await honest(buffer)

        endpoint.expose = bounded  # type: ignore[method-assign]
        forget_memory(world)
        monkeypatch.setattr(gets, "WINDOW_BLOCKS_MAX", 8)
        monkeypatch.setattr(opened, "EXPOSED_BLOCKS_MAX", 16)
        both = (host.get(KEYS[:40], OpenAt.DAEMON), host.get(KEYS[20:], OpenAt.DAEMON))
        for statuses in await asyncio.gather(*both):  # more than can be exposed at a time
            assert set(statuses) == {Status.OK}
        await asyncio.sleep(0.1)  # the last release arrives
        (session,) = world.shard.sessions.values()
        assert session.exposed_blocks == 0

    simulate(tmp_path, story)


def test_plaintext_is_not_wiped_while_a_closing_data_path_still_answers(tmp_path: Path) -> None:
    """verbs: the queue pairs answer until the last goodbye is out."""

    async def story(world: World) -> None:
        host = await joined(world, private=True)
        await stored(host, KEYS[:1])
        ask = data.Fetch(host.handle, OpenAt.DAEMON, False, SECOND_NS, names(host, KEYS[:1]))
        grant = await host._call(ask)
        plain = world.oracle.content("alpha", KEYS[0])
        assert await read(host, grant.items[0]) == plain
        session = next(iter(world.shard.sessions.values()))
        honest = host.wire.daemon.close

        async def slow() -> None:
            await asyncio.sleep(15)  # its lease ends in this time
            await honest()

        host.wire.daemon.close = slow  # type: ignore[method-assign]
        closing = asyncio.ensure_future(world.shard.close_session(session))
        into = memoryview(bytearray(len(plain)))
        for _ in range(14):
            await asyncio.sleep(1)
            op = ReadOp(grant.items[0].span, into)
            (status,) = await host.wire.host.read([op], host._now() + SECOND_NS)
            assert status is not Status.OK or bytes(into) == plain
        assert status is not Status.OK, "its lease has ended"
        await closing
        assert world.shard.gets.opened.memory.mapped_bytes == 0

    simulate(tmp_path, story)


def test_opened_blocks_of_a_session_that_ended_are_not_kept_by_its_leases(tmp_path: Path) -> None:
    """shm: leases last longer than the session, because nobody can be kept from reading."""

    async def story(world: World) -> None:
        host = await joined(world, private=True)
        endpoint = host.wire.daemon
        endpoint.capabilities = replace(endpoint.capabilities, revokes=False)
        await stored(host, KEYS[:4])
        assert set(await stage(host, KEYS[:4], OpenAt.DAEMON)) == {Status.OK}
        session = next(iter(world.shard.sessions.values()))
        assert session.plain_pool is not None
        slabs = [slab for owned in session.plain_pool._owned.values() for slab in owned]
        buffers = [weakref.ref(slab.buffer) for slab in slabs]
        assert buffers
        del slabs, session
        await host.gone()
        world.hosts.remove(host)
        assert len(world.shard.parts.leases) > 0, "nothing was held"
        assert not any(buffer() for buffer in buffers)

    simulate(tmp_path, story)


def test_reports_without_end_do_not_pile_up(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        host, other = await joined(world), await joined(world, tenant="beta")
        await stored(host, KEYS)
        await stored(other, KEYS[:1])
        fetch = data.Fetch(host.handle, OpenAt.HOST, False, SECOND_NS, names(host, KEYS))
        grants = [grant async for grant in host._answers(fetch)]
        rows = [(grant.lease_id, item.index) for grant in grants for item in grant.items]
        assert len(rows) == len(KEYS)
        reports = tuple((lease, index, Status.CORRUPT) for lease, index in rows)
        fetch = data.Fetch(other.handle, OpenAt.HOST, False, SECOND_NS, names(other, KEYS[:1]))
        theirs = (await other._call(fetch)).lease_id
        session, others = world.shard.sessions.values()
        heard = world.shard.gets._reports._reported
        for _ in range(100):
            world.shard.gets.release(session, data.Release((), reports))
        assert len(heard) == REPORTED_MAX // 2
        assert len(world.shard.gets._tasks) == 1
        told = data.Release((theirs,), ((theirs, 0, Status.CORRUPT),))
        world.shard.gets.release(others, told)
        assert len(heard) == REPORTED_MAX // 2 + 1, "nobody hears the other tenant"
        leases = tuple(grant.lease_id for grant in grants)
        world.shard.gets.release(session, data.Release(leases, ()))
        await asyncio.sleep(1)
        assert not heard
        assert set(await host.get(KEYS, OpenAt.HOST)) == {Status.OK}

    simulate(tmp_path, story)


def test_a_report_is_examined_in_turn_and_its_memory_wakes_puts(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        host = await joined(world, private=True)
        parts = world.shard.parts
        await stored(host, KEYS[:2])
        fetch = data.Fetch(host.handle, OpenAt.HOST, False, SECOND_NS, names(host, KEYS[:1]))
        lease = (await host._call(fetch)).lease_id
        run, allocate, opening = parts.compute.run, parts.scratch.allocate, asyncio.Event()

        async def held(fn: Any, *args: Any) -> Any:
            if fn is opened._look:
                await opening.wait()
            return await run(fn, *args)

        def one_at_a_time(owner: bytes, length_bytes: int) -> Any:
            return None if parts.scratch.allocated_bytes else allocate(owner, length_bytes)

        parts.compute.run = held  # type: ignore[method-assign]
        parts.scratch.allocate = one_at_a_time  # type: ignore[method-assign]
        before = parts.turns.compute.in_service
        (session,) = world.shard.sessions.values()
        told = data.Release((lease,), ((lease, 0, Status.CORRUPT),))
        world.shard.gets.release(session, told)
        await asyncio.sleep(0.1)
        assert parts.turns.compute.in_service == before + 1
        put = asyncio.ensure_future(host.put(KEYS[2:3], Ack.ACCEPTED))
        await asyncio.sleep(0.5)
        assert not put.done()
        opening.set()
        begun = host._now()
        assert await put == [Status.OK]
        assert host._now() - begun < SECOND_NS // 10
        assert parts.turns.compute.in_service == before

    simulate(tmp_path, story)


def test_a_report_about_a_block_whose_key_is_gone_is_no_corruption(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        host = await joined(world)
        await stored(host, KEYS[:1])
        fetch = data.Fetch(host.handle, OpenAt.HOST, False, SECOND_NS, names(host, KEYS[:1]))
        (grant,) = [grant async for grant in host._answers(fetch) if grant.items]
        parts = world.shard.parts
        parts.dek_of = lambda _stream, _version: None
        host._send(data.Release((grant.lease_id,), ((grant.lease_id, 0, Status.CORRUPT),)))
        await asyncio.sleep(1)
        assert parts.meters.totals.blocks_corrupt == 0
        assert await host.present(KEYS[:1]) == [True]

    simulate(tmp_path, story)


# Snapshots and erasure.


async def _not_asked(_kek_file: str) -> Any:
    raise AssertionError("nobody changes keys here")


def admin_of(world: World) -> ShardAdmin:
    async def end_sessions(tenant: TenantName) -> int:
        mine = [host for host in world.hosts if host.tenant == tenant]
        for host in mine:
            await host.gone()
        return len(mine)

    return ShardAdmin(
        world.shard, Addresses("here", ()), end_sessions=end_sessions, begin_drain=lambda: None,
        unlock=_not_asked, change_kek=_not_asked,
    )  # fmt: skip


def test_a_snapshot_tells_of_blocks_with_long_meta_and_of_blocks_being_read(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        host = await joined(world, private=True)
        tokens = tuple(range(limits.TOKENS_PER_BLOCK_MAX))
        (name,) = host._names(KEYS[:1])
        plain = b"x" * 50_000
        item = data.PutItem(name, KEYS[0], len(plain), 0, b"", pack_token_ids(tokens))
        reserve = data.Reserve(host.handle, Ack.DURABLE, SECOND_NS, (item,))
        (answer,) = (await host._call(reserve)).items
        span = await host._expose(item, answer, plain)
        done = await host._call(data.Commit(((answer.put_id, span),)))
        assert done.statuses == (Status.OK,)
        admin = admin_of(world)

        async def told() -> list[int]:
            steps = admin.snapshot(TenantName("alpha"))
            events = [event async for event in steps if event is not None]
            return [len(event.token_ids_u32le) // 4 for event in events]

        assert await told() == [len(tokens)]  # from memory
        forget_memory(world)
        assert await told() == [len(tokens)]  # from flash
        fetch = asyncio.ensure_future(
            host._call(data.Stage(host.handle, OpenAt.HOST, 1, SECOND_NS, name))
        )
        while not world.shard.gets.loading:
            await asyncio.sleep(0.00001)
        assert await told() == [len(tokens)]  # while it comes up
        await fetch

    simulate(tmp_path, story)


def test_erasing_drops_blocks_of_a_namespace_opened_meanwhile(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        host = await joined(world)
        await stored(host, KEYS[:3])
        keyring = world.keyring
        honest = keyring.namespaces_of
        keyring.namespaces_of = lambda name: []  # type: ignore[method-assign,assignment]
        receipt = await admin_of(world).tenant_erase(TenantName("alpha"))
        keyring.namespaces_of = honest  # type: ignore[method-assign]
        assert receipt.blocks_dropped == 3
        assert len(world.shard.parts.engine.index) == 0

    simulate(tmp_path, story)


# Room.


def test_a_quota_never_evicts_what_others_stored(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        mine, other = await joined(world), await joined(world, tenant="beta")
        await stored(other, KEYS[:40])
        parts = world.shard.parts
        parts.engine._table.close(
            parts.engine._table.open[parts.accounts.by_name["beta"].stream, False]
        )
        await stored(mine, KEYS[:1])
        account = parts.accounts.by_name["alpha"]
        account.flash_quota_bytes = account.flash_bytes
        # Its only segment is neither open nor sealed: a failed flush has condemned it.
        before = parts.accounts.by_name["beta"].flash_bytes
        segment = parts.engine._table.open[account.stream, False]
        parts.engine._table.condemn(segment)
        await asyncio.wait_for(world.shard.removal.make_room(account, 4096), 10)
        account.flash_quota_bytes = 1
        await asyncio.wait_for(world.shard.removal.shrink_to_quota(account), 10)
        account.flash_quota_bytes = 0
        assert parts.accounts.by_name["beta"].flash_bytes == before

    simulate(tmp_path, story)


def test_others_find_room_while_a_tenant_shrinks_to_its_quota(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        mine, other = await joined(world), await joined(world, tenant="beta")
        parts, removal = world.shard.parts, world.shard.removal
        await stored(other, KEYS[:8])
        for account in parts.accounts.by_name.values():
            if account.name == "alpha":
                for at in range(0, 64, 16):  # four segments of it
                    await stored(mine, KEYS[at : at + 16])
                    parts.engine._table.close(parts.engine._table.open[account.stream, False])
        alpha, beta = (parts.accounts.by_name[name] for name in ("alpha", "beta"))
        evict = parts.engine.evict

        async def slow(*args: Any) -> Any:
            await asyncio.sleep(1)
            return await evict(*args)

        parts.engine.evict = slow  # type: ignore[method-assign]
        parts.engine._table.close(parts.engine._table.open[beta.stream, False])
        beta.flash_quota_bytes, alpha.flash_quota_bytes = beta.flash_bytes, 1
        shrinking = asyncio.ensure_future(removal.shrink_to_quota(alpha))
        await asyncio.sleep(0.5)
        assert await removal.make_room(beta, 4096)
        assert not shrinking.done(), "it waited for all of it"
        await shrinking
        assert alpha.flash_bytes == 0
        alpha.flash_quota_bytes = beta.flash_quota_bytes = 0

    simulate(tmp_path, story)


def test_no_room_is_made_on_flash_that_failed(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        host = await joined(world)
        await stored(host, KEYS[:3])
        parts = world.shard.parts
        parts.engine._table.close(next(iter(parts.engine._table.open.values())))
        await asyncio.sleep(1)
        account = parts.accounts.by_name["alpha"]
        parts.engine._writer.failed = True
        try:
            assert not await asyncio.wait_for(world.shard.removal.make_room(account, 4096), 10)
            account.flash_quota_bytes = 1
            await asyncio.wait_for(world.shard.removal.shrink_to_quota(account), 10)
        finally:
            parts.engine._writer.failed = False
            account.flash_quota_bytes = 0

    simulate(tmp_path, story)


def test_forgetting_what_is_just_being_evicted_is_written_down(tmp_path: Path) -> None:
    """A crash before its segment is free would bring it back."""

    async def story(world: World) -> None:
        await stored(await joined(world), KEYS[:3])
        engine, removal = world.shard.parts.engine, world.shard.removal
        account = world.shard.parts.accounts.by_name[TenantName("alpha")]
        (namespace_id,) = engine.index.namespaces()
        keys = [engine.index.key_of(slot) for slot in engine.index.live_slots().tolist()]
        segment = next(iter(engine._table.open.values())).index
        evicting = asyncio.ensure_future(engine.evict(segment))
        while len(engine.index):
            await asyncio.sleep(1e-6)
        for _ in range(2):  # each is told once
            run = b"".join([*keys[:2], keys[0], bytes(16)])
            removal.forget_absent(
                account, namespace_id, run, engine.index.lookup(namespace_id, run)
            )
            assert engine.stats.tombstones == 2
        assert not evicting.done()
        await evicting
        run = keys[2]
        removal.forget_absent(account, namespace_id, run, engine.index.lookup(namespace_id, run))
        assert engine.stats.tombstones == 2, "nothing is left of it"

    simulate(tmp_path, story)


# Sessions.


def test_a_session_ends_while_others_give_back_plaintext_without_end(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        busy, leaving = await joined(world, private=True), await joined(world, private=True)
        await stored(busy, KEYS[:2])
        honest = busy.wire.daemon.revoke

        async def slow(exposure: Exposure) -> None:
            await asyncio.sleep(0.3)
            await honest(exposure)

        busy.wire.daemon.revoke = slow  # type: ignore[method-assign]
        going = True

        async def without_end() -> None:
            while going:
                assert await busy.get(KEYS[:1], OpenAt.DAEMON) == [Status.OK]

        readers = [asyncio.ensure_future(without_end()) for _ in range(3)]
        await asyncio.sleep(1)
        await asyncio.wait_for(leaving.gone(), 1)
        going = False
        await asyncio.gather(*readers)

    simulate(tmp_path, story)


def test_a_session_whose_data_path_does_not_close_is_gone_all_the_same(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        host = await joined(world)

        async def broken() -> None:
            raise OSError("no")

        host.wire.daemon.close = broken  # type: ignore[method-assign]
        await host.gone()
        assert not world.shard.sessions

    simulate(tmp_path, story)


def test_a_namespace_that_is_opened_again_has_its_handle(tmp_path: Path) -> None:
    """A host asks again when an answer came too late for it: that must not use handles up."""

    async def story(world: World) -> None:
        host = await joined(world)
        (session,) = world.shard.sessions.values()
        descriptors = [
            NamespaceDescriptor(model="sim", cache_salt=salt).canonical() for salt in ("s", "t")
        ]
        for _ in range(limits.NAMESPACES_PER_SESSION_MAX + 1):
            first, second = [await host._call(opening.OpenNamespace(raw)) for raw in descriptors]
            assert (first.handle, first.namespace_id) == (host.handle, host.namespace_id)
            assert first.secret == host.secret
            assert second.handle != first.handle
            assert second.namespace_id != first.namespace_id
        assert len(session.namespaces) == 2
        await stored(host, KEYS[:2])

    simulate(tmp_path, story)


def test_a_bug_in_a_short_request_is_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(world: World) -> None:
        host = await joined(world)

        def broken(*_: object) -> data.ExistsReply:
            raise RuntimeError("a bug")

        monkeypatch.setattr(lookups, "exists_now", broken)
        with pytest.raises(EntresolError) as caught:
            await asyncio.wait_for(host.present(KEYS[:1]), 5)
        assert caught.value.status is Status.INTERNAL

    simulate(tmp_path, story)


def test_a_silent_connection_ends_although_its_timer_fires_early(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        shard, clock = world.shard, world.shard.parts.now_ns
        shard.parts.now_ns = lambda: clock() * 999 // 1000  # behind the clock of the timers
        closed = asyncio.Event()
        connection = _Connection(SimpleNamespace(shard=shard))  # type: ignore[arg-type]
        connection.handler = SessionHandler(
            shard, TenantName("alpha"), write=lambda _: None, close=closed.set
        )
        connection._watch_handshake()
        await asyncio.wait_for(closed.wait(), 6)

    simulate(tmp_path, story)


# Puts.


def test_a_put_without_memory_does_not_wait_block_by_block(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        host = await joined(world)
        parts = world.shard.parts
        account = parts.accounts.by_name["alpha"]
        account.dram_quota_bytes = 4096
        begun = host._now()
        keys = [key for key in KEYS if len(world.oracle.content("alpha", key)) > 8192][:10]
        statuses = await host.put(keys, Ack.ACCEPTED)
        assert Status.OK not in statuses
        assert host._now() - begun < 3 * SECOND_NS, statuses
        account.dram_quota_bytes = 0

    simulate(tmp_path, story)


def test_a_put_larger_than_its_memory_is_stored_bit_by_bit(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        for private in (False, True):
            host = await joined(world, private=private)
            world.shard.parts.accounts.by_name["alpha"].dram_quota_bytes = 96 * 1024
            begun = host._now()
            keys = [b"%d%s" % (private, key) for key in KEYS[:40]]
            await stored(host, keys)
            assert host._now() - begun < SECOND_NS
            assert set(await host.get(keys, OpenAt.HOST)) == {Status.OK}

    simulate(tmp_path, story)


def test_reservations_that_are_never_committed_do_not_lock_others_out(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        hog, other = await joined(world), await joined(world, tenant="beta")
        size = world.config.limits.block_bytes_max
        items = tuple(
            data.PutItem(name, key, size, at, b"", b"")
            for at, (name, key) in enumerate(zip(hog._names(KEYS), KEYS, strict=True))
        )
        reserve = data.Reserve(hog.handle, Ack.ACCEPTED, limits.DEADLINE_NS_MAX, items)
        taken = await hog._call(reserve)
        assert Status.OK in {item.status for item in taken.items}
        more = [b"filling-%09d" % number for number in range(64)]
        small = tuple(
            data.PutItem(name, key, 1, 0, b"", b"")
            for name, key in zip(hog._names(more), more, strict=True)
        )
        await hog._call(data.Reserve(hog.handle, Ack.ACCEPTED, limits.DEADLINE_NS_MAX, small))
        assert Status.OK in await other.put(KEYS[:2], Ack.ACCEPTED), "no share is left for others"
        await asyncio.sleep(31)  # and what is not committed does not stay reserved for ten minutes
        assert world.shard.puts.under_way == 0

    simulate(tmp_path, story)


# All of it at once.


async def disorder(host: Host, steps: int) -> None:
    """Keys named twice, holds beside fetches of the same blocks, memory that empties meanwhile."""
    rng = host.rng
    with contextlib.suppress(EntresolError):
        await host.open()
        for _ in range(steps):
            start = rng.randrange(len(KEYS) - 8)
            keys = KEYS[start : start + rng.randint(1, 8)]
            opened_there = host.wire.private and rng.random() < 0.7
            place = OpenAt.DAEMON if opened_there else OpenAt.HOST
            choice = rng.random()
            if choice < 0.3:
                await host.put(keys, rng.choice((Ack.ACCEPTED, Ack.DURABLE)))
            elif choice < 0.7:
                fetches = (host.get(keys + keys[::-1], place), host.get(keys[:2], place))
                await asyncio.gather(*fetches, stage(host, keys, place))
            elif choice < 0.8:
                await stage(host, keys * 2, place)
            elif choice < 0.9:
                await host.forget(keys[:2])
            else:
                forget_memory(host.world)


@pytest.mark.parametrize("seed", range(4))
def test_disorder_leaves_nothing_behind(seed: int, tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.faults.cut = (0.0, 0.0005)[seed % 2]
        world.faults.read_fails = world.faults.bit_flips = 0.01
        hosts = [Host(world, ("alpha", "beta")[n % 2], private=n < 3) for n in range(5)]
        await asyncio.gather(*(disorder(host, 30) for host in hosts))
        assert world.oracle.wrong_bytes == 0, f"seed={seed}"
        assert world.oracle.served > 0, f"seed={seed}"

    simulate(tmp_path, story, seed=seed)
