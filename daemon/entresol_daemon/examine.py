"""Examines a data file without keys and without writing.

It reads what recovery reads, and then everything else: superblock, segments, footers, each record's
header and payload hash, the plain header of each sealed block, and which blocks are alive.

Invariants: the file is opened read-only; a daemon that wants to start is never kept from it (its
lock is tried and given back at once); what does not verify is counted, never believed.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import stat
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from entresol_daemon.flash.device import BLOCK, Check, IoOp, aligned_buffer, checked
from entresol_daemon.flash.opening import check_fit, read_superblock
from entresol_daemon.flash.resolve import resolve
from entresol_daemon.flash.salvaging import salvage
from entresol_daemon.flash.segment import (
    RECORD_HEADER_BYTES,
    ROW,
    HeaderState,
    RecordHeader,
    RecordKind,
    Rows,
    Superblock,
    Trailer,
    decode_header,
    decode_record_header,
    decode_table,
    decode_trailer,
    payload_hash,
    scan_segment,
)
from entresol_daemon.flash.tombstones import Tombstones, decode_tombstones, joined
from entresol_proto.ids import short
from entresol_proto.seal import codecs
from entresol_proto.seal.block import SealedHeader
from entresol_proto.seal.dtypes import DType
from entresol_proto.status import DeviceError, FormatError, SealError, Status

READ_BYTES_MAX = 8 << 20  # one pread
GOOD, BAD_HEADER, BAD_PAYLOAD, BAD_SEAL, UNREADABLE, UNREAD = range(6)
VERDICTS = ("good", "bad header", "bad payload", "bad sealed header", "unreadable", "not read")
# What a record's payload says of itself, as kept per record: a thousand million are possible.
SEAL = np.dtype(
    [
        ("codec", "u1"), ("dtype", "u1"), ("host_sealed", "u1"), ("known", "u1"),
        ("chunks", "<u4"), ("dek", "<u4"), ("removals", "<u4"),
    ]
)  # fmt: skip
_SEAL = struct.Struct("<BBBBIII")
NO_SEAL = bytes(SEAL.itemsize)


class ReadOnlyFile:
    """A `flash.device.Device` that cannot write."""

    direct = False

    def __init__(self, path: Path) -> None:
        """Raises: DeviceError."""
        self.name = str(path)
        try:
            # A pipe would wait for its writer.
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise DeviceError(
                f"cannot open {path}: {error.strerror}", status=Status.BAD_REQUEST
            ) from None
        mode = os.fstat(self._fd).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISBLK(mode)):
            os.close(self._fd)
            raise DeviceError(
                f"{path} is not a regular file or block device", status=Status.BAD_REQUEST
            )
        self.size_bytes = os.lseek(self._fd, 0, os.SEEK_END)

    def in_use(self) -> bool:
        """True while a daemon holds the file. Never holds its lock for longer than this call."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return False

    def fill(self, offset_bytes: int, view: memoryview) -> bool:
        """Read; False when any byte is missing."""
        done = 0
        try:
            while done < len(view):
                part = view[done : done + READ_BYTES_MAX]
                count = os.preadv(self._fd, [part], offset_bytes + done)
                if not count:
                    return False
                done += count
        except OSError:
            return False
        return True

    def forget(self, offset_bytes: int, length_bytes: int) -> None:
        """Leave no trace in the page cache."""
        os.posix_fadvise(self._fd, offset_bytes, length_bytes, os.POSIX_FADV_DONTNEED)

    async def read(self, ops: Sequence[IoOp], check: Check | None = None) -> list[Status]:
        filled = [self.fill(op.offset_bytes, op.view) for op in ops]
        return checked([Status.OK if one else Status.IO_ERROR for one in filled], check)

    async def write(self, ops: Sequence[IoOp]) -> None:
        raise AssertionError("an examiner never writes")

    async def flush(self) -> None:
        raise AssertionError("an examiner never writes")

    async def close(self) -> None:
        """Release the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@dataclass(slots=True)
class SegmentFacts:
    """One segment as found."""

    segment: int
    state: str  # free, never used, no header, sealed, open, damaged, unreadable
    sequence: int = 0
    stream: str = ""
    source: str = ""  # footer or scan
    records: int = 0
    blocks: int = 0
    live_blocks: int = 0
    live_bytes: int = 0
    damaged: int = 0
    note: str = ""


@dataclass(slots=True)
class Findings:
    """Everything about one file."""

    path: str
    superblock: Superblock
    copies: int
    in_use: bool
    quick: bool
    segments: list[SegmentFacts] = field(default_factory=list)
    rows: list[Rows] = field(default_factory=list)
    row_segments: array[int] = field(default_factory=lambda: array("I"))
    verdicts: bytearray = field(default_factory=bytearray)
    seals: bytearray = field(default_factory=bytearray)  # SEAL of each, when records are listed
    tombstones: list[Tombstones] = field(default_factory=list)
    alive: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    duplicates: int = 0

    @property
    def damaged(self) -> int:
        """Records and segments that are not what was written."""
        bad_segments = sum(s.state in ("damaged", "unreadable") for s in self.segments)
        return bad_segments + sum(s.damaged for s in self.segments)


class Examiner:
    """One walk over one file."""

    def __init__(self, device: ReadOnlyFile, found: Findings, *, list_records: bool) -> None:
        self._device = device
        self._found = found
        self._superblock = found.superblock
        self._list = list_records
        self._buffer = aligned_buffer(found.superblock.segment_bytes)

    def walk(self, progress: Callable[[int, int], None]) -> None:
        """Fill the findings; `progress` hears of segments done and their number."""
        count = self._superblock.segment_count
        for number in range(count):
            facts = self._segment(number)
            self._found.segments.append(facts)
            start = self._superblock.segment_at(number)
            self._device.forget(start, self._superblock.segment_bytes)
            progress(number + 1, count)
        self._resolve()

    def _segment(self, number: int) -> SegmentFacts:
        """Decide what a segment is, as recovery does, and read its records."""
        start, size = self._superblock.segment_at(number), self._superblock.segment_bytes
        head, tail = bytearray(BLOCK), bytearray(BLOCK)
        head_read = self._device.fill(start, memoryview(head))
        tail_read = self._device.fill(start + size - BLOCK, memoryview(tail))
        header = decode_header(self._superblock, number, bytes(head)) if head_read else None
        trailer = decode_trailer(self._superblock, number, bytes(tail)) if tail_read else None
        last = decode_header(self._superblock, number, bytes(tail)) if tail_read else None
        if header is not None and (
            header.state is HeaderState.FREE
            or (last is not None and last.sequence >= header.sequence)
        ):
            return SegmentFacts(number, "free", header.sequence)
        if trailer is not None and (header is None or header.sequence == trailer.sequence):
            facts = SegmentFacts(number, "sealed", trailer.sequence, short(trailer.stream))
            if header is None:
                facts.note = "its header is damaged; the footer tells"
                facts.damaged += 1
            self._sealed(facts, trailer)
            return facts
        if header is not None:
            facts = SegmentFacts(number, "open", header.sequence, short(header.stream))
            self._scan(facts)
            return facts
        if not head_read or not tail_read:
            return SegmentFacts(number, "unreadable", note="the device refuses its edges")
        if not any(head) and not self._has_record(start + BLOCK):
            return SegmentFacts(number, "never used")
        facts = SegmentFacts(number, "damaged", note="neither header nor footer verify")
        if not any(head):  # perhaps the power failed before its first group was flushed
            facts.state, facts.note = "no header", "zeros, and a record behind them"
        self._salvage(facts)
        return facts

    def _has_record(self, offset_bytes: int) -> bool:
        head, key = aligned_buffer(BLOCK), self._superblock.check_key
        return self._device.fill(offset_bytes, head) and bool(decode_record_header(head, key))

    def _salvage(self, facts: SegmentFacts) -> None:
        """Removals count without the edges of their segment."""
        if self._device.fill(self._superblock.segment_at(facts.segment), self._buffer):
            found = salvage(self._superblock, facts.segment, self._buffer)
            self._found.tombstones += found.tombstones

    def _sealed(self, facts: SegmentFacts, trailer: Trailer) -> None:
        """A segment with a footer: its table, and every record that the table names."""
        start = self._superblock.segment_at(facts.segment)
        table = aligned_buffer(max(BLOCK, trailer.table_bytes))
        table_read = self._device.fill(start + trailer.table_offset, table[: trailer.table_bytes])
        rows = decode_table(self._superblock, trailer, table) if table_read else None
        if rows is None:
            facts.note = "its record table is damaged; records were searched for"
            facts.damaged += 1
            self._scan(facts)
            return
        facts.source = "footer"
        whole = not self._found.quick and self._device.fill(start, self._buffer)
        for row in rows:
            at = int(row["offset"]) * BLOCK
            verdict, seal = UNREAD, NO_SEAL
            if whole:
                verdict, seal = self._verify(self._buffer[at:], facts, row)
            elif not self._found.quick or int(row["kind"]) == RecordKind.TOMBSTONES:
                extent = self._read_record(start + at, row)
                verdict = UNREADABLE
                if extent is not None:
                    verdict, seal = self._verify(extent, facts, row)
            facts.damaged += verdict not in (GOOD, UNREAD)
            self._found.verdicts.append(verdict)
            if self._list:
                self._found.seals += seal
        self._take(facts, rows)

    def _read_record(self, offset_bytes: int, row: np.void) -> memoryview | None:
        length = (RECORD_HEADER_BYTES + int(row["sealed"]) + BLOCK - 1) & -BLOCK
        if length > self._superblock.segment_bytes:
            return None
        extent = self._buffer[:length]
        return extent if self._device.fill(offset_bytes, extent) else None

    def _verify(self, extent: memoryview, facts: SegmentFacts, row: np.void) -> tuple[int, bytes]:
        """Whether a record is the one its row names, and what its plain header says."""
        header = decode_record_header(extent, self._superblock.check_key)
        if header is None or not _is_row(header, row, facts.sequence):
            return BAD_HEADER, NO_SEAL
        end = RECORD_HEADER_BYTES + header.sealed_bytes
        if end > len(extent) or payload_hash(extent, header.sealed_bytes) != header.payload_hash:
            return BAD_PAYLOAD, NO_SEAL
        payload = extent[RECORD_HEADER_BYTES:end]
        if header.kind is RecordKind.TOMBSTONES:
            entries = decode_tombstones(payload)
            self._found.tombstones.append(entries)
            return GOOD, _SEAL.pack(0, 0, 0, 0, 0, 0, len(entries))
        return _seal(payload, header)

    def _scan(self, facts: SegmentFacts) -> None:
        """A segment without a footer: search it."""
        facts.source = "scan"
        start = self._superblock.segment_at(facts.segment)
        if not self._device.fill(start, self._buffer):
            facts.state, facts.note = "unreadable", "the device refuses some of it"
            return
        scan = scan_segment(self._superblock, facts.sequence, self._buffer)
        rows: Rows = np.frombuffer(bytes(scan.table), dtype=ROW)
        facts.damaged += scan.damaged
        self._found.tombstones += scan.tombstones
        for row in rows:
            verdict, seal = GOOD, NO_SEAL
            if int(row["kind"]) == RecordKind.BLOCK:  # the scan has verified header and payload
                at = int(row["offset"]) * BLOCK + RECORD_HEADER_BYTES
                payload = self._buffer[at : at + int(row["sealed"])]
                verdict, seal = _seal(payload, row)
            facts.damaged += verdict != GOOD
            self._found.verdicts.append(verdict)
            if self._list:
                self._found.seals += seal
        self._take(facts, rows)

    def _take(self, facts: SegmentFacts, rows: Rows) -> None:
        facts.records = len(rows)
        facts.blocks = int(np.count_nonzero(rows["kind"] == RecordKind.BLOCK))
        self._found.rows.append(rows)
        self._found.row_segments.extend([facts.segment] * len(rows))

    def _resolve(self) -> None:
        """Which blocks are alive: the newest intact copy that nothing removed."""
        found = self._found
        if not found.rows:
            return
        rows = np.concatenate(found.rows)
        segments = np.frombuffer(found.row_segments, np.uint32)
        verdicts = np.frombuffer(bytes(found.verdicts), np.uint8)
        usable = (rows["kind"] == RecordKind.BLOCK) & ((verdicts == GOOD) | (verdicts == UNREAD))
        numbers = np.flatnonzero(usable)
        sequences = np.array([facts.sequence for facts in found.segments], np.uint64)
        multipliers = np.frombuffer(self._superblock.check_key, np.uint64) | np.uint64(1)
        chosen = rows[numbers]
        where = np.ascontiguousarray(segments[numbers])
        resolved = resolve(chosen, where, sequences[where], joined(found.tombstones), multipliers)
        found.duplicates = resolved.duplicates
        found.alive = np.zeros(len(rows), np.bool_)
        found.alive[numbers[resolved.alive]] = True
        lives = where[resolved.alive]
        counts = np.bincount(lives, minlength=len(found.segments))
        sizes = np.bincount(lives, weights=chosen["sealed"][resolved.alive])
        for number in np.flatnonzero(counts).tolist():
            found.segments[number].live_blocks = int(counts[number])
            found.segments[number].live_bytes = int(sizes[number])


def _is_row(header: RecordHeader, row: np.void, sequence: int) -> bool:
    """Whether a record's header says what the footer's row says."""
    return (
        header.sequence == sequence
        and header.kind == int(row["kind"])
        and header.offset == int(row["offset"])
        and header.lsn == int(row["lsn"])
        and header.sealed_bytes == int(row["sealed"])
        and header.plain_bytes == int(row["plain"])
        and header.namespace_id == pair(row, "ns")
        and header.wire_key == pair(row, "key")
    )


def pair(row: np.void, name: str) -> bytes:
    """A 16-byte id that a row holds as two integers."""
    return b"".join(int(row[f"{name}{n}"]).to_bytes(8, "little") for n in (0, 1))


def _seal(payload: memoryview, record: RecordHeader | np.void) -> tuple[int, bytes]:
    """What the plain header of a sealed block says; it must agree with its record."""
    if isinstance(record, RecordHeader):
        name, key = record.namespace_id, record.wire_key
    else:
        name, key = pair(record, "ns"), pair(record, "key")
    try:
        header = SealedHeader.parse(payload)
        codecs.get(header.codec_id)
    except SealError:
        return BAD_SEAL, NO_SEAL
    if header.namespace_id != name or header.wire_key != key:
        return BAD_SEAL, NO_SEAL
    if header.sealed_bytes != len(payload):
        return BAD_SEAL, NO_SEAL
    return GOOD, _SEAL.pack(
        header.codec_id, header.dtype, header.host_sealed, 1, header.chunk_count,
        header.dek_version, 0,
    )  # fmt: skip


def seals_of(found: Findings) -> npt.NDArray[np.void]:
    """SEAL of every record; of none where records were not listed."""
    return np.frombuffer(found.seals, SEAL)


def seal_words(seal: np.void) -> str:
    """The same for people."""
    if seal["removals"]:
        return f"{int(seal['removals'])} removals"
    if not seal["known"]:
        return ""
    words = f"{codecs.get(int(seal['codec'])).name} {DType(int(seal['dtype'])).label} "
    words += f"chunks={int(seal['chunks'])} dek={int(seal['dek'])}"
    return words + (" host-sealed" if seal["host_sealed"] else "")


def examine(
    path: Path,
    *,
    quick: bool = False,
    list_records: bool = False,
    force: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Findings:
    """Walk over a file. `quick` reads no payloads; `force` reads a file that is in use.

    Raises: DeviceError (BUSY when a daemon uses it), FormatError.
    """
    device = ReadOnlyFile(path)
    try:
        in_use = device.in_use()
        if in_use and not force:
            raise DeviceError(
                f"a daemon uses {path}",
                hint="`entresol inspect` without a path asks it; --force-read-only reads anyway, "
                "and may mix what was with what is",
                status=Status.BUSY,
            )
        superblock, copies, _ = asyncio.run(read_superblock(device))
        if superblock is None:
            raise FormatError(f"{path} is blank: no daemon has used it yet")
        check_fit(device, superblock)
        found = Findings(str(path), superblock, copies, in_use, quick)
        Examiner(device, found, list_records=list_records).walk(progress)
        found.in_use = in_use or device.in_use()
        return found
    finally:
        asyncio.run(device.close())
