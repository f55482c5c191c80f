"""Tombstones: what says on flash that a block, or a namespace, was removed. Pure functions.

There may be as many as blocks were ever removed from segments that still exist, so whoever reads
them holds them as rows of TOMBSTONE_BYTES each, never as objects.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_TOMBSTONE = struct.Struct("<16s16sQQII")
TOMBSTONE_BYTES = 56
TOMBSTONES_PER_RECORD_MAX = 1024
TOMBSTONE_ROW = np.dtype(
    [
        ("ns0", "<u8"),
        ("ns1", "<u8"),
        ("key0", "<u8"),
        ("key1", "<u8"),
        ("lsn", "<u8"),
        ("cover", "<u8"),
        ("kind", "<u4"),
        ("reserved", "<u4"),
    ]
)
Tombstones = npt.NDArray[np.void]  # of TOMBSTONE_ROW

assert _TOMBSTONE.size == TOMBSTONE_ROW.itemsize == TOMBSTONE_BYTES

NO_TOMBSTONES: Tombstones = np.zeros(0, TOMBSTONE_ROW)


class TombstoneKind(enum.IntEnum):
    """What a tombstone removes."""

    BLOCK = 1
    NAMESPACE = 2


@dataclass(frozen=True, slots=True)
class Tombstone:
    """Removes every copy of a block (or of a namespace) whose lsn is lower.

    It must stay on flash while the segment with sequence `cover` may hold such a copy (for a
    namespace: any segment with a sequence up to `cover`).
    """

    kind: TombstoneKind
    namespace_id: bytes
    wire_key: bytes
    lsn: int
    cover: int


def encode_tombstones(tombstones: Iterable[Tombstone]) -> bytes:
    """The payload of a tombstone record."""
    return b"".join(
        _TOMBSTONE.pack(t.namespace_id, t.wire_key, t.lsn, t.cover, t.kind, 0) for t in tombstones
    )


def decode_tombstones(payload: bytes | memoryview) -> Tombstones:
    """Entries of a verified payload, copied; unknown kinds and a cut tail are left out."""
    count = len(payload) // TOMBSTONE_BYTES
    if not count:
        return NO_TOMBSTONES
    rows: Tombstones = np.frombuffer(payload, TOMBSTONE_ROW, count)
    known = (rows["kind"] == TombstoneKind.BLOCK) | (rows["kind"] == TombstoneKind.NAMESPACE)
    chosen: Tombstones = rows[known]
    return chosen


def joined(parts: Sequence[Tombstones]) -> Tombstones:
    """All of them, one after the other."""
    if not parts:
        return NO_TOMBSTONES
    # As plain bytes: numpy would work out the common type of the rows field by field.
    raw = np.dtype((np.void, TOMBSTONE_BYTES))
    whole: Tombstones = np.concatenate([part.view(raw) for part in parts]).view(TOMBSTONE_ROW)
    return whole


def listed(rows: Tombstones) -> list[Tombstone]:
    """Them as objects, for those that are to be written again."""
    return [
        Tombstone(TombstoneKind(kind), ns, key, lsn, cover)
        for ns, key, lsn, cover, kind, _ in _TOMBSTONE.iter_unpack(rows.tobytes())
    ]
