"""The whole shard under seeded faults: wrong bytes 0, durable lost 0, nothing held when idle.

`ENTRESOL_SIM_SEEDS` sets how many seeds each scenario runs (default 12; one seed is a few hundred
operations). A failure prints its seed; `ENTRESOL_SIM_SEED=N` runs that one alone.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from entresol_daemon.flash.sim import Fault, FaultPlan
from entresol_proto.status import EntresolError, Status
from entresol_proto.wire.data import Ack, OpenAt
from tests import simloop
from tests.sim.shardlab import Host, World

SEEDS = int(os.environ.get("ENTRESOL_SIM_SEEDS", "12"))
ONE_SEED = os.environ.get("ENTRESOL_SIM_SEED")
KEYS = [b"key-%012d" % number for number in range(120)]
TENANTS = ("alpha", "beta")


def seeds() -> list[int]:
    return [int(ONE_SEED)] if ONE_SEED else list(range(SEEDS))


async def work(host: Host, steps: int) -> None:
    """Random operations of one host until its link breaks."""
    rng = host.rng
    try:
        await host.open()
    except EntresolError:
        return
    for _ in range(steps):
        start = rng.randrange(len(KEYS) - 8)
        keys = KEYS[start : start + rng.randint(1, 8)]
        choice = rng.random()
        if choice < 0.4:
            statuses = await host.put(keys, rng.choice((Ack.ACCEPTED, Ack.DURABLE)))
        elif choice < 0.92:
            place = OpenAt.DAEMON if host.wire.private and rng.random() < 0.5 else OpenAt.HOST
            statuses = await host.get(keys, place)
        else:
            await host.forget(keys[:2])
            continue
        host.world.oracle.tried += len(keys)
        if Status.DISCONNECTED in statuses:
            return
        if rng.random() < 0.3:
            await asyncio.sleep(rng.uniform(0, 0.05))


async def settle(world: World) -> None:
    """Hosts leave; leases run out; what was accepted reaches flash."""
    for host in world.hosts:
        await host.gone()
    world.hosts.clear()
    await world.shard.puts.drain()
    await asyncio.sleep(6)
    world.check_idle()


async def audit(world: World, *, complete: bool) -> None:
    """Each tenant reads everything: exact or a miss; `complete`: all that is durable is there."""
    oracle = world.oracle
    found: set[tuple[str, bytes]] = set()
    for tenant in TENANTS:
        host = Host(world, tenant, careful=True)
        await host.open()
        for start in range(0, len(KEYS), 40):
            keys = KEYS[start : start + 40]
            statuses = await host.get(keys, OpenAt.HOST)
            found |= {(tenant, k) for k, s in zip(keys, statuses, strict=True) if s is Status.OK}
        await host.gone()
    world.hosts.clear()
    assert oracle.wrong_bytes == 0, f"seed={oracle.seed} wrong_bytes={oracle.wrong_bytes}"
    back = found & oracle.forgotten
    assert not back, f"seed={oracle.seed} forgotten blocks came back: {sorted(back)[:3]}"
    if complete:
        lost = oracle.durable - found
        assert not lost, f"seed={oracle.seed} durable lost: {sorted(lost)[:3]} of {len(lost)}"


def simulate(seed: int, story: Callable[[], object]) -> object:
    loop = simloop.SimLoop(seed, seconds_max=100_000)
    return simloop.run(story(), seed, loop=loop)  # type: ignore[arg-type]


async def crashes(folder: Path, seed: int) -> tuple[str, int]:
    """Hosts come and go, links break, power fails several times; the device itself is honest."""
    world = World(folder, seed)
    rng = random.Random(seed)
    for _round in range(4):
        await world.open(TENANTS)
        world.faults.cut = rng.choice((0.0, 0.0005))
        world.faults.read_fails = rng.choice((0.0, 0.02))
        world.faults.bit_flips = rng.choice((0.0, 0.02))
        hosts = [Host(world, rng.choice(TENANTS), private=rng.random() < 0.5) for _ in range(4)]
        jobs = [asyncio.ensure_future(work(host, 25)) for host in hosts]
        _, waiting = await asyncio.wait(jobs, timeout=rng.uniform(0.02, 3.0))
        if rng.random() < 0.3:
            await asyncio.wait(jobs)
            waiting = set()
            await settle(world)
        await world.crash() if rng.random() < 0.7 else await world.stop()
        if waiting:
            await asyncio.wait(waiting)
        for job in jobs:
            job.result()
        world.faults.cut = world.faults.read_fails = world.faults.bit_flips = 0.0
        await world.open(TENANTS)
        await audit(world, complete=True)
        await settle(world)
        await world.stop()
    world.oracle.note("end", world.oracle.served, len(world.oracle.durable))
    return world.oracle.trace.hexdigest(), world.oracle.tried


@pytest.mark.parametrize("seed", seeds())
def test_crashes_lose_nothing_durable(seed: int, tmp_path: Path) -> None:
    _, tried = simulate(seed, lambda: crashes(tmp_path / "state", seed))  # type: ignore[misc]
    assert tried > 0


def test_the_same_seed_is_the_same_run(tmp_path: Path) -> None:
    first = simulate(5, lambda: crashes(tmp_path / "a", 5))
    assert simulate(5, lambda: crashes(tmp_path / "b", 5)) == first
    assert simulate(6, lambda: crashes(tmp_path / "c", 6)) != first


async def bad_media(folder: Path, seed: int) -> None:
    """Flash that rots, lies and fails, and too little of it: exact or a miss, never a crash."""
    rates = {
        Fault.READ_EIO: 0.01, Fault.BIT_ROT: 0.01, Fault.STALE_READ: 0.005,
        Fault.MISDIRECTED_READ: 0.01, Fault.TORN_WRITE: 0.004, Fault.WRITE_EIO: 0.004,
        Fault.MISDIRECTED_WRITE: 0.002, Fault.LOST_WRITE: 0.004, Fault.FLUSH_FAIL: 0.004,
        Fault.ENOSPC: 0.002,
    }  # fmt: skip
    plan = FaultPlan(rates=rates, enabled=False)
    world = World(folder, seed, segments=8, plan=plan)
    rng = random.Random(seed)
    await world.open(TENANTS)
    for _round in range(3):
        plan.enabled = True
        world.faults.read_fails = 0.01
        hosts = [Host(world, rng.choice(TENANTS), private=rng.random() < 0.5) for _ in range(4)]
        await asyncio.gather(*(work(host, 40) for host in hosts))
        plan.enabled = False  # heal: everything pending must now finish
        world.faults.read_fails = 0.0
        await settle(world)
        await audit(world, complete=False)
        await settle(world)
    assert sum(plan.injected.values()) > 0, f"seed={seed}: no fault was injected"
    await world.stop()


@pytest.mark.parametrize("seed", seeds())
def test_bad_media_is_a_miss_never_wrong_bytes(seed: int, tmp_path: Path) -> None:
    simulate(seed, lambda: bad_media(tmp_path / "state", seed))


def test_the_oracle_finds_a_planted_bug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Canary: a host that believes bytes without opening them must be caught."""

    async def trusting(self: Host, item, name, key, size, open_at, until) -> Status:  # type: ignore[no-untyped-def]
        self.world.oracle.saw(self.tenant, key, bytes(size))
        return Status.OK

    monkeypatch.setattr(Host, "_open", trusting)
    with pytest.raises(AssertionError, match="wrong_bytes"):
        simulate(1, lambda: crashes(tmp_path / "state", 1))
