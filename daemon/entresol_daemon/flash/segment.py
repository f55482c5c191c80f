"""The data file's bytes: segment header, records, footer, scan. Pure functions.

DATA_FILE.md is the specification; this file, tombstones.py and superblock.py implement it, alone.
Invariants: nothing decodes unless its check matches; checks are keyed with a random secret of the
file, so bytes that a tenant chose can never pass for a structure of ours; no decoder raises.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import struct
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import xxhash

from entresol_daemon.flash.device import BLOCK, round_up
from entresol_daemon.flash.superblock import (
    DATA_OFFSET,
    FORMAT_VERSION,
    RECORD_HEADER_BYTES,
    SEGMENT_BYTES_MAX,
    SEGMENT_BYTES_MIN,
    SEGMENTS_MIN,
    Superblock,
    block_is_valid,
    choose_superblock,
    close_block,
    decode_superblock,
    encode_superblock,
    version_of,
)
from entresol_daemon.flash.tombstones import Tombstones, decode_tombstones

__all__ = [
    "DATA_OFFSET",
    "FORMAT_VERSION",
    "RECORD_HEADER_BYTES",
    "SEGMENTS_MIN",
    "SEGMENT_BYTES_MAX",
    "SEGMENT_BYTES_MIN",
    "Superblock",
    "choose_superblock",
    "decode_superblock",
    "encode_superblock",
    "version_of",
]

ROW_BYTES = 64
RECORD_MAGIC = 0x52544E45  # "ENTR"
SEGMENT_MAGIC = b"ENTRSEGM"

_TRAILER_MAGIC = b"ENTRTRLR"
_SEGMENT = struct.Struct("<8sII16sIIQ16s")
_TRAILER = struct.Struct("<8sII16sIIQ16sQQQ16s")
_RECORD = struct.Struct("<IBBHQQII16s16sIIQQ")
_RECORD_CHECK = struct.Struct("<8s")

# One row of a footer table, also the shape in which recovery handles records.
ROW = np.dtype(
    [
        ("ns0", "<u8"),
        ("ns1", "<u8"),
        ("key0", "<u8"),
        ("key1", "<u8"),
        ("lsn", "<u8"),
        ("offset", "<u4"),  # in blocks from the segment's start
        ("sealed", "<u4"),
        ("plain", "<u4"),
        ("position", "<u4"),
        ("kind", "<u4"),
        ("reserved", "<u4"),
    ]
)
_ROW = struct.Struct("<16s16sQIIIIII")
Rows = npt.NDArray[np.void]

assert ROW.itemsize == _ROW.size == ROW_BYTES
assert _RECORD.size + _RECORD_CHECK.size == RECORD_HEADER_BYTES


class HeaderState(enum.IntEnum):
    """State field of a segment's first block."""

    FREE = 1
    OPEN = 2  # open or sealed: the trailer tells


class RecordKind(enum.IntEnum):
    """What a record's payload is."""

    BLOCK = 1
    TOMBSTONES = 2


# -- segment header and trailer


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """First block of a segment (and, in a free one, also its last)."""

    state: HeaderState
    segment: int
    sequence: int
    stream: bytes


@dataclass(frozen=True, slots=True)
class Trailer:
    """Last block of a sealed segment: where its footer table is and what it hashes to."""

    segment: int
    sequence: int
    stream: bytes
    rows: int
    table_offset: int  # bytes from the segment's start
    used_bytes: int  # end of the last record
    table_check: bytes

    @property
    def table_bytes(self) -> int:
        """Length of the table, without padding."""
        return self.rows * ROW_BYTES


def encode_header(superblock: Superblock, header: SegmentHeader) -> bytes:
    """A whole block."""
    fields = _SEGMENT.pack(
        SEGMENT_MAGIC,
        FORMAT_VERSION,
        header.state,
        superblock.uuid,
        header.segment,
        0,
        header.sequence,
        header.stream,
    )
    return close_block(fields, superblock.check_key, b"entresol-segm")


def decode_header(superblock: Superblock, segment: int, block: bytes) -> SegmentHeader | None:
    """The header, or None unless it is intact and belongs to this segment of this file."""
    if block[:8] != SEGMENT_MAGIC or not block_is_valid(
        block, superblock.check_key, b"entresol-segm"
    ):
        return None
    _, version, state, uuid, found, _, sequence, stream = _SEGMENT.unpack_from(block)
    if version != FORMAT_VERSION or uuid != superblock.uuid or found != segment:
        return None
    if state not in (HeaderState.FREE, HeaderState.OPEN):
        return None
    return SegmentHeader(HeaderState(state), segment, sequence, stream)


def footer_bytes(rows: int) -> int:
    """Bytes at a segment's end that a footer of `rows` rows needs: table and trailer."""
    return ((rows * ROW_BYTES + BLOCK - 1) & -BLOCK) + BLOCK


def record_bytes_max(segment_bytes: int) -> int:
    """Longest record extent that fits a segment."""
    return segment_bytes - BLOCK - footer_bytes(1)


def encode_footer(
    superblock: Superblock,
    segment: int,
    sequence: int,
    stream: bytes,
    used_bytes: int,
    table: bytes,
) -> tuple[int, bytes]:
    """The table, padded, and the trailer; returns (offset in the segment, bytes)."""
    rows = len(table) // ROW_BYTES
    total = footer_bytes(rows)
    table_offset = superblock.segment_bytes - total
    fields = _TRAILER.pack(
        _TRAILER_MAGIC,
        FORMAT_VERSION,
        0,
        superblock.uuid,
        segment,
        rows,
        sequence,
        stream,
        table_offset,
        rows * ROW_BYTES,
        used_bytes,
        _table_check(superblock, sequence, table),
    )
    trailer = close_block(fields, superblock.check_key, b"entresol-trlr")
    return table_offset, table.ljust(total - BLOCK, b"\0") + trailer


def decode_trailer(superblock: Superblock, segment: int, block: bytes) -> Trailer | None:
    """The trailer, or None unless it is intact and belongs to this segment of this file."""
    if block[:8] != _TRAILER_MAGIC or not block_is_valid(
        block, superblock.check_key, b"entresol-trlr"
    ):
        return None
    fields = _TRAILER.unpack_from(block)
    _, version, _, uuid, found, rows, sequence, stream, table_offset, table_bytes, used, check = (
        fields
    )
    if version != FORMAT_VERSION or uuid != superblock.uuid or found != segment:
        return None
    if table_bytes != rows * ROW_BYTES or used > table_offset:
        return None
    if table_offset + footer_bytes(rows) != superblock.segment_bytes:
        return None
    return Trailer(segment, sequence, stream, rows, table_offset, used, check)


def decode_table(superblock: Superblock, trailer: Trailer, raw: bytes | memoryview) -> Rows | None:
    """The rows (a copy), or None when they are not what the trailer hashed."""
    table = bytes(raw[: trailer.table_bytes])
    check = _table_check(superblock, trailer.sequence, table)
    if len(table) != trailer.table_bytes or not hmac.compare_digest(check, trailer.table_check):
        return None
    return np.frombuffer(table, dtype=ROW)


def _table_check(superblock: Superblock, sequence: int, table: bytes) -> bytes:
    mac = hashlib.blake2b(digest_size=16, key=superblock.check_key, person=b"entresol-table")
    mac.update(sequence.to_bytes(8, "little"))
    mac.update(table)
    return mac.digest()


# -- records


# Not frozen, because one is made per block: a frozen one takes several times as long.
@dataclass(slots=True)
class RecordHeader:
    """First RECORD_HEADER_BYTES of a record. `offset` counts blocks from the segment's start."""

    kind: RecordKind
    sequence: int
    lsn: int
    offset: int
    sealed_bytes: int
    namespace_id: bytes
    wire_key: bytes
    plain_bytes: int
    position: int
    payload_hash: int

    @property
    def extent_bytes(self) -> int:
        """Length on flash, padding included."""
        return extent_bytes(self.sealed_bytes)

    def row(self) -> bytes:
        """This record's row of the footer table."""
        return pack_row(
            self.namespace_id,
            self.wire_key,
            self.lsn,
            self.offset,
            self.sealed_bytes,
            self.plain_bytes,
            self.position,
            self.kind,
        )


def extent_bytes(sealed_bytes: int) -> int:
    """Length of the record of `sealed_bytes`: header, bytes, padding to whole blocks."""
    return round_up(RECORD_HEADER_BYTES + sealed_bytes)


def pack_row(
    namespace_id: bytes,
    wire_key: bytes,
    lsn: int,
    offset: int,
    sealed_bytes: int,
    plain_bytes: int,
    position: int,
    kind: int,
) -> bytes:
    """One footer row."""
    return _ROW.pack(
        namespace_id, wire_key, lsn, offset, sealed_bytes, plain_bytes, position, kind, 0
    )


def payload_hash(extent: bytes | memoryview, sealed_bytes: int) -> int:
    """xxh3-64 over the sealed bytes of an extent. Runs without the interpreter lock."""
    end = RECORD_HEADER_BYTES + sealed_bytes
    return sealed_hash(memoryview(extent)[RECORD_HEADER_BYTES:end])


def sealed_hash(sealed: memoryview) -> int:
    """The same, over these bytes."""
    return xxhash.xxh3_64_intdigest(sealed)


def encode_record_header(header: RecordHeader, check_key: bytes) -> bytes:
    """The header's bytes with their keyed check."""
    fields = _RECORD.pack(
        RECORD_MAGIC,
        FORMAT_VERSION,
        header.kind,
        0,
        header.sequence,
        header.lsn,
        header.offset,
        header.sealed_bytes,
        header.namespace_id,
        header.wire_key,
        header.plain_bytes,
        header.position,
        header.payload_hash,
        0,
    )
    return fields + _record_check(fields, check_key)


def lsn_of(extent: memoryview) -> int:
    """The log number of a record that was verified."""
    return int.from_bytes(extent[16:24], "little")


def encode_record_head(
    kind: RecordKind,
    sequence: int,
    offset: int,
    sealed_bytes: int,
    namespace_id: bytes,
    wire_key: bytes,
    plain_bytes: int,
    position: int,
) -> bytes:
    """A header's bytes with zeros for what only the flash knows: LSN, payload hash and check."""
    return _RECORD.pack(
        RECORD_MAGIC, FORMAT_VERSION, kind, 0, sequence, 0, offset, sealed_bytes, namespace_id,
        wire_key, plain_bytes, position, 0, 0,
    ) + bytes(_RECORD_CHECK.size)  # fmt: skip


def decode_record_header(raw: bytes | memoryview, check_key: bytes) -> RecordHeader | None:
    """The header at the start of `raw`, or None unless it is intact and of this file."""
    if len(raw) < RECORD_HEADER_BYTES:
        return None
    fields = bytes(raw[: _RECORD.size])
    check = bytes(raw[_RECORD.size : RECORD_HEADER_BYTES])
    magic, version, kind, _, sequence, lsn, offset, sealed, ns, key, plain, position, digest, _ = (
        _RECORD.unpack(fields)
    )
    if magic != RECORD_MAGIC or version != FORMAT_VERSION:
        return None
    if not hmac.compare_digest(check, _record_check(fields, check_key)):
        return None
    if kind not in (RecordKind.BLOCK, RecordKind.TOMBSTONES):
        return None
    return RecordHeader(
        RecordKind(kind), sequence, lsn, offset, sealed, ns, key, plain, position, digest
    )


def _record_check(fields: bytes, check_key: bytes) -> bytes:
    return hashlib.blake2b(fields, digest_size=8, key=check_key, person=b"entresol-recd").digest()


# -- scan of a segment without footer


@dataclass(slots=True)
class Scan:
    """What a scan found: `table` as a footer would list it, `tombstones` decoded."""

    table: bytearray = field(default_factory=bytearray)
    tombstones: list[Tombstones] = field(default_factory=list)  # a part for each record
    tombstone_offsets: list[int] = field(default_factory=list)  # in blocks
    used_bytes: int = BLOCK
    damaged: int = 0  # intact headers whose payload is not what was written
    tombstones_lost: int = 0  # of these, records of removals

    def with_found(self, other: Scan) -> Scan:
        """What either of two scans of one segment found: a read that went wrong hides records."""
        rows: dict[int, bytes] = {}
        tombstones: dict[int, Tombstones] = {}
        for scan in (other, self):
            table = bytes(scan.table)
            offsets = np.frombuffer(table, ROW)["offset"].tolist()
            rows |= {
                offset: table[ROW_BYTES * n : ROW_BYTES * (n + 1)]
                for n, offset in enumerate(offsets)
            }
            tombstones |= zip(scan.tombstone_offsets, scan.tombstones, strict=True)
        return Scan(
            bytearray(b"".join(rows[offset] for offset in sorted(rows))),
            [tombstones[offset] for offset in sorted(tombstones)],
            sorted(tombstones),
            max(self.used_bytes, other.used_bytes),
            min(self.damaged, other.damaged),
            min(self.tombstones_lost, other.tombstones_lost),
        )


def scan_segment(superblock: Superblock, sequence: int, raw: memoryview) -> Scan:
    """Find every intact record of `sequence` in a whole segment's bytes.

    A record with an intact header and a bad payload is skipped by its length (records of one
    sequence never overlap); anything else is searched block by block for the next header.
    """
    found = Scan()
    heads = np.frombuffer(raw, dtype="<u4").reshape(-1, BLOCK // 4)
    starts = np.flatnonzero((heads[:, 0] == RECORD_MAGIC) & (heads[:, 2] == sequence & 0xFFFFFFFF))
    limit = superblock.segment_bytes - footer_bytes(1)
    end = BLOCK
    for block in starts.tolist():
        at = block * BLOCK
        if at < end:
            continue
        header = decode_record_header(raw[at : at + RECORD_HEADER_BYTES], superblock.check_key)
        if header is None or header.sequence != sequence or header.offset != block:
            continue
        if at + header.extent_bytes > limit:
            continue
        end = at + header.extent_bytes
        extent = raw[at:end]
        if payload_hash(extent, header.sealed_bytes) != header.payload_hash:
            found.damaged += 1
            found.tombstones_lost += header.kind is RecordKind.TOMBSTONES
            continue
        found.table += header.row()
        found.used_bytes = end
        if header.kind is RecordKind.TOMBSTONES:
            tail = RECORD_HEADER_BYTES + header.sealed_bytes
            found.tombstones.append(decode_tombstones(extent[RECORD_HEADER_BYTES:tail]))
            found.tombstone_offsets.append(block)
    return found


def tombstones_in(
    superblock: Superblock, sequence: int, offset: int, raw: memoryview
) -> Tombstones | None:
    """The tombstones of a record read whole, None when it does not verify."""
    header = decode_record_header(raw, superblock.check_key)
    if (
        header is None
        or header.kind is not RecordKind.TOMBSTONES
        or (header.sequence, header.offset) != (sequence, offset)
        or header.extent_bytes != raw.nbytes
        or payload_hash(raw, header.sealed_bytes) != header.payload_hash
    ):
        return None
    return decode_tombstones(raw[RECORD_HEADER_BYTES : RECORD_HEADER_BYTES + header.sealed_bytes])
