"""Removals in a segment of which both edges are lost: what it was nobody can tell any more.

Its blocks are gone, as their stream is not known. But a removal stays true wherever it is found,
and what it removed may lie in another segment, intact. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from entresol_daemon.flash.device import BLOCK
from entresol_daemon.flash.segment import (
    RECORD_HEADER_BYTES,
    RECORD_MAGIC,
    HeaderState,
    RecordKind,
    Superblock,
    decode_header,
    decode_record_header,
    tombstones_in,
)
from entresol_daemon.flash.tombstones import Tombstones


@dataclass(slots=True)
class Salvage:
    """Of the latest life of the segment that left any; `offsets` are in blocks."""

    sequence: int = 0
    tombstones: list[Tombstones] = field(default_factory=list)  # a part for each record
    offsets: list[int] = field(default_factory=list)

    def with_found(self, other: Salvage) -> Salvage:
        """What either of two reads of one segment found: one that went wrong hides removals."""
        if self.sequence != other.sequence:
            return max(self, other, key=lambda each: each.sequence)
        found = dict(zip(other.offsets, other.tombstones, strict=True))
        found |= zip(self.offsets, self.tombstones, strict=True)
        offsets = sorted(found)
        return Salvage(self.sequence, [found[at] for at in offsets], offsets)


def salvage(superblock: Superblock, number: int, raw: memoryview) -> Salvage:
    """Search a whole segment's bytes. Nothing where its last block says that it was freed since."""
    found = Salvage()
    heads = np.frombuffer(raw, dtype="<u4").reshape(-1, BLOCK // 4)
    for block in np.flatnonzero(heads[:, 0] == RECORD_MAGIC).tolist():
        at = block * BLOCK
        header = decode_record_header(raw[at : at + RECORD_HEADER_BYTES], superblock.check_key)
        if header is None or header.kind is not RecordKind.TOMBSTONES:
            continue
        if header.sequence < found.sequence:
            continue
        extent = raw[at : at + header.extent_bytes]
        entries = tombstones_in(superblock, header.sequence, block, extent)
        if entries is None:
            continue
        if header.sequence > found.sequence:
            found = Salvage(header.sequence)
        found.tombstones.append(entries)
        found.offsets.append(block)
    last = decode_header(superblock, number, bytes(raw[-BLOCK:]))
    if last is not None and last.state is HeaderState.FREE and last.sequence >= found.sequence:
        return Salvage()
    return found
