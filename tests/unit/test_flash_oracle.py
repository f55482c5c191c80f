"""Random work on a faulty simulated device against an oracle that forgets nothing.

Promise checked: wrong bytes 0, acknowledged blocks lost 0 (unless the medium itself was damaged),
removed blocks that come back after a barrier 0. Every failure message carries the seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Coroutine
from typing import Any

import pytest
import simloop
from flashlab import (
    FORGOTTEN,
    NAMESPACES,
    Name,
    Oracle,
    device_bytes,
    drop_namespace,
    get,
    key_of,
    open_engine,
    put,
    stream_of,
    victims,
)

from entresol_daemon.flash.device import BLOCK
from entresol_daemon.flash.engine import Engine
from entresol_daemon.flash.index import Slots
from entresol_daemon.flash.sim import Fault, FaultPlan, SimDevice
from entresol_proto.status import DeviceError, FormatError, Status

SILENT = {
    Fault.MISDIRECTED_READ, Fault.STALE_READ, Fault.MISDIRECTED_WRITE, Fault.LOST_WRITE,
    Fault.BIT_ROT, Fault.LATENT_SECTOR, Fault.READ_EIO,
}  # fmt: skip
SEGMENTS = 16
KEYS = 60


class DestroyedError(Exception):
    """Faults hit both superblock copies: refusing to open is the right answer."""


class Run:
    """One seed's life: several engines one after the other on one medium."""

    def __init__(self, seed: int, plan: FaultPlan, *, media: bool, steps: int) -> None:
        self.rng = random.Random(seed)
        self.seed = seed
        self.plan = plan
        self.media = media
        self.steps = steps
        self.oracle = Oracle()
        self.gone: dict[Name, set[bytes]] = {}  # removed, no barrier yet
        self.waiting: list[asyncio.Task[None]] = []
        self.evictions = 0  # in progress
        self.condemned = 0
        self.corrupt_reads = 0
        self.lost_tombstones = 0
        self.spare_condemned = bool(seed % 2)
        self.engine: Engine | None = None

    async def go(self) -> Oracle:
        device = SimDevice(
            device_bytes(SEGMENTS), seed=self.seed, plan=self.plan, sleep=asyncio.sleep
        )
        self.plan.enabled = False
        self.engine = engine = await open_engine(device, seed=self.seed)
        self.plan.enabled = True
        for _ in range(self.steps):
            action = self.rng.random()
            if action < 0.008 or engine.failed:
                device, engine = await self.crash(device, engine)
            elif action < 0.55:
                await self.put(engine)
            elif action < 0.70:
                self.later(self.read(engine))
            elif action < 0.80:
                self.remove(engine)
            elif action < 0.82:
                self.drop(engine)
            elif action < 0.85:
                await self.barrier(engine)
            elif action < 0.88:
                self.later(self.evict(engine))
            elif action < 0.90:
                await self.evict(engine)
            elif action < 0.93:
                slots = engine.index.live_slots().tolist()
                engine.touch(self.rng.sample(slots, min(3, len(slots))))
            else:
                await asyncio.sleep(self.rng.random() * 0.003)
        device, engine = await self.crash(device, engine)
        await self.settle()
        await engine.close(clean=True)
        return self.oracle

    async def put(self, engine: Engine) -> None:
        name = (self.rng.choice(NAMESPACES), key_of(self.rng.randrange(KEYS)))
        if engine.index.find(*name) >= 0:
            return
        data = self.rng.randbytes(self.rng.randrange(1, 12_000))
        if not engine.room_for(stream_of(name[0]), (len(data) + 4096 + 95) & -4096):
            await self.evict(engine)
            if engine.index.find(*name) >= 0:
                return
        slot, future = put(engine, name, data)
        if slot >= 0:
            self.oracle.put(name, data)
            self.waiting.append(asyncio.ensure_future(self.ack(name, data, future)))

    async def ack(self, name: Name, data: bytes, future: asyncio.Future[Status]) -> None:
        self.oracle.acked(name, data, await future)

    async def read(self, engine: Engine) -> None:
        names = [n for n, story in sorted(self.oracle.stories.items()) if story.current is not None]
        if not names:
            return
        name = self.rng.choice(names)
        story = self.oracle.story(name)
        since, busy = len(story.seen) - 1, self.evictions
        status, data = await get(engine, name)
        if engine is not self.engine:
            return  # a crash came first
        self.oracle.reads += 1
        unchanged = len(story.seen) - 1 == since and not (busy or self.evictions)
        if status is Status.OK and data not in story.seen[since:]:
            self.oracle.wrong += 1
            self.oracle.notes.append(f"wrong bytes while running: {name}")
        if status is not Status.OK and unchanged and not self.faulty:
            self.oracle.lost += 1
            self.oracle.notes.append(f"{status.label} while running: {name}")
        if status is Status.CORRUPT and unchanged:
            slot = engine.index.find(*name)
            if slot >= 0:
                engine.remove(slot, FORGOTTEN)
                self.gone[name] = self.gone.get(name, set()) | self.oracle.removed(name)

    @property
    def faulty(self) -> bool:
        return bool(self.plan.rates)

    def remove(self, engine: Engine) -> None:
        slots = engine.index.live_slots().tolist()
        if slots:
            gone = engine.remove(self.rng.choice(slots), FORGOTTEN)
            name = (gone.namespace_id, gone.wire_key)
            self.gone[name] = self.gone.get(name, set()) | self.oracle.removed(name)

    def drop(self, engine: Engine) -> None:
        namespace = self.rng.choice(NAMESPACES)
        seen = {(r.namespace_id, r.wire_key) for r in drop_namespace(engine, namespace)}
        for name in [n for n in self.oracle.stories if n[0] == namespace]:
            assert name not in seen or self.oracle.story(name).current is not None
            self.gone[name] = self.gone.get(name, set()) | self.oracle.removed(name)

    async def barrier(self, engine: Engine) -> None:
        gone, self.gone = self.gone, {}
        try:
            await engine.barrier()
        except DeviceError:
            for name, versions in gone.items():
                self.gone[name] = self.gone.get(name, set()) | versions
        else:
            self.oracle.forbidden(gone)

    async def evict(self, engine: Engine) -> None:
        choice = victims(engine)
        if self.spare_condemned:
            choice = [c for c in choice if engine.segment_info(c).state.value != "condemned"]
        if not choice:
            return
        segment = choice[0] if self.rng.random() < 0.7 else self.rng.choice(choice)
        share = self.rng.random() * 0.5

        def keep(slots: Slots) -> list[int]:
            kept = [s for s in slots.tolist() if self.rng.random() < share]
            for slot in set(slots.tolist()) - set(kept):
                name = (engine.index.namespace_of(slot), engine.index.key_of(slot))
                self.oracle.story(name).required = None
            return kept

        self.evictions += 1
        try:
            removed = await engine.evict(segment, keep)
        finally:
            self.evictions -= 1
        if engine is self.engine:
            for r in removed:
                if engine.index.find(r.namespace_id, r.wire_key) < 0:
                    self.oracle.evicted((r.namespace_id, r.wire_key))

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        self.waiting.append(asyncio.ensure_future(work))

    async def settle(self) -> None:
        waiting, self.waiting = self.waiting, []
        await asyncio.gather(*waiting)

    async def crash(self, device: SimDevice, engine: Engine) -> tuple[SimDevice, Engine]:
        if self.rng.random() < 0.2 and not engine.failed:
            await engine.close(clean=True)
        for name, story in self.oracle.stories.items():
            if engine.index.find(*name) < 0:
                story.required = None  # dropped by an eviction that has not returned
        after = device.crash()
        self.engine = None
        await engine.close(clean=False)
        await self.settle()
        self.condemned += engine.stats.condemned
        self.corrupt_reads += engine.stats.corrupt_reads
        self.lost_tombstones += engine.stats.tombstones_lost
        self.gone.clear()
        self.plan.enabled = False  # opening and checking see what the faults left behind
        try:
            reborn = await open_engine(after, seed=self.seed)
        except FormatError:
            assert {0, after.size_bytes // BLOCK - 1} <= after.tainted, "a superblock copy was fine"
            raise DestroyedError from None
        # An engine that runs out of segments gives tombstones up, and says so.
        excused = self.media or self.lost_tombstones > 0
        await self.oracle.check(reborn, media=excused, after_crash=True)
        self.plan.enabled = True
        self.engine = reborn
        self.oracle.crashes += 1
        return after, reborn


def run(seed: int, rates: dict[Fault, float], steps: int = 400) -> Run:
    media = bool(SILENT & set(rates))
    story = Run(seed, FaultPlan(rates=rates), media=media, steps=steps)
    oracle = story.oracle
    with contextlib.suppress(DestroyedError):
        simloop.run(story.go(), seed)
    assert oracle.clean, f"seed={seed} rates={rates} {oracle.verdict()}"
    if not media:  # reported faults and crashes must not look like damage
        assert oracle.corrupt == story.corrupt_reads == 0, f"seed={seed} rates={rates}"
        assert story.lost_tombstones == 0 or rates, f"seed={seed}"
    return story


@pytest.mark.parametrize("seed", range(12))
def test_crashes_alone_lose_nothing(seed: int) -> None:
    story = run(seed, {})
    assert story.oracle.crashes >= 1
    assert story.oracle.blocks_checked > 10


@pytest.mark.parametrize("fault", list(Fault))
def test_each_fault_kind(fault: Fault) -> None:
    injected = 0
    for seed in range(6):
        story = run(seed, {fault: 0.05 if fault is Fault.FLUSH_FAIL else 0.02})
        injected += story.plan.injected.get(fault, 0)
    assert injected > 3, f"{fault} was hardly injected"


def test_all_faults_together() -> None:
    for seed in range(6):
        story = run(seed, dict.fromkeys(Fault, 0.004))
        assert story.oracle.reads > 100


def test_failed_flushes_condemn_and_lose_nothing() -> None:
    condemned = 0
    for seed in range(20, 26):
        condemned += run(seed, {Fault.FLUSH_FAIL: 0.1}).condemned
    assert condemned > 10


def test_one_seed_is_one_history() -> None:
    def trace() -> tuple[int, ...]:
        story = run(3, {Fault.FLUSH_FAIL: 0.03, Fault.READ_EIO: 0.02})
        o = story.oracle
        return (o.puts, o.removes, o.reads, o.crashes, o.blocks_checked, o.io_error)

    assert trace() == trace()
