"""What one group commit writes, and how its bytes are made. Pure, except that it fills buffers.

Invariant: `fill` touches only the header bytes of extents and the scratch it was given, so it may
run in a thread while the event loop goes on.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from entresol_daemon.compute import Compute, ComputeError
from entresol_daemon.flash.device import BLOCK, Device, IoOp, aligned_buffer
from entresol_daemon.flash.model import (
    GROUP_BYTES_MAX,
    GROUP_RECORDS_MAX,
    SHARED_FOR_S,
    SHARED_GROUP_BYTES_MAX,
    SHARED_GROUP_BYTES_MIN,
    SHARED_GROUP_RECORDS_MAX,
    SHARED_GROUP_S,
)
from entresol_daemon.flash.segment import (
    RECORD_HEADER_BYTES,
    HeaderState,
    RecordHeader,
    RecordKind,
    SegmentHeader,
    Superblock,
    encode_footer,
    encode_header,
    encode_record_header,
    footer_bytes,
    payload_hash,
)
from entresol_daemon.flash.space import Segment, SegmentTable
from entresol_daemon.flash.tombstones import Tombstone
from entresol_proto.status import DeviceError, Status

NO_KEY = bytes(16)  # of tombstones, which are of no block
FILLED_AT_ONCE_MAX = 16  # headers; one takes 1 to 3 us

Footer = tuple[int, int, bytes, int, bytes]
"""Of a segment: number, sequence, stream, used bytes, table of records."""


@dataclass(slots=True, eq=False)
class Pending:
    """A record on its way: placed in a segment, not durable."""

    kind: RecordKind
    stream: bytes
    namespace_id: bytes
    wire_key: bytes
    extent: memoryview
    sealed_bytes: int
    plain_bytes: int
    position: int
    slot: int  # -1 for tombstones
    segment: Segment
    offset: int  # in blocks
    lsn: int
    future: asyncio.Future[Status] | None
    tries: int = 1
    dead: bool = False  # removed from the index meanwhile
    home: tuple[Segment, int] | None = None  # of a copy: segment and offset of the durable one
    payload_hash: int | None = None  # None: not made yet
    tombstones: list[Tombstone] = field(default_factory=list)

    def settle(self, status: Status) -> None:
        """It is durable, or will not be: tell who waits."""
        if self.home is not None:
            self.home[0].leaving -= 1
            self.home[0].changed()
        if self.future is not None and not self.future.done():
            self.future.set_result(status)


@dataclass(slots=True)
class Group:
    records: list[Pending] = field(default_factory=list)
    headers: list[Segment] = field(default_factory=list)
    footers: list[Segment] = field(default_factory=list)
    frees: list[Segment] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to write."""
        return not (self.records or self.headers or self.footers or self.frees)

    def bury(
        self,
        segment: Segment,
        extent: memoryview,
        length_bytes: int,
        offset: int,
        lsn: int,
        tombstones: list[Tombstone],
    ) -> None:
        """One more record, of these tombstones; nobody waits for it."""
        record = Pending(
            RecordKind.TOMBSTONES, segment.stream, NO_KEY, NO_KEY, extent, length_bytes, 0, 0, -1,
            segment, offset, lsn, None, tombstones=tombstones,
        )  # fmt: skip
        self.records.append(record)

    def note_headers(self) -> None:
        """Those of segments that begin with its records."""
        new = {p.segment.index: p.segment for p in self.records if not p.segment.header_written}
        self.headers += new.values()

    def tables(self) -> tuple[list[SegmentHeader], list[Footer], int]:
        """What `fill` needs to know of segments, and the bytes of scratch for it."""
        headers = [
            SegmentHeader(HeaderState.OPEN, s.index, s.sequence, s.stream) for s in self.headers
        ] + [SegmentHeader(HeaderState.FREE, s.index, s.sequence, s.stream) for s in self.frees]
        footers = [
            (s.index, s.sequence, s.stream, s.used_bytes, bytes(s.rows)) for s in self.footers
        ]
        size = BLOCK * (len(self.headers) + 2 * len(self.frees))
        return headers, footers, size + sum(footer_bytes(s.row_count) for s in self.footers)


async def writes_of(group: Group, superblock: Superblock, compute: Compute) -> list[IoOp]:
    """All that a group writes, hashed and encoded: here what takes no longer than to hand it over
    to a thread would, else by a thread. Raises: DeviceError (no memory)."""
    headers, footers, size = group.tables()
    scratch = aligned_buffer(size) if size else memoryview(b"")  # most write records alone
    args = (superblock, group.records, headers, footers, scratch)
    hashed = all(p.payload_hash is not None for p in group.records)
    if hashed and not footers and len(group.records) + len(headers) <= FILLED_AT_ONCE_MAX:
        pieces = fill(*args)
    else:
        try:
            pieces = await compute.run(fill, *args)
        except ComputeError:
            pieces = fill(*args)  # the pool is full or closing; durability does not wait for it
    ops = [IoOp(offset, scratch[start:end]) for offset, start, end in pieces]
    for p in group.records:
        ops.append(IoOp(superblock.segment_at(p.segment.index) + p.offset * BLOCK, p.extent))
    return ops


def fill(
    superblock: Superblock,
    records: list[Pending],
    headers: list[SegmentHeader],
    footers: list[Footer],
    scratch: memoryview,
) -> list[tuple[int, int, int]]:
    """Hash payloads and write record headers into their extents; encode the rest into `scratch`.

    Returns (device offset, start, end) for each piece of `scratch`. Runs in a thread.
    """
    for p in records:
        if p.payload_hash is None:
            p.payload_hash = payload_hash(p.extent, p.sealed_bytes)
        header = RecordHeader(
            p.kind, p.segment.sequence, p.lsn, p.offset, p.sealed_bytes, p.namespace_id,
            p.wire_key, p.plain_bytes, p.position, p.payload_hash,
        )  # fmt: skip
        p.extent[:RECORD_HEADER_BYTES] = encode_record_header(header, superblock.check_key)
    pieces: list[tuple[int, int, int]] = []
    at = 0

    def put(offset: int, raw: bytes) -> None:
        nonlocal at
        scratch[at : at + len(raw)] = raw
        pieces.append((offset, at, at + len(raw)))
        at += len(raw)

    for head in headers:
        raw = encode_header(superblock, head)
        start = superblock.segment_at(head.segment)
        put(start, raw)
        if head.state is HeaderState.FREE:
            put(start + superblock.segment_bytes - BLOCK, raw)
    for segment, sequence, stream, used_bytes, table in footers:
        offset, raw = encode_footer(superblock, segment, sequence, stream, used_bytes, table)
        put(superblock.segment_at(segment) + offset, raw)
    return pieces


async def takes_writes(device: Device, table: SegmentTable) -> bool:
    """Whether a device that failed takes a write and a flush now: the FREE headers of a segment
    that is free already, which changes nothing."""
    try:
        if table.free:
            segment = table.segments[table.free[0]]
            number, sequence = segment.index, segment.sequence
            header = SegmentHeader(HeaderState.FREE, number, sequence, segment.stream)
            scratch = aligned_buffer(2 * BLOCK)
            pieces = fill(table.superblock, [], [header], [], scratch)
            await device.write([IoOp(at, scratch[start:end]) for at, start, end in pieces])
        await device.flush()
    except (DeviceError, MemoryError):
        return False
    return True


class GroupLength:
    """How much goes out together: all there is while one stream writes; while several do, as much
    as is written in a few milliseconds, because whoever comes next waits for all of it.

    A flush costs the same however little it covers: groups are at least as long as one takes.
    """

    def __init__(self) -> None:
        self._stream: bytes | None = None  # of the record that came last
        self._shared_until = 0.0
        self.bytes_per_s = SHARED_GROUP_BYTES_MIN / SHARED_GROUP_S
        self._flush_s = 0.0

    def came(self, stream: bytes, now: float) -> None:
        """A record was queued."""
        if stream != self._stream:
            if self._stream is not None:
                self._shared_until = now + SHARED_FOR_S
            self._stream = stream

    def wrote(self, length_bytes: int, write_s: float, flush_s: float) -> None:
        """A group is durable. Half of what is believed is what was seen last; a short group says
        how long a device takes for anything, not how much it takes in a time."""
        seen = length_bytes / write_s if write_s > 0 else 0.0
        if seen > self.bytes_per_s or length_bytes >= SHARED_GROUP_BYTES_MIN:
            self.bytes_per_s = (self.bytes_per_s + seen) / 2 if seen else self.bytes_per_s
        self._flush_s = (self._flush_s + flush_s) / 2

    def shared_bytes_max(self, now: float) -> int | None:
        """Bytes of the next group; None while one stream is alone."""
        if now >= self._shared_until:
            return None
        length = int(self.bytes_per_s * max(SHARED_GROUP_S, self._flush_s))
        return min(max(length, SHARED_GROUP_BYTES_MIN), SHARED_GROUP_BYTES_MAX)


class PendingQueue:
    """Records that wait for a group. Those of one stream stay in order."""

    def __init__(self, records: Iterable[Pending] = ()) -> None:
        self._lines: dict[bytes, deque[Pending]] = {}
        self._count = 0
        for p in records:
            self.append(p)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Pending]:
        """Stream by stream."""
        return itertools.chain.from_iterable(self._lines.values())

    def append(self, p: Pending) -> None:
        """The last of its stream."""
        line = self._lines.get(p.stream)
        if line is None:
            line = self._lines[p.stream] = deque()
        line.append(p)
        self._count += 1

    def clear(self) -> None:
        """Forget them all."""
        self._lines.clear()
        self._count = 0

    def take(self, shared_bytes_max: int | None) -> list[Pending]:
        """The records of the next group: about GROUP_BYTES_MAX in the order they came, or the
        smaller part of that which streams that share may have together.

        Then each gets its part of the group, so that a stream that has little waits for a group or
        two and not for all that another has queued. What stays is not looked at.
        """
        if shared_bytes_max is None:
            return self._take_oldest()
        taken: list[Pending] = []
        size = 0
        heap = [(0, number, line) for number, line in enumerate(self._lines.values())]
        while heap and size < shared_bytes_max and len(taken) < SHARED_GROUP_RECORDS_MAX:
            had, number, line = heap[0]
            p = self._pop(line)
            taken.append(p)
            size += p.extent.nbytes
            if line:
                heapq.heapreplace(heap, (had + p.extent.nbytes, number, line))
            else:
                heapq.heappop(heap)
        return taken

    def _take_oldest(self) -> list[Pending]:
        taken: list[Pending] = []
        size = 0
        heap = [(line[0].lsn, number, line) for number, line in enumerate(self._lines.values())]
        heapq.heapify(heap)
        while heap and len(taken) < GROUP_RECORDS_MAX:
            _, number, line = heap[0]
            if taken and size + line[0].extent.nbytes > GROUP_BYTES_MAX:
                break
            p = self._pop(line)
            taken.append(p)
            size += p.extent.nbytes
            if line:
                heapq.heapreplace(heap, (line[0].lsn, number, line))
            else:
                heapq.heappop(heap)
        return taken

    def _pop(self, line: deque[Pending]) -> Pending:
        p = line.popleft()
        self._count -= 1
        if not line:
            del self._lines[p.stream]
        return p
