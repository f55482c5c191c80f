"""Bounded reading of message payloads: every take is checked, every failure is a ProtocolError.

Invariant: nothing is read past the payload, and `done()` refuses trailing bytes, so a message has
exactly one encoding.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from entresol_proto import limits
from entresol_proto.status import ProtocolError

TEXT_BYTES_MAX = 1024  # of a message or hint
NAME_BYTES_MAX = 255  # of a shard, tenant or client name


class Cursor:
    """Reads a payload front to back."""

    __slots__ = ("_at", "_raw", "_what")

    def __init__(self, raw: bytes, what: str) -> None:
        self._raw = raw
        self._at = 0
        self._what = what

    def unpack(self, layout: struct.Struct) -> tuple[Any, ...]:
        """Fixed fields. Raises: ProtocolError when the payload is cut short."""
        end = self._at + layout.size
        if end > len(self._raw):
            raise ProtocolError(f"{self._what} is cut short")
        values = layout.unpack_from(self._raw, self._at)
        self._at = end
        return values

    def take(self, length: int) -> bytes:
        """`length` raw bytes. Raises: ProtocolError when the payload is cut short."""
        end = self._at + length
        if length < 0 or end > len(self._raw):
            raise ProtocolError(f"{self._what} is cut short")
        part = self._raw[self._at : end]
        self._at = end
        return part

    def table(self, layout: struct.Struct, count: int, count_max: int) -> Iterator[tuple[Any, ...]]:
        """`count` rows of fixed layout. Raises: ProtocolError above `count_max`, when cut short."""
        self.check_count(count, count_max)
        return layout.iter_unpack(self.take(layout.size * count))

    def check_count(self, count: int, count_max: int) -> None:
        """Raises: ProtocolError when a peer announces more items than a named limit allows."""
        if count > count_max:
            raise ProtocolError(f"{self._what} has {count} items, at most {count_max} allowed")

    def text(self, length: int, bytes_max: int = TEXT_BYTES_MAX) -> str:
        """UTF-8 text of at most `bytes_max` bytes, as `text16` wrote it. Raises: ProtocolError."""
        if length > bytes_max:
            raise ProtocolError(f"{self._what} has a text of {length} bytes, {bytes_max} allowed")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            raise ProtocolError(f"{self._what} holds text that is not UTF-8") from None

    def flag(self, value: int) -> bool:
        """A boolean byte. Raises: ProtocolError unless it is 0 or 1."""
        if value > 1:
            raise ProtocolError(f"{self._what} has a flag of {value}, not 0 or 1")
        return value == 1

    def zero(self, value: int) -> None:
        """A reserved field. Raises: ProtocolError unless it is 0."""
        if value:
            raise ProtocolError(f"{self._what} has {value} in a reserved field")

    def rest(self) -> bytes:
        """Everything that is left."""
        return self.take(len(self._raw) - self._at)

    def done(self) -> None:
        """Raises: ProtocolError if bytes are left over."""
        if self._at != len(self._raw):
            raise ProtocolError(f"{self._what} has {len(self._raw) - self._at} bytes too many")


def check_deadline(deadline_ns: int) -> None:
    """Of a request, from its receipt on. Raises: ProtocolError when it is out of range."""
    if not 0 < deadline_ns <= limits.DEADLINE_NS_MAX:
        raise ProtocolError(f"deadline of {deadline_ns} ns is out of range")


def text16(value: str, bytes_max: int = TEXT_BYTES_MAX) -> bytes:
    """`u16 length, UTF-8`, cut at a character boundary to at most `bytes_max` bytes.

    What UTF-8 cannot say (lone surrogates, as in a file name that is no text) becomes `?`.
    """
    raw = value.encode(errors="replace")[:bytes_max].decode(errors="ignore").encode()
    return struct.pack("<H", len(raw)) + raw
