"""QUOTE and QUOTED: what a FETCH of these keys would take just now, asked before it is decided.

Same rules as `data`. From protocol 3 on: a host asks only a daemon that said so in its WELCOME,
because an older one ends a session that sends a type it does not know.

Invariant: the times of an answer are in the order in which what they tell of happens, none is above
DEADLINE_NS_MAX, and no more bytes come from flash than there are.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import ClassVar

from entresol_proto import limits
from entresol_proto.status import ProtocolError
from entresol_proto.wire.cursor import Cursor
from entresol_proto.wire.data import OpenAt, Tier, open_at_of, take_keys
from entresol_proto.wire.frames import FrameType

_TIERS = tuple(Tier)  # by wire value
_KNOWN = bytes(_TIERS)


@dataclass(frozen=True, slots=True)
class Quote:
    """Host: how long would this FETCH take, as things are? `prefix` stops at a gap."""

    TYPE: ClassVar[FrameType] = FrameType.QUOTE
    _FIXED: ClassVar[struct.Struct] = struct.Struct("<IBBH")

    handle: int
    open_at: OpenAt
    prefix: bool
    keys: bytes

    def encode(self) -> bytes:
        return self._FIXED.pack(self.handle, self.open_at, self.prefix, 0) + self.keys

    @classmethod
    def decode(cls, raw: bytes) -> Quote:
        cursor = Cursor(raw, "QUOTE")
        handle, open_at, prefix, reserved = cursor.unpack(cls._FIXED)
        cursor.zero(reserved)
        keys = take_keys(cursor, limits.BLOCKS_PER_FETCH_MAX)
        return cls(handle, open_at_of(open_at), cursor.flag(prefix), keys)


@dataclass(frozen=True, slots=True)
class Quoted:
    """Daemon: expected times from a FETCH's receipt, and a tier per key (NONE: it would miss).

    `wait_ns` until something in memory is granted, `memory_ns` until all of that is, `flash_ns`
    until the first block from flash is, `expected_ns` until everything is (half of such fetches
    take less), `high_ns` what nine of ten take at most.
    """

    TYPE: ClassVar[FrameType] = FrameType.QUOTED
    _FIXED: ClassVar[struct.Struct] = struct.Struct("<QQQQQQQ")

    sealed_bytes: int
    flash_bytes: int  # of these, what has to be read from flash
    wait_ns: int
    memory_ns: int
    flash_ns: int
    expected_ns: int
    high_ns: int
    tiers: bytes  # one of each key

    def encode(self) -> bytes:
        fixed = self._FIXED.pack(
            self.sealed_bytes, self.flash_bytes, self.wait_ns, self.memory_ns, self.flash_ns,
            self.expected_ns, self.high_ns,
        )  # fmt: skip
        return fixed + self.tiers

    @classmethod
    def decode(cls, raw: bytes) -> Quoted:
        cursor = Cursor(raw, "QUOTED")
        sealed, read, wait, memory, flash, expected, high = cursor.unpack(cls._FIXED)
        if read > sealed:
            raise ProtocolError(f"{read} bytes of {sealed} come from flash")
        in_order = wait <= min(memory, flash) and max(memory, flash) <= expected <= high
        if not in_order or high > limits.DEADLINE_NS_MAX:
            raise ProtocolError("times of a QUOTED are out of order or of range")
        tiers = cursor.rest()
        cursor.check_count(len(tiers), limits.BLOCKS_PER_FETCH_MAX)
        if tiers.translate(None, _KNOWN):
            raise ProtocolError("unknown tier")
        return cls(sealed, read, wait, memory, flash, expected, high, tiers)

    def tier_list(self) -> list[Tier]:
        """The tiers by name."""
        return [_TIERS[tier] for tier in self.tiers]
