"""Crash-state enumeration: every prefix of the write log, with every kind of half-written tail.

A scripted life (format, put, seal, remove, drop, evict with and without kept blocks, clean close,
reopen) runs once on a device that logs each write and flush. Then a power failure is put after each
of them: none of the unflushed sectors, all of them, random mixes torn at 512 bytes. Each image is
opened and every key is read. Marks in the log say what had been acknowledged by then.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import simloop
from flashlab import (
    FORGOTTEN,
    NAMESPACES,
    OPTIONS,
    Name,
    device_bytes,
    get_all,
    key_of,
    open_engine,
    put,
    victims,
)

from entresol_daemon.flash.engine import Engine, EngineOptions, RecoveryKind
from entresol_daemon.flash.sim import Logged, SimDevice, crash_images
from entresol_proto.status import Status

SEGMENT = 32 * 1024
SEGMENTS = 10
SMALL = replace(OPTIONS, segment_bytes=SEGMENT, blocks_max=256, group_commit_bytes=12 * 1024)
SECONDS_MAX = 12.0  # of processor time, for slow machines; the images tried are printed


@dataclass(frozen=True)
class Fact:
    """An acknowledgement. `kind`: put, durable, removed (no barrier yet), gone, evicting."""

    kind: str
    name: Name
    data: bytes = b""


class Script:
    """One life on a logging device. `held` maps live names to bytes."""

    def __init__(self, device: SimDevice, seed: int) -> None:
        self.device = device
        self.rng = random.Random(seed)
        self.held: dict[Name, bytes] = {}
        self.removed: list[Name] = []
        self.tasks: set[asyncio.Task[None]] = set()

    def say(self, kind: str, name: Name, data: bytes = b"") -> None:
        self.device.mark(Fact(kind, name, data))

    async def put(self, engine: Engine, number: int) -> None:
        name = (self.rng.choice(NAMESPACES), key_of(number))
        data = self.rng.randbytes(self.rng.randrange(1, 9000))
        if name in self.held or not engine.room_for(bytes(16), 12288):
            return
        self.say("put", name, data)
        slot, future = put(engine, name, data)
        if slot >= 0:
            self.held[name] = data
            task = asyncio.ensure_future(self.ack(name, data, future))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def ack(self, name: Name, data: bytes, future: asyncio.Future[Status]) -> None:
        assert await future is Status.OK
        if self.held.get(name) == data:
            self.say("durable", name, data)

    def remove(self, engine: Engine) -> None:
        name = self.rng.choice(sorted(self.held))
        self.say("removed", name)
        engine.remove(engine.index.find(*name), FORGOTTEN)
        del self.held[name]
        self.removed.append(name)

    def drop(self, engine: Engine) -> None:
        namespace = self.rng.choice(NAMESPACES)
        for name in [n for n in self.held if n[0] == namespace]:
            self.say("removed", name)
            del self.held[name]
            self.removed.append(name)
        engine.drop_namespace(namespace)

    async def barrier(self, engine: Engine) -> None:
        gone, self.removed = self.removed, []
        await engine.barrier()
        for name in gone:
            if name not in self.held:
                self.say("gone", name)

    async def evict(self, engine: Engine, share: float) -> None:
        def keep(slots: list[int]) -> list[int]:
            kept = [s for s in slots if self.rng.random() < share]
            for slot in set(slots) - set(kept):
                self.say("evicting", (engine.index.namespace_of(slot), engine.index.key_of(slot)))
            return kept

        chosen = victims(engine)
        if not chosen:
            return
        for r in await engine.evict(chosen[0], lambda slots: keep(slots.tolist())):
            self.held.pop((r.namespace_id, r.wire_key), None)

    async def live(self, options: EngineOptions, rounds: int) -> None:
        """Two openings: a busy one closed cleanly, then another that is just left."""
        for opening in range(2):
            engine = await open_engine(self.device, options, seed=opening)
            for number in range(rounds):
                await self.put(engine, self.rng.randrange(24))
                if number % 5 == 2:
                    await asyncio.sleep(0.002)
                if number % 7 == 3 and self.held:
                    self.remove(engine)
                if number % 11 == 5:
                    await self.barrier(engine)
                if number % 13 == 7:
                    await self.evict(engine, 0.5)
                if number % 29 == 20:
                    self.drop(engine)
                while engine.free_segments <= 2 and victims(engine):
                    await self.evict(engine, 0.2)
            await asyncio.sleep(0.01)
            await engine.close(clean=opening == 0)


def facts_of(log: list[Logged], upto: int) -> tuple[dict[Name, bytes], dict[Name, set[bytes]]]:
    """(what must be there, what may be there) when the first `upto` entries had happened."""
    required: dict[Name, bytes] = {}
    allowed: dict[Name, set[bytes]] = {}
    for entry in log[:upto]:
        fact = entry.mark
        if not isinstance(fact, Fact):
            continue
        if fact.kind == "put":
            allowed.setdefault(fact.name, set()).add(fact.data)
        elif fact.kind == "durable":
            required[fact.name] = fact.data
        elif fact.kind in ("removed", "evicting"):
            required.pop(fact.name, None)
        elif fact.kind == "gone":
            allowed.pop(fact.name, None)
    return required, allowed


async def inspect(
    image: bytearray, required: dict[Name, bytes], allowed: dict[Name, set[bytes]], why: str
) -> int:
    """Open an image and hold it against the facts; returns the blocks checked."""
    device = SimDevice(len(image), image=image)
    engine = await open_engine(device, SMALL)
    assert engine.recovery.records_damaged == 0 or engine.recovery.segments_scanned, why
    found: dict[Name, bytes] = {}
    for name, (status, data) in (await get_all(engine)).items():
        assert status is Status.OK, f"{why}: {name} is {status.label} after a mere crash"
        assert data in allowed.get(name, set()), f"{why}: {name} has wrong or removed bytes"
        found[name] = data
    for name, data in required.items():
        assert found.get(name) == data, f"{why}: {name} was acknowledged and is lost"
    await engine.close(clean=False)
    return len(found)


def enumerate_crashes(seed: int, rounds: int, subsets: int, budget: float) -> tuple[int, int]:
    """Returns (images, blocks checked)."""
    device = SimDevice(
        device_bytes(SEGMENTS, SEGMENT), seed=seed, keep_log=True, sleep=asyncio.sleep
    )
    base = device.image()
    simloop.run(Script(device, seed).live(SMALL, rounds), seed)
    assert device.log is not None
    log = device.log
    rng = random.Random(seed)
    images = blocks = 0
    began = time.process_time()
    facts_at = -1
    required: dict[Name, bytes] = {}
    allowed: dict[Name, set[bytes]] = {}
    for upto, image in crash_images(base, log, rng, subsets=subsets):
        # Marks right after this entry describe acknowledgements that it caused; a crash comes
        # before them. What may be there includes puts announced before the entry.
        if upto != facts_at:
            required, allowed = facts_of(log, upto)
            facts_at = upto
        blocks += simloop.run(inspect(image, required, allowed, f"seed={seed} entry={upto}"))
        images += 1
        if time.process_time() - began > budget:
            break
    return images, blocks


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_crash_state_recovers(seed: int) -> None:
    began = time.process_time()
    images, blocks = enumerate_crashes(seed, rounds=60, subsets=2, budget=SECONDS_MAX)
    seconds = time.process_time() - began
    print(f"seed={seed} images={images} blocks={blocks} wrong=0 lost=0 seconds={seconds:.1f}")
    assert images > 100
    assert blocks > images


def test_an_enumeration_notices_a_lost_flush() -> None:
    """The canary: a device that forgets one flush must be caught."""
    device = SimDevice(device_bytes(SEGMENTS, SEGMENT), keep_log=True, sleep=asyncio.sleep)
    base = device.image()
    simloop.run(Script(device, 1).live(SMALL, 40), 1)
    assert device.log is not None
    log = device.log
    forgotten = next(
        n
        for n, (entry, after) in enumerate(pairwise(log))
        if entry.kind == "flush" and isinstance(after.mark, Fact) and after.mark.kind == "durable"
    )
    cheated = log[:forgotten] + log[forgotten + 1 :]
    caught = 0
    for upto, image in crash_images(base, cheated, random.Random(1), subsets=1):
        required, allowed = facts_of(cheated, upto)
        try:
            simloop.run(inspect(image, required, allowed, "canary"))
        except AssertionError:
            caught += 1
        if caught or upto > forgotten + 50:
            break
    assert caught > 0


def test_formatting_can_be_interrupted_anywhere() -> None:
    device = SimDevice(device_bytes(SEGMENTS, SEGMENT), keep_log=True)
    base = device.image()

    async def life() -> None:
        await (await open_engine(device, SMALL)).close(clean=False)

    simloop.run(life())
    assert device.log is not None
    kinds = set()
    for _, image in crash_images(base, device.log, random.Random(5), subsets=40):

        async def reopen(image: bytearray = image) -> RecoveryKind:
            engine = await open_engine(SimDevice(len(image), image=image), SMALL)
            slot, future = put(engine, (NAMESPACES[0], key_of(1)), b"x")
            assert slot == 0
            assert await future is Status.OK
            await engine.close(clean=False)
            return engine.recovery.kind

        kinds.add(simloop.run(reopen()))
    assert kinds == {RecoveryKind.FORMATTED, RecoveryKind.FOOTERS}
