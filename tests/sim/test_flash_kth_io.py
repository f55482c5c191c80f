"""Fail the k-th I/O, k = 1, 2, 3 ... until the workload gets through (spdk's loop).

For every kind of reported fault, once and for ever from k on. After each: no exception but the
documented ones, no wrong byte, nothing acknowledged is lost, and the engine opens again.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
import simloop
from flashlab import (
    FORGOTTEN,
    NAMESPACES,
    Name,
    device_bytes,
    get,
    key_of,
    open_engine,
    put,
    victims,
)

from entresol_daemon.flash.device import aligned_buffer
from entresol_daemon.flash.engine import Engine, extent_bytes
from entresol_daemon.flash.index import ABSENT
from entresol_daemon.flash.sim import Fault, FaultPlan, SimDevice
from entresol_proto.status import DeviceError, Status

KINDS = (
    Fault.READ_EIO,
    Fault.WRITE_EIO,
    Fault.TORN_WRITE,
    Fault.ENOSPC,
    Fault.FLUSH_FAIL,
)
SEGMENTS = 10
SEEDS = (1, 2)


class Work:
    """A fixed life: fill, remove, evict, reopen, fill again. Remembers what was acknowledged."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.ever: dict[Name, set[bytes]] = {}
        self.durable: dict[Name, bytes] = {}
        self.gone: dict[Name, set[bytes]] = {}
        self.condemned = 0
        self.lost_tombstones = 0

    async def put(self, engine: Engine, number: int) -> None:
        name = (NAMESPACES[number % 3], key_of(number))
        if engine.index.find(*name) != ABSENT:
            return
        data = self.rng.randbytes(self.rng.randrange(100, 20_000))
        self.ever.setdefault(name, set()).add(data)
        slot, future = put(engine, name, data)
        if slot == -1:
            assert await future in (Status.NO_SPACE, Status.IO_ERROR)
        else:
            status = await future
            assert status in (Status.OK, Status.IO_ERROR, Status.NO_SPACE)
            if status is Status.OK:
                self.durable[name] = data
                self.gone.get(name, set()).discard(data)
            else:
                assert engine.index.find(*name) == ABSENT

    async def live(self, device: SimDevice) -> None:
        engine = await open_engine(device)
        try:
            await asyncio.gather(*(self.put(engine, n) for n in range(18)))
            removed = []
            for number in range(0, 18, 4):
                slot = engine.index.find(NAMESPACES[number % 3], key_of(number))
                if slot != ABSENT:
                    gone = engine.remove(slot, FORGOTTEN)
                    removed.append((gone.namespace_id, gone.wire_key))
                    self.durable.pop(removed[-1], None)
            try:
                await engine.barrier()
            except DeviceError:
                pass
            else:
                for name in removed:
                    self.gone[name] = set(self.ever[name])
            for segment in victims(engine)[:2]:
                await self.evict(engine, segment)
            await asyncio.gather(*(self.put(engine, n) for n in range(20, 30)))
            for slot in engine.index.live_slots().tolist():
                await self.read(engine, slot)
        finally:
            await engine.close(clean=True)
            self.condemned += engine.stats.condemned
            self.lost_tombstones += engine.stats.tombstones_lost

    async def evict(self, engine: Engine, segment: int) -> None:
        for r in await engine.evict(segment, lambda slots: slots[::2]):
            self.durable.pop((r.namespace_id, r.wire_key), None)

    async def read(self, engine: Engine, slot: int) -> None:
        name = (engine.index.namespace_of(slot), engine.index.key_of(slot))
        status, data = await get(engine, name)
        assert status in (Status.OK, Status.IO_ERROR)
        if status is Status.OK:
            assert data in self.ever[name], f"wrong bytes of {name}"

    async def verify(self, device: SimDevice) -> None:
        engine = await open_engine(device)
        for name, data in self.durable.items():
            assert await get(engine, name) == (Status.OK, data), f"lost {name}"
        for name, versions in self.ever.items():
            status, data = await get(engine, name)
            assert status in (Status.OK, Status.MISS)
            assert status is Status.MISS or data in versions, f"wrong bytes of {name}"
            if status is Status.OK and not self.lost_tombstones:
                assert data not in self.gone.get(name, set()), f"{name} came back"
        await engine.close(clean=False)


def attempt(seed: int, fault: Fault, k: int, sticky: bool) -> tuple[int, int, str]:
    """One life with the k-th occasion failing; returns (injected, condemned, how it ended)."""
    plan = FaultPlan(at={fault: k}, sticky=sticky)
    device = SimDevice(device_bytes(SEGMENTS), seed=seed, plan=plan, sleep=asyncio.sleep)
    work = Work(seed)
    ended = "done"
    try:
        simloop.run(work.live(device), seed)
    except DeviceError:
        ended = "refused"  # opening says what the device said
    plan.enabled = False
    simloop.run(work.verify(device.crash()), seed)
    return sum(plan.injected.values()), work.condemned, ended


@pytest.mark.parametrize("sticky", [False, True], ids=["once", "for-ever"])
@pytest.mark.parametrize("fault", KINDS)
def test_fail_the_kth_io_until_it_succeeds(fault: Fault, sticky: bool) -> None:
    tried = 0
    ends: Counter[str] = Counter()
    for seed in SEEDS:
        k = 1
        while True:
            injected, condemned, ended = attempt(seed, fault, k, sticky)
            if not injected:
                break
            tried += 1
            ends[ended] += 1
            ends["condemned"] += condemned
            k += 1
            assert k < 2000, "the workload never gets through"
    print(f"fault={fault} sticky={sticky} tried={tried} ends={dict(ends)} wrong=0 lost=0")
    assert tried > 5
    assert (ends["condemned"] > 0) == (fault is not Fault.READ_EIO)


def test_a_failed_flush_condemns_and_the_record_moves() -> None:
    async def life() -> None:
        plan = FaultPlan()
        device = SimDevice(device_bytes(SEGMENTS), plan=plan)
        engine = await open_engine(device)
        name = (NAMESPACES[0], key_of(1))
        plan.at = {Fault.FLUSH_FAIL: plan.occasions.get(Fault.FLUSH_FAIL, 0) + 1}
        slot, future = put(engine, name, b"payload")
        before = engine.index.m_segment[slot]
        assert await future is Status.OK
        assert engine.index.m_segment[slot] != before
        assert engine.segment_info(before).state.value == "condemned"
        assert engine.stats.condemned == engine.stats.failed_groups == 1
        await engine.evict(before)
        assert engine.segment_info(before).state.value == "free"
        await engine.close(clean=False)

    simloop.run(life())


def test_after_too_many_failures_writes_stop_and_reads_go_on() -> None:
    async def life() -> None:
        plan = FaultPlan()
        device = SimDevice(device_bytes(SEGMENTS), plan=plan)
        engine = await open_engine(device)
        first = (NAMESPACES[0], key_of(1))
        slot, future = put(engine, first, b"kept")
        assert await future is Status.OK
        plan.rates = {Fault.FLUSH_FAIL: 1.0}
        while not engine.failed:
            if engine.index.find(NAMESPACES[0], key_of(2)) == ABSENT:
                _, future = put(engine, (NAMESPACES[0], key_of(2)), b"lost")
            assert await future in (Status.IO_ERROR, Status.NO_SPACE)
        assert put(engine, (NAMESPACES[0], key_of(3)), b"late")[0] == -1
        assert not engine.room_for(bytes(16), 4096)
        extent = aligned_buffer(extent_bytes(4))
        assert await engine.read([(slot, extent)]) == [Status.OK]
        engine.remove(slot, FORGOTTEN)
        with pytest.raises(DeviceError, match="stopped writing"):
            await engine.barrier()
        assert await engine.evict(0) == []
        await engine.close(clean=True)

    simloop.run(life())


def test_writes_go_on_when_the_device_is_well_again() -> None:
    """What was forgotten while nothing could be written does not come back either."""

    async def life() -> None:
        plan = FaultPlan()
        device = SimDevice(device_bytes(SEGMENTS), plan=plan)
        engine = await open_engine(device)
        kept, doomed = (NAMESPACES[0], key_of(1)), (NAMESPACES[0], key_of(2))
        for name in (kept, doomed):
            assert await put(engine, name, b"payload")[1] is Status.OK
        plan.rates = {Fault.FLUSH_FAIL: 1.0}
        number = 10
        while not engine.failed:
            await put(engine, (NAMESPACES[0], key_of(number)), b"lost")[1]
            number += 1
        engine.remove(engine.index.find(*doomed), FORGOTTEN)
        with pytest.raises(DeviceError, match="stopped writing"):
            await engine.barrier()
        await asyncio.sleep(60)
        assert engine.failed, "the device is as bad as before"
        plan.rates = {}
        async with asyncio.timeout(6):
            while engine.failed:
                await asyncio.sleep(0.1)
        await engine.barrier()
        later = (NAMESPACES[0], key_of(3))
        assert await put(engine, later, b"payload")[1] is Status.OK
        await engine.close(clean=False)
        engine = await open_engine(device)
        found = [engine.index.find(*name) != ABSENT for name in (kept, doomed, later)]
        assert found == [True, False, True]
        await engine.close(clean=False)

    simloop.run(life())
