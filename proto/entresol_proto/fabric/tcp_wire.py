"""The bytes of a tcp offer, as proto/FABRICS.md has them.

Invariant: what is parsed, encodes to the same bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from entresol_proto import limits
from entresol_proto.status import FabricError, Status

_PARAMS = struct.Struct("<BBBBH")  # version, flags, streams, length of the host name, port
_VERSION = 1
_TLS = 1
_PINNED = 2
_PIN_BYTES = 32


@dataclass(frozen=True, slots=True)
class TcpParams:
    """What a tcp offer carries."""

    host: str
    port: int
    streams: int
    tls: bool
    ticket: bytes
    pin: bytes | None

    def encode(self) -> bytes:
        host = self.host.encode()
        flags = (_TLS if self.tls else 0) | (_PINNED if self.pin else 0)
        head = _PARAMS.pack(_VERSION, flags, self.streams, len(host), self.port)
        return head + self.ticket + (self.pin or b"") + host

    @classmethod
    def parse(cls, raw: bytes) -> TcpParams:
        """Raises: FabricError (BAD_REQUEST) for anything that `encode` would not produce."""
        try:
            version, flags, streams, host_bytes, port = _PARAMS.unpack_from(raw)
            at = _PARAMS.size + limits.TICKET_BYTES
            ticket = raw[_PARAMS.size : at]
            pin = raw[at : at + _PIN_BYTES] if flags & _PINNED else None
            at += _PIN_BYTES if pin is not None else 0
            host = raw[at:].decode("ascii")
        except (struct.error, UnicodeDecodeError):
            version = 0
        if (
            version != _VERSION
            or flags > (_TLS | _PINNED)
            or len(host) != host_bytes
            or len(raw) != at + host_bytes
            or not 0 < streams <= limits.DATA_STREAMS_PER_SESSION_MAX
            or not port
        ):
            raise FabricError("malformed tcp offer", status=Status.BAD_REQUEST)
        return cls(host, port, streams, bool(flags & _TLS), ticket, pin)
