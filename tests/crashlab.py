"""Power failures: lives on a logging device, every state a failure can leave of them, the verdict.

A life (put, seal, remove, drop, evict with and without kept blocks, clean close, checkpoint,
reopen) runs once and logs each write, flush and acknowledgement. A power failure is then put after
every write: none of the unflushed sectors, all of them, and mixes torn at 512 bytes. Invariant: an
image counts only when it was opened and every block in it was read; equal images of one moment are
tried once.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from entresol_daemon.compute import InlineCompute
from entresol_daemon.flash import checkpoint
from entresol_daemon.flash.device import BLOCK, Check, IoOp, checked
from entresol_daemon.flash.engine import Engine, EngineOptions, Removed, RemoveReason
from entresol_daemon.flash.evict import Evictor
from entresol_daemon.flash.index import Slots
from entresol_daemon.flash.sim import TEAR, Logged, SimDevice
from entresol_proto.status import Status
from tests.flashlab import (
    FORGOTTEN,
    NAMESPACES,
    OPTIONS,
    Name,
    device_bytes,
    drop_namespace,
    get_all,
    key_of,
    put,
    victims,
)

SEGMENT = 32 * 1024
SEGMENTS = 8
SMALL = replace(OPTIONS, segment_bytes=SEGMENT, blocks_max=256, group_commit_bytes=12 * 1024)
_WHOLE = 255  # all eight 512-byte pieces of a sector
_MIXED_CHANCE = 0.2

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Fact:
    """An acknowledgement. `kind`: put, durable, removed (no barrier yet), gone, evicting."""

    kind: str
    name: Name
    data: bytes = b""


@dataclass(frozen=True, slots=True)
class FileFact:
    """The checkpoint file: `after` is being written over what was there; then it is `done`."""

    after: bytes
    done: bool


@dataclass(slots=True)
class Facts:
    """What must be there and what may be there, as the log goes on."""

    required: dict[Name, bytes] = field(default_factory=dict)
    allowed: dict[Name, set[bytes]] = field(default_factory=dict)
    ever: dict[Name, set[bytes]] = field(default_factory=dict)
    file: bytes | None = None  # the checkpoint file's durable content
    file_next: bytes | None = None  # while it is being replaced

    def apply(self, fact: object) -> bool:
        """Take one mark in; True when it makes the demands stricter."""
        if isinstance(fact, FileFact):
            self.file_next = None if fact.done else fact.after
            self.file = fact.after if fact.done else self.file
            return True
        if not isinstance(fact, Fact):
            return False
        if fact.kind == "put":
            self.allowed.setdefault(fact.name, set()).add(fact.data)
            self.ever.setdefault(fact.name, set()).add(fact.data)
        elif fact.kind == "durable":
            self.required[fact.name] = fact.data
        elif fact.kind in ("removed", "evicting"):
            self.required.pop(fact.name, None)
        elif fact.kind == "gone":
            self.allowed.pop(fact.name, None)
        return fact.kind in ("durable", "gone")

    def copy(self) -> Facts:
        """For a life that goes on from here."""
        allowed = {name: set(found) for name, found in self.allowed.items()}
        ever = {name: set(found) for name, found in self.ever.items()}
        return Facts(dict(self.required), allowed, ever, self.file)


@dataclass(slots=True)
class Verdict:
    """What reading one image, or many, showed."""

    images: int = 0
    survived: int = 0
    blocks: int = 0
    wrong: int = 0
    lost: int = 0
    back: int = 0  # removed for good, and there again
    refused: int = 0  # would not open, or a block is there and cannot be read
    notes: list[str] = field(default_factory=list)

    @property
    def bad(self) -> int:
        """Promises broken."""
        return self.wrong + self.lost + self.back + self.refused

    def note(self, text: str) -> None:
        """Keep the first few words about what went wrong."""
        if len(self.notes) < 5:
            self.notes.append(text)

    def add(self, other: Verdict) -> None:
        """Take in another one."""
        for name in ("images", "survived", "blocks", "wrong", "lost", "back", "refused"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for text in other.notes:
            self.note(text)


class ImageDevice:
    """A device as a power failure left it: a shared base that stays as it is, and the sectors that
    differ from it. It does not fail. With `log`, its own writes and flushes are noted there."""

    direct = True
    name = "image"

    def __init__(
        self, base: bytes | bytearray, sectors: dict[int, bytes], log: list[Logged] | None = None
    ) -> None:
        self.size_bytes = len(base)
        self.log = log
        self._base = memoryview(base)
        self._sectors = sectors

    async def read(self, ops: Sequence[IoOp], check: Check | None = None) -> list[Status]:
        sectors = self._sectors
        for op in ops:
            offset, view = op.offset_bytes, op.view
            size = view.nbytes
            view[:] = self._base[offset : offset + size]
            first = offset // BLOCK
            for number in range(size // BLOCK):
                piece = sectors.get(first + number)
                if piece is not None:
                    view[number * BLOCK : (number + 1) * BLOCK] = piece
        return checked([Status.OK] * len(ops), check)

    async def write(self, ops: Sequence[IoOp]) -> None:
        for op in ops:
            data = bytes(op.view)
            if self.log is not None:
                self.log.append(Logged("write", op.offset_bytes, data))
            for at in range(0, len(data), BLOCK):
                start, piece = op.offset_bytes + at, data[at : at + BLOCK]
                if piece == self._base[start : start + BLOCK]:  # who damages the base means these
                    self._sectors.pop(start // BLOCK, None)
                else:
                    self._sectors[start // BLOCK] = piece

    async def flush(self) -> None:
        if self.log is not None:
            self.log.append(Logged("flush"))

    async def close(self) -> None:
        pass

    def mark(self, what: object) -> None:
        """As `SimDevice.mark`."""
        if self.log is not None:
            self.log.append(Logged("mark", mark=what))

    def image(self) -> bytearray:
        """All of it."""
        whole = bytearray(self._base)
        for sector, data in self._sectors.items():
            whole[sector * BLOCK : (sector + 1) * BLOCK] = data
        return whole


class Wreck:
    """The log so far as a power failure sees it: what is durable, what was under way."""

    def __init__(self, base: bytes | bytearray) -> None:
        self.durable = bytearray(base)
        self.unsynced: list[tuple[int, bytes]] = []  # (sector, content) in the order written
        self._seen: set[bytes] = set()

    def stricter(self) -> None:
        """More is demanded from here on: images tried before are tried again."""
        self._seen.clear()

    def take(self, entry: Logged) -> int:
        """A write or a flush happened; returns how many sectors became unflushed."""
        if entry.kind == "flush":
            for sector, data in self.unsynced:
                self.durable[sector * BLOCK : (sector + 1) * BLOCK] = data
            self.unsynced.clear()
            self._seen.clear()
            return 0
        for at in range(0, len(entry.data), BLOCK):
            sector = (entry.offset_bytes + at) // BLOCK
            self.unsynced.append((sector, entry.data[at : at + BLOCK]))
        return len(entry.data) // BLOCK

    def states(self, rng: random.Random, fresh: int, mixes: int) -> Iterator[dict[int, bytes]]:
        """The sectors over `durable` of each state a failure could leave now.

        `fresh`: sectors of the last write, which arrive alone, not at all, or torn.
        """
        old = len(self.unsynced) - fresh
        choices = [bytes(old + fresh), bytes([_WHOLE]) * (old + fresh)]
        if fresh:
            choices.append(bytes(old) + bytes([_WHOLE]) * fresh)
            torn = bytearray([_WHOLE]) * (old + fresh)
            torn[old + rng.randrange(fresh)] = (1 << rng.randrange(1, BLOCK // TEAR)) - 1
            choices.append(bytes(torn))
        choices += [self._mix(rng) for _ in range(mixes if self.unsynced else 0)]
        for masks in choices:
            key = masks.rstrip(b"\0")  # writes that left nothing might as well not have been
            if key not in self._seen:
                self._seen.add(key)
                yield self._sectors(masks)

    def _mix(self, rng: random.Random) -> bytes:
        masks = bytearray(rng.choices((0, _WHOLE), k=len(self.unsynced)))
        for number in range(len(masks)):
            if rng.random() < _MIXED_CHANCE:
                masks[number] = rng.randrange(256)
        return bytes(masks)

    def _sectors(self, masks: bytes) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        for (sector, data), mask in zip(self.unsynced, masks, strict=True):
            if mask == _WHOLE:
                found[sector] = data
            elif mask:
                at = sector * BLOCK
                piece = bytearray(found.get(sector, self.durable[at : at + BLOCK]))
                for number in range(BLOCK // TEAR):
                    if mask >> number & 1:
                        start = number * TEAR
                        piece[start : start + TEAR] = data[start : start + TEAR]
                found[sector] = bytes(piece)
        return found


class NotingCompute(InlineCompute):
    """Tells the log when the checkpoint file is being replaced: a failure can come in between."""

    def __init__(self, mark: Callable[[object], None]) -> None:
        super().__init__()
        self._mark = mark

    async def run(self, fn: Callable[..., R], *args: Any) -> R:
        if fn is not checkpoint.save:
            return await super().run(fn, *args)
        self._mark(FileFact(args[2], done=False))
        saved = await super().run(fn, *args)
        self._mark(FileFact(args[2], done=True))
        return saved


async def open_at(device: Any, options: EngineOptions, seed: int = 0) -> Engine:
    """Open an engine whose checkpoint, if it has one, is noted in the device's log."""
    loop = asyncio.get_running_loop()
    return await Engine.open(
        device, options, compute=NotingCompute(device.mark),
        now_ns=lambda: int(loop.time() * 1e9), random_bytes=random.Random(seed).randbytes,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Style:
    """What a life is made of: something happens at every so manyth step; 0 is never."""

    rounds: int = 40
    keys: int = 24
    bytes_max: int = 9000
    remove: int = 7
    barrier: int = 11
    evict: int = 13
    drop: int = 29
    kept: float = 0.5  # of an evicted segment's blocks
    clean: tuple[bool, ...] = (True, False)  # how each opening ends


STYLES = {
    "mixed": Style(),
    "evict": Style(remove=17, evict=4, drop=0, kept=0.7, keys=40),
    "forget": Style(remove=2, barrier=5, evict=19, drop=9, bytes_max=4000),
    "checkpoint": Style(rounds=16, clean=(True, True, False)),
    "format": Style(rounds=3, keys=4, clean=(False,)),
}


class Life:
    """One life on a logging device. `held` maps live names to bytes."""

    def __init__(self, device: Any, seed: int, style: Style) -> None:
        self.device = device
        self.rng = random.Random(seed)
        self.style = style
        self.held: dict[Name, bytes] = {}
        self.removed: list[Name] = []
        self.tasks: set[asyncio.Task[None]] = set()

    def say(self, kind: str, name: Name, data: bytes = b"") -> None:
        self.device.mark(Fact(kind, name, data))

    async def put(self, engine: Engine, number: int) -> None:
        name = (self.rng.choice(NAMESPACES), key_of(number))
        data = self.rng.randbytes(self.rng.randrange(1, self.style.bytes_max))
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
        if await future is Status.OK and self.held.get(name) == data:
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
        drop_namespace(engine, namespace)

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
        self.tell_drops(engine)
        for r in await engine.evict(chosen[0], lambda slots: keep(slots.tolist())):
            self.held.pop((r.namespace_id, r.wire_key), None)

    def tell_drops(self, engine: Engine) -> None:
        """A kept block for which there is no room is evicted after all: its mark comes before."""
        evictor = engine._evictor
        drop = Evictor._drop.__get__(evictor)

        def told(slots: Slots, reason: RemoveReason) -> list[Removed]:
            if reason is RemoveReason.NO_SPACE:
                for slot in slots.tolist():
                    name = (engine.index.namespace_of(slot), engine.index.key_of(slot))
                    self.say("evicting", name)
            gone: list[Removed] = drop(slots, reason)
            return gone

        evictor._drop = told  # type: ignore[method-assign]

    async def steps(self, engine: Engine) -> None:
        style = self.style
        for number in range(style.rounds):
            await self.put(engine, self.rng.randrange(style.keys))
            if number % 5 == 2:
                await asyncio.sleep(0.002)
            if style.remove and number % style.remove == style.remove // 2 and self.held:
                self.remove(engine)
            if style.barrier and number % style.barrier == style.barrier // 2:
                await self.barrier(engine)
            if style.evict and number % style.evict == style.evict // 2:
                await self.evict(engine, style.kept)
            if style.drop and number % style.drop == style.drop // 2:
                self.drop(engine)
            while engine.free_segments <= 2 and victims(engine):
                await self.evict(engine, style.kept / 2)
        await asyncio.sleep(0.01)

    async def live(self, options: EngineOptions) -> None:
        """All openings of the style."""
        for opening, clean in enumerate(self.style.clean):
            engine = await open_at(self.device, options, opening)
            await self.steps(engine)
            await engine.close(clean=clean)


def logging_device(seed: int) -> SimDevice:
    """Blank, its I/O takes time, and all of it is noted."""
    size = device_bytes(SEGMENTS, SEGMENT)
    return SimDevice(size, seed=seed, keep_log=True, sleep=asyncio.sleep)


async def judge(
    device: ImageDevice, options: EngineOptions, facts: Facts, *, writable: bool = False
) -> Verdict:
    """Open an image and hold it against the facts. `writable`: where there is room, it also takes a
    new block."""
    verdict = Verdict(images=1)
    engine = await open_at(device, options)
    try:
        found: dict[Name, bytes] = {}
        for name, (status, data) in (await get_all(engine)).items():
            verdict.blocks += 1
            if status is not Status.OK:
                verdict.refused += 1
                verdict.note(f"{name} is {status.label} after a mere crash")
            elif data not in facts.ever.get(name, ()):
                verdict.wrong += 1
                verdict.note(f"{name} has wrong bytes")
            elif data not in facts.allowed.get(name, ()):
                verdict.back += 1
                verdict.note(f"{name} was removed for good and is back")
            found[name] = data
        for name, data in facts.required.items():
            if found.get(name) != data:
                verdict.lost += 1
                verdict.note(f"{name} was acknowledged and is lost")
        if writable and engine.room_for(bytes(16), 8192):
            name = (NAMESPACES[0], b"a-new-block-here")
            slot, future = put(engine, name, b"x" * 5000)
            if slot < 0 or await future is not Status.OK:
                verdict.refused += 1
                verdict.note("the opened image takes no block")
    finally:
        await engine.close(clean=False)
    verdict.survived = int(verdict.bad == 0)
    return verdict


class CheckpointFile:
    """The checkpoint file beside an image, in each form a power failure can leave."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._now: bytes | None = None
        path.unlink(missing_ok=True)

    def forms(self, facts: Facts, rng: random.Random) -> Iterator[None]:
        """Puts each possible form in place in turn."""
        part = self.path.with_name(self.path.name + ".part")
        part.unlink(missing_ok=True)
        self._put(facts.file)
        if facts.file_next is not None:
            yield
            part.write_bytes(facts.file_next[: rng.randrange(len(facts.file_next) + 1)])
            yield
            part.unlink()
            self._put(facts.file_next)  # renamed, the folder not synced
        yield

    def _put(self, raw: bytes | None) -> None:
        if raw == self._now:
            return
        self._now = raw
        if raw is None:
            self.path.unlink(missing_ok=True)
        else:
            self.path.write_bytes(raw)


@dataclass(frozen=True, slots=True)
class Moment:
    """A state to be tried: the log up to `entry`, what holds then, and the image."""

    entry: int
    facts: Facts
    base: bytearray
    sectors: dict[int, bytes]

    def device(self, log: list[Logged] | None = None) -> ImageDevice:
        """The image, ready to be written to."""
        return ImageDevice(self.base, dict(self.sectors), log)


def moments(
    base: bytes | bytearray, log: Sequence[Logged], rng: random.Random, mixes: int, facts: Facts
) -> Iterator[Moment]:
    """Every power failure of a log. Use up a moment before asking for the next: they share memory.

    `facts` are what held before the log began.
    """
    wreck = Wreck(base)
    for number, entry in enumerate(log, start=1):
        fresh = 0
        if entry.kind == "mark":
            if facts.apply(entry.mark):
                wreck.stricter()
            if not isinstance(entry.mark, FileFact) and number < len(log):
                continue
        else:
            fresh = wreck.take(entry)
            if entry.kind == "flush" and number < len(log):
                continue  # as the whole write before; what it acknowledged comes next
        for sectors in wreck.states(rng, fresh, mixes):
            yield Moment(number, facts, wreck.durable, sectors)
