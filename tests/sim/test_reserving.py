"""RESERVEs at a put budget that is nearly full: what is held is what is charged, and each item is
answered for itself."""

from __future__ import annotations

import asyncio
import tracemalloc
from pathlib import Path

import pytest

from entresol_daemon.core.accounts import Account
from entresol_daemon.core.admission import Admission, WriteBudget
from entresol_daemon.core.fairness import GETS
from entresol_daemon.shard import reserving
from entresol_daemon.shard.parts import RETRIES_IN_VAIN_MAX
from entresol_proto import limits
from entresol_proto.fabric.base import RemoteSpan
from entresol_proto.ids import TenantName, pack_token_ids
from entresol_proto.status import Status
from entresol_proto.wire import data
from entresol_proto.wire.data import Ack
from tests.sim.shardlab import SECOND_NS, Host, World
from tests.sim.test_shard_review import KEYS, joined, simulate

HOG_KEYS = [b"hog-%09d" % number for number in range(1_000)]


async def reserved(host: Host, items: list[data.PutItem]) -> list[Status]:
    answer = await host._call(data.Reserve(host.handle, Ack.ACCEPTED, 60 * SECOND_NS, tuple(items)))
    return [item.status for item in answer.items]


def item(host: Host, key: bytes, size_bytes: int = 1, token_ids: bytes = b"") -> data.PutItem:
    (name,) = host._names([key])
    return data.PutItem(name, key, size_bytes, 0, b"", token_ids)


async def fill(host: Host, token_ids: bytes = b"") -> int:
    """Reserve until nothing more has room; how many there are."""
    for at in range(0, len(HOG_KEYS), 100):
        some = [item(host, key, 1, token_ids) for key in HOG_KEYS[at : at + 100]]
        if Status.BUSY in await reserved(host, some):
            return len(host.world.shard.puts._reserving.open)
    raise AssertionError("the put budget was never full")


def test_reservations_hold_no_more_memory_than_is_charged(tmp_path: Path) -> None:
    """With as many token ids as a block may have, which a host need not send any block for."""

    async def story(world: World) -> None:
        host = await joined(world)
        budget = world.shard.parts.put_budget
        some = [world.rng.randrange(2**32) for _ in range(limits.TOKENS_PER_BLOCK_MAX)]
        tracemalloc.start()
        try:
            before_bytes = tracemalloc.get_traced_memory()[0]
            count = await fill(host, pack_token_ids(some))
            held_bytes = tracemalloc.get_traced_memory()[0] - before_bytes
        finally:
            tracemalloc.stop()
        assert count > 200
        assert held_bytes < budget.used_bytes, (held_bytes / count, budget.used_bytes / count)

    simulate(tmp_path, story)


@pytest.mark.parametrize(
    ("size_bytes", "status"),
    [
        (0, Status.BAD_REQUEST),
        (2**32 - 1, Status.TOO_LARGE),
        (200 * limits.MIB, Status.TOO_LARGE),
    ],
)
def test_an_impossible_item_is_answered_for_itself_where_the_others_wait(
    tmp_path: Path, size_bytes: int, status: Status
) -> None:
    async def story(world: World) -> None:
        host = await joined(world)
        await fill(host)
        items = [item(host, KEYS[0], size_bytes), item(host, KEYS[1]), item(host, KEYS[2])]
        begun_ns = host._now()
        assert await reserved(host, items) == [status, Status.BUSY, Status.BUSY]
        assert host._now() - begun_ns >= SECOND_NS, "it waited for room"

    simulate(tmp_path, story)


def test_an_impossible_item_that_is_being_stored_is_not_what_room_is_waited_for(
    tmp_path: Path,
) -> None:
    async def story(world: World) -> None:
        host = await joined(world)
        await fill(host)
        items = [item(host, HOG_KEYS[0], 2**32 - 1), item(host, KEYS[0])]
        assert await reserved(host, items) == [Status.BUSY, Status.BUSY]

    simulate(tmp_path, story)


def test_only_so_many_reserves_are_kept_waiting_and_none_because_of_another_tenant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of a host's hundreds of requests may have megabytes of token ids."""
    monkeypatch.setattr(reserving, "WAITING_BYTES_MAX", 256 * limits.KIB)

    async def story(world: World) -> None:
        hog, other = await joined(world), await joined(world, tenant="beta")
        reserving_ = world.shard.puts._reserving
        await fill(hog)
        await fill(other)
        begun_ns, ids = hog._now(), bytes(4 * limits.TOKENS_PER_BLOCK_MAX)
        waited_ns = []

        async def ask(host: Host, key: bytes) -> None:
            assert await reserved(host, [item(host, key, 200_000, ids)]) == [Status.BUSY]
            waited_ns.append(host._now() - begun_ns)

        tasks = [asyncio.create_task(ask(hog, key)) for key in KEYS[:40]]
        await asyncio.sleep(0.5)
        kept = sum(not task.done() for task in tasks)
        assert 10 < kept < 20, "half of what there is, where another tenant is"
        assert sum(reserving_._waiting.values()) <= 128 * limits.KIB
        assert max(waited_ns) < SECOND_NS, "the others were told at once"
        theirs = asyncio.create_task(ask(other, KEYS[50]))
        await asyncio.sleep(0.5)
        assert not theirs.done(), "it waits for room, as ever"
        await asyncio.gather(*tasks, theirs)
        assert not reserving_._waiting
        assert not reserving_._all_waiting.used

    simulate(tmp_path, story)


def test_what_is_given_up_takes_nothing_of_the_write_budget(tmp_path: Path) -> None:
    """Else who reserves and never commits keeps all others from storing, for a day if it likes."""

    async def story(world: World) -> None:
        admission = world.shard.parts.admission = Admission("auto", budget=WriteBudget(1, 100_000))
        hog, other = await joined(world), await joined(world, tenant="beta")
        for key in HOG_KEYS[:20]:
            asked = (item(hog, key, 60_000),)
            answer = await hog._call(data.Reserve(hog.handle, Ack.ACCEPTED, SECOND_NS, asked))
            (given,) = answer.items
            assert given.status is Status.OK
            if key in HOG_KEYS[:10]:
                await hog._call(data.Commit(((given.put_id, RemoteSpan(0, 0, 0)),)))
            else:
                await asyncio.sleep(1.1)  # until its time is over
        assert admission.budget_level(hog._now()) == (100_000, 100_000)
        assert await other.put(KEYS[:1], Ack.DURABLE) == [Status.OK]
        level = admission.budget_level(hog._now())
        assert level is not None
        assert level[0] < 100_000, "what is stored counts"
        assert await other.put(KEYS[:1], Ack.DURABLE) == [Status.EXISTS]

    simulate(tmp_path, story)


def test_a_reserve_hears_of_room_however_many_gets_of_its_tenant_wait_in_vain(
    tmp_path: Path,
) -> None:
    async def story(world: World) -> None:
        keeps, asks, hog, host = [await joined(world) for _ in range(4)]
        assert set(await keeps.put(KEYS[:12], Ack.DURABLE)) == {Status.OK}
        account = world.shard.parts.accounts.by_name[TenantName("alpha")]
        account.get_quota_bytes = 1  # one block at a time, whoever of its hosts has it
        held = data.Stage(
            keeps.handle, data.OpenAt.HOST, 5 * SECOND_NS, SECOND_NS, keeps._names(KEYS[:1])[0]
        )
        await keeps._call(held)
        getting = [asyncio.create_task(asks.get([key], data.OpenAt.HOST)) for key in KEYS[1:9]]
        await fill(hog)
        reserving_ = asyncio.create_task(reserved(host, [item(host, KEYS[20])]))
        await asyncio.sleep(0.1)
        assert not any(each.done() for each in (*getting, reserving_))
        (first, *_) = world.shard.puts._reserving.open
        await hog._call(data.Commit(((first[1], RemoteSpan(0, 0, 0)),)))
        await asyncio.sleep(0.1)
        assert reserving_.done(), "there is room"
        assert await reserving_ == [Status.OK]
        account.get_quota_bytes = 0
        await asyncio.gather(*getting)

    simulate(tmp_path, story)


def test_room_that_comes_while_a_long_reserve_is_looked_at_is_seen(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        hog, host = await joined(world), await joined(world)
        loop_turns, open_ = world.shard.parts.turns.loop, world.shard.puts._reserving.open
        await fill(hog)
        take, gave_up = loop_turns.take, []

        async def take_meanwhile(account: Account, cost: int, rank: int = GETS) -> None:
            if not gave_up:  # its first item had no room, and thousands are to be looked at
                gave_up.append(next(iter(open_.values())))
                world.shard.puts._reserving.close(gave_up[0])
            await take(account, cost, rank)

        loop_turns.take = take_meanwhile  # type: ignore[method-assign]
        keys = [b"long-%09d" % number for number in range(3_000)]
        begun_ns = host._now()
        statuses = await reserved(host, [item(host, key) for key in keys])
        assert gave_up
        assert statuses[0] is Status.OK
        assert host._now() - begun_ns < SECOND_NS, "it waited for what had come already"

    simulate(tmp_path, story)


def test_a_reserve_that_waits_for_room_offers_its_blocks_once(tmp_path: Path) -> None:
    """Looked at again when there is room, what was not admitted counted as offered twice."""

    async def story(world: World) -> None:
        hog, host = await joined(world), await joined(world)
        world.shard.parts.admission = Admission("auto", budget=None)
        await fill(hog)
        open_ = world.shard.puts._reserving.open
        (first, *_) = open_
        await hog._call(data.Commit(((first[1], RemoteSpan(0, 0, 0)),)))  # room for a short one
        admission = world.shard.parts.admission = Admission("second_touch", budget=None)
        some = [item(host, KEYS[0]), item(host, KEYS[1], 200_000)]
        asking = asyncio.create_task(reserved(host, some))
        await asyncio.sleep(0.1)
        assert not asking.done()
        assert len(admission.ghost) == 1, "the first; the other had no room"
        await hog._call(data.Commit(tuple((put, RemoteSpan(0, 0, 0)) for _, put in open_)))
        await asyncio.sleep(0.1)
        assert await asking == [Status.NOT_ADMITTED] * 2
        assert await reserved(host, some) == [Status.OK] * 2, "the second time"

    simulate(tmp_path, story)


def test_of_many_commits_that_wait_for_memory_few_look_for_it_in_vain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(world: World) -> None:
        hosts = [await joined(world) for _ in range(40)]
        parts, looks = world.shard.parts, list[int]()

        def none(_owner: bytes, length_bytes: int, _most: int) -> None:
            looks.append(length_bytes)

        with monkeypatch.context() as full:
            full.setattr(parts.residency, "allocate", none)
            putting = [
                asyncio.create_task(host.put([key], Ack.ACCEPTED))
                for host, key in zip(hosts, KEYS, strict=False)
            ]
            await asyncio.sleep(0.1)
            assert len(looks) == len(hosts), "each has looked"
            for notice in range(1, 4):
                parts.room.notify()
                await asyncio.sleep(0.1)
                assert len(looks) - len(hosts) <= notice * (RETRIES_IN_VAIN_MAX + 1)
        parts.room.notify()
        assert await asyncio.gather(*putting) == [[Status.OK]] * len(hosts), "one notice for all"

    simulate(tmp_path, story)
