"""Lives as in `test_flash_lives`, on worse files: held against the same model, with its excuses.

A start may find the checkpoint gone, damaged or an older one, a superblock copy damaged, the device
grown, or an index that is too small; one read of it may lie or be refused, or some places be
refused until the next start; its own writes may fail, or be cut short again and again. Blocks are
damaged at rest and found by the scrubber while evictions run. Excused is only what the fault
explains: a damaged block may be gone, what a device refuses may be missing or not known to be
removed until it is given again, and what an index has no room for may be left out.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from entresol_daemon.flash.device import BLOCK
from entresol_daemon.flash.engine import Engine, RecoveryKind, Removed, RemoveReason, SegmentState
from entresol_daemon.flash.index import PENDING, Slots
from entresol_daemon.flash.segment import DATA_OFFSET, RECORD_HEADER_BYTES
from entresol_daemon.flash.sim import Fault, FaultPlan, SimDevice
from entresol_daemon.flash.space import SegmentTable
from entresol_proto.status import DeviceError, FormatError, Status
from tests import simloop
from tests.flashlab import NAMESPACES, Name, get, get_all, key_of, open_engine
from tests.sim.test_flash_lives import WRITE_FAULTS, Lives, Past, data_of

LIES = (Fault.READ_EIO, Fault.MISDIRECTED_READ, Fault.STALE_READ)
GROWTH = 16 * BLOCK
DAMAGE = (RemoveReason.CORRUPT, RemoveReason.IO_ERROR)


class HardLives(Lives):
    """See the module."""

    def __init__(self, seed: int, folder: Path) -> None:
        super().__init__(seed)
        self.path = folder / f"checkpoint-{seed}"
        self.old: list[bytes] = []  # checkpoints of before
        self.blocks_max = self.options.blocks_max
        self.options = replace(self.options, checkpoint_path=self.path)
        self.is_hurt = False  # a superblock copy is damaged, and no opening has come to its end
        self.is_refused = False  # the device does not give some places in this life
        self.was_closed = False  # cleanly
        self.damaged: set[Name] = set()

    # -- between two lives

    def tamper(self) -> None:
        """What happens to files at rest."""
        rng = self.rng
        if self.path.exists():
            raw = self.path.read_bytes()
            what = rng.random()
            if what < 0.1:
                self.path.unlink()
            elif what < 0.2:
                at = rng.randrange(len(raw))
                self.path.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
            elif what < 0.3 and self.old:
                self.path.write_bytes(rng.choice(self.old))
            self.old.append(raw)
        if rng.random() < 0.15 and not self.is_hurt:
            self.is_hurt = True
            self.counts["superblock hurt"] += 1
            mirror = int.from_bytes(self.device.image_at(144, 8), "little")
            grown = mirror + BLOCK < self.device.size_bytes  # then nothing else says where that is
            at = (mirror if grown else rng.choice((0, mirror))) + rng.randrange(BLOCK)
            self.device.poke(at, bytes([self.device.image_at(at, 1)[0] ^ 1]))
        if rng.random() < 0.1 and not self.is_hurt:
            self.resize(GROWTH)

    def resize(self, more: int) -> None:
        """The device after it has grown."""
        image = self.device.image() + bytes(more)
        self.device.closed = True
        self.device = SimDevice(
            len(image), seed=self.rng.getrandbits(32), image=image, sleep=asyncio.sleep
        )
        self.counts["grown"] += 1

    def trouble(self) -> None:
        """What the next opening has to cope with."""
        rng, device = self.rng, self.device
        device._latent.clear()
        self.is_refused = False
        device.plan = FaultPlan()
        what = rng.random()
        if what < 0.3:
            device.plan = FaultPlan(at={rng.choice(LIES): rng.randrange(1, 60)})
        elif what < 0.45:
            device.plan = FaultPlan(rates={rng.choice(WRITE_FAULTS): 0.1, Fault.FLUSH_FAIL: 0.1})
        elif what < 0.7 and self.pasts:
            self.refuse()

    def refuse(self) -> None:
        """The device gives some places no more, or some removals."""
        rng, device = self.rng, self.device
        self.is_refused = True
        self.counts["refused"] += 1
        if rng.random() < 0.6:
            places = range(DATA_OFFSET, device.size_bytes, BLOCK)
            heads = [(at // BLOCK, device.image_at(at, 6)) for at in places]
            removals = [at for at, head in heads if head == b"ENTR\1\2"]
            device._latent |= set(rng.sample(removals, min(len(removals), rng.choice((1, 3)))))
            return
        for _ in range(rng.choice((1, 1, 3))):
            first = rng.randrange(DATA_OFFSET, device.size_bytes - BLOCK, BLOCK) // BLOCK
            last = min(first + rng.choice((1, 1, 4)), device.size_bytes // BLOCK - 1)
            mirror = int.from_bytes(device.image_at(144, 8), "little") // BLOCK
            device._latent |= set(range(first, last)) - {mirror}

    async def open(self) -> Engine:
        cuts = self.rng.choice((0, 0, 1, 3))
        blocks_max = self.rng.choice((self.blocks_max, self.blocks_max, self.blocks_max, 6))
        options = replace(self.options, blocks_max=blocks_max)
        if self.pasts:
            self.tamper()
        while True:
            self.trouble()
            opening = asyncio.ensure_future(open_engine(self.device, options))
            patience_s = self.rng.random() * 0.006 if cuts else None
            await asyncio.wait({opening}, timeout=patience_s)
            if opening.done():
                if opening.exception() is None:
                    break
                assert isinstance(opening.exception(), DeviceError), opening.exception()
                assert not isinstance(opening.exception(), FormatError), opening.exception()
                self.counts["opening failed"] += 1
                self.device = self.wreck()
                continue
            cuts -= 1
            self.counts["cut short"] += 1
            after = self.wreck()
            opening.cancel()
            await asyncio.wait({opening})
            self.device = after
        self.is_hurt = False
        self.device.plan = FaultPlan()
        engine = self.engine = opening.result()
        engine.listen(lambda removed: self.left(engine, removed))
        self.counts[engine.recovery.kind.value] += 1
        self.is_refused |= engine.hides_blocks and not engine.recovery.blocks_dropped
        found = await get_all(engine)
        self.judge_hard(engine, found)
        for name, (status, _) in found.items():
            if status is Status.CORRUPT:
                engine.remove(engine.index.find(*name), RemoveReason.CORRUPT)
        what = self.rng.random()
        if what < 0.5:
            rates = {self.rng.choice(WRITE_FAULTS): self.rng.choice((0.01, 0.1))}
            rates[Fault.FLUSH_FAIL] = self.rng.choice((0, 0.05, 0.3))
            self.device.plan = FaultPlan(rates=rates)
        elif what < 0.7:
            self.device.plan = FaultPlan(at={self.rng.choice(LIES): self.rng.randrange(1, 200)})
        return engine

    def judge_hard(self, engine: Engine, found: dict[Name, tuple[Status, bytes]]) -> None:
        report = engine.recovery
        left_out = 0
        for name in found.keys() | self.pasts.keys():
            past = self.pasts.setdefault(name, Past())
            status, data = found.get(name, (Status.MISS, b""))
            what = f"{name}: {past} {status.label}"
            if status is Status.IO_ERROR:
                assert self.is_refused, what
                past.current, past.durable = past.newest, 0
                continue
            if status is Status.CORRUPT:
                assert name in self.damaged, what
                past.current, past.required = past.newest, 0
                continue
            version = int.from_bytes(data[:4], "big")
            assert status is Status.MISS or data == data_of(name, version), f"wrong bytes of {name}"
            what = f"{name} has version {version}: {past} {report}"
            if self.is_refused:
                past.current = version
                self.counts["served though forgotten"] += 0 < version <= past.forbidden
                if not version and report.blocks_dropped:
                    past.required = 0
                continue
            if past.required and not version and report.blocks_dropped:
                left_out += 1
                past.current = past.required = 0
                continue
            assert not past.required or version == past.required, f"lost: {what}"
            if version:
                assert past.forbidden < version <= past.newest, f"forgotten, and back: {what}"
                assert version >= past.durable, f"older than the last one: {what}"
            if self.was_closed and report.kind is RecoveryKind.CHECKPOINT:
                assert version == past.current, f"not as it was closed: {what}"
            if self.is_strict and version != past.current:
                assert not version, f"back, though nothing was haunted: {what}"
            past.current = past.required = version
            past.durable = max(past.durable, version)
        assert left_out <= report.blocks_dropped, f"{left_out} lost: {report}"
        self.counts["left out"] += left_out
        self.counts["strict"] += self.is_strict and not self.is_refused

    async def end(self, engine: Engine) -> None:
        self.was_closed = False
        refused = self.is_refused
        if refused and not engine.failed:
            await self.keep_forgotten(engine)
        if self.rng.random() < 0.3 and not engine.failed:
            await engine.close()
            self.was_closed = not engine.failed
            self.counts["closed"] += 1
        self.is_strict = not engine.is_haunted and not refused
        self.engine = None
        if engine.stats.tombstones_lost or engine.stats.unread_freed:
            self.counts["lost for good"] += 1
            for past in self.pasts.values():
                past.required = past.forbidden = past.durable = 0
            self.is_strict = False
        after = self.device if self.was_closed and self.rng.random() < 0.7 else self.wreck()
        for task in self.tasks:
            task.cancel()
        await engine.close(clean=False)
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.gone.clear()
        self.device = after

    # -- what happens in one

    async def step(self, engine: Engine) -> None:
        what = self.rng.random()
        if what < 0.02:
            self.damage(engine)
        elif what < 0.06:
            self.later(self.scrub(engine))
        elif what < 0.12:
            self.later(self.look(engine))
        elif what < 0.15:
            self.forget_absent(engine)
        elif what < 0.2 and self.is_refused:
            await self.keep_forgotten(engine)
        else:
            await super().step(engine)

    def damage(self, engine: Engine) -> None:
        """One bit of a block's payload."""
        index = engine.index
        durable = [s for s in index.live_slots().tolist() if not index.m_flags[s] & PENDING]
        if not durable:
            return
        slot = self.rng.choice(durable)
        name = (index.namespace_of(slot), index.key_of(slot))
        start = DATA_OFFSET + index.m_segment[slot] * self.options.segment_bytes
        at = (
            start
            + index.m_offset[slot] * BLOCK
            + RECORD_HEADER_BYTES
            + index.m_sealed_bytes[slot]
            - 1
        )
        latent = set(self.device._latent)
        self.device.poke(at, bytes([self.device.image_at(at, 1)[0] ^ 1]))
        self.device._latent |= latent
        past = self.pasts[name]
        past.required = past.durable = 0
        self.damaged.add(name)
        self.counts["damaged"] += 1

    async def scrub(self, engine: Engine) -> None:
        slots = engine.index.live_slots()
        names = {s: (engine.index.namespace_of(s), engine.index.key_of(s)) for s in slots.tolist()}
        for slot, status in await engine.scrub(slots):
            name = names[slot]
            if status is Status.CORRUPT and engine is self.engine:
                assert name in self.damaged, f"scrubbed: {name}"
                if engine.index.find(*name) == slot:
                    engine.remove(slot, RemoveReason.CORRUPT)
                    self.counts["scrubbed"] += 1

    async def look(self, engine: Engine) -> None:
        """A get."""
        slots = engine.index.live_slots().tolist()
        if not slots:
            return
        slot = self.rng.choice(slots)
        name = (engine.index.namespace_of(slot), engine.index.key_of(slot))
        past = self.pasts[name]
        before = past.current
        status, data = await get(engine, name)
        if engine is not self.engine or past.current != before:
            return
        if status is Status.OK and not self.is_refused:
            assert data == data_of(name, before), f"a get of {name}: {past}"
        elif status is Status.CORRUPT:
            assert name in self.damaged, f"got corrupt: {name}"

    async def keep_forgotten(self, engine: Engine) -> None:
        """An eviction keeps a block that was forgotten, as the opening could not know."""
        for name, past in self.pasts.items():
            slot = engine.index.find(*name)
            if slot >= 0 and 0 < past.current <= past.forbidden:
                self.counts["kept though forgotten"] += 1
                await engine.evict(engine.index.m_segment[slot], lambda slots: slots)
                return

    def forget_absent(self, engine: Engine) -> None:
        name = (self.rng.choice(NAMESPACES), key_of(self.rng.randrange(self.keys)))
        if engine.index.find(*name) < 0 and name in self.pasts and engine.is_haunted:
            engine.bury_absent(name[0], [name[1]])
            self.pasts[name].required = 0
            self.gone[name] = self.pasts[name].newest

    def left(self, engine: Engine, removed: Any) -> None:
        each: Removed
        for each in removed if engine is self.engine else ():
            past = self.pasts[each.namespace_id, each.wire_key]
            if each.reason in DAMAGE or self.is_refused:
                past.durable = 0  # of what is damaged, or hidden, an older one may be back
            if not (self.is_refused and past.required != past.current):
                past.required = 0
            past.current = 0
            self.counts[each.reason.value] += 1

    def forget(self, engine: Engine) -> None:
        slots = engine.index.live_slots().tolist()
        if slots:
            gone = engine.remove(self.rng.choice(slots), RemoveReason.FORGOTTEN)
            name = (gone.namespace_id, gone.wire_key)
            self.pasts[name].required = 0
            self.gone[name] = self.pasts[name].newest

    async def drop(self, engine: Engine) -> None:
        for past in self.pasts.values():  # what is hidden may be of that namespace
            past.required *= past.current != 0 or not self.is_refused
        await super().drop(engine)

    async def evict(self, engine: Engine) -> None:
        used = (SegmentState.SEALED, SegmentState.CONDEMNED, SegmentState.OPEN)
        infos = [info for info in engine.segments() if info.state in used]
        if self.rng.random() < 0.97:
            infos = [info for info in infos if not info.unread]
        segments = [info.segment for info in infos]
        if segments:
            share = self.rng.choice((0, 0.5, 0.9, 1))

            def keep(slots: Slots) -> list[int]:
                return [slot for slot in slots.tolist() if self.rng.random() < share]

            await engine.evict(self.rng.choice(segments[: self.rng.choice((1, 99))]), keep)


def live(folder: Path, *seeds: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in seeds:
        lives = HardLives(seed, folder)
        try:
            simloop.run(lives.go(), seed)
        except AssertionError as error:
            raise AssertionError(f"seed={seed}: {error}") from None
        counts += lives.counts
    return counts


def test_what_is_there_is_what_was_stored_whatever_is_the_matter_with_the_file(
    tmp_path: Path,
) -> None:
    counts = live(tmp_path, *range(12), 10010)  # the last one lost a segment to a stale header
    for kind in (
        "refused", "scrubbed", "cut short", "opening failed", "superblock hurt", "grown",
        "left out", "checkpoint", "strict",
    ):  # fmt: skip
        assert counts[kind] > 1, f"{kind} hardly happened: {counts}"


def test_a_copy_that_outdoes_what_an_opening_could_not_read_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SegmentTable, "lsn_of_copy", lambda table, *_: table.next_lsn())
    with pytest.raises(AssertionError, match="forgotten, and back"):
        live(tmp_path, *range(30))
