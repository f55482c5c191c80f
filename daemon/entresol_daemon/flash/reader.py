"""Reading records back and proving that they are the ones asked for.

Invariant: OK means that the header's keyed check, the segment's sequence, the place, the key, the
lengths and (unless switched off) the payload's hash all agree. Anything else is CORRUPT, IO_ERROR
or MISS, and the buffer's content is then undefined.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from entresol_daemon.flash.checking import Expected, RecordCheck
from entresol_daemon.flash.device import BLOCK, Device, IoOp, aligned_buffer
from entresol_daemon.flash.index import Index, Slots
from entresol_daemon.flash.model import COPY_BYTES_MAX, EngineStats
from entresol_daemon.flash.segment import RECORD_HEADER_BYTES, extent_bytes
from entresol_daemon.flash.space import SegmentTable
from entresol_daemon.flash.writer import Writer
from entresol_proto import limits
from entresol_proto.status import Status

READ_TRIES_MAX = 2  # a misdirected read is transient: ask once more before calling it corrupt
HEAD_BLOCKS_MAX = 2  # the header of a block of a thousand chunks is longer than one
# Of a block with more it may be: a chunk takes four bytes of it, the other fields 204.
LONG_PLAIN_BYTES = (BLOCK - RECORD_HEADER_BYTES - 204) // 4 * limits.CHUNK_BYTES_MIN
_WIPE = bytes(RECORD_HEADER_BYTES)


class Reader:
    """Reads by slot; see the module."""

    def __init__(
        self,
        device: Device,
        index: Index,
        table: SegmentTable,
        writer: Writer,
        stats: EngineStats,
        verify_payloads: bool,
    ) -> None:
        self._device = device
        self._index = index
        self._table = table
        self._writer = writer
        self._stats = stats
        self._verify_payloads = verify_payloads

    def expect(self, slot: int) -> Expected:
        """What a live slot promises."""
        index = self._index
        segment = self._table.segments[index.m_segment[slot]]
        return Expected(
            segment,
            segment.sequence,
            index.m_offset[slot],
            index.namespace_of(slot),
            index.key_of(slot),
            index.m_sealed_bytes[slot],
            index.m_plain_bytes[slot],
            index.m_position[slot],
        )

    async def read(
        self,
        ops: Sequence[tuple[int, memoryview]],
        *,
        payloads: bool = False,
        headers: bool = False,
    ) -> list[Status]:
        """Whole records into whole extents; see `Engine.read`. `payloads` are hashed even where
        reads do not; `headers` stay in the extents of durable ones."""
        payloads = payloads or self._verify_payloads
        statuses = [Status.MISS] * len(ops)
        self._stats.reads += len(ops)
        live = self._index.is_live
        first = [self.expect(slot) if live(slot) else None for slot, _ in ops]
        todo: Sequence[int] = range(len(ops))
        for attempt in range(READ_TRIES_MAX):
            self._stats.read_retries += len(todo) if attempt else 0
            await self._attempt(ops, first, todo, statuses, payloads, again=attempt > 0)
            todo = [number for number in todo if statuses[number] is Status.CORRUPT]
            if not todo:
                break
        self._stats.corrupt_reads += statuses.count(Status.CORRUPT)
        self._stats.io_error_reads += statuses.count(Status.IO_ERROR)
        for _, extent in ops:
            if not headers:
                extent[:RECORD_HEADER_BYTES] = _WIPE
        return statuses

    async def _attempt(
        self,
        ops: Sequence[tuple[int, memoryview]],
        first: list[Expected | None],
        todo: Sequence[int],
        statuses: list[Status],
        payloads: bool,
        *,
        again: bool,
    ) -> None:
        """Read what was expected at first; `again`, wherever it is now (an eviction may have moved
        it)."""
        wanted: list[tuple[int, Expected, memoryview]] = []
        for number in todo:
            slot, extent = ops[number]
            statuses[number] = Status.MISS
            expected = first[number]
            if expected is None:
                continue
            if again:
                before = expected
                if not self._index.is_live(slot):
                    continue
                expected = self.expect(slot)
                if not expected.is_same_block(before):
                    continue
            if extent.nbytes != extent_bytes(expected.sealed_bytes):
                assert again, "extent is not the record's length"
                continue  # the key was removed and stored anew, in the slot that became free
            pending = self._writer.pending.get(slot)
            if pending is not None:
                extent[RECORD_HEADER_BYTES:] = pending.extent[RECORD_HEADER_BYTES:]
                statuses[number] = Status.OK
            else:
                wanted.append((number, expected, extent))
        if wanted:
            items = [(expected, view) for _, expected, view in wanted]
            found = await self._once(items, payloads)
            for (number, expected, view), status in zip(wanted, found, strict=True):
                statuses[number] = status
                if status is Status.OK:
                    self._stats.read_bytes += view.nbytes
                elif (again or status is not Status.CORRUPT) and not self._stays(
                    ops, number, expected
                ):
                    statuses[number] = Status.MISS  # whatever was read: it is not what is there now

    def _stays(
        self, ops: Sequence[tuple[int, memoryview]], number: int, expected: Expected
    ) -> bool:
        """Whether the slot still holds the block that was read, where it was."""
        slot = ops[number][0]
        return self._index.is_live(slot) and self.expect(slot) == expected

    async def scrub(self, slots: Sequence[int] | Slots) -> list[tuple[int, Status]]:
        """Verify durable blocks batch by batch; returns those that are not what was stored."""
        bad: list[tuple[int, Status]] = []
        left = deque(int(slot) for slot in slots)
        while left:
            batch: list[tuple[int, Expected]] = []
            size = 0
            while left and (not batch or size < COPY_BYTES_MAX):
                slot = left.popleft()
                if self._index.is_live(slot) and slot not in self._writer.pending:
                    batch.append((slot, self.expect(slot)))
                    size += extent_bytes(batch[-1][1].sealed_bytes)
            scratch = aligned_buffer(size)
            ops, at = [], 0
            for slot, expected in batch:
                end = at + extent_bytes(expected.sealed_bytes)
                ops.append((slot, scratch[at:end]))
                at = end
            for (slot, _), status in zip(ops, await self.read(ops, payloads=True), strict=True):
                if status in (Status.CORRUPT, Status.IO_ERROR):
                    bad.append((slot, status))
        return bad

    async def heads(self, slots: Sequence[int]) -> list[bytes]:
        """The beginning of each record, its sealed header to its end in it; empty where it cannot
        be had or is not the record's."""
        result = [b""] * len(slots)
        todo: list[tuple[int, Expected, memoryview]] = []
        stride = HEAD_BLOCKS_MAX * BLOCK
        scratch = aligned_buffer(stride * len(slots))
        for number, slot in enumerate(slots):
            if not self._index.is_live(slot):
                continue
            pending = self._writer.pending.get(slot)
            if pending is not None:
                result[number] = bytes(pending.extent[: self._head_bytes(slot)])
            else:
                at = number * stride
                view = scratch[at : at + self._head_bytes(slot)]
                todo.append((number, self.expect(slot), view))
        if todo:
            statuses = await self._once([(e, view) for _, e, view in todo], False)
            for (number, _, view), status in zip(todo, statuses, strict=True):
                if status is Status.OK:
                    result[number] = bytes(view)
        return result

    def _head_bytes(self, slot: int) -> int:
        if self._index.m_plain_bytes[slot] <= LONG_PLAIN_BYTES:
            return BLOCK
        return min(HEAD_BLOCKS_MAX * BLOCK, extent_bytes(self._index.m_sealed_bytes[slot]))

    async def _once(self, items: list[tuple[Expected, memoryview]], payloads: bool) -> list[Status]:
        """Read and verify; the segments cannot be freed meanwhile."""
        superblock = self._table.superblock
        check = RecordCheck(items, superblock.check_key, payloads)
        for expected, _ in items:
            expected.segment.readers += 1
        try:
            io = [
                IoOp(superblock.segment_at(e.segment.index) + e.offset * BLOCK, view)
                for e, view in items
            ]
            return await self._device.read(io, check)
        finally:
            for expected, _ in items:
                expected.segment.readers -= 1
                if not expected.segment.readers:
                    expected.segment.changed()
