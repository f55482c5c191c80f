"""The control stream's frames: sans-IO, versioned, lengths checked before anything is allocated.

Layout (little-endian, 16 bytes): `u16 magic, u8 version, u8 type, u32 request_id, u32 length,
u32 crc32(first 12 bytes)`, then `length` bytes of payload. The payload needs no checksum of
its own: the stream is TLS 1.3. Described in proto/FORMAT.md.

Invariant: `FrameDecoder` holds at most one header plus the announced, already bounded payload.
"""

from __future__ import annotations

import enum
import struct
import zlib
from dataclasses import dataclass

from entresol_proto import limits
from entresol_proto.status import ProtocolError, Status

MAGIC = 0x5345  # "ES" on the wire
VERSION = 1
_HEADER = struct.Struct("<HBBII")
_CRC = struct.Struct("<I")


class FrameType(enum.IntEnum):
    """Wire numbers: requests of the host are below 64, answers of the daemon above."""

    HELLO = 1
    ATTACH = 2
    OPEN_NAMESPACE = 3
    FETCH = 4
    RELEASE = 5
    RESERVE = 6
    COMMIT = 7
    EXISTS = 8
    STAGE = 9
    TOUCH = 10
    FORGET = 11
    EXPLAIN = 12
    PING = 13
    GOODBYE = 14  # either side: no new requests, finish what is under way
    QUOTE = 15  # from protocol 3 on
    WELCOME = 65
    ATTACHED = 66
    NAMESPACE_OPENED = 67
    GRANT = 68
    RESERVED = 70
    PUT_DONE = 71
    EXISTS_REPLY = 72
    STAGED = 73
    DONE = 74
    EXPLAINED = 76
    PONG = 77
    ERROR = 78
    QUOTED = 79


_TYPES = {int(item): item for item in FrameType}


# Not frozen, because several are made per request: a frozen one takes several times as long.
@dataclass(slots=True)
class Frame:
    """One frame. `payload` is owned by the receiver (a private copy)."""

    type: FrameType
    request_id: int
    payload: bytes


def encode_frame(kind: FrameType, request_id: int, payload: bytes = b"") -> bytes:
    """The bytes of one frame. Raises: ProtocolError if the payload exceeds the largest frame."""
    if len(payload) > limits.FRAME_PAYLOAD_BYTES_MAX:
        raise ProtocolError(
            f"{kind.name} payload of {len(payload)} bytes exceeds {limits.FRAME_PAYLOAD_BYTES_MAX}",
            status=Status.TOO_LARGE,
        )
    head = _HEADER.pack(MAGIC, VERSION, kind, request_id, len(payload))
    return head + _CRC.pack(zlib.crc32(head)) + payload


class FrameDecoder:
    """Turns a byte stream into frames.

    `payload_bytes_max` may be raised with `allow()` once the session is open; before that a
    stranger can make us hold only a few KiB.
    """

    __slots__ = ("_broken", "_buffer", "_payload_bytes_max")

    def __init__(self, payload_bytes_max: int = limits.FRAME_PAYLOAD_BYTES_BEFORE_OPEN_MAX) -> None:
        self._payload_bytes_max = payload_bytes_max
        self._buffer = bytearray()
        self._broken = False

    def allow(self, payload_bytes_max: int) -> None:
        """Change the largest accepted payload."""
        self._payload_bytes_max = payload_bytes_max

    @property
    def buffered_bytes(self) -> int:
        return len(self._buffer)

    @property
    def missing_bytes(self) -> int:
        """Of the frame that has begun; 0 before its header is whole."""
        held = len(self._buffer)
        if held < limits.FRAME_HEADER_BYTES:
            return 0
        length = int(_HEADER.unpack_from(self._buffer)[4])  # checked when it came
        return limits.FRAME_HEADER_BYTES + length - held

    def feed(self, data: bytes | bytearray | memoryview) -> list[Frame]:
        """Add received bytes, return the frames they complete.

        Raises: ProtocolError on wrong magic, checksum, version, type or length. The decoder holds
        and accepts nothing afterwards; the stream must be closed.
        """
        if self._broken:
            raise ProtocolError("the stream is broken already")
        try:
            return self._feed(data)
        except ProtocolError:
            self._broken = True
            self._buffer.clear()
            raise

    def _feed(self, data: bytes | bytearray | memoryview) -> list[Frame]:
        held = self._buffer
        if held:
            held += data
            frames, at = self._frames(memoryview(held))
            if at:
                del held[:at]
        else:  # as a rule nothing is left of what came before: then nothing is copied twice
            frames, at = self._frames(memoryview(data))
            if at < len(data):
                held += data[at:]
        return frames

    def _frames(self, data: memoryview) -> tuple[list[Frame], int]:
        """The whole frames at the beginning, and where they end. `data` is let go of."""
        frames: list[Frame] = []
        at, size = 0, len(data)
        with data:
            while size - at >= limits.FRAME_HEADER_BYTES:
                kind, request_id, length = self._header(data, at)
                begin = at + limits.FRAME_HEADER_BYTES
                if begin + length > size:
                    break
                at = begin + length
                frames.append(Frame(kind, request_id, bytes(data[begin:at])))
        return frames, at

    def _header(self, data: memoryview, at: int) -> tuple[FrameType, int, int]:
        magic, version, kind, request_id, length = _HEADER.unpack_from(data, at)
        (crc,) = _CRC.unpack_from(data, at + _HEADER.size)
        if magic != MAGIC:
            raise ProtocolError("not an Entresol frame (wrong magic)")
        if crc != zlib.crc32(data[at : at + _HEADER.size]):
            raise ProtocolError("frame header checksum does not match")
        if version != VERSION:
            raise ProtocolError(
                f"frame version {version}, this build speaks {VERSION}",
                status=Status.UNSUPPORTED,
                hint="upgrade the older side",
            )
        frame_type = _TYPES.get(kind)
        if frame_type is None:
            raise ProtocolError(f"unknown frame type {kind}", status=Status.UNSUPPORTED)
        if length > self._payload_bytes_max:
            raise ProtocolError(
                f"{frame_type.name} announces {length} bytes, limit {self._payload_bytes_max}",
                status=Status.TOO_LARGE,
            )
        return frame_type, request_id, length
