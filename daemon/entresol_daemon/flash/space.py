"""Segments in memory: which are free, open, full; who gets the next place in which.

Invariants: a segment is written only between its opening and its footer; `free` holds only segments
whose FREE header is durable; user appends leave `free_segments_min` segments for the engine itself;
sequences and log numbers (lsn) never repeat, because they start with the file's generation.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable

from entresol_daemon.flash.device import BLOCK
from entresol_daemon.flash.index import PENDING, Index
from entresol_daemon.flash.model import (
    UNREAD_KEEP_NS,
    EngineOptions,
    EngineStats,
    RemovedHook,
    SegmentInfo,
    SegmentState,
    ignore_removed,
)
from entresol_daemon.flash.segment import (
    RECORD_HEADER_BYTES,
    RecordKind,
    Superblock,
    footer_bytes,
    pack_row,
    record_bytes_max,
)
from entresol_daemon.flash.stock import Stock
from entresol_daemon.flash.tombstones import TOMBSTONE_BYTES

NO_STREAM = bytes(16)
NAME_BYTES = 32  # of a block: its namespace id, then its wire key
DOUBTFUL_MAX = 65_536  # names; it takes a failing device, or a crash, to make one
COPY_RESERVE = 1  # free segments that the engine's own copies leave for tombstones
SEGMENTS_PER_OPEN = 16  # there are at least, where copies have segments of their own
_SEQUENCE_BITS = 32
_LSN_BITS = 40
_REFRESH_PER_CALL = 64  # segments whose oldest_touch one `infos` call recomputes


class Segment:
    """One segment. Offsets are in bytes from its start; `rows` is its future footer table."""

    __slots__ = (
        "blocks",
        "evict_tries",
        "footer_due",
        "header_written",
        "hides",
        "index",
        "kept",
        "last_touch",
        "leaving",
        "live_blocks",
        "live_bytes",
        "oldest_touch",
        "owes",
        "readers",
        "refusals",
        "row_count",
        "rows",
        "sequence",
        "shadows",
        "slots",
        "state",
        "stream",
        "tombstone_offsets",
        "unflushed",
        "unread",
        "used_bytes",
        "waiters",
    )

    def __init__(self, index: int) -> None:
        self.index = index
        self.readers = 0  # device reads in flight
        self.waiters: list[asyncio.Future[None]] = []
        self.reset(SegmentState.FREE, NO_STREAM, 0)

    def reset(self, state: SegmentState, stream: bytes, sequence: int) -> None:
        """Begin another life."""
        self.state = state
        self.stream = stream
        self.sequence = sequence
        self.kept = False  # for copies of what evictions kept, not for what comes new
        self.used_bytes = BLOCK
        self.rows = bytearray()
        self.row_count = 0
        self.slots = array("I")  # of its blocks in order; stale entries stay
        self.tombstone_offsets: list[int] = []  # in blocks
        self.blocks = 0
        self.live_blocks = 0
        self.live_bytes = 0
        self.last_touch = 0
        self.oldest_touch = 0
        self.unflushed = 0  # records placed here and not durable
        self.leaving = 0  # blocks whose copies elsewhere are not durable
        self.header_written = False
        self.footer_due = False
        # May hold copies that are neither in the index nor covered by a tombstone that names this
        # sequence: while such a segment exists, no tombstone is dropped.
        self.shadows = False
        self.owes = False  # blocks of it were buried: not free before that is durable
        self.hides = False  # may hold blocks that the opening did not find, or left out
        self.unread = False  # the device refused parts of it at opening: another may find them
        self.evict_tries = 0  # evictions that could not write elsewhere what must not be lost
        self.refusals = 0  # evictions for which the device did not give what is here

    @property
    def segment(self) -> int:
        """Its number, as policies call it."""
        return self.index

    def changed(self) -> None:
        """Wake whoever waits in `change`."""
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)
        self.waiters.clear()

    async def quiet(self) -> None:
        """Wait until no record of it, nor a copy, is being written and nobody reads from it."""
        while self.unflushed or self.leaving or self.readers:
            await self.change()

    async def change(self) -> None:
        """Wait until it has changed."""
        waiter = asyncio.get_running_loop().create_future()
        self.waiters.append(waiter)
        await waiter


def keeps_apart(open_segments: int, segments: int) -> bool:
    """Whether one more may be open beside these, for what evictions keep of a stream."""
    return (open_segments + 1) * SEGMENTS_PER_OPEN <= segments


class SegmentTable:
    """All segments of the file, and the counters that number them."""

    def __init__(
        self, superblock: Superblock, options: EngineOptions, index: Index, stats: EngineStats
    ) -> None:
        self.on_removed: RemovedHook = ignore_removed
        self.superblock = superblock
        self.segments = [Segment(number) for number in range(superblock.segment_count)]
        self.free: deque[int] = deque()
        self.stock: Stock[Segment] = Stock()
        # By stream and `kept`, the least recently appended first.
        self.open: OrderedDict[tuple[bytes, bool], Segment] = OrderedDict()
        self.lives: dict[int, Segment] = {}  # all in use, by sequence, the oldest first
        self.shadowing: set[int] = set()  # numbers of those with `shadows`
        self.hiding: set[int] = set()  # numbers of those with `hides`
        # Names of which those that shadow may hold an older copy: one that goes is buried, so that
        # a crash does not bring the older back.
        self.doubtful: set[bytes] = set()
        # Another opening may find removals that this one did not: no copy outdoes its block.
        self.unsure = False
        self.closed: list[Segment] = []  # full, their footers not handed to the writer yet
        self.extent_bytes_max = record_bytes_max(superblock.segment_bytes)
        self._options = options
        self._index = index
        self._stats = stats
        self._sequence = superblock.generation << _SEQUENCE_BITS
        self._lsn = superblock.generation << _LSN_BITS
        self._refresh_at = 0
        self._unread_until: asyncio.TimerHandle | None = None

    # -- numbers

    @property
    def sequence(self) -> int:
        """The highest sequence given out."""
        return self._sequence

    @property
    def lsn(self) -> int:
        """The highest log number given out: it moves with every append and removal."""
        return self._lsn

    def next_lsn(self) -> int:
        """A log number above all earlier ones."""
        self._lsn += 1
        return self._lsn

    def lsn_of_copy(self, target: Segment, lsn: int) -> int:
        """The log number of a copy that goes to `target`: a new one; where the opening may have
        missed removals of the block, or a newer one of its name, that of the record, `lsn`. Such a
        removal names another segment than `target`: none is dropped while that is there."""
        new = self.next_lsn()
        if not self.unsure:
            return new
        self.cast_shadows(target)
        return lsn

    # -- places

    def fits(self, segment: Segment, extent_bytes: int) -> bool:
        """True when the extent and the footer that then is due still fit."""
        end = segment.used_bytes + extent_bytes + footer_bytes(segment.row_count + 1)
        return end <= self.superblock.segment_bytes

    def has_room(self, stream: bytes, extent_bytes: int, reserve: int) -> bool:
        """True when `open_for` would give a segment."""
        segment = self.open.get((stream, False))
        if segment is not None and self.fits(segment, extent_bytes):
            return True
        return len(self.free) > reserve and extent_bytes <= self.extent_bytes_max

    def open_for(
        self, stream: bytes, extent_bytes: int, reserve: int, *, kept: bool = False
    ) -> Segment | None:
        """The stream's open segment with room for the extent, opening one if more than `reserve`
        segments are free. A full one is closed; too many open ones close the idlest."""
        segment = self.open.get((stream, kept))
        if segment is not None and self.fits(segment, extent_bytes):
            self.open.move_to_end((stream, kept))
            return segment
        if len(self.free) <= reserve or extent_bytes > self.extent_bytes_max:
            return None
        if segment is not None:
            self.close(segment)
        if len(self.open) >= self._options.open_segments_max:
            self.close(next(iter(self.open.values())))
        fresh = self.segments[self.free.popleft()]
        self._sequence += 1
        fresh.reset(SegmentState.OPEN, stream, self._sequence)
        fresh.kept = kept
        self.lives[fresh.sequence] = fresh
        self.open[stream, kept] = fresh
        self._stats.opened_segments += 1
        return fresh

    def open_for_copy(self, stream: bytes, extent_bytes: int) -> Segment | None:
        """A place for a block that an eviction keeps: beside others of those, which will leave when
        it does; not between new ones, which are younger. Where that would leave too many segments
        half empty, or none is free, in the stream's own."""
        others = len(self.open) - ((stream, True) in self.open)
        if keeps_apart(others, len(self.segments)):
            found = self.open_for(stream, extent_bytes, COPY_RESERVE, kept=True)
            if found is not None:
                return found
        return self.open_for(stream, extent_bytes, COPY_RESERVE)

    def tombstones_fit(self) -> int:
        """How many of them `open_anywhere` has a place for in one record; at least 1."""
        room = self.extent_bytes_max if self.free else 0
        if not room:
            whole = self.superblock.segment_bytes
            ends = (s.used_bytes + footer_bytes(s.row_count + 1) for s in self.open.values())
            room = whole - min(ends, default=whole)
        return max(1, (room - RECORD_HEADER_BYTES) // TOMBSTONE_BYTES)

    def open_anywhere(self, stream: bytes, extent_bytes: int) -> Segment | None:
        """A place for the engine's own record: any open segment, the stream's first."""
        first = self.open.get((stream, False))
        for segment in ([first] if first is not None else []) + list(self.open.values()):
            if self.fits(segment, extent_bytes):
                return segment
        return self.open_for(stream, extent_bytes, 0)

    def place(
        self,
        segment: Segment,
        kind: RecordKind,
        namespace_id: bytes,
        wire_key: bytes,
        sizes: tuple[int, int, int, int],
        lsn: int,
    ) -> int:
        """Take the next place for a record; returns its offset in blocks.

        `sizes` is (extent, sealed, plain bytes, position). Raises: MemoryError; nothing is taken.
        """
        extent, sealed, plain, position = sizes
        offset = segment.used_bytes // BLOCK
        # First what takes memory, so that it is all or nothing.
        segment.rows += pack_row(namespace_id, wire_key, lsn, offset, sealed, plain, position, kind)
        segment.used_bytes += extent
        segment.row_count += 1
        segment.unflushed += 1
        if kind is RecordKind.TOMBSTONES:
            segment.tombstone_offsets.append(offset)
        return offset

    def add_live(self, segment: Segment, slot: int, extent_bytes: int) -> None:
        """A block in `slot` now lives in the segment."""
        segment.slots.append(slot)
        segment.blocks += 1
        segment.live_blocks += 1
        segment.live_bytes += extent_bytes
        touch = self._index.m_last_touch[slot]
        segment.last_touch = max(segment.last_touch, touch)
        if segment.oldest_touch == 0 or touch < segment.oldest_touch:
            segment.oldest_touch = touch
        if segment.live_blocks == 1:
            self.stock.put(segment)

    def add_dead(self, segment: Segment, extent_bytes: int) -> None:
        """One of the segment's blocks died or moved away."""
        segment.live_blocks -= 1
        segment.live_bytes -= extent_bytes
        assert segment.live_blocks >= 0, "more blocks died than lived in a segment"
        if not segment.live_blocks:
            self.stock.put(segment)

    def bring_home(self, slot: int, extent_bytes: int, home: Segment, offset: int) -> None:
        """A block lives again where it was copied from: its copy did not become durable."""
        self._index.m_segment[slot] = home.index
        self._index.m_offset[slot] = offset
        self._index.m_flags[slot] &= ~PENDING & 0xFF
        home.live_blocks += 1
        home.live_bytes += extent_bytes
        if home.live_blocks == 1:
            self.stock.put(home)

    # -- life

    def close(self, segment: Segment) -> None:
        """No more appends; its footer is written once its records are durable."""
        assert segment.state is SegmentState.OPEN, "only an open segment can be closed"
        del self.open[segment.stream, segment.kept]
        segment.state = SegmentState.SEALED
        self.stock.put(segment)
        segment.footer_due = True
        self.closed.append(segment)

    def condemn(self, segment: Segment) -> None:
        """A flush it needed failed: nothing more is written to it, nothing unflushed is trusted."""
        if segment.state is SegmentState.OPEN:
            del self.open[segment.stream, segment.kept]
        if segment.state is not SegmentState.CONDEMNED:
            self._stats.condemned += 1
        segment.state = SegmentState.CONDEMNED
        self.stock.put(segment)
        segment.footer_due = False
        self.cast_shadows(segment)

    def cast_shadows(self, segment: Segment) -> None:
        """From here on it may hold copies that no tombstone names (see `Segment.shadows`)."""
        segment.shadows = True
        self.shadowing.add(segment.index)

    def doubt(self, names: Iterable[bytes]) -> None:
        """See `doubtful`; what is beyond DOUBTFUL_MAX is not remembered."""
        left = DOUBTFUL_MAX - len(self.doubtful)
        self.doubtful.update(itertools.islice(names, max(0, left)))

    def begin_free(self, segment: Segment) -> None:
        """Nothing in it lives any more; its FREE header is about to be written."""
        assert segment.live_blocks == 0, "a segment with live blocks is being freed"
        if segment.state is SegmentState.OPEN:
            del self.open[segment.stream, segment.kept]
        segment.state = SegmentState.FREEING
        self.stock.drop(segment.index)
        segment.footer_due = False
        self.cast_shadows(segment)

    def end_free(self, segment: Segment) -> None:
        """Its FREE header is durable."""
        self.lives.pop(segment.sequence, None)
        self.shadowing.discard(segment.index)
        if not self.shadowing:
            self.doubtful.clear()
        self.hiding.discard(segment.index)
        segment.reset(SegmentState.FREE, NO_STREAM, segment.sequence)
        self.free.append(segment.index)

    def restock(self) -> None:
        """All of them have changed: they were found at opening."""
        for segment in self.segments:
            self.stock.put(segment)
        used = self.used()
        self.lives = {s.sequence: s for s in sorted(used, key=lambda each: each.sequence)}
        self.shadowing = {s.index for s in used if s.shadows}
        self.hiding = {s.index for s in used if s.hides}

    def keep_unread(self, log: logging.Logger) -> None:
        """Segments that this opening could not read are for another one: freed last, for long."""
        if self.stock.unread:
            self.unsure = True
            log.error(
                "event=segments_unread count=%d hours=%d hint='restart the daemon once the device "
                "gives them again'", len(self.stock.unread), UNREAD_KEEP_NS // 3_600_000_000_000,
            )  # fmt: skip
            loop = asyncio.get_running_loop()
            self._unread_until = loop.call_later(UNREAD_KEEP_NS / 1e9, self.give_up_unread)

    def give_up_unread(self) -> None:
        """They are freed as others are from here on."""
        if self._unread_until is not None:
            self._unread_until.cancel()
        for segment in list(self.stock.unread.values()):
            segment.unread = False
            self.stock.put(segment)

    # -- views

    def used(self) -> list[Segment]:
        """Every segment that is not durably free."""
        return [s for s in self.segments if s.state is not SegmentState.FREE]

    def info(self, segment: Segment) -> SegmentInfo:
        """What policies see of one segment."""
        return SegmentInfo(
            segment=segment.index,
            stream=segment.stream,
            sequence=segment.sequence,
            state=segment.state,
            blocks=segment.blocks,
            live_blocks=segment.live_blocks,
            live_bytes=segment.live_bytes,
            last_touch=segment.last_touch,
            oldest_touch=segment.oldest_touch,
            used_bytes=0 if segment.state is SegmentState.FREE else segment.used_bytes,
            unread=segment.unread,
        )

    def states(self) -> list[SegmentState]:
        """Of every segment, by number: a hundredth of the work of `infos`."""
        return [segment.state for segment in self.segments]

    def live_bytes(self) -> list[int]:
        """Of every segment, by number."""
        return [segment.live_bytes for segment in self.segments]

    def infos(self) -> list[SegmentInfo]:
        """All segments; refreshes `oldest_touch` of a few, round robin."""
        count = len(self.segments)
        for step in range(min(_REFRESH_PER_CALL, count)):
            self._refresh(self.segments[(self._refresh_at + step) % count])
        self._refresh_at = (self._refresh_at + _REFRESH_PER_CALL) % count
        return [self.info(segment) for segment in self.segments]

    def _refresh(self, segment: Segment) -> None:
        if segment.live_blocks:
            touch, where, live = (
                self._index.m_last_touch, self._index.m_segment, self._index.is_live,
            )  # fmt: skip
            number = segment.index
            segment.oldest_touch = min(
                (touch[slot] for slot in segment.slots if live(slot) and where[slot] == number),
                default=segment.oldest_touch,
            )
