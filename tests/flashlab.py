"""What the flash tests share: small engines, put and get, and an oracle that remembers everything.

The oracle lives outside the engine. It knows every version ever put under a key, which of them a
crash may legitimately show again, and which must be there.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field, replace

from entresol_daemon.compute import InlineCompute
from entresol_daemon.flash.device import BLOCK, Device, aligned_buffer
from entresol_daemon.flash.engine import (
    RECORD_HEADER_BYTES,
    Engine,
    EngineOptions,
    Record,
    Removed,
    RemoveReason,
    SegmentState,
    extent_bytes,
)
from entresol_daemon.flash.index import ABSENT
from entresol_daemon.flash.segment import DATA_OFFSET, payload_hash
from entresol_proto.status import Status

SEGMENT = 64 * 1024
STREAMS = (b"stream-of-tenant", b"another-tenant-s")
NAMESPACES = (b"namespace-one-of", b"namespace-two-of", b"namespace-three-")
OPTIONS = EngineOptions(
    segment_bytes=SEGMENT, blocks_max=4096, group_commit_bytes=32 * 1024,
    group_commit_ns=1_000_000, open_segments_max=4, free_segments_min=2,
)  # fmt: skip

Name = tuple[bytes, bytes]  # namespace id, wire key


def device_bytes(segments: int, segment_bytes: int = SEGMENT) -> int:
    return DATA_OFFSET + segments * segment_bytes + BLOCK


def key_of(number: int) -> bytes:
    return b"key-" + number.to_bytes(4, "big") + bytes(8)


def stream_of(namespace: bytes) -> bytes:
    """A namespace belongs to one tenant."""
    return STREAMS[NAMESPACES.index(namespace) % len(STREAMS)]


async def open_engine(
    device: Device, options: EngineOptions = OPTIONS, *, seed: int = 0, clock: bool = True
) -> Engine:
    rng = random.Random(seed)
    loop = asyncio.get_running_loop()
    return await Engine.open(
        device, options, compute=InlineCompute(), now_ns=lambda: int(loop.time() * 1e9),
        random_bytes=rng.randbytes,
    )  # fmt: skip


def record(namespace: bytes, key: bytes, data: bytes, position: int = 0) -> Record:
    extent = aligned_buffer(extent_bytes(len(data)))
    extent[RECORD_HEADER_BYTES : RECORD_HEADER_BYTES + len(data)] = data
    known = payload_hash(extent, len(data)) if len(data) % 2 else None  # groups of both kinds
    return Record(namespace, key, extent, len(data), 2 * len(data), position, known)


def put(
    engine: Engine, name: Name, data: bytes, *, stream: bytes | None = None
) -> tuple[int, asyncio.Future[Status]]:
    where = stream if stream is not None else stream_of(name[0])
    return engine.append(where, record(name[0], name[1], data, len(data)))


async def get(engine: Engine, name: Name) -> tuple[Status, bytes]:
    slot = engine.index.find(*name)
    if slot == ABSENT:
        return Status.MISS, b""
    size = engine.index.m_sealed_bytes[slot]
    extent = aligned_buffer(extent_bytes(size))
    status = (await engine.read([(slot, extent)]))[0]
    return status, bytes(extent[RECORD_HEADER_BYTES : RECORD_HEADER_BYTES + size])


_memory = aligned_buffer(0)


def _scratch(length_bytes: int) -> memoryview:
    """Memory that calls share: thousands of small images are read in a second."""
    global _memory
    if _memory.nbytes < length_bytes:
        _memory = aligned_buffer(length_bytes)
    return _memory


def drop_namespace(engine: Engine, namespace: bytes) -> list[Removed]:
    """Drop it without a turn of the loop in between."""
    return [each for removed in engine.drop_namespace(namespace) for each in removed]


async def get_all(engine: Engine) -> dict[Name, tuple[Status, bytes]]:
    """Every block of the index, read in one batch."""
    index = engine.index
    slots = index.live_slots().tolist()
    sizes = [index.m_sealed_bytes[slot] for slot in slots]
    memory = _scratch(sum(extent_bytes(size) for size in sizes))
    ops, at = [], 0
    for slot, size in zip(slots, sizes, strict=True):
        ops.append((slot, memory[at : at + extent_bytes(size)]))
        at += extent_bytes(size)
    statuses = await engine.read(ops)
    return {
        (index.namespace_of(slot), index.key_of(slot)): (
            status, bytes(view[RECORD_HEADER_BYTES : RECORD_HEADER_BYTES + size])
        )
        for (slot, view), size, status in zip(ops, sizes, statuses, strict=True)
    }  # fmt: skip


@dataclass
class Story:
    """One key's past."""

    ever: set[bytes] = field(default_factory=set)
    allowed: set[bytes] = field(default_factory=set)  # may be seen after a crash
    current: bytes | None = None  # visible now
    required: bytes | None = None  # acknowledged durable, not removed, not evicted
    seen: list[bytes | None] = field(default_factory=lambda: [None])  # all values of current

    def become(self, value: bytes | None) -> None:
        self.current = value
        self.seen.append(value)


@dataclass
class Oracle:
    """Put, remove, evict and barrier report here; `check` compares an engine with it."""

    stories: dict[Name, Story] = field(default_factory=dict)
    wrong: int = 0
    lost: int = 0
    resurrected: int = 0
    corrupt: int = 0
    io_error: int = 0
    reads: int = 0
    puts: int = 0
    removes: int = 0
    crashes: int = 0
    blocks_checked: int = 0
    notes: list[str] = field(default_factory=list)

    def story(self, name: Name) -> Story:
        return self.stories.setdefault(name, Story())

    def put(self, name: Name, data: bytes) -> None:
        story = self.story(name)
        story.ever.add(data)
        story.allowed.add(data)
        story.become(data)
        story.required = None
        self.puts += 1

    def acked(self, name: Name, data: bytes, status: Status) -> None:
        """The put's future is done."""
        story = self.story(name)
        if status is Status.OK:
            if story.current == data:
                story.required = data
        elif story.current == data:
            story.become(None)

    def removed(self, name: Name) -> set[bytes]:
        """Returns what a later barrier forbids."""
        story = self.story(name)
        gone = set(story.allowed)
        story.become(None)
        story.required = None
        self.removes += 1
        return gone

    def forbidden(self, gone: dict[Name, set[bytes]]) -> None:
        """A barrier returned: these versions are gone for ever."""
        for name, versions in gone.items():
            self.story(name).allowed -= versions

    def evicted(self, name: Name) -> None:
        story = self.story(name)
        story.become(None)
        story.required = None

    async def check(self, engine: Engine, *, media: bool, after_crash: bool) -> None:
        """Read every key ever used. After a crash, what is found becomes the truth.

        `media`: faults that may damage or lose durable bytes were injected, so losses and the
        return of removed blocks are excused; wrong bytes never are.
        """
        for name, story in sorted(self.stories.items()):
            status, data = await get(engine, name)
            self.judge(name, story, status, data, media=media, after_crash=after_crash)
            if status is Status.CORRUPT:  # as the daemon does
                engine.remove(engine.index.find(*name), RemoveReason.CORRUPT)
        if after_crash:
            known = set(self.stories)
            for slot in engine.index.live_slots().tolist():
                name = (engine.index.namespace_of(slot), engine.index.key_of(slot))
                if name not in known:
                    self.wrong += 1
                    self.notes.append(f"invented {name}")

    def judge(
        self, name: Name, story: Story, status: Status, data: bytes, *, media: bool,
        after_crash: bool,
    ) -> None:  # fmt: skip
        self.reads += 1
        if status is Status.OK:
            self.blocks_checked += 1
            if data not in story.ever or (not after_crash and data != story.current):
                self.wrong += 1
                self.notes.append(f"wrong bytes of {name}: {len(data)} bytes")
            elif after_crash and not media and data not in story.allowed:
                self.resurrected += 1
                self.notes.append(f"resurrected {name}")
        else:
            self.corrupt += status is Status.CORRUPT
            self.io_error += status is Status.IO_ERROR
            expected = story.required if after_crash else story.current
            if expected is not None and not media:
                self.lost += 1
                self.notes.append(f"lost {name}: {status.label}")
        if after_crash and status is not Status.IO_ERROR:
            found = data if status is Status.OK else None
            if media and found is not None:
                story.allowed.add(found)
            story.become(found)
            story.required = found

    def verdict(self) -> str:
        return (
            f"wrong={self.wrong} lost={self.lost} resurrected={self.resurrected} "
            f"notes={self.notes[:5]}"
        )

    @property
    def clean(self) -> bool:
        return not (self.wrong or self.lost or self.resurrected)


def stock_faults(engine: Engine) -> list[str]:
    """What `engine.stock` has otherwise than a look at every segment."""
    where: dict[int, str] = {}
    for info in engine.segments():
        state, alive = info.state, info.live_blocks > 0
        if info.segment in engine.stock.resting:
            continue
        if state is SegmentState.CONDEMNED:
            where[info.segment] = "unread" if info.unread else "condemned"
        elif state is SegmentState.SEALED:
            where[info.segment] = f"sealed {info.stream.hex()}" if alive else "empty"
        elif state is SegmentState.OPEN and alive:
            where[info.segment] = f"opened {info.stream.hex()}"
        elif state is SegmentState.OPEN and info.blocks:
            where[info.segment] = "idle"
    stock, has = engine.stock, dict[int, str]()
    has |= dict.fromkeys(stock.condemned, "condemned") | dict.fromkeys(stock.empty, "empty")
    has |= dict.fromkeys(stock.unread, "unread") | dict.fromkeys(stock.idle, "idle")
    for name, shelves in (("sealed", stock.sealed), ("opened", stock.opened)):
        for stream, shelf in shelves.items():
            has |= dict.fromkeys(shelf, f"{name} {stream.hex()}")
            if not shelf:
                has[-1] = f"nothing under {name} {stream.hex()}"
    used = {i.sequence for i in engine.segments() if i.state is not SegmentState.FREE} - {0}
    lives = engine._table.lives.keys() - {0}  # lost, or not read: there may be several
    return [
        f"segment {number} is {where.get(number)}, in stock as {has.get(number)}"
        for number in sorted(where.keys() | has.keys())
        if where.get(number) != has.get(number)
    ] + [f"sequence {number} is of no segment, or unknown" for number in sorted(lives ^ used)]


def victims(engine: Engine) -> list[int]:
    """Segments that an eviction may choose, condemned and oldest first, unread ones last."""
    assert not stock_faults(engine), stock_faults(engine)
    chosen = [
        info
        for info in engine.segments()
        if info.state in (SegmentState.SEALED, SegmentState.CONDEMNED, SegmentState.OPEN)
    ]
    chosen.sort(
        key=lambda i: (
            i.unread, i.state is not SegmentState.CONDEMNED,
            i.state is SegmentState.OPEN, i.sequence,
        )
    )  # fmt: skip
    return [info.segment for info in chosen]


def without_checkpoint(options: EngineOptions) -> EngineOptions:
    return replace(options, checkpoint_path=None)


FORGOTTEN = RemoveReason.FORGOTTEN
