"""The write budget of a shard with two tenants of which one offers all it can."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from entresol_daemon.core.admission import Admission, WriteBudget
from entresol_daemon.core.eviction import Victim, VictimReason
from entresol_proto.ids import TenantName
from entresol_proto.status import Status
from entresol_proto.wire.data import Ack
from tests.sim.shardlab import Host, World
from tests.sim.test_reserving import item, reserved
from tests.sim.test_shard_review import KEYS, joined, simulate, stored
from tests.sim.test_tenant_changes import admin_of

SECONDS = 20


async def flood(hog: Host) -> None:
    """New blocks in tens, each offered twice, until it is cancelled."""
    number = 0
    while True:
        keys = [b"hog-%09d" % each for each in range(number, number + 10)]
        for _ in range(2):
            await hog.put(keys, Ack.ACCEPTED)
        number += 10
        await asyncio.sleep(0.1)


def test_a_tenant_within_its_share_is_refused_nothing_and_an_erased_one_leaves_nothing(
    tmp_path: Path,
) -> None:
    async def story(world: World) -> None:
        budget = WriteBudget(100_000, 300_000)
        admission = world.shard.parts.admission = Admission("auto", budget=budget)
        hog, other = await joined(world), await joined(world, tenant="beta")
        flooding = asyncio.create_task(flood(hog))
        await asyncio.sleep(2)
        level = admission.budget_level(hog._now())
        assert level is not None
        assert level[0] < 0, "the budget is used up"
        for number in range(SECONDS):  # of 50,000 bytes a second, at most 40,000
            keys = [b"own-%09d" % number]
            assert await other.put(keys, Ack.DURABLE) == [Status.OK], number
            await asyncio.sleep(1)
        flooding.cancel()
        account = world.shard.parts.accounts.by_name[TenantName("alpha")]
        assert account.flash_bytes > 50_000 * SECONDS, "and the hog has what is left"
        assert budget.drawn(account.stream)
        await admin_of(world).tenant_erase(TenantName("alpha"))
        assert not budget.drawn(account.stream)
        assert not admission.ghost.note(b"a new key", account.stream)
        assert len(admission.ghost) == 1, "nothing else is remembered"

    simulate(tmp_path, story)


def test_what_eviction_writes_again_is_charged_to_the_owner_of_the_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(world: World) -> None:
        budget = WriteBudget(1, 1_000_000_000)
        parts, removal = world.shard.parts, world.shard.removal
        parts.admission = Admission("auto", budget=budget)
        host, other = await joined(world), await joined(world, tenant="beta")
        await stored(host, KEYS[:8])
        await stored(other, KEYS[:8])
        mine, theirs = (parts.accounts.by_name[TenantName(name)] for name in ("alpha", "beta"))
        before = budget.drawn(mine.stream), budget.drawn(theirs.stream)
        names = b"".join(other._names(KEYS[:8]))
        slots = parts.engine.index.lookup(other.namespace_id, names)
        assert (slots >= 0).all()
        removal._budget.inserted(10_000_000)
        monkeypatch.setattr(parts.valued, "keep", lambda *_: np.ones(8, np.bool_))
        victim = Victim(0, VictimReason.PRESSURE, theirs.stream, reinsert=True)
        assert len(removal._keep(victim, slots)) == 8
        again_bytes = int(parts.engine.index.sealed_bytes[slots].sum())
        assert budget.drawn(mine.stream) == before[0]
        assert budget.drawn(theirs.stream) == before[1] + again_bytes

    simulate(tmp_path, story)


def test_what_a_tenant_gives_up_comes_back_to_it(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        budget = WriteBudget(1, 1_000_000)
        parts = world.shard.parts
        parts.admission = Admission("auto", budget=budget)
        gives_up, other = await joined(world), await joined(world, tenant="beta")
        for host in (gives_up, other):
            assert await reserved(host, [item(host, KEYS[0], 50_000)]) == [Status.OK]
        mine, theirs = (
            parts.accounts.by_name[TenantName(name)].stream for name in ("alpha", "beta")
        )
        (reservation, _) = world.shard.puts._reserving.open.values()
        assert reservation.session.account.stream == mine
        world.shard.puts._reserving.close(reservation)
        assert (budget.drawn(mine), budget.drawn(theirs)) == (0, 50_000)

    simulate(tmp_path, story)
