"""A shard that evicts by worth, in simulation: exact bytes, sums that add up, a crash, an erase."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from entresol_daemon.core import worth
from entresol_daemon.shard.valued import TOLD_TOGETHER
from entresol_proto.ids import TenantName
from entresol_proto.status import Status
from entresol_proto.wire.data import Ack, OpenAt
from tests import simloop
from tests.sim.shardlab import Host, World
from tests.sim.test_shard_review import admin_of

SEED = 11
SEGMENTS = 10  # of 1 MiB: some 80 blocks each
HOT = [b"hot-%012d" % number for number in range(12)]
ROUND = 48


async def fill(world: World, host: Host, rounds: int, *, first: int = 0) -> None:
    """Every round puts new blocks and reads the hot ones, which are put again where they went."""
    for at in range(first, first + rounds):
        await host.put(
            [b"cold-%d-%08d" % (at % 10, ROUND * at + n) for n in range(ROUND)], Ack.DURABLE
        )
        found = await host.get(HOT, OpenAt.HOST)
        again = [key for key, status in zip(HOT, found, strict=True) if status is not Status.OK]
        if again:
            await host.put(again, Ack.DURABLE)
        await asyncio.sleep(0.1)


async def story(world: World) -> None:
    await world.open(("alpha", "beta"))
    host = Host(world, "alpha", private=False, careful=True)
    await host.open()
    await fill(world, host, 60)
    parts = world.shard.parts
    assert len(parts.valued._told) < TOLD_TOGETHER
    (standing,) = parts.valued.report()
    assert standing.stream == parts.accounts.by_name[TenantName("alpha")].stream
    assert standing.rules, f"seed {SEED}: worth never ruled: {standing}"
    assert parts.engine.stats.evicted_segments > 2 * SEGMENTS
    assert parts.engine.stats.copied_bytes <= 0.15 * parts.engine.stats.appended_bytes
    assert (await host.get(HOT, OpenAt.HOST)).count(Status.OK) >= len(HOT) - 2
    await host.gone()
    world.hosts.clear()
    await world.crash()

    await world.open(("alpha", "beta"))
    host = Host(world, "alpha", private=False, careful=True)
    await host.open()
    assert not world.shard.parts.valued.report(), "nothing that was learned is persistent"
    await fill(world, host, 20, first=100)
    assert world.shard.parts.valued.report()
    admin = admin_of(world)
    await host.gone()
    world.hosts.clear()
    await admin.tenant_erase(TenantName("alpha"))
    assert not world.shard.parts.valued.report(), "what was learned of an erased tenant is gone"
    assert world.oracle.wrong_bytes == 0
    assert world.oracle.served > 500
    await world.shard.puts.drain()
    await asyncio.sleep(12)
    world.check_idle()
    await world.stop()


def test_a_life_with_eviction_by_worth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worth, "LEARN_EVERY", 64)
    world = World(tmp_path / "state", SEED, segments=SEGMENTS)
    world.config = replace(world.config, flash=replace(world.config.flash, eviction="worth"))
    simloop.run(story(world), SEED, loop=simloop.SimLoop(SEED, seconds_max=10_000))


async def ticks_story(world: World) -> None:
    await world.open(("alpha", "beta"))
    host = Host(world, "alpha", private=False, careful=True)
    await host.open()
    await host.put(HOT, Ack.DURABLE)
    assert (await host.get(HOT, OpenAt.HOST)).count(Status.OK) == len(HOT)
    parts = world.shard.parts
    values = parts.valued._values
    assert values is not None
    learned: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    with patch.object(values, "told", lambda stream, slots, keys, touch, put, found: learned.append(
        (slots, touch, put)
    )):  # fmt: skip
        parts.valued.learn()
    ((slots, touch, put),) = learned
    assert len(set(touch.tolist())) == len(touch) == 2 * len(HOT), "each has a tick of its own"
    last = parts.engine.index.last_touch
    assert touch[~put].tolist() == last[slots[~put]].tolist(), "that of its block in the index"
    assert touch[put].max() < touch[~put].min()
    await host.gone()
    world.hosts.clear()
    await world.shard.puts.drain()
    await asyncio.sleep(12)
    await world.stop()


def test_each_block_is_learned_of_at_its_own_tick(tmp_path: Path) -> None:
    """A request's blocks are touched one after the other, and their ages are counted from there."""
    world = World(tmp_path / "state", SEED, segments=SEGMENTS)
    world.config = replace(world.config, flash=replace(world.config.flash, eviction="worth"))
    simloop.run(ticks_story(world), SEED, loop=simloop.SimLoop(SEED, seconds_max=10_000))
