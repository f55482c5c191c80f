"""Messages of a put: RESERVE and what is answered, COMMIT and how it ended. Same rules as `data`,
by whose name they are known elsewhere.
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

_U32 = struct.Struct("<I")


class Ack(enum.IntEnum):
    """What a put waits for."""

    ACCEPTED = 0  # sealed and servable, in memory
    DURABLE = 1  # on flash and flushed


@dataclass(slots=True)
class PutItem:
    """One block a host wants to store.

    `parent` is the engine key of the block before it, empty at the root; `position` is the block's
    index in its sequence; `token_ids_u32le` are 4 bytes each (`ids.pack_token_ids`).
    """

    key: bytes  # 16-byte wire key
    engine_key: bytes
    plain_bytes: int
    position: int
    parent: bytes
    token_ids_u32le: bytes = field(repr=False)


@dataclass(slots=True)
class Reserve:
    """Host: which of these do you want? Items are in prefix order."""

    TYPE: ClassVar[FrameType] = FrameType.RESERVE
    _FIXED: ClassVar[struct.Struct] = struct.Struct("<IBBHQ")
    _ITEM: ClassVar[struct.Struct] = struct.Struct("<16sIIHBB")

    handle: int
    ack: Ack
    deadline_ns: int
    items: tuple[PutItem, ...]

    def encode(self) -> bytes:
        parts = [self._FIXED.pack(self.handle, self.ack, 0, len(self.items), self.deadline_ns)]
        for i in self.items:
            tokens, odd = divmod(len(i.token_ids_u32le), 4)
            assert not odd, "token ids are packed u32"
            parts.append(
                self._ITEM.pack(
                    i.key, i.plain_bytes, i.position, tokens, len(i.engine_key), len(i.parent)
                )
                + i.engine_key
                + i.parent
                + i.token_ids_u32le
            )
        return b"".join(parts)

    @classmethod
    def decode(cls, raw: bytes) -> Reserve:
        cursor = Cursor(raw, "RESERVE")
        handle, ack, reserved, count, deadline_ns = cursor.unpack(cls._FIXED)
        cursor.zero(reserved)
        cursor.check_count(count, limits.BLOCKS_PER_PUT_MAX)
        check_deadline(deadline_ns)
        items = []
        for _index in range(count):
            key, plain, position, tokens, key_bytes, parent_bytes = cursor.unpack(cls._ITEM)
            if not limits.ENGINE_KEY_BYTES_MIN <= key_bytes <= limits.ENGINE_KEY_BYTES_MAX:
                raise ProtocolError(f"engine key of {key_bytes} bytes")
            cursor.check_count(tokens, limits.TOKENS_PER_BLOCK_MAX)
            if parent_bytes and not (
                limits.ENGINE_KEY_BYTES_MIN <= parent_bytes <= limits.ENGINE_KEY_BYTES_MAX
            ):
                raise ProtocolError(f"parent key of {parent_bytes} bytes")
            engine_key = cursor.take(key_bytes)
            parent = cursor.take(parent_bytes)
            items.append(PutItem(key, engine_key, plain, position, parent, cursor.take(4 * tokens)))
        cursor.done()
        if ack > Ack.DURABLE:
            raise ProtocolError(f"unknown acknowledgement {ack}")
        return cls(handle, Ack(ack), deadline_ns, tuple(items))


@dataclass(slots=True)
class Reserved:
    """Daemon: one answer per item. OK carries a put id and, for host sealing, a single-use key."""

    TYPE: ClassVar[FrameType] = FrameType.RESERVED
    _ITEM: ClassVar[struct.Struct] = struct.Struct("<IIQ32s32s16s")

    @dataclass(slots=True)
    class Item:
        status: Status
        dek_version: int = 0
        put_id: int = 0
        salt: bytes = bytes(32)
        key: bytes = bytes(32)
        commitment: bytes = bytes(16)

        def __repr__(self) -> str:
            return f"Reserved.Item(status={self.status.label}, put_id={self.put_id})"

    items: tuple[Item, ...]

    def encode(self) -> bytes:
        size = self._ITEM.size
        raw = bytearray(_U32.size + len(self.items) * size)
        _U32.pack_into(raw, 0, len(self.items))
        for at, i in enumerate(self.items):
            self._ITEM.pack_into(
                raw, _U32.size + at * size,
                i.status, i.dek_version, i.put_id, i.salt, i.key, i.commitment,
            )  # fmt: skip
        return bytes(raw)

    @classmethod
    def decode(cls, raw: bytes) -> Reserved:
        cursor = Cursor(raw, "RESERVED")
        (count,) = cursor.unpack(_U32)
        rows = cursor.table(cls._ITEM, count, limits.BLOCKS_PER_PUT_MAX)
        items = tuple(cls.Item(status_of(row[0]), *row[1:]) for row in rows)
        cursor.done()
        return cls(items)


@dataclass(slots=True)
class Commit:
    """Host: the reserved blocks lie ready to be read there. A zero length gives a reservation up.

    Pairs are (put id, span): sealed bytes when the host seals, plaintext otherwise.
    """

    TYPE: ClassVar[FrameType] = FrameType.COMMIT
    _ITEM: ClassVar[struct.Struct] = struct.Struct("<QIQI")

    items: tuple[tuple[int, RemoteSpan], ...]

    def encode(self) -> bytes:
        rows = [
            self._ITEM.pack(put_id, span.rkey, span.address, span.length_bytes)
            for put_id, span in self.items
        ]
        return _U32.pack(len(rows)) + b"".join(rows)

    @classmethod
    def decode(cls, raw: bytes) -> Commit:
        cursor = Cursor(raw, "COMMIT")
        (count,) = cursor.unpack(_U32)
        rows = cursor.table(cls._ITEM, count, limits.BLOCKS_PER_PUT_MAX)
        items = tuple((row[0], RemoteSpan(*row[1:])) for row in rows)
        cursor.done()
        return cls(items)


@dataclass(slots=True)
class PutDone:
    """Daemon: outcomes of a COMMIT, in its order; the host's memory is its own again."""

    TYPE: ClassVar[FrameType] = FrameType.PUT_DONE
    statuses: tuple[Status, ...]

    def encode(self) -> bytes:
        return bytes(self.statuses)

    @classmethod
    def decode(cls, raw: bytes) -> PutDone:
        Cursor(raw, "PUT_DONE").check_count(len(raw), limits.BLOCKS_PER_PUT_MAX)
        return cls(tuple(status_of(value) for value in raw))
