"""Gets of some blocks in memory are answered at once; whatever else there is goes the long way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from entresol_daemon.core import planning
from entresol_daemon.shard import gets, resident
from entresol_daemon.shard.dispatch import CARRIED_AHEAD_BYTES_MAX
from entresol_daemon.shard.resident import BLOCKS_MAX_ALONE
from entresol_daemon.shard.turns import BLOCK_COST, CARRY_COST_SHIFT, WINDOW_BLOCKS_IN_TURN
from entresol_proto.status import Status
from entresol_proto.wire import data
from entresol_proto.wire.data import Fetch, OpenAt
from entresol_proto.wire.quote import Quote
from tests.sim.shardlab import Host, World
from tests.sim.test_shard_review import forget_memory, joined, names, simulate, stage, stored

OK = Status.OK
KEYS = [b"resident-%08d" % number for number in range(128)]


def ways(world: World) -> list[str]:
    """Which way each get goes from now on."""
    gets, found = world.shard.gets, []
    at_once, long_way = gets.resident.fetch_now, gets.fetch

    def fetch_now(*args: Any, **named: Any) -> data.Grant | None:
        grant = at_once(*args, **named)
        if grant is not None:
            found.append("now")
        return grant

    async def fetch(*args: Any) -> None:
        found.append("later")
        await long_way(*args)

    gets.resident.fetch_now = fetch_now  # type: ignore[method-assign]
    gets.fetch = fetch  # type: ignore[method-assign]
    return found


async def warm(world: World, count: int = 8, *, private: bool = False) -> tuple[Host, list[str]]:
    """A host to which its blocks are shown, all in memory; and the ways of its gets."""
    host = await joined(world, private=private)
    await stored(host, KEYS[:count])
    assert await host.get(KEYS[:count], OpenAt.HOST) == [OK] * count
    await asyncio.sleep(0.1)  # the last release arrives
    return host, ways(world)


def test_some_blocks_in_memory_are_answered_at_once(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        host, found = await warm(world, BLOCKS_MAX_ALONE)
        for keys in (KEYS[:8], KEYS[3:4], KEYS[:BLOCKS_MAX_ALONE]):
            assert await host.get(keys, OpenAt.HOST) == [OK] * len(keys)
        assert found == ["now"] * 3
        await asyncio.sleep(0.1)
        (session,) = world.shard.sessions.values()
        assert (session.held_bytes, session.account.leases) == (0, 0)

    simulate(tmp_path, story)


# What the process is and does: not of a get alone.
OF_THE_PROCESS = ("process", "python", "malloc", "tasks", "event_loop")


def counted(world: World) -> dict[str, float]:
    """All counts of the shard, without sums of times."""
    registry = world.shard.parts.metrics.registry
    assert isinstance(registry, CollectorRegistry)
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in registry.collect()
        for sample in family.samples
        if not sample.name.endswith(("_sum", "_bucket", "_created"))
        and not sample.name.removeprefix("entresol_").startswith(OF_THE_PROCESS)
    }


@pytest.mark.parametrize("open_at", OpenAt)
@pytest.mark.parametrize("blocks", [8, BLOCKS_MAX_ALONE])
def test_both_ways_count_the_same(tmp_path: Path, blocks: int, open_at: OpenAt) -> None:
    async def story(world: World) -> None:
        host, found = await (warm if open_at is OpenAt.HOST else opened)(world, blocks)
        index, index_use = world.shard.parts.engine.index, world.shard.parts.meters.usefulness
        grown, uses = [], []
        at_once = world.shard.gets.resident.fetch_now
        for way in (at_once, lambda *_, **__: None):
            world.shard.gets.resident.fetch_now = way  # type: ignore[method-assign]
            before = counted(world)
            names = host._names(KEYS[:blocks])
            slots = [index.find(host.namespace_id, name) for name in names]
            touched = index.last_touch[slots].copy()
            assert await host.get(KEYS[:blocks], open_at) == [OK] * blocks
            await asyncio.sleep(0.1)
            after = counted(world)
            grown.append({name: after[name] - before.get(name, 0) for name in after})
            rise = index.last_touch[slots] - touched
            uses.append((rise.tolist(), index_use._uses[slots].tolist()))
        assert found == ["now", "later"]
        changes = [{name: count for name, count in each.items() if count} for each in grown]
        assert changes[0] == changes[1]
        assert "entresol_request_seconds_count[('type', 'fetch')]" in changes[0]
        assert any(name.startswith("entresol_first_grant_seconds_count") for name in changes[0])
        assert uses[0][0] == uses[1][0], "recency"
        assert [b - a for a, b in zip(uses[0][1], uses[1][1], strict=True)] in (
            [0] * blocks,
            [1] * blocks,
        )

    simulate(tmp_path, story)


def _more_keys(world: World, host: Host) -> Callable[[], Any]:
    return lambda: host.get(KEYS[: BLOCKS_MAX_ALONE + 1], OpenAt.HOST)


def _contend(world: World) -> None:
    """As if another tenant had a turn, for a second."""
    loop_turns = world.shard.parts.turns.loop
    loop_turns._contended_until = asyncio.get_running_loop().time() + 1


def _more_than_a_turn_while_others_use_the_loop(world: World, host: Host) -> Callable[[], Any]:
    _contend(world)
    return lambda: host.get(KEYS[: WINDOW_BLOCKS_IN_TURN + 1], OpenAt.HOST)


def _one_is_absent(world: World, host: Host) -> Callable[[], Any]:
    return lambda: host.get([*KEYS[:3], b"nobody-stored-this"], OpenAt.HOST)


def _one_is_on_flash(world: World, host: Host) -> Callable[[], Any]:
    forget_memory(world)
    return lambda: host.get(KEYS[:3], OpenAt.HOST)


def _no_room(world: World, host: Host) -> Callable[[], Any]:
    (session,) = world.shard.sessions.values()
    session.held_bytes += world.config.limits.inflight_bytes_per_session_max - 4096

    def give_back() -> None:
        session.held_bytes -= world.config.limits.inflight_bytes_per_session_max - 4096
        world.shard.parts.room.notify()

    asyncio.get_running_loop().call_later(0.5, give_back)
    return lambda: host.get(KEYS[:8], OpenAt.HOST)


def _nobody_is_before_it_at_the_door(world: World, host: Host) -> Callable[[], Any]:
    door = world.shard.gets.door
    door.inside += door.at_once

    def leave() -> None:
        door.inside -= door.at_once - 1
        door._left()

    asyncio.get_running_loop().call_later(0.002, leave)
    return lambda: host.get(KEYS[:8], OpenAt.HOST)


def _not_shown_yet(world: World, host: Host) -> Callable[[], Any]:
    (session,) = world.shard.sessions.values()
    session.exposures.clear()
    return lambda: host.get(KEYS[:8], OpenAt.HOST)


def _being_timed(world: World, host: Host) -> Callable[[], Any]:
    async def after_a_quote() -> list[Status]:
        await host._call(_quote(host))
        return await host.get(KEYS[:8], OpenAt.HOST)

    return after_a_quote


def _quote(host: Host) -> Any:
    return Quote(host.handle, OpenAt.HOST, False, names(host, KEYS[:8]))


@pytest.mark.parametrize(
    "case",
    [_more_keys, _more_than_a_turn_while_others_use_the_loop, _one_is_absent, _one_is_on_flash,
     _no_room, _nobody_is_before_it_at_the_door, _not_shown_yet, _being_timed],
)  # fmt: skip
def test_whatever_has_to_wait_goes_the_long_way(
    tmp_path: Path, case: Callable[[World, Host], Callable[[], Any]]
) -> None:
    async def story(world: World) -> None:
        host, found = await warm(world, BLOCKS_MAX_ALONE + 1)
        statuses = await case(world, host)()
        assert found == ["later"]
        assert set(statuses[:3]) == {OK}
        await asyncio.sleep(1)
        assert await host.get(KEYS[:3], OpenAt.HOST) == [OK] * 3
        expected = "later" if case is _being_timed else "now"
        assert found == ["later", expected]

    simulate(tmp_path, story)


@pytest.mark.parametrize("blocks", [1, WINDOW_BLOCKS_IN_TURN, BLOCKS_MAX_ALONE])
def test_what_is_answered_at_once_is_paid_for(tmp_path: Path, blocks: int) -> None:
    """Of a tenant's turns on the loop; as many as it has alone are not to be had beside others."""

    async def story(world: World) -> None:
        host, found = await warm(world, BLOCKS_MAX_ALONE)
        loop_turns, more = world.shard.parts.turns.loop, []
        count = loop_turns.count
        loop_turns.count = (  # type: ignore[method-assign]
            lambda account, cost: (more.append(cost), count(account, cost))
        )
        assert await host.get(KEYS[:blocks], OpenAt.HOST) == [OK] * blocks
        assert found == ["now"]
        assert sum(cost for cost in more if cost > 0) == BLOCK_COST * max(0, blocks - 8)
        _contend(world)
        assert await host.get(KEYS[:blocks], OpenAt.HOST) == [OK] * blocks
        assert found[1] == ("now" if blocks <= WINDOW_BLOCKS_IN_TURN else "later")

    simulate(tmp_path, story)


def test_a_key_that_was_retired_opens_nothing_at_once(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        host, found = await warm(world)
        (session,) = world.shard.sessions.values()
        keys = dict(session.tenant.deks)
        session.tenant.deks.clear()
        assert await host.get(KEYS[:2], OpenAt.HOST) == [Status.ERASED] * 2
        assert found == ["later"]
        session.tenant.deks.update(keys)

    simulate(tmp_path, story)


def test_one_key_twice_is_leased_twice_and_let_go(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        host, found = await warm(world)
        assert await host.get([KEYS[0], KEYS[0]], OpenAt.HOST) == [OK, OK]
        assert found == ["now"]

    simulate(tmp_path, story)


def test_blocks_come_within_their_grant_where_that_is_asked_for(tmp_path: Path) -> None:
    """Nothing is leased, held or pinned; another answer than a short one in memory is as ever."""

    async def story(world: World) -> None:
        host, found = await warm(world)
        (session,) = world.shard.sessions.values()
        carried = world.shard.parts.metrics.grants_carried
        leases, sent = world.shard.parts.leases, []
        grant = leases.grant
        leases.grant = lambda *args: sent.append(args) or grant(*args)  # type: ignore[method-assign]
        for count in (1, 6):
            assert await host.get(KEYS[:count], OpenAt.HOST, carry=True) == [OK] * count
        assert (found, sent) == (["now"] * 2, [])
        assert carried._value.get() == 2
        assert (session.held_bytes, session.account.leases) == (0, 0)
        absent = b"nobody-stored-this"
        assert await host.get([KEYS[0], absent], OpenAt.HOST, carry=True) == [OK, Status.MISS]
        assert await host.get(KEYS[:2], OpenAt.HOST) == [OK, OK]
        forget_memory(world)
        assert await host.get(KEYS[:2], OpenAt.HOST, carry=True) == [OK, OK]
        assert (found, len(sent)) == (["now"] * 2 + ["later", "now", "later"], 3)
        assert carried._value.get() == 2
        await asyncio.sleep(0.1)
        assert (session.held_bytes, session.account.leases) == (0, 0)

    simulate(tmp_path, story)


def test_who_does_not_take_its_answers_gets_no_blocks_in_them(tmp_path: Path) -> None:
    """What waits to be sent is charged to nobody: many sessions that read nothing must not hold
    much of it."""

    async def story(world: World) -> None:
        host, _ = await warm(world)
        carried = world.shard.parts.metrics.grants_carried._value
        handler = host._handler
        assert handler is not None

        async def carries() -> bool:
            before = carried.get()
            assert await host.get(KEYS[:1], OpenAt.HOST, carry=True) == [OK]
            return bool(carried.get() - before)

        assert await carries()
        handler._queued_bytes = lambda: 1
        assert not await carries()
        handler._queued_bytes = lambda: 0
        assert await carries()
        for more in (0, 1):  # answers that leave together
            handler._answers = [bytes(CARRIED_AHEAD_BYTES_MAX), bytes(more)]
            assert handler._may_carry() is (more == 0)
        handler._answers = None
        handler._protocol = 3  # the byte is reserved in it
        assert not await carries()

    simulate(tmp_path, story)


def test_more_than_a_grant_carries_is_leased(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(world: World) -> None:
        host, found = await warm(world)
        slot = world.shard.parts.engine.index.find(host.namespace_id, host._names(KEYS[:1])[0])
        sealed_bytes = int(world.shard.parts.engine.index.sealed_bytes[slot])
        for most in (sealed_bytes - 1, sealed_bytes):
            monkeypatch.setattr(resident, "CARRY_BYTES_MAX", most)
            assert await host.get(KEYS[:1], OpenAt.HOST, carry=True) == [OK]
        assert found == ["now", "now"]
        assert world.shard.parts.metrics.grants_carried._value.get() == 1

    simulate(tmp_path, story)


def test_what_is_carried_is_paid_for_by_its_length(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        host, _ = await warm(world)
        loop_turns, more = world.shard.parts.turns.loop, []
        count = loop_turns.count
        loop_turns.count = (  # type: ignore[method-assign]
            lambda account, cost: (more.append(cost), count(account, cost))
        )
        index = world.shard.parts.engine.index
        slots = [index.find(host.namespace_id, name) for name in host._names(KEYS[:6])]
        assert await host.get(KEYS[:6], OpenAt.HOST, carry=True) == [OK] * 6
        sealed_bytes = sum(int(index.sealed_bytes[slot]) for slot in slots)
        assert sum(more) == sealed_bytes >> CARRY_COST_SHIFT

    simulate(tmp_path, story)


def test_of_a_long_get_only_the_first_window_is_granted_in_two_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host has work, then, while the next window is prepared."""
    window = BLOCKS_MAX_ALONE // 2 + 8
    monkeypatch.setattr(planning, "FIRST_GRANT_BYTES", 64 * 1024)
    monkeypatch.setattr(gets, "WINDOW_BLOCKS_MAX", window)

    async def story(world: World) -> None:
        host, found = await warm(world, 2 * window)
        sent: list[int] = []
        grant = world.shard.gets.granting.grant

        async def granting(job: Any, entries: Any, *, final: bool) -> None:
            sent.append(len(entries))
            await grant(job, entries, final=final)

        world.shard.gets.granting.grant = granting  # type: ignore[method-assign]
        assert await host.get(KEYS[: 2 * window], OpenAt.HOST) == [OK] * (2 * window)
        assert found == ["later"]
        first, rest, second = sent
        assert 0 < first < rest
        assert (first + rest, second) == (window, window)

    simulate(tmp_path, story)


def test_a_get_is_answered_before_leases_that_came_with_it_are_let_go(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        host, found = await warm(world, 2)
        handler, machine = host._handler, host._machine
        seen: list[str] = []
        write, release = handler._write, world.shard.gets.release

        def written(raw: bytes) -> None:
            seen.append("written")
            write(raw)

        def broken(_raw: bytes) -> None:
            raise MemoryError

        def released(*args: Any) -> None:
            seen.append("released")
            release(*args)

        handler._write = written
        world.shard.gets.release = released  # type: ignore[method-assign]
        wanted = b"".join(host._names(KEYS[:2]))
        asked = [
            machine.send(data.Fetch(host.handle, OpenAt.HOST, False, 10**9, wanted))
            for _ in range(3)
        ]
        for request, _ in asked:
            host._waiting[request] = asyncio.Queue()
        gone = machine.send(data.Release((1 << 40,)))[1]  # of no lease: that is no error
        handler.receive(asked[0][1] + asked[1][1] + gone + asked[2][1] + gone)
        assert found == ["now"] * 3
        assert seen == ["written", "released", "released", "written"], (
            "two writes, not one for each"
        )
        for request, _ in asked:
            grant = await asyncio.wait_for(host._waiting[request].get(), 5)
            assert len(grant.items) == 2
            host._send(data.Release((grant.lease_id,)))
        await asyncio.sleep(0.1)
        assert handler._answers is None
        handler._write = broken
        with pytest.raises(MemoryError):
            handler.receive(
                machine.send(data.Fetch(host.handle, OpenAt.HOST, False, 10**9, wanted))[1]
            )
        assert handler._answers is None, "what comes later is not kept for nothing"
        handler._write = write

    simulate(tmp_path, story)


@pytest.mark.parametrize(("open_at", "carry"), [("HOST", False), ("HOST", True), ("DAEMON", False)])
def test_what_was_found_is_the_last_to_leave_memory(
    tmp_path: Path, open_at: str, carry: bool
) -> None:
    async def story(world: World) -> None:
        place = OpenAt[open_at]
        host, found = await (warm if place is OpenAt.HOST else opened)(world)
        index, (session,) = world.shard.parts.engine.index, world.shard.sessions.values()
        for keys in (KEYS[:2], KEYS[4:6], KEYS[1:3]):
            assert await host.get(keys, place, carry=carry) == [OK] * 2
            await asyncio.sleep(0.1)
            slots = [index.find(host.namespace_id, name) for name in host._names(keys)]
            order = list(world.shard.parts.residency._idle[session.account.stream])
            assert sorted(order[-2:]) == sorted(slots)
        assert found == ["now"] * 3

    simulate(tmp_path, story)


# Opened by the daemon -----------------------------------------------------------------------------


async def opened(world: World, count: int = 8) -> tuple[Host, list[str]]:
    """The same for blocks held opened for four seconds, over a fabric that shows whole slabs,
    as shm does."""
    host, found = await warm(world, count, private=True)
    (session,) = world.shard.sessions.values()
    assert session.endpoint is not None
    session.endpoint.capabilities = replace(session.endpoint.capabilities, revokes=False)  # type: ignore[misc]
    assert set(await stage(host, KEYS[:count], OpenAt.DAEMON)) == {OK}
    return host, found


def test_what_is_held_opened_is_answered_at_once_until_it_is_wiped(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        host, found = await opened(world, BLOCKS_MAX_ALONE)
        (session,) = world.shard.sessions.values()
        session.exposures.clear()  # nothing sealed is read
        for keys in (KEYS[:8], KEYS[3:4], [KEYS[0], KEYS[0]], KEYS[:BLOCKS_MAX_ALONE]):
            assert await host.get(keys, OpenAt.DAEMON) == [OK] * len(keys)
        assert found == ["now"] * 4
        await asyncio.sleep(0.1)
        assert {block.pins for block in session.plain_blocks.values()} == {1}, "the hold's"
        assert (session.held_bytes, session.account.leases) != (0, 0), "the hold's"
        await asyncio.sleep(5)
        assert not session.plain_blocks
        assert (session.held_bytes, session.account.leases) == (0, 0)
        assert await host.get(KEYS[:8], OpenAt.DAEMON) == [OK] * 8
        assert found == ["now"] * 4 + ["later"]

    simulate(tmp_path, story)


def test_an_opened_block_is_not_found_any_more_once_its_sealed_one_is_gone(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        host, found = await opened(world)
        (session,) = world.shard.sessions.values()
        fetch = Fetch(host.handle, OpenAt.DAEMON, False, 10**9, names(host, KEYS[:2]), False)
        (grant,) = [each async for each in host._answers(fetch)]
        assert found == ["now"]
        await host.forget(KEYS[:2])
        forget_memory(world)
        lease = world.shard.parts.leases.get(session.number, grant.lease_id)
        assert lease is not None
        assert [block.pins for block in lease.payload.plain.values()] == [2, 2]  # and the hold's
        assert await host.get(KEYS[:2], OpenAt.DAEMON) == [Status.MISS] * 2
        host._send(data.Release((grant.lease_id,), ()))
        await asyncio.sleep(0.1)
        assert {block.pins for block in session.plain_blocks.values()} == {1}

    simulate(tmp_path, story)


def _shown_one_by_one(world: World) -> None:
    (session,) = world.shard.sessions.values()
    assert session.endpoint is not None
    session.endpoint.capabilities = replace(session.endpoint.capabilities, revokes=True)  # type: ignore[misc]


def _opened_for_nobody(world: World) -> None:
    (session,) = world.shard.sessions.values()
    session.plain_blocks.popitem()


@pytest.mark.parametrize("case", [_shown_one_by_one, _opened_for_nobody])
def test_what_is_to_be_opened_or_shown_goes_the_long_way(
    tmp_path: Path, case: Callable[[World], None]
) -> None:
    async def story(world: World) -> None:
        host, found = await opened(world)
        case(world)
        assert await host.get(KEYS[:8], OpenAt.DAEMON) == [OK] * 8
        assert found == ["later"]

    simulate(tmp_path, story)
