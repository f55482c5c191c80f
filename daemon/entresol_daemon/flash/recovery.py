"""Finding the blocks again at opening: from the checkpoint, else from footers and scans.

Invariants: recovery only reads, and writes again what no flush is known to cover (`renewing`); what
it cannot verify it leaves out and counts; it never raises for damaged content. A segment is sealed
when its header and trailer agree on the sequence, and scanned when they do not. Memory is bounded
by RECOVERY_BATCH_BYTES, one segment, and 64 bytes per record.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from entresol_daemon.compute import Compute
from entresol_daemon.flash.checkpoint import Checkpoint
from entresol_daemon.flash.device import BLOCK, Device, IoOp, aligned_buffer
from entresol_daemon.flash.index import U32, U64, Index, Slots
from entresol_daemon.flash.looking import BATCH_OPS, Looking, decode_edges
from entresol_daemon.flash.model import (
    RECOVERY_BATCH_BYTES,
    RecoveryKind,
    RecoveryReport,
    SegmentState,
)
from entresol_daemon.flash.renewing import renew_free, renew_records
from entresol_daemon.flash.resolve import distinct, resolve
from entresol_daemon.flash.salvaging import Salvage, salvage
from entresol_daemon.flash.segment import (
    RECORD_HEADER_BYTES,
    ROW,
    HeaderState,
    RecordKind,
    Rows,
    Scan,
    SegmentHeader,
    Superblock,
    Trailer,
    decode_header,
    decode_record_header,
    decode_table,
    extent_bytes,
    footer_bytes,
    scan_segment,
    tombstones_in,
)
from entresol_daemon.flash.space import NAME_BYTES, NO_STREAM, Segment, SegmentTable
from entresol_daemon.flash.tombstones import Tombstones, joined

_SCAN_OP_BYTES = 1 << 20
_TOMBSTONE_READS_MAX = 3  # of a record before it is given up
_ROW_RAW = np.dtype((np.void, ROW.itemsize))


@dataclass(slots=True)
class Found:
    """What opening must hand to the writer."""

    to_free: list[Segment] = field(default_factory=list)
    to_footer: list[Segment] = field(default_factory=list)


class Recovery:
    """One opening's search. Fills `table`, `index` and `report`."""

    def __init__(
        self,
        device: Device,
        compute: Compute,
        index: Index,
        table: SegmentTable,
        report: RecoveryReport,
        log: logging.Logger,
    ) -> None:
        self._device = device
        self._compute = compute
        self._index = index
        self._table = table
        self._superblock = table.superblock
        self._report = report
        self._log = log
        self._looking = Looking(device, compute, table.superblock, log)
        self._rows: list[Rows] = []
        self._where: list[tuple[int, int, int]] = []  # segment, sequence, count per part of rows
        self._tombstones: list[Tombstones] = []
        self._tombstone_records: list[tuple[Segment, int, int]] = []  # offset, extent bytes
        self._found = Found()

    # -- with a checkpoint

    async def from_checkpoint(self, checkpoint: Checkpoint) -> str:
        """Take the checkpoint's word if every segment's header agrees; else say why not."""
        if len(checkpoint.key0) > self._index.capacity:
            return "more blocks than blocks_max"
        count = self._superblock.segment_count
        raw = await self._looking.blocks([self._superblock.segment_at(n) for n in range(count)])
        no_trailers: list[bytes | None] = [None] * count
        edges = await self._compute.run(decode_edges, self._superblock, 0, raw, no_trailers)
        notes = {note.segment: note for note in checkpoint.segments}
        for number, (header, _) in enumerate(edges):
            note = notes.pop(number, None)
            block = raw[number]
            if note is None:
                if block is None or (
                    any(block) and (header is None or header.state is not HeaderState.FREE)
                ):
                    return f"segment {number} was free and is not"
                self._table.segments[number].sequence = header.sequence if header else 0
            elif header is None:
                if not note.condemned:  # such a one may have lost its header, or never flushed it
                    return f"segment {number} is not the one of the checkpoint"
            elif (header.state, header.sequence) != (HeaderState.OPEN, note.sequence):
                return f"segment {number} is not the one of the checkpoint"
        if notes:
            return "it names segments that do not exist"
        for note in checkpoint.segments:
            segment = self._table.segments[note.segment]
            state = SegmentState.CONDEMNED if note.condemned else SegmentState.SEALED
            self._adopt(segment, state, note.stream, note.sequence)
            segment.shadows = note.shadows
            segment.blocks = note.blocks
            segment.tombstone_offsets = note.tombstone_offsets
            segment.used_bytes = note.used_bytes
        self._collect_free()
        numbers = np.array([self._index.intern(name) for name in checkpoint.names], np.uint32)
        slots = self._index.insert_many(
            numbers[checkpoint.namespace] if len(numbers) else checkpoint.namespace,
            checkpoint.key0,
            checkpoint.key1,
            segment=checkpoint.columns["segment"],
            offset=checkpoint.columns["offset"],
            sealed_bytes=checkpoint.columns["sealed_bytes"],
            plain_bytes=checkpoint.columns["plain_bytes"],
            position=checkpoint.columns["position"],
            last_touch=checkpoint.last_touch,
        )
        self._assign(slots)
        self._table.restock()
        self._report.kind = RecoveryKind.CHECKPOINT
        return ""

    # -- without

    async def from_footers(self) -> Found:
        """Read headers, trailers and footers; scan the segments that have none."""
        self._report.kind = RecoveryKind.FOOTERS
        count = self._superblock.segment_count
        sealed: list[Trailer] = []
        to_scan: list[tuple[Segment, int]] = []
        step = BATCH_OPS // 2
        for first in range(0, count, step):
            last = min(count, first + step)
            looked = heads, tails, edges, free = await self._looking.edges(first, last)
            if not await renew_free(self._device, self._superblock, first, looked):
                self._log.warning("event=free_headers_not_renewed segments=%d", len(free))
            unused: list[Segment] = []
            for n, (header, trailer) in enumerate(edges):
                segment = self._table.segments[first + n]
                if not self._classify(
                    segment, header, trailer, heads[n], tails[n], sealed, to_scan
                ):
                    await self._look_again(segment, sealed, to_scan)
                if header is None and segment.state is SegmentState.FREE:
                    unused.append(segment)
            await self._look_behind(unused)
        to_scan += await self._read_footers(sealed)
        await self._read_tombstones()
        await self._scan(to_scan)
        self._collect_free()
        self._build()
        self._table.restock()
        return self._found

    def _classify(
        self,
        segment: Segment,
        header: SegmentHeader | None,
        trailer: Trailer | None,
        head: bytes | None,
        tail: bytes | None,
        sealed: list[Trailer],
        to_scan: list[tuple[Segment, int]],
    ) -> bool:
        """See DATA_FILE.md, "Opening". False when both edges were read and neither is one."""
        if header is not None and header.state is HeaderState.FREE:
            segment.sequence = header.sequence
            return True
        if trailer is not None and (header is None or header.sequence == trailer.sequence):
            self._adopt(segment, SegmentState.SEALED, trailer.stream, trailer.sequence)
            sealed.append(trailer)
        elif header is not None:
            self._adopt(segment, SegmentState.SEALED, header.stream, header.sequence)
            last = None if tail is None else decode_header(self._superblock, segment.index, tail)
            if last is not None and last.sequence >= header.sequence:
                self._found.to_free.append(segment)  # its end says that it was
            else:
                to_scan.append((segment, header.sequence))
        elif head is None or tail is None:
            self._adopt(segment, SegmentState.CONDEMNED, NO_STREAM, 0)
            self._leave_alone(segment)
        else:
            return not any(head)  # never used
        return True

    async def _look_again(
        self, segment: Segment, sealed: list[Trailer], to_scan: list[tuple[Segment, int]]
    ) -> None:
        """A segment without edges is lost, unless it was the read that was wrong."""
        start = self._superblock.segment_at(segment.index)
        end = start + self._superblock.segment_bytes - BLOCK
        head, tail = await self._looking.blocks([start, end])
        ((header, trailer),) = decode_edges(self._superblock, segment.index, [head], [tail])
        if not self._classify(segment, header, trailer, head, tail, sealed, to_scan):
            self._report.segments_damaged += 1
            if not await self._salvage(segment):
                self._adopt(segment, SegmentState.SEALED, NO_STREAM, 0)
                self._found.to_free.append(segment)

    async def _look_behind(self, unused: Sequence[Segment]) -> None:
        """A first block of zeros is that of a segment never used; but where a record follows it,
        the header was lost, with the power or later."""
        places = [self._superblock.segment_at(segment.index) + BLOCK for segment in unused]
        blocks = await self._looking.blocks(places)
        for segment, block in zip(unused, blocks, strict=True):
            if block and decode_record_header(block, self._superblock.check_key) is not None:
                await self._salvage(segment)

    async def _salvage(self, segment: Segment) -> bool:
        """Removals in a segment without edges count all the same; with such it is freed as one that
        failed, by an eviction, which carries them on. False when there are none."""
        start, size = self._superblock.segment_at(segment.index), self._superblock.segment_bytes
        buffer, found, whole = aligned_buffer(size), Salvage(), True
        for _ in range(2):  # what is not found now is freed: ask twice
            whole &= await self._read_whole(start, buffer)
            again = await self._compute.run(salvage, self._superblock, segment.index, buffer)
            found = found.with_found(again)
        self._log.warning(
            "event=segment_without_edges segment=%d removals=%d effect=its_blocks_are_gone",
            segment.index, sum(map(len, found.tombstones)),
        )  # fmt: skip
        if whole and not found.tombstones:
            return False
        self._adopt(segment, SegmentState.CONDEMNED, NO_STREAM, found.sequence)
        segment.shadows = True
        segment.tombstone_offsets = found.offsets
        self._tombstones += found.tombstones
        if not whole:
            self._leave_alone(segment)
        return True

    async def _read_footers(self, trailers: list[Trailer]) -> list[tuple[Segment, int]]:
        """Take rows from intact tables; returns the segments to scan instead."""
        bad: list[tuple[Segment, int]] = []
        while trailers:
            batch: list[tuple[Trailer, int, int]] = []
            size = 0
            while trailers and (not batch or size < RECOVERY_BATCH_BYTES):
                trailer = trailers.pop()
                end = size + footer_bytes(trailer.rows) - BLOCK
                batch.append((trailer, size, end))
                size = end
            buffer = aligned_buffer(size)
            ops = [
                IoOp(self._superblock.segment_at(t.segment) + t.table_offset, buffer[start:end])
                for t, start, end in batch
                if end > start
            ]
            await self._looking.read(ops)
            tables = await self._compute.run(_decode_tables, self._superblock, batch, buffer)
            for (trailer, _, _), rows in zip(batch, tables, strict=True):
                segment = self._table.segments[trailer.segment]
                if rows is None:
                    bad.append((segment, trailer.sequence))
                    continue
                self._report.segments_from_footer += 1
                segment.used_bytes = trailer.used_bytes
                self._take_rows(segment, rows)
                if segment.tombstone_offsets:
                    others = rows[rows["kind"] == RecordKind.TOMBSTONES]
                    for offset, sealed in zip(
                        segment.tombstone_offsets, others["sealed"].tolist(), strict=True
                    ):
                        self._tombstone_records.append((segment, offset, extent_bytes(sealed)))
        return bad

    def _take_rows(self, segment: Segment, rows: Rows) -> None:
        is_block = rows["kind"] == RecordKind.BLOCK
        blocks, offsets = rows, []
        if not is_block.all():
            blocks = rows[is_block]
            offsets = rows["offset"][rows["kind"] == RecordKind.TOMBSTONES].tolist()
        segment.row_count = len(rows)
        segment.blocks = len(blocks)
        segment.tombstone_offsets = offsets
        if len(blocks):
            self._rows.append(blocks)
            self._where.append((segment.index, segment.sequence, len(blocks)))

    async def _read_tombstones(self) -> None:
        """Fetch the tombstone records that footers list, in batches."""
        todo, self._tombstone_records = self._tombstone_records, []
        while todo:
            batch: list[tuple[Segment, int, int, int]] = []  # offset, start, end
            ops: list[tuple[int, int]] = []
            size = 0
            while todo and (not batch or size < RECOVERY_BATCH_BYTES):
                segment, offset, length = todo.pop()
                base = self._superblock.segment_at(segment.index)
                batch.append((segment, offset, size, size + length))
                ops.append((base + offset * BLOCK, length))
                size += length
            buffer = aligned_buffer(size)
            await self._looking.read(
                [
                    IoOp(at, buffer[start:end])
                    for (at, _), (_, _, start, end) in zip(ops, batch, strict=True)
                ]
            )
            for (at, _), (segment, offset, start, end) in zip(ops, batch, strict=True):
                await self._take_tombstones(at, segment, offset, buffer[start:end])

    async def _take_tombstones(
        self, at: int, segment: Segment, offset: int, record: memoryview
    ) -> None:
        """A record of removals, asked for again where one read of it went wrong: without it, what
        it removed would be served."""
        whole = [True]
        for attempt in range(_TOMBSTONE_READS_MAX):
            if attempt:
                whole = await self._looking.read([IoOp(at, record)])
            entries = tombstones_in(self._superblock, segment.sequence, offset, record)
            if entries is not None:
                self._tombstones.append(entries)
                return
        if not all(whole) and not segment.unread:
            self._leave_alone(segment)
        self._report.records_damaged += 1
        self._tombstones_lost(at, 1)

    def _tombstones_lost(self, at: int, records: int) -> None:
        self._report.tombstones_lost += records
        self._log.error(
            "event=tombstones_lost offset=%d records=%d effect=removed_blocks_may_be_back "
            "hint='forget again what must not be served'", at, records,
        )  # fmt: skip

    async def _scan(self, segments: list[tuple[Segment, int]]) -> None:
        """Search whole segments for records; one segment's bytes in memory at a time."""
        if not segments:
            return
        size = self._superblock.segment_bytes
        buffer = aligned_buffer(size)
        for segment, sequence in segments:
            scan, whole = held, _ = await self._scan_once(segment, sequence, buffer)
            if whole:
                # What is not found now is freed, or left out of the footer: ask twice.
                held, whole = await self._scan_once(segment, sequence, buffer)
                scan = scan.with_found(held)
            self._report.segments_scanned += 1
            self._report.records_damaged += scan.damaged
            if scan.tombstones_lost:
                self._tombstones_lost(
                    self._superblock.segment_at(segment.index), scan.tombstones_lost
                )
            self._tombstones += scan.tombstones
            table = bytes(scan.table)
            self._take_rows(segment, np.frombuffer(table, dtype=ROW))
            segment.used_bytes = scan.used_bytes
            if held.table:  # what `buffer` has
                place = (self._superblock, (segment.index, sequence))
                whole &= await renew_records(self._device, *place, buffer, held.table)
            if not whole:
                self._leave_alone(segment)
            elif not segment.row_count:
                self._found.to_free.append(segment)
            else:
                segment.rows = scan.table
                segment.footer_due = True
                self._found.to_footer.append(segment)
            self._log.info(
                "event=segment_scanned segment=%d records=%d damaged=%d",
                segment.index, segment.row_count, scan.damaged,
            )  # fmt: skip

    async def _scan_once(
        self, segment: Segment, sequence: int, buffer: memoryview
    ) -> tuple[Scan, bool]:
        """What is in a segment, and whether the device gave all of it."""
        whole = await self._read_whole(self._superblock.segment_at(segment.index), buffer)
        scan = await self._compute.run(scan_segment, self._superblock, sequence, buffer)
        return scan, whole

    async def _read_whole(self, start: int, buffer: memoryview) -> bool:
        size = len(buffer)
        ops = [
            IoOp(start + at, buffer[at : min(size, at + _SCAN_OP_BYTES)])
            for at in range(0, size, _SCAN_OP_BYTES)
        ]
        return all(await self._looking.read(ops))

    def _leave_alone(self, segment: Segment) -> None:
        """The device refuses parts of it now: what is there may be read at another opening."""
        segment.state = SegmentState.CONDEMNED
        segment.shadows = segment.hides = segment.unread = True
        self._report.segments_unreadable += 1

    def _build(self) -> None:
        """Decide which records live and put them into the index."""
        tombstones = joined(self._tombstones)
        self._tombstones.clear()
        self._report.tombstones = len(tombstones)
        if not self._rows:
            return
        # As plain bytes: numpy would work out the common type of the rows field by field.
        rows = np.concatenate([part.view(_ROW_RAW) for part in self._rows]).view(ROW)
        counts = [count for _, _, count in self._where]
        segment: U32 = np.repeat(np.array([s for s, _, _ in self._where], np.uint32), counts)
        sequence: U64 = np.repeat(np.array([q for _, q, _ in self._where], np.uint64), counts)
        self._rows.clear()
        raw = self._superblock.check_key
        multipliers = np.frombuffer(raw, np.uint64) | np.uint64(1)
        resolved = resolve(rows, segment, sequence, tombstones, multipliers)
        self._report.duplicates = resolved.duplicates
        self._table.doubt(rows[row].tobytes()[:NAME_BYTES] for row in resolved.older)
        for number in resolved.shadowed:
            self._table.segments[number].shadows = True
        alive = resolved.alive
        surplus = len(alive) - self._index.capacity
        if surplus > 0:
            self._report.blocks_dropped = surplus
            self._table.doubt(rows[row].tobytes()[:NAME_BYTES] for row in alive[:surplus])
            for number in np.unique(segment[alive[:surplus]]).tolist():
                self._table.segments[number].shadows = True
                self._table.segments[number].hides = True
            alive = alive[surplus:]
        live = rows[alive]
        slots = self._index.insert_many(
            self._intern(live),
            np.ascontiguousarray(live["key0"]),
            np.ascontiguousarray(live["key1"]),
            segment=segment[alive],
            offset=live["offset"],
            sealed_bytes=live["sealed"],
            plain_bytes=live["plain"],
            position=live["position"],
        )
        self._assign(slots)

    def _intern(self, rows: Rows) -> U32:
        """Namespace numbers of rows, one dictionary look-up per distinct namespace."""
        pairs = np.empty((len(rows), 2), np.uint64)
        pairs[:, 0], pairs[:, 1] = rows["ns0"], rows["ns1"]
        names = np.ascontiguousarray(pairs).view("V16").ravel()
        firsts, inverse = distinct(pairs)
        numbers = [self._index.intern(names[row].tobytes()) for row in firsts]
        return np.array(numbers, np.uint32)[inverse]

    def _assign(self, slots: Slots) -> None:
        """Tell every segment which blocks live in it. `slots` in order of appending or place."""
        index = self._index
        self._report.blocks = len(slots)
        if not len(slots):
            return
        where = index.segment[slots]
        order = np.argsort(where, kind="stable")
        slots, where = slots[order], where[order]
        starts = np.flatnonzero(np.diff(where.astype(np.int64), prepend=-1))
        ends = np.append(starts[1:], len(slots))
        sizes = (
            index.sealed_bytes[slots].astype(np.int64) + RECORD_HEADER_BYTES + BLOCK - 1
        ) & -BLOCK
        touch = index.last_touch[slots]
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            segment = self._table.segments[int(where[start])]
            segment.slots = array("I", slots[start:end].astype(np.uint32).tobytes())
            segment.live_blocks = end - start
            segment.live_bytes = int(sizes[start:end].sum())
            segment.last_touch = int(touch[start:end].max())
            segment.oldest_touch = int(touch[start:end].min())

    # -- small things

    def _adopt(self, segment: Segment, state: SegmentState, stream: bytes, sequence: int) -> None:
        segment.reset(state, stream, sequence)
        segment.header_written = True

    def _collect_free(self) -> None:
        for segment in self._table.segments:
            if segment.state is SegmentState.FREE:
                self._table.free.append(segment.index)
        self._report.segments = len(self._table.segments)


def _decode_tables(
    superblock: Superblock, batch: list[tuple[Trailer, int, int]], buffer: memoryview
) -> list[Rows | None]:
    return [decode_table(superblock, trailer, buffer[start:end]) for trailer, start, end in batch]
