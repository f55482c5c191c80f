"""The superblock, and the envelope of every 4 KiB structure. Pure functions.

Two copies, in the first and the last block of the file, say what it is: far apart, so that no
single misdirected write takes both. Invariants: everything an envelope holds lies in
its first 512 bytes, which a drive writes whole or not at all, and its check covers the whole block;
a clean close is believed only when both copies say so.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass, replace

from entresol_daemon.flash.device import BLOCK
from entresol_proto.status import FormatError

FORMAT_VERSION = 1
DATA_OFFSET = 64 * 1024  # where segment 0 begins
RECORD_HEADER_BYTES = 96
SEGMENT_BYTES_MIN = 32 * 1024
SEGMENT_BYTES_MAX = 1024 * 1024 * 1024
SEGMENTS_MIN = 4
GENERATIONS_LOST_MAX = 16  # openings of which a lost copy may have told alone

_CHECK_AT = 496
_CHECK_BYTES = 16
_MAGIC = b"ENTRESOL"
_SUPER = struct.Struct("<8sII16s32sQQIIQQ32sIIQ")
_CLEAN = 1


@dataclass(frozen=True, slots=True)
class Superblock:
    """What the file is. `check_key` keys every other check; `generation` counts openings."""

    uuid: bytes
    check_key: bytes
    segment_bytes: int
    segment_count: int
    mirror_offset: int  # of the second copy
    data_offset: int = DATA_OFFSET
    generation: int = 0
    clean: bool = False
    checkpoint_bytes: int = 0
    checkpoint_digest: bytes = bytes(32)

    def segment_at(self, segment: int) -> int:
        """Device offset of a segment."""
        return self.data_offset + segment * self.segment_bytes


def _block_check(block: bytes, key: bytes, person: bytes) -> bytes:
    mac = hashlib.blake2b(block[:_CHECK_AT], digest_size=_CHECK_BYTES, key=key, person=person)
    mac.update(block[_CHECK_AT + _CHECK_BYTES :])
    return mac.digest()


def close_block(fields: bytes, key: bytes, person: bytes) -> bytes:
    block = bytearray(BLOCK)
    block[: len(fields)] = fields
    block[_CHECK_AT : _CHECK_AT + _CHECK_BYTES] = _block_check(bytes(block), key, person)
    return bytes(block)


def block_is_valid(block: bytes, key: bytes, person: bytes) -> bool:
    return len(block) == BLOCK and hmac.compare_digest(
        block[_CHECK_AT : _CHECK_AT + _CHECK_BYTES], _block_check(block, key, person)
    )


def encode_superblock(superblock: Superblock, copy: int) -> bytes:
    """One of the two copies (0 and 1), a whole block."""
    s = superblock
    fields = _SUPER.pack(
        _MAGIC,
        FORMAT_VERSION,
        _CLEAN if s.clean else 0,
        s.uuid,
        s.check_key,
        s.segment_bytes,
        s.data_offset,
        s.segment_count,
        RECORD_HEADER_BYTES,
        s.generation,
        s.checkpoint_bytes,
        s.checkpoint_digest,
        copy,
        0,
        s.mirror_offset,
    )
    return close_block(fields, b"", b"entresol-super")


def decode_superblock(block: bytes, copy: int) -> Superblock | None:
    """The copy, or None when it is blank, damaged or of an unknown version (see `version_of`)."""
    if version_of(block) != FORMAT_VERSION or not block_is_valid(block, b"", b"entresol-super"):
        return None
    fields = _SUPER.unpack_from(block)
    (_, _, flags, uuid, check_key, segment_bytes, data_offset, segment_count, header_bytes) = (
        fields[:9]
    )
    generation, checkpoint_bytes, checkpoint_digest, found_copy, _, mirror_offset = fields[9:]
    sane = (
        header_bytes == RECORD_HEADER_BYTES
        and found_copy == copy
        and SEGMENT_BYTES_MIN <= segment_bytes <= SEGMENT_BYTES_MAX
        and segment_bytes % BLOCK == 0
        and data_offset % BLOCK == 0
        and data_offset >= BLOCK
        and segment_count >= SEGMENTS_MIN
        and mirror_offset % BLOCK == 0
        and mirror_offset >= data_offset + segment_count * segment_bytes
    )
    if not sane:
        return None
    return Superblock(
        uuid=uuid,
        check_key=check_key,
        segment_bytes=segment_bytes,
        segment_count=segment_count,
        mirror_offset=mirror_offset,
        data_offset=data_offset,
        generation=generation,
        clean=bool(flags & _CLEAN),
        checkpoint_bytes=checkpoint_bytes,
        checkpoint_digest=checkpoint_digest,
    )


def version_of(block: bytes) -> int | None:
    """The format version a superblock copy claims, None when it is not one."""
    if block[:8] != _MAGIC:
        return None
    return int.from_bytes(block[8:12], "little")


def choose_superblock(first: bytes, mirror: bytes) -> tuple[Superblock | None, bool]:
    """The newest valid copy, and whether both are valid and equal (else `clean` is not trusted).

    (None, True) for a blank file: its first block is zero and its mirror is none of ours. Raises:
    FormatError when neither copy is usable and the first block is not blank.
    """
    found = [decode_superblock(first, 0), decode_superblock(mirror, 1)]
    valid = [s for s in found if s is not None]
    if valid:
        best = max(valid, key=lambda s: s.generation)
        agree = len(valid) == 2 and valid[0] == valid[1]
        return (best if agree else replace(best, clean=False)), agree
    versions = {version_of(first), version_of(mirror)} - {None, FORMAT_VERSION}
    if versions:
        raise FormatError(
            f"data file has format version {max(v for v in versions if v is not None)}, "
            f"this build reads version {FORMAT_VERSION}",
            hint="start the version that wrote it, or give an empty file",
        )
    if not any(first):
        return None, True
    raise FormatError(
        "not an Entresol data file, or both superblock copies are damaged",
        hint="check the path; to start empty, remove the file or discard the device's content",
    )
