"""Encoders against decoders, and a fuzzer for everything that parses bytes from flash.

The fuzzer's canary is a scanner whose keyed check always agrees: the same harness must catch it.
"""

from __future__ import annotations

import hmac
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entresol_daemon.flash.device import BLOCK
from entresol_daemon.flash.segment import (
    RECORD_HEADER_BYTES,
    HeaderState,
    RecordHeader,
    RecordKind,
    Scan,
    SegmentHeader,
    Superblock,
    choose_superblock,
    decode_header,
    decode_record_header,
    decode_superblock,
    decode_table,
    decode_trailer,
    encode_footer,
    encode_header,
    encode_record_header,
    encode_superblock,
    extent_bytes,
    footer_bytes,
    payload_hash,
    scan_segment,
)
from entresol_daemon.flash.tombstones import (
    TOMBSTONE_BYTES,
    Tombstone,
    TombstoneKind,
    decode_tombstones,
    encode_tombstones,
    listed,
)

SEGMENT = 64 * 1024
SB = Superblock(b"u" * 16, b"k" * 32, SEGMENT, 8, 64 * 1024 + 8 * SEGMENT)
SEQUENCE = (3 << 32) | 7
NS, KEY = b"n" * 16, b"w" * 16
FUZZ_INPUTS = 30_000


def make_record(number: int, offset: int, payload: bytes, sequence: int = SEQUENCE) -> bytes:
    extent = bytearray(extent_bytes(len(payload)))
    extent[RECORD_HEADER_BYTES : RECORD_HEADER_BYTES + len(payload)] = payload
    header = RecordHeader(
        RecordKind.BLOCK, sequence, 100 + number, offset, len(payload), NS,
        number.to_bytes(16, "big"), 2 * len(payload), number,
        payload_hash(bytes(extent), len(payload)),
    )  # fmt: skip
    extent[:RECORD_HEADER_BYTES] = encode_record_header(header, SB.check_key)
    return bytes(extent)


def make_segment(rng: random.Random) -> tuple[bytearray, set[bytes]]:
    """A crashed segment and the footer rows of what is really in it."""
    raw = bytearray(SEGMENT)
    raw[:BLOCK] = encode_header(SB, SegmentHeader(HeaderState.OPEN, 0, SEQUENCE, b"s" * 16))
    at, rows = BLOCK, set()
    for number in range(8):
        extent = make_record(number, at // BLOCK, rng.randbytes(rng.randrange(1, 8000)))
        if at + len(extent) > SEGMENT - footer_bytes(9):
            break
        raw[at : at + len(extent)] = extent
        header = decode_record_header(extent, SB.check_key)
        assert header is not None
        rows.add(header.row())
        at += len(extent)
    return raw, rows


def rows_of(scan: Scan) -> list[bytes]:
    table = bytes(scan.table)
    return [table[n : n + 64] for n in range(0, len(table), 64)]


def test_superblock_round_trip() -> None:
    for copy in (0, 1):
        block = encode_superblock(SB, copy)
        assert decode_superblock(block, copy) == SB
        assert decode_superblock(block, 1 - copy) is None, "a copy belongs to its place"
        assert not any(block[512:]), "all of it lies in the part that is written atomically"


def test_the_newer_superblock_wins_and_a_lonely_clean_flag_is_not_believed() -> None:
    old = Superblock(SB.uuid, SB.check_key, SEGMENT, 8, SB.mirror_offset, generation=4, clean=True)
    new = Superblock(SB.uuid, SB.check_key, SEGMENT, 8, SB.mirror_offset, generation=5)
    both = choose_superblock(encode_superblock(old, 0), encode_superblock(old, 1))
    assert both == (old, True)
    found, agree = choose_superblock(encode_superblock(new, 0), encode_superblock(old, 1))
    assert (found, agree) == (new, False)
    found, agree = choose_superblock(encode_superblock(old, 0), bytes(BLOCK))
    assert found is not None
    assert (found.clean, agree) == (False, False)
    assert choose_superblock(bytes(BLOCK), b"old content" + bytes(BLOCK - 11)) == (None, True)


def test_headers_belong_to_their_segment_and_file() -> None:
    header = SegmentHeader(HeaderState.OPEN, 3, SEQUENCE, b"s" * 16)
    block = encode_header(SB, header)
    assert decode_header(SB, 3, block) == header
    assert decode_header(SB, 4, block) is None
    other = Superblock(b"U" * 16, SB.check_key, SEGMENT, 8, SB.mirror_offset)
    assert decode_header(other, 3, block) is None
    foreign = Superblock(SB.uuid, b"K" * 32, SEGMENT, 8, SB.mirror_offset)
    assert decode_header(foreign, 3, block) is None


@given(rows=st.integers(0, 300))
@settings(max_examples=30, deadline=None)
def test_footer_round_trip(rows: int) -> None:
    table = random.Random(rows).randbytes(64 * rows)
    offset, raw = encode_footer(SB, 2, SEQUENCE, b"s" * 16, BLOCK, table)
    assert offset + len(raw) == SEGMENT
    assert len(raw) == footer_bytes(rows)
    trailer = decode_trailer(SB, 2, raw[-BLOCK:])
    assert trailer is not None
    assert (trailer.rows, trailer.table_offset, trailer.sequence) == (rows, offset, SEQUENCE)
    found = decode_table(SB, trailer, raw)
    assert found is not None
    assert found.tobytes() == table
    assert decode_trailer(SB, 1, raw[-BLOCK:]) is None


def test_record_header_round_trip_and_size() -> None:
    extent = make_record(5, 9, b"payload")
    header = decode_record_header(extent, SB.check_key)
    assert header is not None
    assert (header.lsn, header.offset, header.sealed_bytes, header.position) == (105, 9, 7, 5)
    assert RECORD_HEADER_BYTES % 16 == 0
    assert decode_record_header(extent, b"another key, 32 bytes long......") is None
    assert decode_record_header(extent[: RECORD_HEADER_BYTES - 1], SB.check_key) is None


@given(st.lists(st.tuples(st.sampled_from(TombstoneKind), st.binary(min_size=16, max_size=16),
                          st.binary(min_size=16, max_size=16), st.integers(0, 2**64 - 1),
                          st.integers(0, 2**64 - 1))))  # fmt: skip
def test_tombstones_round_trip(
    entries: list[tuple[TombstoneKind, bytes, bytes, int, int]],
) -> None:
    tombstones = [Tombstone(*entry) for entry in entries]
    raw = encode_tombstones(tombstones)
    assert len(raw) == TOMBSTONE_BYTES * len(tombstones)
    assert listed(decode_tombstones(raw)) == tombstones
    assert listed(decode_tombstones(raw + b"tail")) == tombstones


def test_a_scan_skips_a_bad_payload_by_its_length_and_resyncs_after_a_bad_header() -> None:
    raw, rows = make_segment(random.Random(1))
    full = scan_segment(SB, SEQUENCE, memoryview(raw))
    assert set(rows_of(full)) == rows
    offsets = [int.from_bytes(row[40:44], "little") for row in rows_of(full)]
    payload = bytearray(raw)
    payload[offsets[1] * BLOCK + 200] ^= 1
    scan = scan_segment(SB, SEQUENCE, memoryview(payload))
    assert (len(rows_of(scan)), scan.damaged) == (len(rows) - 1, 1)
    header = bytearray(raw)
    header[offsets[1] * BLOCK + 30] ^= 1
    scan = scan_segment(SB, SEQUENCE, memoryview(header))
    assert (len(rows_of(scan)), scan.damaged) == (len(rows) - 1, 0)


def test_a_tenants_payload_cannot_pass_for_a_record() -> None:
    """A payload full of records that are right in everything but the keyed check."""
    forged = Superblock(SB.uuid, b"guess" * 6 + b"!!", SEGMENT, 8, SB.mirror_offset)
    evil = bytearray(5 * BLOCK - RECORD_HEADER_BYTES)
    for block in range(1, 4):
        at = block * BLOCK - RECORD_HEADER_BYTES
        inner = RecordHeader(
            RecordKind.BLOCK, SEQUENCE, 999, 1 + block, 0, NS, b"victim-key......", 0, 0,
            payload_hash(bytes(BLOCK), 0),
        )  # fmt: skip
        evil[at : at + RECORD_HEADER_BYTES] = encode_record_header(inner, forged.check_key)
    raw = bytearray(SEGMENT)
    extent = bytearray(make_record(1, 1, bytes(evil)))
    extent[50] ^= 1  # the outer header is damaged, so the scan searches inside
    raw[BLOCK : BLOCK + len(extent)] = extent
    assert not rows_of(scan_segment(SB, SEQUENCE, memoryview(raw)))


def fuzz(seed: int, inputs: int) -> int:
    """Mutate a crashed segment and scan it; whatever comes out must have been put in.

    Raises: AssertionError when the scan invents a record.
    """
    rng = random.Random(seed)
    raw, rows = make_segment(rng)
    heads = [n for n in range(0, SEGMENT, BLOCK) if raw[n : n + 4] == b"ENTR"]
    for _ in range(inputs):
        damaged = bytearray(raw)
        for _ in range(rng.randrange(1, 6)):
            move = rng.random()
            at = rng.choice(heads) if rng.random() < 0.7 else rng.randrange(SEGMENT - 256)
            if move < 0.5:
                damaged[at + rng.randrange(RECORD_HEADER_BYTES)] = rng.randrange(256)
            elif move < 0.7:
                source = rng.choice(heads)
                target = rng.randrange(1, SEGMENT // BLOCK - 2) * BLOCK
                damaged[target : target + 4096] = raw[source : source + 4096]
            elif move < 0.8:
                damaged[at : at + 100] = rng.randbytes(100)
            else:  # a plausible field: another length, offset or key
                field = rng.choice([24, 28, 32, 48, 64, 68])
                damaged[at + field : at + field + 4] = rng.randrange(1, 60).to_bytes(4, "little")
        scan = scan_segment(SB, SEQUENCE, memoryview(damaged))
        invented = set(rows_of(scan)) - rows
        assert not invented, f"seed={seed}: the scan invented a record"
    return inputs


def test_fuzzed_segments_never_yield_what_was_not_written() -> None:
    began = time.process_time()
    tried = sum(fuzz(seed, FUZZ_INPUTS // 3) for seed in (1, 2, 3))
    print(f"inputs={tried} invented=0 crashes=0 seconds={time.process_time() - began:.1f}")


def test_the_fuzzer_catches_a_parser_without_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: True)
    with pytest.raises(AssertionError, match="invented a record"):
        fuzz(1, FUZZ_INPUTS)


@given(st.binary(max_size=200), st.integers(0, 2**64 - 1))
@settings(max_examples=300, deadline=None)
def test_decoders_never_raise(junk: bytes, number: int) -> None:
    for magic in (b"", b"ENTRSEGM", b"ENTRTRLR", b"ENTR", b"ENTRESOL\x01\0\0\0"):
        block = (magic + junk).ljust(BLOCK, b"\0")
        assert decode_superblock(block, 0) is None
        assert decode_header(SB, 0, block) is None
        assert decode_trailer(SB, 0, block) is None
        assert decode_record_header(block, SB.check_key) is None
        assert decode_record_header(magic + junk, SB.check_key) is None
    raw = bytearray(SEGMENT)
    raw[BLOCK : BLOCK + len(junk)] = junk
    raw[BLOCK : BLOCK + 4] = b"ENTR"
    assert not scan_segment(SB, number, memoryview(raw)).table
    decode_tombstones(junk)
