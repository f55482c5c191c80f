"""A tenant's namespaces are bounded by what it keeps, not by what it ever asked for: at the limit
the records of those that have nothing go, and whatever is stored keeps its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from entresol_daemon.core.departed import Departed
from entresol_daemon.shard import remembering
from entresol_proto.fabric.base import RemoteSpan
from entresol_proto.ids import TenantName
from entresol_proto.status import DeviceError, EntresolError, Status
from entresol_proto.wire import data
from entresol_proto.wire.data import Ack, OpenAt
from tests import simloop
from tests.sim.shardlab import SECOND_NS, Host, World
from tests.sim.test_shard_review import admin_of

ALPHA = TenantName("alpha")
KEYS = [b"namespace-%07d" % number for number in range(64)]
MOST = 4  # namespaces of a tenant
NOTHING = RemoteSpan(0, 0, 0)
Story = Callable[[World], Coroutine[Any, Any, None]]


def simulate(folder: Path, story: Story, *, seed: int = 1) -> None:
    """Run a story on a fresh world of few namespaces; nothing may be held at its end."""

    async def whole() -> None:
        world = World(folder / "state", seed)
        await begin(world)
        await story(world)
        for host in world.hosts:
            await host.gone()
        world.hosts.clear()
        await world.shard.puts.drain()
        await asyncio.sleep(12)
        world.check_idle()
        assert not records(world)._held
        assert not records(world)._doomed
        assert world.oracle.wrong_bytes == 0
        await world.stop()

    simloop.run(whole(), seed, loop=simloop.SimLoop(seed, seconds_max=10_000))


async def begin(world: World) -> None:
    await world.open(("alpha", "beta"))
    world.keyring._namespaces._per_tenant_max = MOST


async def joined(world: World, salt: str, *, tenant: str = "alpha") -> Host:
    host = Host(world, tenant, careful=True)
    await host.open(salt)
    return host


async def stored(host: Host, keys: list[bytes]) -> None:
    assert set(await host.put(keys, Ack.DURABLE)) == {Status.OK}


def records(world: World) -> remembering.Remembering:
    return world.shard.puts._reserving._remembering


def remembered(world: World) -> list[bytes]:
    return [bytes(each) for each in world.keyring.namespaces_of(ALPHA)]


async def reserve(host: Host, key: bytes) -> int:
    """One block; the id of what may be committed."""
    item = data.PutItem(host._names([key])[0], key, 4096, 0, b"", b"")
    reply = await host._call(data.Reserve(host.handle, Ack.DURABLE, 5 * SECOND_NS, (item,)))
    (answer,) = reply.items
    assert answer.status is Status.OK
    return int(answer.put_id)


async def use_up(world: World, salts: range) -> list[bytes]:
    """A host that opens a namespace for every request, reserves, gives up, and forgets."""
    made = []
    for number in salts:
        host = await joined(world, f"used-up-{number}")
        put_id = await reserve(host, KEYS[0])
        await host._call(data.Commit(((put_id, NOTHING),)))
        await host.forget(KEYS[:1])
        made.append(host.namespace_id)
        await host.gone()
        world.hosts.remove(host)
    return made


def test_a_host_that_uses_namespaces_up_takes_none_from_its_tenant(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        made = await use_up(world, range(MOST))
        assert remembered(world) == made
        host = await joined(world, "production")
        await stored(host, KEYS[:2])
        assert host.namespace_id in remembered(world)
        await use_up(world, range(10, 10 + 5 * MOST))  # nor what is stored its record
        assert host.namespace_id in remembered(world)
        assert await host.get(KEYS[:2], OpenAt.HOST) == [Status.OK] * 2

    simulate(tmp_path, story)


def test_a_tenant_may_have_more_namespaces_over_its_life_than_at_once(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        for number in range(5 * MOST):
            host = await joined(world, f"user-{number}")
            await stored(host, KEYS[:2])
            assert host.namespace_id in remembered(world)
            assert len(remembered(world)) <= MOST
            await host.forget(KEYS[:2])

    simulate(tmp_path, story)


def test_namespaces_with_blocks_are_the_limit_and_forgetting_makes_room(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        hosts = [await joined(world, f"kept-{number}") for number in range(MOST)]
        for host in hosts:
            await stored(host, KEYS[:1])
        one_more = await joined(world, "one more")
        with pytest.raises(EntresolError, match="4 namespaces already") as caught:
            await reserve(one_more, KEYS[0])
        assert caught.value.status is Status.QUOTA
        assert remembered(world) == [host.namespace_id for host in hosts]
        other = await joined(world, "one more", tenant="beta")  # the limit is each tenant's own
        await stored(other, KEYS[:1])
        await hosts[2].forget(KEYS[:1])
        await stored(one_more, KEYS[:1])
        assert hosts[2].namespace_id not in remembered(world)
        assert set(remembered(world)) == {
            host.namespace_id for host in (*hosts[:2], hosts[3], one_more)
        }

    simulate(tmp_path, story)


def test_one_that_others_have_open_is_written_down_again_by_their_next_put(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        early = await joined(world, "early")
        same = await joined(world, "early")
        await stored(early, KEYS[:1])
        await early.forget(KEYS[:1])
        await use_up(world, range(2 * MOST))
        assert early.namespace_id not in remembered(world)
        assert await early.get(KEYS[:1], OpenAt.HOST) == [Status.MISS]
        puts = [stored(early, KEYS[:3]), stored(same, KEYS[3:6])]
        await asyncio.gather(*puts)
        assert remembered(world).count(early.namespace_id) == 1
        await use_up(world, range(20, 20 + 2 * MOST))
        assert early.namespace_id in remembered(world)
        assert await same.get(KEYS[:6], OpenAt.HOST) == [Status.OK] * 6

    simulate(tmp_path, story)


def test_what_is_reserved_or_being_stored_keeps_its_record(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        waits = await joined(world, "waits")
        put_id = await reserve(waits, KEYS[0])
        await use_up(world, range(3 * MOST))
        assert waits.namespace_id in remembered(world)
        await waits._call(data.Commit(((put_id, NOTHING),)))
        await use_up(world, range(20, 20 + 2 * MOST))
        assert waits.namespace_id not in remembered(world)

    simulate(tmp_path, story)


def test_a_put_that_comes_while_its_namespace_is_given_up_waits_and_is_known(
    tmp_path: Path,
) -> None:
    async def story(world: World) -> None:
        host = await joined(world, "in between")
        await stored(host, KEYS[:1])
        await host.forget(KEYS[:1])
        await use_up(world, range(MOST - 1))
        run, begun, go_on = world.shard.parts.keys.run, asyncio.Event(), asyncio.Event()

        async def slow(function: Any, *args: Any) -> Any:
            if function == world.keyring.forget_namespaces:
                begun.set()
                await go_on.wait()
            return await run(function, *args)

        world.shard.parts.keys.run = slow  # type: ignore[method-assign]
        last = await joined(world, "last")
        asking = asyncio.ensure_future(stored(last, KEYS[:1]))
        await begun.wait()
        assert host.namespace_id in records(world)._doomed
        late = await joined(world, "in between")  # opened while the record is still there
        puts = [
            asyncio.ensure_future(stored(host, KEYS[:2])),
            asyncio.ensure_future(stored(late, KEYS[2:4])),
        ]
        await asyncio.sleep(1)
        assert not world.shard.parts.engine.index.has_namespace(host.namespace_id)
        go_on.set()
        await asyncio.gather(asking, *puts)
        assert {host.namespace_id, last.namespace_id} <= set(remembered(world))

    simulate(tmp_path, story)


@pytest.mark.parametrize("clean", [True, False])
def test_a_restart_has_everything_that_is_stored_and_whose_it_is(
    tmp_path: Path, clean: bool
) -> None:
    async def story(world: World) -> None:
        gone = await joined(world, "comes again")
        await stored(gone, KEYS[:2])
        await gone.forget(KEYS[:2])
        for number in range(3):
            await stored(await joined(world, f"kept-{number}"), KEYS[:4])
            await use_up(world, range(10 * number, 10 * number + 3))
        await stored(gone, KEYS[4:6])
        await (world.stop() if clean else world.crash())
        await begin(world)
        index = world.shard.parts.engine.index
        assert len(index.namespaces()) == MOST
        assert set(index.namespaces()) <= set(remembered(world))
        kept = {f"kept-{number}": KEYS[:4] for number in range(3)}
        for salt, keys in {"comes again": KEYS[4:6], **kept}.items():
            host = await joined(world, salt)
            assert await host.get(keys, OpenAt.HOST) == [Status.OK] * len(keys)
        again = await joined(world, "comes again")
        assert await again.get(KEYS[:2], OpenAt.HOST) == [Status.MISS] * 2
        receipt = await admin_of(world).tenant_erase(ALPHA)
        assert receipt.blocks_dropped == 14
        assert len(index) == 0
        assert world.keyring._namespaces._owner == {}

    simulate(tmp_path, story)


@pytest.mark.parametrize("later", [False, True])
def test_a_crash_brings_no_block_back_that_nobody_is_known_to_have(
    tmp_path: Path, later: bool
) -> None:
    """An evicted block is on flash until its segment is free. `later`: a start lies in between."""

    async def story(world: World) -> None:
        host = await joined(world, "evicted")
        await stored(host, KEYS[:2])
        if later:
            await world.crash()
            await begin(world)
        engine = world.shard.parts.engine
        never: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        engine._writer.free = lambda _segment: never  # type: ignore[method-assign]
        slot = int(engine.index.slots_of(host.namespace_id)[0])
        evicting = asyncio.ensure_future(engine.evict(int(engine.index.segment[slot])))
        while len(engine.index):
            await asyncio.sleep(0.001)
        assert engine.is_haunted
        before = engine.stats.tombstones
        await use_up(world, range(2 * MOST))
        assert host.namespace_id not in remembered(world)
        # One for it; those that never had a block took none.
        assert engine.stats.tombstones == before + 1
        evicting.cancel()
        await world.crash()
        await begin(world)
        assert not world.shard.parts.engine.index.namespaces()

    simulate(tmp_path, story)


def test_what_left_before_this_start_is_buried_once(tmp_path: Path) -> None:
    """A clean stop may leave segments behind that have older copies, and notes no names."""

    async def story(world: World) -> None:
        made = await use_up(world, range(MOST))
        await world.stop()
        await begin(world)
        engine = world.shard.parts.engine
        table = engine._table
        segment = table.segments[table.free[-1]]
        table.cast_shadows(segment)
        before = engine.stats.tombstones
        await use_up(world, range(10, 10 + 3 * MOST))
        assert not set(made) & set(remembered(world))
        assert engine.stats.tombstones == before + len(made)
        table.shadowing.discard(segment.index)
        segment.shadows = False

    simulate(tmp_path, story)


def test_what_cannot_be_buried_keeps_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(world: World) -> None:
        host = await joined(world, "evicted")
        await stored(host, KEYS[:2])
        engine, removal = world.shard.parts.engine, world.shard.removal
        table, barrier = engine._table, removal.barrier
        segment = table.segments[table.free[-1]]
        await host.forget(KEYS[:2])
        table.cast_shadows(segment)

        async def fails(account: Any) -> None:
            raise DeviceError("no room", status=Status.NO_SPACE)

        with monkeypatch.context() as patch:
            patch.setattr(removal, "barrier", fails)
            made = [await joined(world, f"empty-{number}") for number in range(MOST)]
            for each in made:
                await reserve(each, KEYS[0])
                await each.gone()
                world.hosts.remove(each)
            last = await joined(world, "last")
            await reserve(last, KEYS[0])
        assert host.namespace_id in remembered(world)
        assert last.namespace_id in remembered(world)
        assert removal.barrier == barrier
        await use_up(world, range(10, 10 + 2 * MOST))
        assert host.namespace_id not in remembered(world)
        table.shadowing.discard(segment.index)
        segment.shadows = False

    simulate(tmp_path, story)


def test_what_the_opening_did_not_find_keeps_the_record_of_its_namespace(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        host = await joined(world, "before")
        await stored(host, KEYS[:2])
        await host.forget(KEYS[:2])
        await world.stop()
        await begin(world)
        table = world.shard.parts.engine._table
        segment = table.segments[table.free[-1]]
        table.cast_shadows(segment)
        table.hiding.add(segment.index)
        await use_up(world, range(3 * MOST))  # those that came since hide nothing
        assert host.namespace_id in remembered(world)
        table.hiding.clear()
        await use_up(world, range(20, 20 + 2 * MOST))
        assert host.namespace_id not in remembered(world)
        table.shadowing.discard(segment.index)
        segment.shadows = False

    simulate(tmp_path, story)


def test_a_keyring_that_cannot_be_written_gives_nothing_up_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(world: World) -> None:
        await use_up(world, range(MOST))
        early = await joined(world, "used-up-0")
        host = await joined(world, "production")

        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(world.keyring._namespaces, "_save", full)
            with pytest.raises(EntresolError) as caught:
                await reserve(host, KEYS[0])
            assert caught.value.status is Status.IO_ERROR
        await stored(host, KEYS[:1])
        await stored(early, KEYS[:1])
        assert {host.namespace_id, early.namespace_id} <= set(remembered(world))
        await world.crash()
        await begin(world)
        assert {host.namespace_id, early.namespace_id} <= set(remembered(world))

    simulate(tmp_path, story)


def test_without_a_data_path_nothing_is_written_down(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        host = await joined(world, "nothing")
        (session,) = world.shard.sessions.values()
        endpoint, session.endpoint = session.endpoint, None
        with pytest.raises(EntresolError, match="no data path"):
            await reserve(host, KEYS[0])
        session.endpoint = endpoint
        assert not remembered(world)

    simulate(tmp_path, story)


def test_names_that_left_are_bounded() -> None:
    departed = Departed(2)
    for number in range(2):
        departed.note(bytes([number]) * 16)
        departed.note(bytes([number]) * 16)
    assert departed.may_return(bytes(16))
    assert not departed.may_return(b"x" * 16)
    departed.buried(bytes(16))
    assert not departed.may_return(bytes(16))
    for number in range(3):
        departed.note(bytes([number]) * 16)
    assert departed.may_return(b"x" * 16), "whatever did not fit may be any"
    departed.clear()
    assert not departed.may_return(b"x" * 16)
    assert not departed.may_return(bytes(16))
