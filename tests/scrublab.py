"""Latent errors planted under a whole shard, and the product's scrubber that has to find them.

Blocks go in through a simulated host, in virtual time. Then some of them are damaged on the medium,
each in one of the ways a drive does it, and the scrubber runs as it would by itself. Invariant: the
judgement comes from outside: what was planted must be gone, counted and published, and everything
else must still be served exactly.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field, replace
from pathlib import Path

from entresol_daemon.core.scrubbing import START_NS
from entresol_daemon.events.types import Kind
from entresol_daemon.flash.device import BLOCK
from entresol_daemon.flash.engine import RECORD_HEADER_BYTES, extent_bytes
from entresol_proto.ids import EngineKey, wire_key
from entresol_proto.status import Status
from entresol_proto.wire.data import Ack, OpenAt
from tests.sim.shardlab import Host, World

TENANT = "alpha"
PER_CALL = 8
WAYS = ("header bit", "payload bit", "zeros", "another block", "refused", "older bytes")
CYCLE_S_MAX = 3600.0


@dataclass(slots=True)
class Report:
    """What one world showed."""

    planted: int = 0
    found: int = 0
    false: int = 0  # sound blocks that went, or were called damaged
    wrong: int = 0
    scrubbed: int = 0  # bytes, of a busy story
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Keep the first few words."""
        if len(self.notes) < 5:
            self.notes.append(text)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a block's record is on the device."""

    key: bytes
    name: tuple[bytes, bytes]
    at: int
    sealed_bytes: int


class ScrubWorld:
    """A shard full of blocks."""

    def __init__(self, folder: Path, seed: int, blocks: int) -> None:
        self.world = World(folder, seed, segments=32)
        self.rng = random.Random(seed)
        self.keys = [b"key-%012d" % number for number in range(blocks)]
        self.places: list[Place] = []
        self.namespace_id = b""

    async def fill(self) -> None:
        """Store every key durably and drop the copies in memory."""
        world = self.world
        await world.open((TENANT,))
        host = Host(world, TENANT, careful=True)
        await host.open()
        for start in range(0, len(self.keys), PER_CALL):
            statuses = await host.put(self.keys[start : start + PER_CALL], Ack.DURABLE)
            assert all(status is Status.OK for status in statuses), statuses
        self.namespace_id, secret = host.namespace_id, host.secret
        await host.gone()
        world.hosts.clear()
        parts = world.shard.parts
        parts.residency.clear()
        index, superblock = parts.engine.index, parts.engine._superblock
        for key in self.keys:
            name = (self.namespace_id, bytes(wire_key(secret, EngineKey(key))))
            slot = index.find(*name)
            base = superblock.segment_at(index.m_segment[slot])
            at = base + index.m_offset[slot] * BLOCK
            self.places.append(Place(key, name, at, index.m_sealed_bytes[slot]))

    def plant(self, count: int) -> dict[bytes, str]:
        """Damage `count` blocks on the medium; key -> how."""
        chosen = self.rng.sample(self.places, count)
        return {place.key: self._damage(place) for place in chosen}

    def _damage(self, place: Place) -> str:
        device, rng = self.world.device, self.rng
        way = rng.choice(WAYS)
        size = extent_bytes(place.sealed_bytes)
        used = RECORD_HEADER_BYTES + place.sealed_bytes
        sector = place.at + rng.randrange(-(-used // BLOCK)) * BLOCK
        if way in ("header bit", "payload bit"):
            span = (0, RECORD_HEADER_BYTES) if way == "header bit" else (RECORD_HEADER_BYTES, used)
            at = place.at + rng.randrange(*span)
            device.poke(at, bytes([device.image_at(at, 1)[0] ^ 1 << rng.randrange(8)]))
        elif way == "zeros":
            device.poke(sector, bytes(BLOCK))
        elif way == "another block":
            own, others = device.image_at(place.at, min(size, BLOCK)), self.places
            while (found := device.image_at(rng.choice(others).at, len(own))) == own:
                pass  # itself, or one that has got this one's bytes before: no damage
            device.poke(place.at, found)
        elif way == "older bytes":  # of the block's own first sector, with another sequence
            head = bytearray(device.image_at(place.at, BLOCK))
            head[8] ^= 1
            device.poke(place.at, bytes(head))
        else:
            device._latent.add(sector // BLOCK)
        return way

    async def cycle(self) -> None:
        """Let the scrubber go through everything once."""
        scrubber = self.world.shard.scrubber
        before = scrubber.progress.cycles
        async with asyncio.timeout(START_NS / 1e9 + CYCLE_S_MAX):
            while scrubber.progress.cycles == before:
                await asyncio.sleep(1.0)

    async def judge(self, planted: dict[bytes, str], report: Report) -> None:
        """Hold index, counters, events and what a host reads against what was planted."""
        parts, scrubber = self.world.shard.parts, self.world.shard.scrubber
        report.planted += len(planted)
        for place in self.places:
            gone = parts.engine.index.find(*place.name) < 0
            if place.key in planted:
                report.found += gone
                if not gone:
                    report.note(f"{planted[place.key]} was not found")
            elif gone:
                report.false += 1
                report.note("a sound block was dropped")
        refused = sum(way == "refused" for way in planted.values())
        damaged = len(planted) - refused
        metrics = parts.metrics
        counted = {
            "found": scrubber.found,
            "corrupt": int(metrics.scrub_found[Status.CORRUPT]._value.get()),
            "refused": int(metrics.scrub_found[Status.IO_ERROR]._value.get()),
            "corrupt blocks": int(metrics.corrupt_blocks["scrub"]._value.get()),
            "events": parts.events.published[Kind.CORRUPT],
        }
        wanted = {
            "found": len(planted), "corrupt": damaged, "refused": refused,
            "corrupt blocks": damaged, "events": damaged,
        }  # fmt: skip
        if counted != wanted:
            report.false += 1
            report.note(f"planted {wanted}, counted {counted}")

    async def read_back(self, planted: dict[bytes, str], report: Report) -> None:
        """A host reads everything: sound blocks exactly, the others not at all."""
        world = self.world
        host = Host(world, TENANT, careful=True)
        await host.open()
        for start in range(0, len(self.keys), 40):
            keys = self.keys[start : start + 40]
            for key, status in zip(keys, await host.get(keys, OpenAt.HOST), strict=True):
                if (status is Status.OK) == (key in planted):
                    report.false += 1
                    report.note(f"{key!r} is {status.label}, planted: {planted.get(key)}")
        await host.gone()
        world.hosts.clear()
        report.wrong += world.oracle.wrong_bytes


async def story(
    folder: Path, seed: int, blocks: int, errors: int, *, locked: bool = False,
    spoil: bool = False,
) -> Report:  # fmt: skip
    """Fill, plant, scrub, judge. `locked`: the daemon has no KEK while it scrubs. `spoil` plants
    the canary's bug: half of what is asked for is not looked at."""
    report = Report()
    place = ScrubWorld(folder, seed, blocks)
    world = place.world
    await place.fill()
    if locked:
        await world.stop()
        await world.open((), locked=True)
    planted = place.plant(errors)
    if spoil:
        engine = world.shard.parts.engine
        whole = engine.scrub
        engine.scrub = lambda slots: whole(list(slots)[::2])  # type: ignore[method-assign]
    await place.cycle()
    await place.judge(planted, report)
    if locked:
        await world.stop()
        world.device._latent.clear()
        await world.open((TENANT,))
    await place.read_back(planted, report)
    await world.stop()
    return report


async def busy_story(folder: Path, seed: int) -> Report:
    """Hosts store, read and forget on a small flash, so that segments are evicted and used again,
    while one cycle follows the other. Nothing is damaged: nothing may be found."""
    report = Report()
    world = World(folder, seed, segments=7)
    flash = replace(world.config.flash, scrub_bytes_per_s=1 << 30)
    world.config = replace(world.config, flash=flash)
    await world.open((TENANT, "beta"))
    hosts = [Host(world, tenant, careful=True) for tenant in (TENANT, "beta", TENANT)]
    work = [asyncio.ensure_future(_busy(host, seed + n)) for n, host in enumerate(hosts)]
    scrubber = world.shard.scrubber
    while not all(task.done() for task in work):
        if not scrubber.running:
            scrubber.begin_now()
        await asyncio.sleep(0.001)
    await asyncio.gather(*work)
    report.scrubbed = scrubber.scrubbed_bytes
    report.false = scrubber.found
    if scrubber.found:
        report.note(f"{scrubber.found} sound blocks were called damaged")
    if not scrubber.progress.cycles or not world.shard.parts.engine.stats.evicted_segments:
        report.note("the story was too short to mean anything")
    for host in hosts:
        await host.gone()
    world.hosts.clear()
    await world.shard.puts.drain()
    await asyncio.sleep(6)
    world.check_idle()
    report.wrong = world.oracle.wrong_bytes
    await world.stop()
    return report


async def _busy(host: Host, seed: int) -> None:
    rng = random.Random(seed)
    keys = [b"key-%012d" % number for number in range(400)]
    await host.open()
    for _ in range(60):
        start = rng.randrange(len(keys) - PER_CALL)
        some = keys[start : start + PER_CALL]
        chance = rng.random()
        if chance < 0.6:
            await host.put(some, rng.choice((Ack.DURABLE, Ack.ACCEPTED)))
        elif chance < 0.9:
            await host.get(some, OpenAt.HOST)
        else:
            await host.forget(some[:2])
