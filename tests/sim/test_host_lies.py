"""What a host can have the daemon believe of its own tenant's blocks, and whom that costs: reports
of blocks that only hosts can open, blocks that were sealed wrongly, keys that were forgotten.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from pathlib import Path
from typing import Any

import pytest

from entresol_daemon.core.history import History
from entresol_daemon.flash.device import BLOCK
from entresol_daemon.flash.segment import RECORD_HEADER_BYTES
from entresol_daemon.shard.reports import REPORTED_MAX
from entresol_daemon.shard.turns import LOOP_ROUND_COST, REMOVAL_COST
from entresol_proto.ids import TenantName
from entresol_proto.seal.bypass import TRIES, Bypass
from entresol_proto.status import Status
from entresol_proto.wire import data
from entresol_proto.wire.data import Ack, OpenAt, Reason
from tests.sim.shardlab import SECOND_NS, Host, Oracle, World
from tests.sim.test_shard_review import forget_memory, joined, names, simulate

KEYS = [b"lies-%011d" % number for number in range(320)]


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Oracle, "content", lambda _self, _tenant, key: key[-1:])


def lines(caplog: pytest.LogCaptureFixture, event: str) -> list[logging.LogRecord]:
    return [each for each in caplog.records if f"event={event} " in str(each.msg)]


async def leased(host: Host, keys: list[bytes]) -> list[tuple[int, int, Status]]:
    """Lies about every one of these blocks, which stay leased."""
    fetch = data.Fetch(host.handle, OpenAt.HOST, False, 3 * SECOND_NS, names(host, keys))
    grants = [grant async for grant in host._answers(fetch)]
    found = [(g.lease_id, item.index, Status.CORRUPT) for g in grants for item in g.items]
    assert len(found) == len(keys)
    return found


def test_lies_about_host_sealed_blocks_take_turns_and_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """4,096 of them held the loop for 225 ms, and each was a line at ERROR."""

    async def story(world: World) -> None:
        host, parts = await joined(world), world.shard.parts
        for at in range(0, len(KEYS), 64):
            assert set(await host.put(KEYS[at : at + 64], Ack.DURABLE)) == {Status.OK}
        lies = await leased(host, KEYS)
        for resident in parts.residency._by_slot.values():
            resident.host_sealed = True  # as far as the daemon knows
        (session,) = world.shard.sessions.values()
        there = [len(parts.engine.index)]

        async def watch() -> None:
            while True:
                there.append(len(parts.engine.index))
                await asyncio.sleep(0)

        watching = asyncio.ensure_future(watch())
        lease_ids = tuple({lease for lease, _, _ in lies})
        world.shard.gets.release(session, data.Release((), tuple(lies)))
        assert len(parts.engine.index) == len(KEYS), "dropped without a turn"
        world.shard.gets.release(session, data.Release(lease_ids, ()))
        for _ in range(2_000):
            await asyncio.sleep(0)
        watching.cancel()
        steps = [before - after for before, after in itertools.pairwise(there)]
        assert max(steps) <= LOOP_ROUND_COST // REMOVAL_COST + 1
        assert len(parts.engine.index) == len(KEYS) - REPORTED_MAX // 2
        assert parts.meters.totals.corrupt_where == {"host_report": REPORTED_MAX // 2}
        lost = parts.metrics.host_reports_lost[TenantName("alpha")]
        assert lost._value.get() == len(KEYS) - REPORTED_MAX // 2
        assert not world.shard.gets._reports._reported

    simulate(tmp_path, story)
    (told,) = lines(caplog, "host_report")
    assert told.args == ("alpha", len(KEYS), len(KEYS) - REPORTED_MAX // 2)
    assert not lines(caplog, "corrupt")
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


class Spoiler(Host):
    """Seals, and turns a bit in what authenticates the last chunk."""

    async def _expose(self, item: Any, answer: Any, plain: bytes) -> Any:
        span = await super()._expose(item, answer, plain)
        if self.at_host:
            self.wire.exposed[1][span.rkey][span.length_bytes - 1] ^= 1
        return span


def test_plaintext_of_another_length_than_reserved_is_refused(tmp_path: Path) -> None:
    class Other(Host):
        async def _expose(self, item: Any, answer: Any, plain: bytes) -> Any:
            return await super()._expose(item, answer, plain + b"more")

    async def story(world: World) -> None:
        host = Other(world, "alpha", private=True, careful=True)
        await host.open()
        assert not host.at_host
        assert await host.put(KEYS[:2], Ack.DURABLE) == [Status.BAD_REQUEST] * 2
        assert await host.present(KEYS[:2]) == [False] * 2
        assert not len(world.shard.parts.engine.index)

    simulate(tmp_path, story)


@pytest.mark.parametrize("place", ["memory", "flash"])
def test_what_a_host_sealed_wrongly_is_not_the_drives_doing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    async def story(world: World) -> None:
        spoiler, parts = Spoiler(world, "alpha", careful=True), world.shard.parts
        await spoiler.open()
        reader = await joined(world, private=True)
        keys = KEYS[:40]
        assert set(await spoiler.put(keys, Ack.DURABLE)) == {Status.OK}
        if place == "flash":
            forget_memory(world)
        assert set(await reader.get(keys, OpenAt.DAEMON)) == {Status.CORRUPT}
        assert parts.meters.totals.corrupt_where == {"seal": len(keys)}
        assert await reader.present(keys) == [False] * len(keys)
        assert set(await reader.get(keys, OpenAt.DAEMON)) == {Status.MISS}

    simulate(tmp_path, story)
    told = lines(caplog, "sealed_wrongly")
    assert len(told) == 40
    assert {each.levelno for each in told} == {logging.WARNING}
    first = {each.args[0] for each in told if isinstance(each.args, tuple)}
    assert first == {"alpha"}, "of one kind, which is held back"
    assert not lines(caplog, "corrupt")


def test_blocks_that_do_not_open_are_dropped_in_turns(tmp_path: Path) -> None:
    """A window of 64 held the loop for 7 ms."""

    async def story(world: World) -> None:
        spoiler, parts = Spoiler(world, "alpha", careful=True), world.shard.parts
        await spoiler.open()
        reader = await joined(world, private=True)
        keys = KEYS[:64]
        assert set(await spoiler.put(keys, Ack.DURABLE)) == {Status.OK}
        turns = [0]  # how many were dropped in each
        gone = parts.engine.remove

        def remove(slot: int, reason: Any) -> None:
            if not turns[-1]:
                asyncio.get_running_loop().call_soon(turns.append, 0)
            turns[-1] += 1
            gone(slot, reason)

        parts.engine.remove = remove  # type: ignore[method-assign]
        assert set(await reader.get(keys, OpenAt.DAEMON)) == {Status.CORRUPT}
        assert sum(turns) == len(keys)
        assert max(turns) <= LOOP_ROUND_COST // REMOVAL_COST

    simulate(tmp_path, story)


@pytest.mark.parametrize("moment", [0, 3, 7, 11])
def test_a_host_that_leaves_while_its_blocks_are_dropped_leaves_nothing(
    tmp_path: Path, moment: int
) -> None:
    async def story(world: World) -> None:
        spoiler, parts = Spoiler(world, "alpha", careful=True), world.shard.parts
        await spoiler.open()
        good, reader = await joined(world, private=True), await joined(world, private=True)
        assert set(await good.put(KEYS[:8], Ack.DURABLE)) == {Status.OK}
        assert set(await spoiler.put(KEYS[8:64], Ack.DURABLE)) == {Status.OK}
        gone, removed = parts.engine.remove, itertools.count()

        def remove(slot: int, reason: Any) -> None:
            gone(slot, reason)
            if next(removed) == 5 * moment:
                reader.cut()

        parts.engine.remove = remove  # type: ignore[method-assign]
        assert Status.CORRUPT not in await reader.get(KEYS[:64], OpenAt.DAEMON)
        parts.engine.remove = gone  # type: ignore[method-assign]
        await reader.gone()
        assert await good.get(KEYS[:8], OpenAt.DAEMON) == [Status.OK] * 8
        assert set(await good.get(KEYS[8:64], OpenAt.DAEMON)) <= {Status.CORRUPT, Status.MISS}

    simulate(tmp_path, story)  # which looks at pins and memory


def test_damage_on_flash_is_the_drives_doing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(world: World) -> None:
        host, parts = await joined(world, private=True), world.shard.parts
        assert set(await host.put(KEYS[:2], Ack.DURABLE)) == {Status.OK}
        flip(world, KEYS[:1], host)
        forget_memory(world)
        assert await host.get(KEYS[:2], OpenAt.DAEMON) == [Status.CORRUPT, Status.OK]
        assert parts.meters.totals.corrupt_where == {"flash": 1}

    simulate(tmp_path, story)
    (told,) = lines(caplog, "corrupt")
    assert told.levelno == logging.ERROR


def flip(world: World, keys: list[bytes], host: Host) -> list[int]:
    """Turn a bit of each block where it is on flash; returns their segments."""
    engine = world.shard.parts.engine
    slots = engine.index.lookup(host.namespace_id, names(host, keys)).tolist()
    for slot in slots:
        base = engine._superblock.segment_at(int(engine.index.m_segment[slot]))
        at = base + int(engine.index.m_offset[slot]) * BLOCK + RECORD_HEADER_BYTES + 9
        world.device.poke(at, bytes([world.device.image_at(at, 1)[0] ^ 1]))
    return [int(engine.index.m_segment[slot]) for slot in slots]


def test_damage_that_an_eviction_finds_is_counted_as_well(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(world: World) -> None:
        host, parts = await joined(world), world.shard.parts
        assert set(await host.put(KEYS[:3], Ack.DURABLE)) == {Status.OK}
        (segment, _) = flip(world, KEYS[:2], host)
        await parts.engine.evict(segment, lambda slots: slots)
        assert await host.present(KEYS[:3]) == [False, False, True]
        assert parts.meters.totals.corrupt_where == {"flash": 2}

    simulate(tmp_path, story)
    assert {each.levelno for each in lines(caplog, "corrupt")} == {logging.ERROR}


def test_a_block_that_went_meanwhile_is_not_counted_as_corrupt(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        host, parts = await joined(world), world.shard.parts
        assert set(await host.put(KEYS[:1], Ack.DURABLE)) == {Status.OK}
        (resident,) = parts.residency._by_slot.values()
        await host.forget(KEYS[:1])
        world.shard.removal.corrupt(resident, where="flash")
        assert parts.meters.totals.blocks_corrupt == 0

    simulate(tmp_path, story)


def test_rows_of_forgotten_keys_are_their_tenants(tmp_path: Path) -> None:
    """They were nobody's, and pushed out what others would have been told."""

    async def story(world: World) -> None:
        host, other = await joined(world), await joined(world, tenant="beta")
        parts = world.shard.parts
        parts.history = History(60)
        theirs = parts.accounts.by_name[TenantName("beta")].stream
        mine = parts.accounts.by_name[TenantName("alpha")].stream
        for at, name in enumerate(other._names(KEYS[:25])):
            parts.history.record(other.namespace_id, name, Reason.EVICTED, at, theirs)
        for at in range(0, 40, 20):
            some = host._names(KEYS[at : at + 20])
            for number, name in enumerate(some):
                parts.history.record(host.namespace_id, name, Reason.EVICTED, number, mine)
            await host.forget(KEYS[at : at + 20])
        assert set(parts.history._owners) == {mine, theirs}
        kept = [parts.history.why(other.namespace_id, name)[0] for name in other._names(KEYS[:25])]
        assert kept == [Reason.EVICTED] * 25

    simulate(tmp_path, story)


def test_what_was_learned_of_a_tenant_is_not_pushed_out_by_namespaces_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Oracle, "content", lambda _self, _tenant, key: random.Random(key).randbytes(9000)
    )

    async def story(world: World) -> None:
        world.shard.host_id, chooser = bytes(15) + b"1", world.shard.parts.codecs
        chooser._link_bytes_per_s = 10**8  # a slow link to another host: blocks are compressed
        bypass = chooser.bypass = Bypass(places_max=8)
        host = await joined(world, private=True)  # the daemon seals
        for key in KEYS[:TRIES]:
            assert await host.put([key], Ack.DURABLE) == [Status.OK]
        for number in range(20):
            other = Host(world, "beta", private=True, careful=True)
            await other.open(salt=f"{number}")
            assert await other.put([KEYS[number]], Ack.DURABLE) == [Status.OK]
        assert bypass.skipped == 0
        assert await host.put([KEYS[TRIES]], Ack.DURABLE) == [Status.OK]
        assert bypass.skipped == 1

    simulate(tmp_path, story)
