"""Blocks to be opened wait for memory as others do: until their get's deadline, others' end or a
RELEASE behind it; what goes meanwhile is not served, and who leaves keeps nothing.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from entresol_daemon.shard import gets, opened
from entresol_daemon.shard.opened import OpenedBlocks
from entresol_proto.limits import KIB
from entresol_proto.status import Status
from entresol_proto.wire import data
from entresol_proto.wire.data import Ack, OpenAt, Tier
from tests.sim.shardlab import SECOND_NS, Host, Oracle, World
from tests.sim.test_shard_review import forget_memory, joined, names, simulate, stage

OK = Status.OK
KEYS = [b"opened-%09d" % number for number in range(64)]
ROOM = 2 << 20  # one slab for opened blocks: 34 of them


@pytest.fixture(autouse=True)
def long(monkeypatch: pytest.MonkeyPatch) -> None:
    def content(_self: Oracle, _tenant: str, key: bytes) -> bytes:
        return random.Random(key).randbytes(60_000)

    monkeypatch.setattr(Oracle, "content", content)


async def stored(host: Host, keys: list[bytes]) -> None:
    for at in range(0, len(keys), 32):  # as many as the put budget takes
        assert set(await host.put(keys[at : at + 32], Ack.DURABLE)) == {OK}


def may_hold(world: World, length_bytes: int) -> None:
    """What a session may hold: else it may never ask for more than there is memory for."""
    limits = world.shard.parts.config.limits
    object.__setattr__(limits, "inflight_bytes_per_session_max", length_bytes)


def fetch(host: Host, keys: list[bytes], *, seconds: float = 1) -> data.Fetch:
    deadline_ns = int(seconds * SECOND_NS)
    return data.Fetch(host.handle, OpenAt.DAEMON, False, deadline_ns, names(host, keys))


async def leased(host: Host, keys: list[bytes]) -> tuple[int, ...]:
    grants = [grant async for grant in host._answers(fetch(host, keys))]
    assert sum(len(grant.items) for grant in grants) == len(keys)
    return tuple(grant.lease_id for grant in grants)


async def answered(host: Host, *messages: Any) -> tuple[dict[int, Tier], dict[int, Status]]:
    """What comes of the first message, when all arrive in one piece."""
    sent = [host._machine.send(message) for message in messages]
    queue = host._waiting[sent[0][0]] = asyncio.Queue()
    host._handler.receive(b"".join(raw for _, raw in sent))
    tiers: dict[int, Tier] = {}
    misses: dict[int, Status] = {}
    while True:
        grant = await queue.get()
        if grant is None:
            return tiers, misses
        assert isinstance(grant, data.Grant)
        assert not misses.keys() & tiers.keys()
        tiers |= {item.index: item.tier for item in grant.items}
        misses |= dict(grant.misses)
        if grant.lease_id and not host.careful:
            host._send(data.Release((grant.lease_id,), ()))
        if grant.final:
            return tiers, misses


@pytest.mark.parametrize("place", ["memory", "flash"])
def test_a_release_behind_the_get_gives_it_room(tmp_path: Path, place: str) -> None:
    """26 of 30 blocks were BUSY at once, with a second left."""

    async def story(world: World) -> None:
        host = await joined(world, private=True)
        await stored(host, KEYS[:60])
        leases = await leased(host, KEYS[:30])
        if place == "flash":
            forget_memory(world)
        tiers, misses = await answered(host, fetch(host, KEYS[30:60]), data.Release(leases, ()))
        assert not misses
        assert sorted(tiers) == list(range(30))
        assert set(tiers.values()) == {Tier.FLASH if place == "flash" else Tier.MEMORY}

    simulate(tmp_path, story, opened_bytes=ROOM)


def test_more_than_there_is_memory_for_comes_as_it_is_released(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        host = await joined(world, private=True)
        await stored(host, KEYS)
        may_hold(world, 2 * ROOM)
        host.careful = False  # `answered` gives back what it has
        tiers, misses = await answered(host, fetch(host, KEYS))
        assert (sorted(tiers), misses) == (list(range(len(KEYS))), {})
        host.careful = True

    simulate(tmp_path, story, opened_bytes=ROOM)


def test_what_a_session_may_hold_is_any_number_of_bytes(tmp_path: Path) -> None:
    """20MB, say: less than a slab, and no whole number of pages."""

    async def story(world: World) -> None:
        host = await joined(world, private=True)
        await stored(host, KEYS[:2])
        may_hold(world, 1_000_001)
        assert await host.get(KEYS[:2], OpenAt.DAEMON) == [OK] * 2

    simulate(tmp_path, story)


def test_without_room_it_is_busy_at_the_deadline_and_not_before(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        host = await joined(world, private=True)
        await stored(host, KEYS[:40])
        await leased(host, KEYS[:34])
        (session,) = world.shard.sessions.values()
        held, began = session.held_bytes, host._loop.time()
        tiers, misses = await answered(host, fetch(host, KEYS[34:40], seconds=0.3))
        assert 0.3 <= host._loop.time() - began < 0.31
        assert (tiers, set(misses.values()), len(misses)) == ({}, {Status.BUSY}, 6)
        assert session.held_bytes == held
        assert world.shard.gets.door.outside == 0

    simulate(tmp_path, story, opened_bytes=ROOM)


def test_nothing_is_opened_for_a_get_that_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what waits behind a part that could not be shown, part after part was opened, and BUSY."""
    monkeypatch.setattr(opened, "EXPOSED_BLOCKS_MAX", 30)

    async def story(world: World) -> None:
        host = await joined(world, private=True)
        await stored(host, KEYS[:60])
        await leased(host, KEYS[:30])
        may_hold(world, 2 * ROOM)
        honest = OpenedBlocks._open_all
        begun_ns, times = world.shard.parts.now_ns(), list[int]()

        async def open_all(self: OpenedBlocks, *rest: Any) -> list[tuple[int, Status]]:
            times.append(world.shard.parts.now_ns() - begun_ns)
            return await honest(self, *rest)

        monkeypatch.setattr(OpenedBlocks, "_open_all", open_all)
        tiers, misses = await answered(host, fetch(host, KEYS[30:60], seconds=0.3))
        assert (tiers, set(misses.values()), len(misses)) == ({}, {Status.BUSY}, 30)
        assert times
        assert max(times) < 0.3 * SECOND_NS, times

    simulate(tmp_path, story, opened_bytes=ROOM)


def test_what_is_removed_while_it_waits_is_not_served(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        host, other = await joined(world, private=True), await joined(world)
        await stored(host, KEYS[:40])
        leases = await leased(host, KEYS[:34])
        asking = asyncio.ensure_future(answered(host, fetch(host, KEYS[34:40], seconds=0.4)))
        await asyncio.sleep(0.1)
        await other.forget(KEYS[34:37])
        host._send(data.Release(leases, ()))
        tiers, misses = await asking
        assert misses == dict.fromkeys(range(3), Status.MISS)
        assert sorted(tiers) == [3, 4, 5]

    simulate(tmp_path, story, opened_bytes=ROOM)


def test_a_stage_that_finds_none_says_so_at_its_deadline(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        host = await joined(world, private=True)
        await stored(host, KEYS[:40])
        statuses = await stage(host, KEYS[:40], OpenAt.DAEMON)
        assert statuses == [OK] * 34 + [Status.BUSY] * 6

    simulate(tmp_path, story, opened_bytes=ROOM)


def test_blocks_that_are_open_do_not_wait_for_one_that_is_not(tmp_path: Path) -> None:
    """All were BUSY at the deadline, also those that a STAGE had brought up."""

    async def story(world: World) -> None:
        host = await joined(world, private=True)
        await stored(host, KEYS[:35])
        may_hold(world, 2 * ROOM)
        assert set(await stage(host, KEYS[:34], OpenAt.DAEMON)) == {OK}
        keys = [KEYS[0], KEYS[34], *KEYS[1:8]]
        tiers, misses = await answered(host, fetch(host, keys, seconds=0.3))
        assert misses == {1: Status.BUSY}
        assert sorted(tiers) == [0, *range(2, len(keys))]
        tiers, misses = await answered(host, fetch(host, [KEYS[34], KEYS[0]], seconds=0.3))
        assert (misses, list(tiers)) == ({0: Status.BUSY}, [1])

    simulate(tmp_path, story, opened_bytes=ROOM)


def test_a_session_that_has_all_it_may_keeps_no_other_of_its_tenant_waiting(
    tmp_path: Path,
) -> None:
    """Its gets looked again whenever anything became free, in vain, and others had no look left."""

    async def story(world: World) -> None:
        object.__setattr__(world.shard.parts.config.limits, "lease_ns", 5 * SECOND_NS)
        full, asks = await joined(world, private=True), await joined(world, private=True)
        other = await joined(world, private=True, tenant="beta")
        await stored(full, KEYS)
        await stored(other, KEYS[:1])
        await leased(full, KEYS[:34])
        theirs = await leased(other, KEYS[:1])
        may_hold(world, 2 * ROOM)  # sealed, as where blocks are shorter so
        waiting = [asyncio.ensure_future(answered(full, fetch(full, [key]))) for key in KEYS[34:50]]
        await asyncio.sleep(0.1)
        asking = asyncio.ensure_future(answered(asks, fetch(asks, KEYS[:1], seconds=0.3)))
        await asyncio.sleep(0.1)
        assert not any(each.done() for each in (asking, *waiting))
        other._send(data.Release(theirs, ()))
        tiers, misses = await asking
        assert (list(tiers), misses) == ([0], {})
        found = await asyncio.gather(*waiting)
        assert [misses for _, misses in found] == [{0: Status.BUSY}] * 16

    simulate(tmp_path, story, opened_bytes=4 * ROOM)


@pytest.mark.parametrize("revokes", [True, False])
def test_a_session_that_ends_gives_its_room_at_once(tmp_path: Path, revokes: bool) -> None:
    """Over shm its leases end by themselves, later; its memory is gone before."""

    async def story(world: World) -> None:
        host = await joined(world, private=True)
        end = host.wire.daemon
        end.capabilities = replace(end.capabilities, revokes=revokes)
        await stored(host, KEYS[:34])
        other = await joined(world, private=True)
        await leased(host, KEYS[:34])
        asking = asyncio.ensure_future(answered(other, fetch(other, KEYS[:4], seconds=0.4)))
        await asyncio.sleep(0.1)
        assert not asking.done()
        host.cut()
        tiers, misses = await asking
        assert (sorted(tiers), misses) == ([0, 1, 2, 3], {})

    simulate(tmp_path, story, opened_bytes=ROOM)


def test_a_grant_that_cannot_be_sent_keeps_nothing_of_what_waits(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        host = await joined(world, private=True)
        await stored(host, KEYS[:40])
        (session,) = world.shard.sessions.values()
        may_hold(world, 2 * ROOM)

        def emit(_grant: data.Grant) -> None:
            raise MemoryError

        with pytest.raises(MemoryError):
            await world.shard.gets.fetch(session, fetch(host, KEYS[:40]), emit)

    simulate(tmp_path, story, opened_bytes=ROOM)


def test_what_is_absent_is_told_once_however_many_windows_are_opened_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gets, "LOAD_FIRST_BYTES", 4 * 64 * KIB)
    monkeypatch.setattr(gets, "LOAD_WINDOW_BYTES", 4 * 64 * KIB)
    at_once = OpenedBlocks.open

    async def slowly(self: OpenedBlocks, leased: Any, removal: Any) -> list[tuple[int, Status]]:
        await asyncio.sleep(0.05)  # until other windows have landed
        return await at_once(self, leased, removal)

    monkeypatch.setattr(OpenedBlocks, "open", slowly)

    async def story(world: World) -> None:
        host = await joined(world, private=True)
        await stored(host, KEYS[:24])
        forget_memory(world)
        grants = [grant async for grant in host._answers(fetch(host, KEYS[:28]))]
        told = [index for grant in grants for index, _ in grant.misses]
        told += [item.index for grant in grants for item in grant.items]
        assert len(grants) > 2
        assert sorted(told) == list(range(28))

    simulate(tmp_path, story)


@pytest.mark.parametrize("seed", range(8))
def test_hosts_that_wait_and_leave_at_any_moment_keep_nothing(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)

    async def story(world: World) -> None:
        writers = [await joined(world, tenant=tenant) for tenant in ("alpha", "beta")]
        for writer in writers:
            await stored(writer, KEYS)
        hosts = [await joined(world, private=True, tenant=t) for t in ("alpha", "alpha", "beta")]
        may_hold(world, 2 * ROOM)

        async def leave(host: Host) -> None:
            await asyncio.sleep(rng.uniform(0, 0.05))
            host.cut()

        async def ask(host: Host) -> None:
            for _ in range(3):
                keys = rng.sample(KEYS, 40)
                found = await host.get(keys, OpenAt.DAEMON)
                assert set(found) <= {OK, Status.DISCONNECTED, Status.BUSY}, found

        leaving = rng.sample(hosts, 1)
        await asyncio.gather(*map(ask, hosts), *map(leave, leaving))
        stays = next(host for host in hosts if host not in leaving)
        await asyncio.sleep(1)
        assert await stays.get(KEYS[:34], OpenAt.DAEMON) == [OK] * 34

    simulate(tmp_path, story, seed=seed, opened_bytes=ROOM)
