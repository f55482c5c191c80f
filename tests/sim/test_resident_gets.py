"""Gets of a few blocks in memory are answered at once; whatever else there is goes the long way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from entresol_daemon.shard.resident import KEYS_BYTES_MAX
from entresol_daemon.shard.turns import WINDOW_BLOCKS_IN_TURN
from entresol_proto import limits
from entresol_proto.status import Status
from entresol_proto.wire import data
from entresol_proto.wire.data import OpenAt
from entresol_proto.wire.quote import Quote
from tests.sim.shardlab import Host, World
from tests.sim.test_shard_review import KEYS, forget_memory, joined, names, simulate, stored

OK = Status.OK


def ways(world: World) -> list[str]:
    """Which way each get goes from now on."""
    gets, found = world.shard.gets, []
    at_once, long_way = gets.resident.fetch_now, gets.fetch

    def fetch_now(*args: Any) -> data.Grant | None:
        grant = at_once(*args)
        if grant is not None:
            found.append("now")
        return grant

    async def fetch(*args: Any) -> None:
        found.append("later")
        await long_way(*args)

    gets.resident.fetch_now = fetch_now  # type: ignore[method-assign]
    gets.fetch = fetch  # type: ignore[method-assign]
    return found


async def warm(world: World, count: int = 8) -> tuple[Host, list[str]]:
    """A host to which its blocks are shown, all in memory; and the ways of its gets."""
    host = await joined(world)
    await stored(host, KEYS[:count])
    assert await host.get(KEYS[:count], OpenAt.HOST) == [OK] * count
    await asyncio.sleep(0.1)  # the last release arrives
    return host, ways(world)


def test_a_few_blocks_in_memory_are_answered_at_once(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        host, found = await warm(world)
        assert await host.get(KEYS[:8], OpenAt.HOST) == [OK] * 8
        assert await host.get(KEYS[3:4], OpenAt.HOST) == [OK]
        assert found == ["now", "now"]
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


def test_both_ways_count_the_same(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        host, found = await warm(world)
        index, index_use = world.shard.parts.engine.index, world.shard.parts.meters.usefulness
        grown, uses = [], []
        at_once = world.shard.gets.resident.fetch_now
        for way in (at_once, lambda *_: None):
            world.shard.gets.resident.fetch_now = way  # type: ignore[method-assign]
            before = counted(world)
            slots = [index.find(host.namespace_id, name) for name in host._names(KEYS[:8])]
            touched = index.last_touch[slots].copy()
            assert await host.get(KEYS[:8], OpenAt.HOST) == [OK] * 8
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
        assert [b - a for a, b in zip(uses[0][1], uses[1][1], strict=True)] in ([0] * 8, [1] * 8)

    simulate(tmp_path, story)


def _more_keys(world: World, host: Host) -> Callable[[], Any]:
    count = WINDOW_BLOCKS_IN_TURN + 1
    assert count * limits.WIRE_KEY_BYTES > KEYS_BYTES_MAX
    return lambda: host.get(KEYS[:count], OpenAt.HOST)


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
    [_more_keys, _one_is_absent, _one_is_on_flash, _no_room, _nobody_is_before_it_at_the_door,
     _not_shown_yet, _being_timed],
)  # fmt: skip
def test_whatever_has_to_wait_goes_the_long_way(
    tmp_path: Path, case: Callable[[World, Host], Callable[[], Any]]
) -> None:
    async def story(world: World) -> None:
        host, found = await warm(world, 9)
        statuses = await case(world, host)()
        assert found == ["later"]
        assert set(statuses[:3]) == {OK}
        await asyncio.sleep(1)
        assert await host.get(KEYS[:3], OpenAt.HOST) == [OK] * 3
        expected = "later" if case is _being_timed else "now"
        assert found == ["later", expected]

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
