"""What is read from the drive: superblocks, segments and their footers, records, checkpoints.

Everything on flash is checked with a key of the file, so these bytes get past the check only where
`fix` puts it right, as a thief who knows the key could. No decoder of segment.py raises.
"""

from __future__ import annotations

import functools
import hashlib
import json
import struct
from contextlib import AbstractContextManager
from dataclasses import replace
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np

from entresol_daemon.flash import checkpoint, segment, superblock
from entresol_daemon.flash.device import BLOCK
from entresol_daemon.flash.segment import (
    HeaderState,
    RecordHeader,
    RecordKind,
    SegmentHeader,
    Superblock,
)
from entresol_daemon.flash.tombstones import (
    TOMBSTONE_BYTES,
    Tombstone,
    TombstoneKind,
    decode_tombstones,
    encode_tombstones,
)
from entresol_proto.status import FormatError
from tests.fuzz.mutate import mutate_tree, to_json
from tests.fuzz.target import Parser, Scratch, Target

SEGMENT = 32 * 1024
SB = Superblock(
    uuid=b"u" * 16, check_key=b"k" * 32, segment_bytes=SEGMENT, segment_count=8,
    mirror_offset=segment.DATA_OFFSET + 8 * SEGMENT, generation=3,
)  # fmt: skip
SEQUENCE = 5
SIGNED = 496  # of an envelope; its check follows


def record(kind: RecordKind, offset: int, payload: bytes, key: bytes = b"w" * 16) -> bytes:
    """A whole record of segment 0 at block `offset`, padded."""
    digest = segment.payload_hash(bytes(segment.RECORD_HEADER_BYTES) + payload, len(payload))
    head = RecordHeader(kind, SEQUENCE, 9, offset, len(payload), b"n" * 16, key, 400, 2, digest)
    raw = segment.encode_record_header(head, SB.check_key) + payload
    return raw.ljust(segment.extent_bytes(len(payload)), b"\0")


def envelope_fix(raw: bytes, person: bytes, key: bytes = SB.check_key) -> bytes:
    """The fields of a block under a right check; the input holds only its first 512 bytes."""
    fields = raw[:SIGNED].ljust(SIGNED, b"\0")
    mac = hashlib.blake2b(fields, digest_size=16, key=key, person=person)
    return fields + mac.digest()


# Superblock ---------------------------------------------------------------------------------------


def superblock_seeds() -> list[bytes]:
    """Both copies, cut to the bytes that matter: clean, not clean, blank, of another version."""
    clean = replace(SB, clean=True, checkpoint_bytes=5)
    pairs = [(SB, SB), (clean, clean), (clean, SB)]
    both = [
        superblock.encode_superblock(first, 0)[:512] + superblock.encode_superblock(second, 1)[:512]
        for first, second in pairs
    ]
    newer = both[0][:8] + b"\2\0\0\0" + both[0][12:]
    return [*both, bytes(1024), newer]


def fix_superblock(rng: Random, raw: bytes) -> bytes:
    """Right checks in both copies, or in one."""
    first, second = raw[:512], raw[512:]
    if rng.random() < 0.8:
        first = envelope_fix(first, b"entresol-super", b"")
    if rng.random() < 0.8:
        second = envelope_fix(second, b"entresol-super", b"")
    return first.ljust(512, b"\0") + second


def superblock_parser() -> Parser:
    """Refused, blank, or sane: the file it describes has room for what it says."""

    def parse(raw: bytes) -> str:
        first, mirror = (part[:512].ljust(BLOCK, b"\0") for part in (raw[:512], raw[512:]))
        try:
            found, agree = superblock.choose_superblock(first, mirror)
        except FormatError as error:
            return f"refused {'version' in str(error)}"
        if found is None:
            assert not any(first)
            return "blank"
        assert segment.SEGMENT_BYTES_MIN <= found.segment_bytes <= segment.SEGMENT_BYTES_MAX
        assert found.segment_count >= segment.SEGMENTS_MIN
        assert found.segment_at(found.segment_count) <= found.mirror_offset
        assert agree or not found.clean, "a clean close is believed on one copy's word"
        return f"ok {agree} {found.clean}"

    return parse


def _one_copy_is_enough(first: bytes, mirror: bytes) -> tuple[Superblock | None, bool]:
    found = [superblock.decode_superblock(first, 0), superblock.decode_superblock(mirror, 1)]
    return next((one for one in found if one is not None), None), False


# Segment header, trailer, table, record header, tombstones ---------------------------------------

_HEADER, _TRAILER, _RECORD, _TOMBSTONES = range(4)


def structure_seeds() -> list[bytes]:
    """`u8 which`, then the structure, blocks cut to their first 512 bytes."""
    head = segment.encode_header(SB, SegmentHeader(HeaderState.OPEN, 0, SEQUENCE, b"t" * 16))
    free = segment.encode_header(SB, SegmentHeader(HeaderState.FREE, 0, SEQUENCE, bytes(16)))
    row = RecordHeader(RecordKind.BLOCK, SEQUENCE, 9, 1, 600, b"n" * 16, b"w" * 16, 400, 2, 1).row()
    _, footer = segment.encode_footer(SB, 0, SEQUENCE, b"t" * 16, 2 * BLOCK, row * 3)
    tombstones = encode_tombstones(
        [Tombstone(kind, b"n" * 16, b"w" * 16, 4, 5) for kind in TombstoneKind]
    )
    return [
        bytes([_HEADER]) + head[:512],
        bytes([_HEADER]) + free[:512],
        bytes([_TRAILER]) + footer[-BLOCK : -BLOCK + 512] + row * 3,
        bytes([_RECORD]) + record(RecordKind.BLOCK, 1, bytes(50))[: segment.RECORD_HEADER_BYTES],
        bytes([_TOMBSTONES]) + tombstones,
    ]


def fix_structure(_: Random, raw: bytes) -> bytes:
    """The check of whichever structure it is."""
    which = raw[0] % 4 if raw else _TOMBSTONES
    if which == _HEADER:
        return raw[:1] + envelope_fix(raw[1:513], b"entresol-segm")
    if which == _TRAILER:
        return raw[:1] + envelope_fix(raw[1:513], b"entresol-trlr") + raw[513:]
    if which == _RECORD:
        fields = raw[1 : 1 + segment._RECORD.size].ljust(segment._RECORD.size, b"\0")
        return raw[:1] + fields + segment._record_check(fields, SB.check_key)
    return raw


def structures_parser() -> Parser:
    """None, or what the structure's own encoder would have written."""

    def parse(raw: bytes) -> str:
        which, body = (raw[0] % 4 if raw else 0), raw[1:]
        if which == _HEADER:
            block = body[:512].ljust(BLOCK, b"\0")
            header = segment.decode_header(SB, 0, block)
            if header is None:
                return "header none"
            assert header.segment == 0
            return f"header {header.state.name}"
        if which == _TRAILER:
            return _parse_trailer(body)
        if which == _RECORD:
            found = segment.decode_record_header(body, SB.check_key)
            if found is None:
                return "record none"
            assert found.extent_bytes % BLOCK == 0
            assert found.extent_bytes >= found.sealed_bytes + segment.RECORD_HEADER_BYTES
            assert len(found.row()) == segment.ROW_BYTES
            return f"record {found.kind.name}"
        tombstones = decode_tombstones(body)
        assert len(tombstones) <= len(body) // TOMBSTONE_BYTES
        return f"tombstones {min(len(tombstones), 3)}"

    return parse


def _parse_trailer(body: bytes) -> str:
    trailer = segment.decode_trailer(SB, 0, body[:512].ljust(BLOCK, b"\0"))
    if trailer is None:
        return "trailer none"
    assert trailer.table_bytes <= SEGMENT, "a table larger than its segment"
    assert trailer.table_offset + segment.footer_bytes(trailer.rows) == SEGMENT
    assert trailer.used_bytes <= trailer.table_offset
    rows = segment.decode_table(SB, trailer, body[512:])
    if rows is None:
        return "table none"
    assert len(rows) == trailer.rows
    return "table"


def _unchecked_record(raw: bytes | memoryview, check_key: bytes) -> RecordHeader:
    values = segment._RECORD.unpack(bytes(raw[: segment._RECORD.size]))
    _, _, kind, _, sequence, lsn, offset, sealed, ns, key, plain, position, digest, _ = values
    return RecordHeader(
        RecordKind(kind), sequence, lsn, offset, sealed, ns, key, plain, position, digest
    )


# Scan of a whole segment --------------------------------------------------------------------------


@functools.cache
def scan_seeds() -> list[bytes]:
    """The records of an open segment, without the free room behind them."""
    tombstones = encode_tombstones([Tombstone(TombstoneKind.BLOCK, b"n" * 16, b"w" * 16, 4, 5)])
    blocks = [
        record(RecordKind.BLOCK, 1, b"a" * 300),
        record(RecordKind.BLOCK, 2, b"b" * 5_000, b"x" * 16),
        record(RecordKind.TOMBSTONES, 4, tombstones),
    ]
    return [b"".join(blocks), blocks[0], b"", blocks[0] + bytes(BLOCK) + blocks[2]]


def fix_scan(rng: Random, raw: bytes) -> bytes:
    """Right checks, and sometimes right payload hashes, wherever a record begins."""
    out = bytearray(raw)
    for at in range(0, len(out) - segment.RECORD_HEADER_BYTES, BLOCK):
        if out[at : at + 4] != segment.RECORD_MAGIC.to_bytes(4, "little"):
            continue
        sealed = int.from_bytes(out[at + 28 : at + 32], "little")
        if rng.random() < 0.5 and sealed < len(out) - at - segment.RECORD_HEADER_BYTES:
            digest = segment.payload_hash(bytes(out[at:]), sealed)
            out[at + 72 : at + 80] = digest.to_bytes(8, "little")
        fields = bytes(out[at : at + segment._RECORD.size])
        out[at + len(fields) : at + len(fields) + 8] = segment._record_check(fields, SB.check_key)
    return bytes(out)


def scan_parser() -> Parser:
    """What is found lies in the segment, in order, and does not overlap."""
    memory = bytearray(SEGMENT)
    view = memoryview(memory)
    limit = SEGMENT - segment.footer_bytes(1)

    def parse(raw: bytes) -> str:
        body = raw[: SEGMENT - BLOCK]
        memory[BLOCK : BLOCK + len(body)] = body
        memory[BLOCK + len(body) :] = bytes(SEGMENT - BLOCK - len(body))
        found = segment.scan_segment(SB, SEQUENCE, view)
        rows = np.frombuffer(bytes(found.table), segment.ROW)
        end = BLOCK
        for row in rows:
            begin = int(row["offset"]) * BLOCK
            assert begin >= end, "records overlap"
            end = begin + segment.extent_bytes(int(row["sealed"]))
            assert end <= limit, "a record beyond the segment"
            assert _is_signed(memory[begin : begin + segment.RECORD_HEADER_BYTES]), (
                "a forged record"
            )
        assert found.used_bytes == (end if len(rows) else BLOCK)
        gone = min(sum(map(len, found.tombstones)), 3)
        return f"{len(rows)} rows {found.damaged} damaged {gone} gone"

    return parse


def _is_signed(header: bytearray) -> bool:
    """Whether the check of a record's header is right, reckoned without the product's code."""
    fields, check = bytes(header[:88]), bytes(header[88:])
    mac = hashlib.blake2b(fields, digest_size=8, key=SB.check_key, person=b"entresol-recd")
    return mac.digest() == check


def _believes_headers() -> AbstractContextManager[object]:
    """Takes any record header whose kind is known."""

    def decode(raw: bytes | memoryview, check_key: bytes) -> RecordHeader | None:
        try:
            return _unchecked_record(raw, check_key)
        except ValueError:
            return None

    return patch.object(segment, "decode_record_header", decode)


# Checkpoint ---------------------------------------------------------------------------------------


@functools.cache
def checkpoint_bytes(rows: int) -> bytes:
    """A checkpoint as `encode` writes it, from an index of `rows` blocks in one segment."""
    import pyarrow as pa

    keys = pa.array([bytes([n]) * 16 for n in range(rows)], pa.binary(16))
    spaces = pa.DictionaryArray.from_arrays(
        pa.array([0] * rows, pa.int32()), pa.array([b"n" * 16], pa.binary(16))
    )
    arrays = {"namespace": spaces, "key": keys}
    for name in checkpoint._COLUMNS:
        arrays[name] = pa.array(range(rows), pa.uint32())
    arrays["last_touch"] = pa.array(range(rows), pa.uint64())
    about = {
        "version": 1, "uuid": SB.uuid.hex(), "generation": 3,
        "segments": [[0, SEQUENCE, (b"t" * 16).hex(), 0, 0, rows, [4]]],
    }  # fmt: skip
    return ipc_file(arrays, json.dumps(about).encode())


def ipc_file(arrays: dict[str, object], about: bytes) -> bytes:
    """An Arrow file of one batch."""
    import pyarrow as pa

    schema = pa.schema(
        [(name, array.type) for name, array in arrays.items()],  # type: ignore[attr-defined]
        metadata={checkpoint._LABEL: about},
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.record_batch(list(arrays.values()), schema=schema))
    return bytes(sink.getvalue())


def a_checkpoint(rng: Random) -> bytes:
    """A well-formed Arrow file whose columns or description are not a checkpoint's."""
    import pyarrow as pa

    rows = rng.choice((0, 1, 3))
    kinds = (pa.uint32(), pa.uint64(), pa.int8(), pa.float64(), pa.binary(16), pa.string())
    arrays: dict[str, object] = {}
    for name in ("namespace", "key", *checkpoint._COLUMNS, "last_touch"):
        if rng.random() < 0.1:
            continue
        kind = rng.choice(kinds) if rng.random() < 0.15 else None
        if kind is None and name == "namespace":
            dictionary = pa.array([b"n" * 16], pa.binary(16))
            arrays[name] = pa.DictionaryArray.from_arrays(
                pa.array([0] * rows, pa.int32()), dictionary
            )
        elif kind is None and name == "key":
            arrays[name] = pa.array([b"w" * 16] * rows, pa.binary(16))
        else:
            value: Any = {"string": "x", "fixed_size_binary[16]": b"y" * 16}.get(str(kind), 1)
            if rng.random() < 0.1:
                value = None
            arrays[name] = pa.array([value] * rows, kind or pa.uint32())
    about = {"version": 1, "uuid": "00", "generation": 3,
             "segments": [[0, SEQUENCE, "74" * 16, 0, 0, rows, [4]]]}  # fmt: skip
    damaged = mutate_tree(rng, about) if rng.random() < 0.7 else about
    return vouched(ipc_file(arrays, to_json(damaged)))


def vouched(body: bytes) -> bytes:
    """The file behind a digest of its own: whole files only, a mutation takes it away."""
    return hashlib.blake2b(body, digest_size=8).digest() + body


def checkpoint_seeds() -> list[bytes]:
    """`8 bytes of digest`, then the file; with a wrong digest, too."""
    whole = [checkpoint_bytes(rows) for rows in (0, 1, 3)]
    return [*map(vouched, whole), bytes(8) + whole[1]]


def checkpoint_parser() -> Parser:
    """A file with a wrong digest never reaches Arrow. One with the right digest decodes or is
    refused; those are well-formed Arrow files, as only a writer with the file's key makes them, of
    the right and of wrong columns."""
    file = Scratch("index.arrow")

    def parse(raw: bytes) -> str:
        body = raw[8:]
        right = vouched(body) == raw
        digest = checkpoint._digest(SB, body) if right else b"d" * 32
        named = replace(SB, checkpoint_bytes=len(body), checkpoint_digest=digest)
        try:
            found = checkpoint.load(file.holds(body), named)
        except FormatError as error:
            return f"refused {right} {'malformed' in str(error)}"
        assert right, "a checkpoint with a wrong digest was parsed"
        rows = len(found.key0)
        assert all(len(column) == rows for column in found.columns.values())
        assert len(found.namespace) == len(found.last_touch) == len(found.key1) == rows
        return f"ok {min(rows, 3)}"

    return parse


def _any_digest() -> AbstractContextManager[object]:
    return patch.object(checkpoint, "_digest", lambda superblock, raw: b"d" * 32)


TARGETS = (
    Target(
        name="superblock", share=30, seeds=superblock_seeds, make=superblock_parser,
        fix=fix_superblock,
        canaries=(lambda: patch.object(superblock, "choose_superblock", _one_copy_is_enough),),
        modules=("entresol_daemon.flash.superblock",),
    ),
    Target(
        name="flash_structures", share=50, seeds=structure_seeds, make=structures_parser,
        fix=fix_structure,
        canaries=(lambda: patch.object(segment, "decode_record_header", _unchecked_record),),
        modules=("entresol_daemon.flash.segment",),
    ),
    Target(
        name="segment_scan", share=20, seeds=scan_seeds, make=scan_parser, fix=fix_scan,
        bytes_max=SEGMENT, alloc_bytes_max=512 * 1024,
        canaries=(_believes_headers,), modules=("entresol_daemon.flash.segment",),
    ),
    Target(
        name="checkpoint", share=10, seeds=checkpoint_seeds, make=checkpoint_parser,
        generate=a_checkpoint, alloc_bytes_max=1024 * 1024,
        canaries=(_any_digest,), modules=("entresol_daemon.flash.checkpoint",),
    ),
)  # fmt: skip
assert struct.calcsize("<IBBHQQI") == 28  # where `fix_scan` finds the sealed length
