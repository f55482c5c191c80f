"""Lives of small files, whose segments are used again all the time, held against a strict model.

A life puts, forgets, drops namespaces and evicts, beside one another; evictions are cancelled,
writes and flushes fail, the process is killed or the power fails, in an opening as well. Checked at
every opening: what was acknowledged is there; what was forgotten is not; no block is back of whose
name a newer one had been durable; and where the engine said that it was not haunted, the blocks are
those of the index. A seed is one history.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import Any

import pytest

from entresol_daemon.flash.engine import Engine, Removed, SegmentState
from entresol_daemon.flash.evict import Evictor
from entresol_daemon.flash.index import Slots
from entresol_daemon.flash.sim import Fault, FaultPlan, SimDevice
from entresol_daemon.flash.space import SegmentTable
from entresol_daemon.flash.tombstones import NO_TOMBSTONES
from entresol_proto.status import DeviceError, Status
from tests import simloop
from tests.flashlab import (
    FORGOTTEN,
    NAMESPACES,
    OPTIONS,
    Name,
    device_bytes,
    get_all,
    key_of,
    open_engine,
    put,
    stock_faults,
)

STEPS = 120
OPENINGS = 6
WRITE_FAULTS = (Fault.WRITE_EIO, Fault.TORN_WRITE, Fault.ENOSPC)


def data_of(name: Name, version: int) -> bytes:
    """Says which version it is; of a length that differs."""
    rng = random.Random(f"{name} {version}")
    return version.to_bytes(4, "big") + rng.randbytes(rng.choice((1, 500, 3900, 4001, 9000)))


@dataclass(slots=True)
class Past:
    """Of one name, by number of version; 0 is none."""

    newest: int = 0  # that was ever put
    current: int = 0  # in the index
    required: int = 0  # durable, neither forgotten nor evicted
    durable: int = 0  # the newest that ever was
    forbidden: int = 0  # forgotten for good, and all before


class Lives:
    """See the module. `counts`: what happened."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.pasts: dict[Name, Past] = {}
        self.keys = rng.choice((4, 12, 30))
        self.options = replace(
            OPTIONS,
            segment_bytes=rng.choice((32, 48)) * 1024,
            free_segments_min=rng.choice((1, 2)),
            group_commit_bytes=rng.choice((8, 64)) * 1024,
            open_segments_max=rng.choice((1, 4)),
        )
        size = device_bytes(rng.choice((6, 8, 12, 20)), self.options.segment_bytes)
        self.device = SimDevice(size, seed=seed, sleep=asyncio.sleep)
        self.engine: Engine | None = None  # while it lives
        self.tasks: set[asyncio.Task[None]] = set()
        self.gone: dict[Name, int] = {}  # forgotten, and no barrier yet
        self.is_strict = False  # the last one that lived was not haunted

    async def go(self) -> None:
        for _ in range(OPENINGS):
            engine = await self.open()
            for _ in range(self.rng.randrange(STEPS)):
                await self.step(engine)
            await self.end(engine)
        await (await self.open()).close()

    # -- one life

    async def open(self) -> Engine:
        while True:
            opening = asyncio.ensure_future(open_engine(self.device, self.options))
            patience_s = self.rng.choice((None, None, self.rng.random() * 0.003))
            await asyncio.wait({opening}, timeout=patience_s)
            if opening.done():
                break
            self.counts["cut short"] += 1
            after = self.wreck()
            opening.cancel()
            await asyncio.wait({opening})
            self.device = after
        engine = self.engine = opening.result()
        engine.listen(lambda removed: self.left(engine, removed))
        self.judge(await get_all(engine))
        if self.rng.random() < 0.6:
            rates = {self.rng.choice(WRITE_FAULTS): self.rng.choice((0.01, 0.1))}
            rates[Fault.FLUSH_FAIL] = self.rng.choice((0, 0.05, 0.3))
            self.device.plan = FaultPlan(rates=rates)
        return engine

    def judge(self, found: dict[Name, tuple[Status, bytes]]) -> None:
        for name in found.keys() | self.pasts.keys():
            past = self.pasts.setdefault(name, Past())
            status, data = found.get(name, (Status.MISS, b""))
            assert status in (Status.OK, Status.MISS), f"{name} is {status.label}"
            version = int.from_bytes(data[:4], "big")
            assert status is Status.MISS or data == data_of(name, version), f"wrong bytes of {name}"
            what = f"{name} has version {version}: {past}"
            assert not past.required or version == past.required, f"lost: {what}"
            if version:
                assert past.forbidden < version <= past.newest, f"forgotten, and back: {what}"
                assert version >= past.durable, f"older than the last one: {what}"
            if self.is_strict and version != past.current:
                assert not version, f"back, though nothing was haunted: {what}"
            past.current = past.required = version
            past.durable = max(past.durable, version)
        self.counts["strict"] += self.is_strict

    async def end(self, engine: Engine) -> None:
        if self.rng.random() < 0.2 and not engine.failed:
            await engine.close()
            self.counts["closed"] += 1
        self.is_strict = not engine.is_haunted
        self.engine = None
        after = self.wreck()
        for task in self.tasks:
            task.cancel()
        await engine.close(clean=False)
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.gone.clear()
        self.device = after

    def wreck(self) -> SimDevice:
        """The device after a kill, of which unflushed writes are still seen, or without power."""
        power = self.rng.random() < 0.5
        self.counts["power" if power else "killed"] += 1
        if power:
            return self.device.crash(plan=FaultPlan())
        self.device.plan = FaultPlan()
        return self.device

    # -- what happens in one

    async def step(self, engine: Engine) -> None:
        action, rng = self.rng.random(), self.rng
        if action < 0.5:
            self.put(engine)
        elif action < 0.6:
            self.forget(engine)
        elif action < 0.62:
            await self.drop(engine)
        elif action < 0.68:
            await self.barrier(engine)
        elif action < 0.76:
            evicting = self.later(self.evict(engine))
            if rng.random() < 0.2:
                asyncio.get_running_loop().call_later(rng.random() * 0.003, evicting.cancel)
        elif action < 0.85:
            await self.evict(engine)
        else:
            await asyncio.sleep(rng.choice((0, 0.0002, 0.002, 3.0 if engine.failed else 0.01)))
        if engine.free_segments <= self.options.free_segments_min:
            await self.evict(engine)
        assert not stock_faults(engine), stock_faults(engine)

    def later(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def put(self, engine: Engine) -> None:
        name = (self.rng.choice(NAMESPACES), key_of(self.rng.randrange(self.keys)))
        if engine.index.find(*name) >= 0:
            return
        past = self.pasts.setdefault(name, Past())
        slot, future = put(engine, name, data_of(name, past.newest + 1))
        if slot >= 0:
            past.newest += 1
            past.current, past.required = past.newest, 0
            self.later(self.acknowledged(engine, past, past.newest, future))

    async def acknowledged(
        self, engine: Engine, past: Past, version: int, future: asyncio.Future[Status]
    ) -> None:
        if await future is Status.OK and engine is self.engine and past.current == version:
            past.required = past.durable = version

    def left(self, engine: Engine, removed: Any) -> None:
        """Blocks are out of the index."""
        each: Removed
        for each in removed if engine is self.engine else ():
            past = self.pasts[each.namespace_id, each.wire_key]
            past.current = past.required = 0
            self.counts[each.reason.value] += 1

    def forget(self, engine: Engine) -> None:
        slots = engine.index.live_slots().tolist()
        if slots:
            gone = engine.remove(self.rng.choice(slots), FORGOTTEN)
            name = (gone.namespace_id, gone.wire_key)
            self.gone[name] = self.pasts[name].newest

    async def drop(self, engine: Engine) -> None:
        space = self.rng.choice(NAMESPACES)
        before = {name: past.newest for name, past in self.pasts.items() if name[0] == space}
        for _ in engine.drop_namespace(space):
            await asyncio.sleep(self.rng.choice((0, 0.001)))
        for slot in engine.index.slots_of(space).tolist():  # an eviction moved it meanwhile
            name = (space, engine.index.key_of(slot))
            if self.pasts[name].current <= before.get(name, 0):
                engine.remove(slot, FORGOTTEN)
        self.gone |= before

    async def barrier(self, engine: Engine) -> None:
        gone = dict(self.gone)
        try:
            await engine.barrier()
        except DeviceError:
            return
        for name, version in gone.items():
            past = self.pasts[name]
            past.forbidden = max(past.forbidden, version)
        self.gone = {n: v for n, v in self.gone.items() if gone.get(n) != v}

    async def evict(self, engine: Engine) -> None:
        used = (SegmentState.SEALED, SegmentState.CONDEMNED, SegmentState.OPEN)
        segments = [info.segment for info in engine.segments() if info.state in used]
        if segments:
            share = self.rng.choice((0, 0.5, 0.9, 1))

            def keep(slots: Slots) -> list[int]:
                return [slot for slot in slots.tolist() if self.rng.random() < share]

            await engine.evict(self.rng.choice(segments[: self.rng.choice((1, 99))]), keep)


def live(*seeds: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in seeds:
        lives = Lives(seed)
        try:
            simloop.run(lives.go(), seed)
        except AssertionError as error:
            raise AssertionError(f"seed={seed}: {error}") from None
        counts += lives.counts
    return counts


def test_what_is_there_is_what_was_last_stored_and_not_forgotten() -> None:
    counts = live(*range(14), 64)  # the last one found a block that went without a tombstone
    for kind in ("power", "killed", "closed", "cut short", "strict", "evicted", "no_space"):
        assert counts[kind] > 3, f"{kind} hardly happened: {counts}"


@pytest.mark.parametrize("planted", ["removals are let go", "no shadows", "no doubt"])
def test_a_planted_bug_is_found(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if planted == "removals are let go":
        monkeypatch.setattr(Evictor, "_needed", lambda *_: NO_TOMBSTONES)
    elif planted == "no shadows":
        monkeypatch.setattr(SegmentTable, "cast_shadows", lambda *_: None)
    else:
        monkeypatch.setattr(SegmentTable, "doubt", lambda *_: None)
    with pytest.raises(AssertionError, match="seed="):
        live(*range(60))
