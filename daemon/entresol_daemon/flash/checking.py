"""What a read of records must have brought.

Invariant: a buffer passes only if its header's keyed check, the segment's sequence, the place, the
key, the lengths and, where asked for, the payload's hash all agree. The native kernel says the same
of what it finds good (record.h); this decides of all else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from entresol_daemon.flash.segment import (
    RecordHeader,
    RecordKind,
    decode_record_header,
    encode_record_head,
    payload_hash,
)
from entresol_daemon.flash.space import Segment


@dataclass(slots=True)
class Expected:
    """A record as the index knows it, remembered before the read."""

    segment: Segment
    sequence: int
    offset: int  # in blocks
    namespace_id: bytes
    wire_key: bytes
    sealed_bytes: int
    plain_bytes: int
    position: int

    def is_in(self, header: RecordHeader | None) -> bool:
        """True when the header is this record's."""
        return (
            header is not None
            and header.kind is RecordKind.BLOCK
            and header.sequence == self.sequence
            and header.offset == self.offset
            and header.wire_key == self.wire_key
            and header.namespace_id == self.namespace_id
            and header.sealed_bytes == self.sealed_bytes
            and header.plain_bytes == self.plain_bytes
            and header.position == self.position
        )

    def is_same_block(self, other: Expected) -> bool:
        """True where both are of one block, wherever it lies."""
        return (self.namespace_id, self.wire_key) == (other.namespace_id, other.wire_key)

    def head(self) -> bytes:
        """Its header, but for what only the flash knows."""
        return encode_record_head(
            RecordKind.BLOCK, self.sequence, self.offset, self.sealed_bytes, self.namespace_id,
            self.wire_key, self.plain_bytes, self.position,
        )  # fmt: skip


class RecordCheck:
    """A `Check` of a device: whether each buffer holds its record. Called in threads."""

    __slots__ = ("_items", "key", "payloads")

    def __init__(
        self, items: Sequence[tuple[Expected, memoryview]], check_key: bytes, payloads: bool
    ) -> None:
        """`payloads`: whether they are hashed."""
        self._items = items
        self.key = check_key
        self.payloads = payloads

    def __call__(self, number: int) -> bool:
        expected, view = self._items[number]
        header = decode_record_header(view, self.key)
        if header is None or not expected.is_in(header):
            return False
        return not self.payloads or payload_hash(view, header.sealed_bytes) == header.payload_hash

    def head(self, number: int) -> bytes:
        """What the header of one must be, but for what only the flash knows: see record.h."""
        return self._items[number][0].head()
