"""What operators and followers of events ask for, where there is much of it: in short steps."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entresol_daemon.core.accounts import Account
from entresol_daemon.events.mirror import Mirror
from entresol_daemon.events.stream import snapshot_batches
from entresol_daemon.events.types import Event, Gap, Medium, Position
from entresol_daemon.flash.sim import Fault
from entresol_daemon.shard import listing
from entresol_daemon.shard.choosing import PLACES_MAX
from entresol_daemon.shard.keycare import LOOK_NS
from entresol_daemon.shard.turns import FLASH_ITEM_BYTES, Turns
from entresol_proto.ids import NamespaceDescriptor, TenantName, pack_token_ids
from entresol_proto.status import Status
from tests.sim import shardlab
from tests.sim.shardlab import World
from tests.sim.test_shard_review import KEYS, forget_memory, joined, simulate, stored
from tests.sim.test_tenant_changes import admin_of

ALPHA, BETA = TenantName("alpha"), TenantName("beta")
SPACES = 200


class Ticks:
    """Turns of the loop that others had."""

    def __init__(self) -> None:
        self.count = 0

    @contextlib.asynccontextmanager
    async def counted(self) -> AsyncIterator[Ticks]:
        async def tick() -> None:
            while True:
                self.count += 1
                await asyncio.sleep(0)

        ticking = asyncio.ensure_future(tick())
        await asyncio.sleep(0)
        self.count = 0
        try:
            yield self
        finally:
            ticking.cancel()


async def listed(world: World) -> list[Event]:
    """A snapshot."""
    return [event async for event in admin_of(world).snapshot(ALPHA) if event is not None]


def contended(world: World) -> None:
    """Two tenants used the loop just now."""
    for name in ("alpha", "beta"):
        world.shard.parts.turns.loop._note(TenantName(name))


def test_a_tenants_namespaces_are_told_in_its_turns(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await stored(await joined(world), KEYS[:3])
        for number in range(SPACES):
            canonical = NamespaceDescriptor("m", cache_salt=f"{number}").canonical()
            world.keyring.remember_namespace("alpha", canonical)
        contended(world)
        async with Ticks().counted() as ticks:
            found = await admin_of(world).namespaces(ALPHA)
            assert ticks.count > SPACES // 4, "others waited for all of them"
        assert len(found) == SPACES + 1
        assert [each.blocks for each in found if each.blocks] == [3]

    simulate(tmp_path, story)


def test_a_snapshot_looks_through_the_index_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(world: World) -> None:
        await stored(await joined(world), KEYS)
        host = await joined(world)
        await host.forget(KEYS[10:30])
        whole = await listed(world)
        monkeypatch.setattr(listing, "SCAN_SLOTS", 7)
        pieces = await listed(world)
        assert [each.wire_keys for each in pieces] == [each.wire_keys for each in whole]
        assert len(whole) == len(KEYS) - 20

    simulate(tmp_path, story)


def test_a_snapshot_of_many_blocks_is_sorted_in_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five million kept the loop, and everybody, for a second."""

    async def story(world: World) -> None:
        await stored(await joined(world), KEYS)
        whole = await listed(world)
        parts, sorted_there = world.shard.parts, list[int]()
        honest = parts.compute.run

        async def run(fn: Any, *args: Any) -> Any:
            if fn is listing.by_position:
                assert parts.turns.compute.in_service, "out of turn"
                sorted_there.append(sum(map(len, args[0])))
            return await honest(fn, *args)

        monkeypatch.setattr(parts.compute, "run", run)
        monkeypatch.setattr(listing, "SORTED_AT_ONCE", len(KEYS) - 1)
        found = await listed(world)
        assert [each.wire_keys for each in found] == [each.wire_keys for each in whole]
        assert sorted_there == [len(KEYS)]

    simulate(tmp_path, story)


@pytest.mark.parametrize("when", ["looked for", "listed"])
def test_a_snapshot_ends_where_its_tenant_is_erased_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Without its turns it went through the rest, millions of blocks, in one turn of the loop."""
    sorted_there, honest = list[int](), listing.by_position

    def counted(found: Any, positions: Any) -> Any:
        sorted_there.append(sum(map(len, found)))
        return honest(found, positions)

    async def story(world: World) -> None:
        await stored(await joined(world), KEYS)
        monkeypatch.setattr(listing, "by_position", counted)
        monkeypatch.setattr(listing, "HEADS_AT_ONCE", 1)
        walk = admin_of(world).snapshot(ALPHA)
        while await anext(walk) is None and when == "listed":
            pass
        world.shard.parts.accounts.remove(ALPHA)
        assert not [event async for event in walk]
        assert len(sorted_there) == (when == "listed")

    simulate(tmp_path, story)


def test_slots_are_sorted_by_positions_of_any_length() -> None:
    rng = np.random.default_rng(7)
    for most in (1, 300, 2**16, 2**20, 2**32):
        positions = rng.integers(0, most, 3_000, np.uint32)
        slots = np.flatnonzero(rng.random(3_000) < 0.7)
        expected = slots[np.argsort(positions[slots], kind="stable")]
        assert (listing.by_position([slots[:9], slots[9:]], positions) == expected).all()
    assert not len(listing.by_position([np.zeros(0, np.int64)], positions))


def test_a_snapshot_reads_many_heads_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by one, the log of a busy tenant is full before its snapshot is over, time and again."""

    async def story(world: World) -> None:
        await stored(await joined(world), KEYS)
        whole = await listed(world)
        forget_memory(world)
        reader, asked = world.shard.parts.engine._reader, list[int]()
        honest = reader.heads

        async def heads(slots: Sequence[int]) -> list[bytes]:
            asked.append(len(slots))
            return await honest(slots)

        monkeypatch.setattr(reader, "heads", heads)
        found = await listed(world)
        assert [replace(each, medium=Medium.MEMORY, time_unix_ns=0) for each in found] == [
            replace(each, time_unix_ns=0) for each in whole
        ]
        assert len(asked) == -(-len(KEYS) // listing.HEADS_AT_ONCE)
        assert max(asked) <= listing.HEADS_AT_ONCE

    simulate(tmp_path, story)


def test_a_snapshot_names_a_block_that_took_the_slot_of_one_read_ahead(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        host = await joined(world)
        await stored(host, KEYS[:8])
        forget_memory(world)
        index = world.shard.parts.engine.index
        walk = admin_of(world).snapshot(ALPHA)
        first = await anext(walk)
        while first is None:
            first = await anext(walk)
        before = {index.key_of(slot): slot for slot in index.live_slots().tolist()}
        await host.forget(KEYS[5:6])
        await stored(host, KEYS[20:21])
        forget_memory(world)
        (new,) = (slot for slot in index.live_slots().tolist() if index.key_of(slot) not in before)
        assert new in before.values(), "in the slot of the one that is gone"
        found = [first, *[event async for event in walk if event is not None]]
        assert {key for each in found for key in each.engine_keys} >= {KEYS[20]}
        assert KEYS[5] not in {key for each in found for key in each.engine_keys}
        assert all(each.engine_keys for each in found)

    simulate(tmp_path, story)


def test_a_snapshot_pays_for_whole_records_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block with many tokens is read whole: that was nobody's turn."""
    tokens = pack_token_ids(tuple(range(2_000)))  # more than the first 4 KiB have

    async def story(world: World) -> None:
        monkeypatch.setattr(shardlab, "pack_token_ids", lambda _ids: tokens)
        await stored(await joined(world, private=True), KEYS[:4])
        forget_memory(world)
        parts = world.shard.parts
        honest_read, honest_take = parts.engine.read, Turns.take
        whole, paid = list[int](), list[int]()

        async def read(items: list[tuple[int, memoryview]]) -> list[Status]:
            whole.extend(view.nbytes for _, view in items)
            return await honest_read(items)

        async def take(self: Turns, account: Account, cost: int, *rest: int) -> int:
            paid.append(cost)
            return await honest_take(self, account, cost, *rest)

        monkeypatch.setattr(parts.engine, "read", read)
        monkeypatch.setattr(Turns, "take", take)
        found = await listed(world)
        assert [event.token_ids_u32le for event in found] == [tokens] * 4
        assert len(whole) == 4
        assert sum(paid) >= sum(whole) + (len(whole) + 4) * FLASH_ITEM_BYTES

    simulate(tmp_path, story)


def test_a_snapshot_lists_blocks_that_the_device_does_not_give_just_now(tmp_path: Path) -> None:
    """Left out, they were gone for whoever follows: no event says that they are back."""

    async def story(world: World) -> None:
        await stored(await joined(world), KEYS[:4])
        whole = await listed(world)
        forget_memory(world)
        world.device.plan.rates = {Fault.READ_EIO: 1.0}
        found = await listed(world)
        world.device.plan.rates = {}
        assert [each.wire_keys for each in found] == [each.wire_keys for each in whole]
        assert {each.medium for each in found} == {Medium.FLASH}
        assert [each.position for each in found] == [each.position for each in whole]
        assert not any(each.engine_keys or each.parent or each.token_ids for each in found)

    simulate(tmp_path, story)


def test_many_tenants_are_listed_in_steps_and_without_those_erased_meanwhile(
    tmp_path: Path,
) -> None:
    async def story(world: World) -> None:
        await stored(await joined(world), KEYS[:5])
        for number in range(SPACES):
            world.keyring.add_tenant(f"t{number:03}", now_unix_s=1)
        admin, tenants = admin_of(world), world.keyring.tenants()
        gone = next(info for info in tenants if info.name == "t150")
        await admin.tenant_list()
        async with Ticks().counted() as ticks:
            listing = asyncio.ensure_future(admin.tenant_list())
            await asyncio.sleep(0)
            world.keyring.erase(gone.name, now_unix_s=2)
            found = await listing
            assert ticks.count >= SPACES // 32
        assert len(found) == len(tenants) - 1
        assert gone.name not in {each.name for each in found}
        assert {each.name: each.blocks for each in found if each.blocks} == {"alpha": 5}
        await admin.tenant_erase(TenantName(gone.name))

    simulate(tmp_path, story)


def test_pages_of_segments_are_those_of_the_whole(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await stored(await joined(world), KEYS)
        admin = admin_of(world)
        whole = await admin.segments(0, 1000)
        assert [each.segment for each in whole] == list(
            range(len(world.shard.parts.engine.segment_states()))
        )
        pages = [each for at in range(0, 60, 7) for each in await admin.segments(at, 7)]
        assert pages == whole
        assert {each.tenant for each in whole} == {"", "alpha"}

    simulate(tmp_path, story)


def test_tenants_that_are_due_at_once_change_their_keys_one_by_one(tmp_path: Path) -> None:
    """And what they leave in freed memory is swept once for all of them."""

    async def story(world: World) -> None:
        parts, care = world.shard.parts, world.shard.keycare
        names = [f"t{number:03}" for number in range(50)]
        for name in names:
            world.shard.tenancy.adopt(world.keyring.add_tenant(name, now_unix_s=1).info)
        sweeps, running, most = 0, 0, 0

        def sweep() -> Iterator[None]:
            nonlocal sweeps
            sweeps += 1
            return iter([None])

        class Slow:
            async def run(self, fn: Any, *args: Any) -> Any:
                nonlocal running, most
                running += 1
                most = max(most, running)
                await asyncio.sleep(0.01)
                running -= 1
                return fn(*args)

        parts.sweep = sweep
        parts.keys = Slow()  # type: ignore[assignment]
        keys = replace(parts.config.keys, rotate_age_ns=3600 * 10**9)
        parts.config = replace(parts.config, keys=keys)
        now_ns = parts.unix_ns()
        parts.unix_ns = lambda: now_ns + 2 * 3600 * 10**9
        await asyncio.sleep(5)
        rings = [info for info in world.keyring.tenants() if info.name in names]
        assert {(info.active_version, len(info.fingerprints)) for info in rings} == {(2, 1)}
        assert care.versions_ended >= len(names)
        assert most == 1
        assert 1 <= sweeps <= 3
        assert not world.keyring._destroyed
        parts.unix_ns = lambda: now_ns
        assert LOOK_NS < 5 * 10**9

    simulate(tmp_path, story)


def test_a_tenants_namespaces_tell_nothing_of_anothers(tmp_path: Path) -> None:
    """Beta saw its `codec` become empty, and no sums of its own, by what alpha opened."""

    async def story(world: World) -> None:
        beta = await joined(world, tenant="beta")
        await stored(beta, KEYS[:3])
        admin = admin_of(world)
        before = await admin.namespaces(BETA)
        assert [row.codec for row in before] == ["raw"]
        assert before[0].sealed_bytes > before[0].plain_bytes > 0
        parts = world.shard.parts
        session = (await joined(world))._handler.session
        for number in range(2 * PLACES_MAX):
            session.namespaces.clear()
            canonical = NamespaceDescriptor("m", cache_salt=f"{number}").canonical()
            opened = world.shard.open_namespace(session, canonical)
            space = session.namespaces[opened.handle]
            if number % 2:
                parts.codecs.learn("alpha", space.namespace_id, space.dtype, space.choice, 9, 9)
                parts.meters.ratios.add("alpha", space.namespace_id, space.dtype, 0, 9, 9)
        assert await admin.namespaces(BETA) == before
        await admin.tenant_erase(ALPHA)
        assert not parts.codecs.latest("alpha")
        assert not parts.meters.ratios.rows("alpha")
        assert await admin.namespaces(BETA) == before

    simulate(tmp_path, story)


async def picture(world: World) -> Mirror:
    """What a snapshot that is followed shows, with no event after it."""
    parts, mirror = world.shard.parts, Mirror()
    steps = snapshot_batches(
        parts.events, admin_of(world).snapshot, ALPHA, batch_events=2, follow=True
    )
    async for batch in steps:
        assert not isinstance(batch, Gap)
        if isinstance(batch, Position):
            mirror.restart(batch)
            continue
        for event in batch:
            if event.seq:
                mirror.follow(parts.events.incarnation, [event])
            else:
                mirror.load([event])
    return mirror


def test_a_block_that_goes_while_it_is_read_is_not_listed_behind_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For who follows it were there for ever: what ended it was told already."""
    tokens = pack_token_ids(tuple(range(2_000)))  # read whole, so that there is time for it

    async def story(world: World) -> None:
        monkeypatch.setattr(shardlab, "pack_token_ids", lambda _ids: tokens)
        host = await joined(world, private=True)
        await stored(host, KEYS[:6])
        forget_memory(world)
        parts = world.shard.parts
        honest, reads = parts.engine.read, itertools.count()

        async def read(items: list[tuple[int, memoryview]]) -> list[Status]:
            statuses = await honest(items)
            if (at := next(reads)) % 2:
                await host.forget(KEYS[at : at + 1])  # the one that is read
            return statuses

        monkeypatch.setattr(parts.engine, "read", read)
        mirror = await picture(world)
        index = parts.engine.index
        left = {index.key_of(slot) for slot in index.live_slots().tolist()}
        assert {key for _, key in mirror.blocks} == left
        assert len(left) == 3

    simulate(tmp_path, story)


def test_a_snapshot_that_finds_nothing_for_long_says_that_it_goes_on(tmp_path: Path) -> None:
    """Whoever follows it reads the log in between; silent, it were overtaken."""

    async def story(world: World) -> None:
        host = await joined(world)
        await stored(host, KEYS)
        walk = admin_of(world).snapshot(ALPHA)
        while await anext(walk) is None:
            pass
        await host.forget(KEYS[1:])
        left = [event async for event in walk]
        assert len(left) >= len(KEYS) // listing.HEADS_AT_ONCE - 1
        assert left == [None] * len(left)

    simulate(tmp_path, story)
