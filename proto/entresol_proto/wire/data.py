"""Messages that move and manage blocks inside an open session; those of puts are in `puts`.

Same rules as `opening`: one encoding, named limits, ProtocolError for the rest. But what a get or a
put is made of is not frozen: a frozen dataclass takes several times as long to make.
Keys travel as one run of 16-byte wire keys (`keys`), in prefix order.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass, field
from typing import ClassVar

from entresol_proto import limits
from entresol_proto.fabric.base import RemoteSpan
from entresol_proto.status import ProtocolError, Status
from entresol_proto.wire.cursor import Cursor, check_deadline
from entresol_proto.wire.frames import FrameType
from entresol_proto.wire.opening import status_of
from entresol_proto.wire.puts import Ack, Commit, PutDone, PutItem, Reserve, Reserved

__all__ = [
    "Ack", "Commit", "Done", "Exists", "ExistsReply", "Explain", "Explained", "Fetch", "Forget",
    "Grant", "GrantItem", "Keyed", "OpenAt", "PutDone", "PutItem", "Reason", "Release", "Reserve",
    "Reserved", "Stage", "Staged", "Tier", "Touch", "open_at_of", "split_keys", "take_keys",
]  # fmt: skip

_U32 = struct.Struct("<I")
_KEY = limits.WIRE_KEY_BYTES


class OpenAt(enum.IntEnum):
    """Where the sealed block is opened on a get (or sealed on a put)."""

    HOST = 0
    DAEMON = 1


class Tier(enum.IntEnum):
    """Where the daemon found a block."""

    NONE = 0
    MEMORY = 1
    FLASH = 2

    @property
    def label(self) -> str:
        return self.name.lower()


def split_keys(keys: bytes) -> list[bytes]:
    """The 16-byte wire keys of a run."""
    return [keys[at : at + _KEY] for at in range(0, len(keys), _KEY)]


def take_keys(cursor: Cursor, count_max: int) -> bytes:
    """A run of keys up to the end of the payload. Raises: ProtocolError."""
    keys = cursor.rest()
    if len(keys) % _KEY or not keys:
        raise ProtocolError(f"{len(keys)} bytes are not a run of {_KEY}-byte keys")
    cursor.check_count(len(keys) // _KEY, count_max)
    return keys


def open_at_of(value: int) -> OpenAt:
    """The place of a wire byte. Raises: ProtocolError for a number this build does not know."""
    if value > OpenAt.DAEMON:
        raise ProtocolError(f"unknown place to open blocks: {value}")
    return OpenAt(value)


@dataclass(slots=True)
class Fetch:
    """Host: lease me these blocks. `deadline_ns` counts from receipt. `prefix` stops at a gap.

    `carry`: the answer may have the blocks in it, if they are few and in memory (from protocol 4).
    """

    TYPE: ClassVar[FrameType] = FrameType.FETCH
    _FIXED: ClassVar[struct.Struct] = struct.Struct("<IBBBBQ")

    handle: int
    open_at: OpenAt
    prefix: bool
    deadline_ns: int
    keys: bytes
    carry: bool = False

    def encode(self) -> bytes:
        fixed = self._FIXED.pack(
            self.handle, self.open_at, self.prefix, self.carry, 0, self.deadline_ns
        )
        return fixed + self.keys

    @classmethod
    def decode(cls, raw: bytes) -> Fetch:
        cursor = Cursor(raw, "FETCH")
        handle, open_at, prefix, carry, reserved, deadline_ns = cursor.unpack(cls._FIXED)
        cursor.zero(reserved)
        check_deadline(deadline_ns)
        keys = take_keys(cursor, limits.BLOCKS_PER_FETCH_MAX)
        flag = cursor.flag
        return cls(handle, open_at_of(open_at), flag(prefix), deadline_ns, keys, flag(carry))


@dataclass(slots=True)
class GrantItem:
    """One leased block: where to read it and, for host-opened reads, its single-use key.

    `index` is the key's place in the FETCH. For daemon-opened reads the span holds plaintext, key
    is `ids.engine_key_digest` of the engine key in the block's header, commitment is zero.
    """

    index: int
    tier: Tier
    span: RemoteSpan
    plain_bytes: int
    key: bytes  # 32
    commitment: bytes  # 16

    def __repr__(self) -> str:
        return f"GrantItem(index={self.index}, tier={self.tier.label})"


@dataclass(slots=True)
class Grant:
    """Daemon: some answers of a FETCH; `final` on the last frame of the request.

    One lease covers all items of the frame and lasts `lease_ns` from the daemon's sending; the host
    counts it from receipt less the time the frame may have travelled, by using it early.

    `carried`: where the FETCH allowed it, the sealed blocks themselves, end to end; `address` of
    each span is its place there, and there is no lease: all numbers of one are 0.
    """

    TYPE: ClassVar[FrameType] = FrameType.GRANT
    _FIXED: ClassVar[struct.Struct] = struct.Struct("<BBHIQQQ")
    _ITEM: ClassVar[struct.Struct] = struct.Struct("<IIIQII32s16s")
    _MISS: ClassVar[struct.Struct] = struct.Struct("<II")

    final: bool
    lease_id: int
    lease_ns: int
    expires_ns: int  # daemon's monotonic clock; meaningful to a host under the same kernel (shm)
    items: tuple[GrantItem, ...]
    misses: tuple[tuple[int, Status], ...]
    carried: bytes = field(default=b"", repr=False)

    @property
    def span_bytes(self) -> int:
        """Memory of the daemon that its blocks take, without padding."""
        return sum([item.span.length_bytes for item in self.items])

    def encode(self) -> bytes:
        # In one piece: an object per item would leave its key in as many places of freed memory.
        item_bytes, miss_bytes = self._ITEM.size, self._MISS.size
        at = self._FIXED.size
        raw = bytearray(at + len(self.items) * item_bytes + len(self.misses) * miss_bytes)
        self._FIXED.pack_into(
            raw, 0, self.final, bool(self.carried), len(self.items), len(self.misses),
            self.lease_id, self.lease_ns, self.expires_ns,
        )  # fmt: skip
        pack = self._ITEM.pack_into
        for i in self.items:
            span = i.span
            pack(raw, at, i.index, i.tier, span.rkey, span.address, span.length_bytes,
                 i.plain_bytes, i.key, i.commitment)  # fmt: skip
            at += item_bytes
        miss = self._MISS.pack_into
        for index, status in self.misses:
            miss(raw, at, index, status)
            at += miss_bytes
        return b"".join((raw, self.carried))

    @classmethod
    def decode(cls, raw: bytes) -> Grant:
        cursor = Cursor(raw, "GRANT")
        final, carries, count, missed, lease_id, lease_ns, expires_ns = cursor.unpack(cls._FIXED)
        items = tuple(
            GrantItem(index, _tier(tier), RemoteSpan(rkey, address, size), plain, key, commitment)
            for index, tier, rkey, address, size, plain, key, commitment in cursor.table(
                cls._ITEM, count, limits.BLOCKS_PER_FETCH_MAX
            )
        )
        misses = tuple(
            (index, status_of(status))
            for index, status in cursor.table(cls._MISS, missed, limits.BLOCKS_PER_FETCH_MAX)
        )
        carried = b""
        if cursor.flag(carries):
            carried = cursor.rest()
            _check_carried(items, carried, lease_id or lease_ns or expires_ns)
        cursor.done()
        return cls(cursor.flag(final), lease_id, lease_ns, expires_ns, items, misses, carried)


def _check_carried(items: tuple[GrantItem, ...], carried: bytes, lease: int) -> None:
    """Raises: ProtocolError unless the items are what is carried, all of it, and not leased."""
    at = 0
    for item in items:
        if item.span.rkey or item.span.address != at or not item.span.length_bytes:
            raise ProtocolError("GRANT carries a block that is not where it should be")
        at += item.span.length_bytes
    if at != len(carried) or not 0 < at <= limits.CARRIED_BYTES_MAX or lease:
        raise ProtocolError(f"GRANT carries {len(carried)} bytes, its items are of {at}")


_TIERS = tuple(Tier)  # by wire value; an enum call costs as much as the rest of a grant item


def _tier(value: int) -> Tier:
    if value >= len(_TIERS):
        raise ProtocolError(f"unknown tier {value}")
    return _TIERS[value]


@dataclass(slots=True)
class Release:
    """Host: done with these leases; `reports` names blocks that could not be read or verified.

    A report is (lease id, item index as in the FETCH, status).
    """

    TYPE: ClassVar[FrameType] = FrameType.RELEASE
    _FIXED: ClassVar[struct.Struct] = struct.Struct("<II")
    _LEASE: ClassVar[struct.Struct] = struct.Struct("<Q")
    _REPORT: ClassVar[struct.Struct] = struct.Struct("<QII")

    lease_ids: tuple[int, ...]
    reports: tuple[tuple[int, int, Status], ...] = ()

    def encode(self) -> bytes:
        parts = [self._FIXED.pack(len(self.lease_ids), len(self.reports))]
        parts += [self._LEASE.pack(lease_id) for lease_id in self.lease_ids]
        parts += [self._REPORT.pack(*report) for report in self.reports]
        return b"".join(parts)

    @classmethod
    def decode(cls, raw: bytes) -> Release:
        cursor = Cursor(raw, "RELEASE")
        leases, reports = cursor.unpack(cls._FIXED)
        ids = tuple(row[0] for row in cursor.table(cls._LEASE, leases, limits.BLOCKS_PER_FETCH_MAX))
        rows = cursor.table(cls._REPORT, reports, limits.BLOCKS_PER_FETCH_MAX)
        found = tuple((lease, index, status_of(status)) for lease, index, status in rows)
        cursor.done()
        return cls(ids, found)


@dataclass(frozen=True, slots=True)
class Keyed:
    """Base of the requests that are a namespace handle and a run of keys."""

    _FIXED: ClassVar[struct.Struct] = struct.Struct("<I")
    TYPE: ClassVar[FrameType] = FrameType.EXISTS

    handle: int
    keys: bytes

    def encode(self) -> bytes:
        return self._FIXED.pack(self.handle) + self.keys

    @classmethod
    def decode(cls, raw: bytes) -> Keyed:
        cursor = Cursor(raw, cls.TYPE.name)
        (handle,) = cursor.unpack(cls._FIXED)
        return cls(handle, take_keys(cursor, limits.KEYS_PER_FRAME_MAX))


@dataclass(frozen=True, slots=True)
class Exists(Keyed):
    """Host: which of these could I get now?"""

    TYPE: ClassVar[FrameType] = FrameType.EXISTS


@dataclass(frozen=True, slots=True)
class Touch(Keyed):
    """Host: I use these from elsewhere, keep them recent. Keys in prefix order."""

    TYPE: ClassVar[FrameType] = FrameType.TOUCH


@dataclass(frozen=True, slots=True)
class Forget(Keyed):
    """Host: drop these; they do not come back after a restart."""

    TYPE: ClassVar[FrameType] = FrameType.FORGET


@dataclass(frozen=True, slots=True)
class Explain:
    """Host: why would these miss? Whole engine keys, so that other namespaces can be looked at."""

    TYPE: ClassVar[FrameType] = FrameType.EXPLAIN
    _FIXED: ClassVar[struct.Struct] = struct.Struct("<II")

    handle: int
    engine_keys: tuple[bytes, ...]

    def encode(self) -> bytes:
        rows = [bytes([len(key)]) + key for key in self.engine_keys]
        return self._FIXED.pack(self.handle, len(rows)) + b"".join(rows)

    @classmethod
    def decode(cls, raw: bytes) -> Explain:
        cursor = Cursor(raw, "EXPLAIN")
        handle, count = cursor.unpack(cls._FIXED)
        cursor.check_count(count, limits.BLOCKS_PER_FETCH_MAX)
        keys = []
        for _index in range(count):
            size = cursor.take(1)[0]
            if not limits.ENGINE_KEY_BYTES_MIN <= size <= limits.ENGINE_KEY_BYTES_MAX:
                raise ProtocolError(f"engine key of {size} bytes")
            keys.append(cursor.take(size))
        cursor.done()
        return cls(handle, tuple(keys))


@dataclass(frozen=True, slots=True)
class ExistsReply:
    """Daemon: the longest stored prefix, and a bit per key (LSB first)."""

    TYPE: ClassVar[FrameType] = FrameType.EXISTS_REPLY
    prefix_blocks: int
    bitmap: bytes

    def encode(self) -> bytes:
        return _U32.pack(self.prefix_blocks) + self.bitmap

    @classmethod
    def decode(cls, raw: bytes) -> ExistsReply:
        cursor = Cursor(raw, "EXISTS_REPLY")
        (prefix,) = cursor.unpack(_U32)
        bitmap = cursor.rest()
        cursor.check_count(len(bitmap) * 8, limits.KEYS_PER_FRAME_MAX + 7)
        return cls(prefix, bitmap)


@dataclass(frozen=True, slots=True)
class Stage:
    """Host: bring these up ahead of use and hold them for `hold_ns`."""

    TYPE: ClassVar[FrameType] = FrameType.STAGE
    _FIXED: ClassVar[struct.Struct] = struct.Struct("<IIQQ")

    handle: int
    open_at: OpenAt
    hold_ns: int
    deadline_ns: int
    keys: bytes

    def encode(self) -> bytes:
        fixed = self._FIXED.pack(self.handle, self.open_at, self.hold_ns, self.deadline_ns)
        return fixed + self.keys

    @classmethod
    def decode(cls, raw: bytes) -> Stage:
        cursor = Cursor(raw, "STAGE")
        handle, open_at, hold_ns, deadline_ns = cursor.unpack(cls._FIXED)
        check_deadline(deadline_ns)
        keys = take_keys(cursor, limits.BLOCKS_PER_FETCH_MAX)
        return cls(handle, open_at_of(open_at), hold_ns, deadline_ns, keys)


@dataclass(frozen=True, slots=True)
class Staged:
    """Daemon: a status per key of a STAGE."""

    TYPE: ClassVar[FrameType] = FrameType.STAGED
    statuses: tuple[Status, ...]

    def encode(self) -> bytes:
        return bytes(self.statuses)

    @classmethod
    def decode(cls, raw: bytes) -> Staged:
        Cursor(raw, "STAGED").check_count(len(raw), limits.BLOCKS_PER_FETCH_MAX)
        return cls(tuple(status_of(value) for value in raw))


@dataclass(frozen=True, slots=True)
class Done:
    """Daemon: how many blocks a TOUCH or FORGET found."""

    TYPE: ClassVar[FrameType] = FrameType.DONE
    count: int

    def encode(self) -> bytes:
        return _U32.pack(self.count)

    @classmethod
    def decode(cls, raw: bytes) -> Done:
        cursor = Cursor(raw, "DONE")
        (count,) = cursor.unpack(_U32)
        cursor.done()
        return cls(count)


class Reason(enum.IntEnum):
    """Why a key is, or is not, here (EXPLAIN)."""

    IN_MEMORY = 0
    ON_FLASH = 1
    NEVER_STORED = 2  # or so long ago that the bounded history forgot it
    EVICTED = 3
    FORGOTTEN = 4
    CORRUPT = 5
    ERASED = 6
    BEING_STORED = 7
    OTHER_NAMESPACE = 8  # the tenant has it under another model, layout or salt
    NOT_ADMITTED = 9
    LOST = 10  # accepted but not durable when the daemon stopped, or its segment failed

    @property
    def label(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Explained:
    """Daemon: (reason, when in Unix ns or 0) per key."""

    TYPE: ClassVar[FrameType] = FrameType.EXPLAINED
    _ITEM: ClassVar[struct.Struct] = struct.Struct("<BQ")

    rows: tuple[tuple[Reason, int], ...]

    def encode(self) -> bytes:
        return b"".join(self._ITEM.pack(*row) for row in self.rows)

    @classmethod
    def decode(cls, raw: bytes) -> Explained:
        if len(raw) % cls._ITEM.size:
            raise ProtocolError("EXPLAINED is cut short")
        cursor = Cursor(raw, "EXPLAINED")
        count = len(raw) // cls._ITEM.size
        rows = []
        for reason, when in cursor.table(cls._ITEM, count, limits.KEYS_PER_FRAME_MAX):
            if reason > Reason.LOST:
                raise ProtocolError(f"unknown reason {reason}")
            rows.append((Reason(reason), when))
        return cls(tuple(rows))
