"""Messages that open, describe and end a session.

Each message is a frozen dataclass with `encode()` and a strict `decode()`: one encoding, counts
checked against named limits, ProtocolError for anything else. Layouts are in proto/FORMAT.md.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import ClassVar

from entresol_proto import limits
from entresol_proto.fabric.base import FabricKind, Offer
from entresol_proto.status import ProtocolError, Status
from entresol_proto.wire.cursor import NAME_BYTES_MAX, Cursor, text16
from entresol_proto.wire.frames import FrameType

PROTOCOL_MIN = 1
PROTOCOL_MAX = 4
PROTOCOL_HOST_SEALED = 2  # the first with namespaces whose keys the tenant keeps
PROTOCOL_QUOTE = 3  # the first with QUOTE
PROTOCOL_CARRY = 4  # the first in which a GRANT may carry the blocks
OFFERS_MAX = 16
NO_FABRIC = 0  # a control-only session: exists, explain, touch, forget

_STATUSES = {int(item): item for item in Status}


def status_of(value: int) -> Status:
    """The Status of a wire byte. Raises: ProtocolError for a number this build does not know."""
    found = _STATUSES.get(value)
    if found is None:
        raise ProtocolError(f"unknown status {value}")
    return found


@dataclass(frozen=True, slots=True)
class Hello:
    """Host: what I speak and where I run. Equal `host_id`s mean a shared kernel."""

    TYPE: ClassVar[FrameType] = FrameType.HELLO
    _FIXED: ClassVar[struct.Struct] = struct.Struct("<BBHH")

    protocol_min: int
    protocol_max: int
    host_id: bytes  # 16 bytes
    open_threads: int  # threads the host uses to open blocks
    client: str

    def encode(self) -> bytes:
        return (
            self._FIXED.pack(self.protocol_min, self.protocol_max, self.open_threads, 0)
            + self.host_id
            + text16(self.client, NAME_BYTES_MAX)
        )

    @classmethod
    def decode(cls, raw: bytes) -> Hello:
        cursor = Cursor(raw, "HELLO")
        low, high, threads, reserved = cursor.unpack(cls._FIXED)
        cursor.zero(reserved)
        host_id = cursor.take(16)
        (size,) = cursor.unpack(_U16)
        name = cursor.text(size, NAME_BYTES_MAX)
        cursor.done()
        return cls(low, high, host_id, threads, name)


@dataclass(frozen=True, slots=True)
class Welcome:
    """Daemon: who I am, what you may do, which data paths you may attach."""

    TYPE: ClassVar[FrameType] = FrameType.WELCOME
    _FIXED: ClassVar[struct.Struct] = struct.Struct("<BB16sQQIIIH16sH")

    protocol: int
    session_id: bytes
    incarnation: int
    lease_ns: int
    frame_payload_bytes_max: int
    block_bytes_max: int
    blocks_per_fetch_max: int
    requests_in_flight_max: int
    host_id: bytes
    shard: str
    tenant: str
    offers: tuple[Offer, ...]

    def encode(self) -> bytes:
        parts = [
            self._FIXED.pack(
                self.protocol,
                0,
                self.session_id,
                self.incarnation,
                self.lease_ns,
                self.frame_payload_bytes_max,
                self.block_bytes_max,
                self.blocks_per_fetch_max,
                self.requests_in_flight_max,
                self.host_id,
                len(self.offers),
            ),
            text16(self.shard, NAME_BYTES_MAX),
            text16(self.tenant, NAME_BYTES_MAX),
        ]
        parts += [struct.pack("<BH", o.kind, len(o.params)) + o.params for o in self.offers]
        return b"".join(parts)

    @classmethod
    def decode(cls, raw: bytes) -> Welcome:
        cursor = Cursor(raw, "WELCOME")
        (protocol, reserved, session_id, incarnation, lease_ns, frame_max, block_max, fetch_max,
         inflight, host_id, count) = cursor.unpack(cls._FIXED)  # fmt: skip
        cursor.zero(reserved)
        cursor.check_count(count, OFFERS_MAX)
        shard = cursor.text(cursor.unpack(_U16)[0], NAME_BYTES_MAX)
        tenant = cursor.text(cursor.unpack(_U16)[0], NAME_BYTES_MAX)
        offers = []
        for _index in range(count):
            kind, size = cursor.unpack(_OFFER)
            cursor.check_count(size, limits.OFFER_PARAMS_BYTES_MAX)
            params = cursor.take(size)
            try:
                offers.append(Offer(FabricKind(kind), params))
            except ValueError:
                continue  # a fabric newer than this build
        cursor.done()
        return cls(protocol, session_id, incarnation, lease_ns, frame_max, block_max, fetch_max,
                   inflight, host_id, shard, tenant, tuple(offers))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Attach:
    """Host: I take this data path (`kind` 0: none); `reply` is what its set-up gave."""

    TYPE: ClassVar[FrameType] = FrameType.ATTACH
    kind: int
    reply: bytes = field(default=b"", repr=False)

    def encode(self) -> bytes:
        return struct.pack("<BH", self.kind, len(self.reply)) + self.reply

    @classmethod
    def decode(cls, raw: bytes) -> Attach:
        cursor = Cursor(raw, "ATTACH")
        kind, size = cursor.unpack(_OFFER)
        cursor.check_count(size, limits.OFFER_PARAMS_BYTES_MAX)
        reply = cursor.take(size)
        cursor.done()
        return cls(kind, reply)


@dataclass(frozen=True, slots=True)
class Attached:
    """Daemon: the data path is up."""

    TYPE: ClassVar[FrameType] = FrameType.ATTACHED
    kind: int

    def encode(self) -> bytes:
        return struct.pack("<B", self.kind)

    @classmethod
    def decode(cls, raw: bytes) -> Attached:
        cursor = Cursor(raw, "ATTACHED")
        (kind,) = cursor.unpack(_U8)
        cursor.done()
        return cls(kind)


@dataclass(frozen=True, slots=True)
class OpenNamespace:
    """Host: I will use blocks of this descriptor (`NamespaceDescriptor.canonical()`)."""

    TYPE: ClassVar[FrameType] = FrameType.OPEN_NAMESPACE
    descriptor: bytes = field(repr=False)  # holds the cache salt

    def encode(self) -> bytes:
        return self.descriptor

    @classmethod
    def decode(cls, raw: bytes) -> OpenNamespace:
        if len(raw) > limits.DESCRIPTOR_BYTES_MAX:
            raise ProtocolError("namespace descriptor is too long", status=Status.TOO_LARGE)
        return cls(raw)


@dataclass(frozen=True, slots=True)
class NamespaceOpened:
    """Daemon: use `handle` from now on; name blocks under `secret`; seal as told."""

    TYPE: ClassVar[FrameType] = FrameType.NAMESPACE_OPENED
    _FIXED: ClassVar[struct.Struct] = struct.Struct("<I16s32sBBHI")

    handle: int
    namespace_id: bytes
    secret: bytes = field(repr=False)
    codec_id: int  # what host-side sealing should use
    seal_at_host: bool  # puts on this session are sealed by the host before they are read
    chunk_bytes: int

    def encode(self) -> bytes:
        return self._FIXED.pack(
            self.handle, self.namespace_id, self.secret, self.codec_id, self.seal_at_host, 0,
            self.chunk_bytes,
        )  # fmt: skip

    @classmethod
    def decode(cls, raw: bytes) -> NamespaceOpened:
        cursor = Cursor(raw, "NAMESPACE_OPENED")
        handle, ns_id, secret, codec_id, at_host, reserved, chunk = cursor.unpack(cls._FIXED)
        cursor.zero(reserved)
        cursor.done()
        if not limits.CHUNK_BYTES_MIN <= chunk <= limits.CHUNK_BYTES_MAX:
            raise ProtocolError(f"NAMESPACE_OPENED wants chunks of {chunk} bytes")
        return cls(handle, ns_id, secret, codec_id, cursor.flag(at_host), chunk)


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """Daemon: this request failed as a whole. Its status is a failure: one that said OK would have
    hosts take for done what never was."""

    TYPE: ClassVar[FrameType] = FrameType.ERROR
    status: Status
    message: str
    hint: str = ""

    def encode(self) -> bytes:
        return bytes([self.status]) + text16(self.message) + text16(self.hint)

    @classmethod
    def decode(cls, raw: bytes) -> ErrorReply:
        cursor = Cursor(raw, "ERROR")
        status = status_of(cursor.unpack(_U8)[0])
        if not status.is_failure:
            raise ProtocolError(f"ERROR says {status.label}")
        message = cursor.text(cursor.unpack(_U16)[0])
        hint = cursor.text(cursor.unpack(_U16)[0])
        cursor.done()
        return cls(status, message, hint)


@dataclass(frozen=True, slots=True)
class Goodbye:
    """Either side: I take no new requests; what is under way is finished."""

    TYPE: ClassVar[FrameType] = FrameType.GOODBYE
    status: Status = Status.OK
    message: str = ""

    def encode(self) -> bytes:
        return bytes([self.status]) + text16(self.message)

    @classmethod
    def decode(cls, raw: bytes) -> Goodbye:
        cursor = Cursor(raw, "GOODBYE")
        (status,) = cursor.unpack(_U8)
        message = cursor.text(cursor.unpack(_U16)[0])
        cursor.done()
        return cls(status_of(status), message)


@dataclass(frozen=True, slots=True)
class Ping:
    """Host: are you there? The daemon echoes the eight bytes as a PONG."""

    TYPE: ClassVar[FrameType] = FrameType.PING
    token: bytes

    def encode(self) -> bytes:
        return self.token

    @classmethod
    def decode(cls, raw: bytes) -> Ping:
        if len(raw) != 8:
            raise ProtocolError(f"PING carries {len(raw)} bytes, not 8")
        return cls(raw)


@dataclass(frozen=True, slots=True)
class Pong(Ping):
    """Daemon: I am."""

    TYPE: ClassVar[FrameType] = FrameType.PONG


_U8 = struct.Struct("<B")
_U16 = struct.Struct("<H")
_OFFER = struct.Struct("<BH")
