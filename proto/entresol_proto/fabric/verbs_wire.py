"""What two verbs endpoints tell each other: set-up parameters, and messages of 64 bytes. No I/O.

Set-up travels in the control stream (offer and ATTACH reply). Messages travel as SENDs on the first
rail; they carry no data, only which memory may be read: without them a reader could not tell an
expired lease from a lost link, because a refused READ ends the queue pair.

Invariant: everything here is parsed from an untrusted peer; whatever `encode` would not produce is
refused with BAD_REQUEST before anything acts on it. Layout: proto/FABRICS.md.
"""

from __future__ import annotations

import enum
import ipaddress
import struct
from dataclasses import dataclass, field

from entresol_proto import limits
from entresol_proto.status import FabricError, ProtocolError, Status

_VERSION = 1
_PRIVATE = 1
_INFINIBAND = 1
_OFFER = struct.Struct("<BBBBI16s")  # version, flags, rails, zero, lifetime in ms, ticket
_REPLY = struct.Struct("<BB16s")  # version, rails, ticket
_RAIL = struct.Struct(
    "<BBBBHHII16s"
)  # number, flags, mtu code, rd_atomic, lid, zero, qpn, psn, gid
_MTUS = (256, 512, 1024, 2048, 4096)
_MESSAGE = struct.Struct("<BBHIQQ4I24s")  # type, rails, zero, taken, address, length, rkeys, zero
MESSAGE_BYTES = _MESSAGE.size
_NUMBER_MAX = 2**24  # queue pair numbers and packet sequence numbers


@dataclass(frozen=True, slots=True)
class Rail:
    """One end of one queue pair."""

    number: int  # of the rail in the offer
    infiniband: bool
    mtu_bytes: int
    rd_atomic: int  # reads it can have outstanding and answer
    lid: int
    qpn: int
    psn: int = field(repr=False)
    gid: bytes

    @property
    def gid_text(self) -> str:
        """Eight groups of four digits, as pyverbs wants it."""
        return ipaddress.IPv6Address(self.gid).exploded

    @property
    def ipv4(self) -> str | None:
        """The address behind a RoCE v2 GID of an IPv4 network."""
        mapped = ipaddress.IPv6Address(self.gid).ipv4_mapped
        return None if mapped is None else str(mapped)

    def encode(self) -> bytes:
        return _RAIL.pack(
            self.number, _INFINIBAND if self.infiniband else 0, _MTUS.index(self.mtu_bytes) + 1,
            self.rd_atomic, self.lid, 0, self.qpn, self.psn, self.gid,
        )  # fmt: skip

    @classmethod
    def parse(cls, raw: bytes, at: int) -> Rail:
        """Raises: FabricError, struct.error."""
        number, flags, mtu, rd_atomic, lid, zero, qpn, psn, gid = _RAIL.unpack_from(raw, at)
        address = ipaddress.IPv6Address(gid)
        infiniband = bool(flags & _INFINIBAND)
        good = (
            flags <= _INFINIBAND
            and 1 <= mtu <= len(_MTUS)
            and rd_atomic > 0
            and zero == 0
            and 1 < qpn < _NUMBER_MAX  # 0 and 1 belong to the fabric's management
            and psn < _NUMBER_MAX
            and (infiniband or not (address.is_unspecified or address.is_multicast))
        )
        if not good:
            raise FabricError("malformed verbs parameters", status=Status.BAD_REQUEST)
        return cls(number, infiniband, _MTUS[mtu - 1], rd_atomic, lid, qpn, psn, gid)


def _parse_rails(raw: bytes, at: int, count: int, what: str) -> tuple[Rail, ...]:
    if not 0 < count <= limits.VERBS_RAILS_MAX or len(raw) != at + count * _RAIL.size:
        raise FabricError(f"malformed verbs {what}", status=Status.BAD_REQUEST)
    rails = tuple(Rail.parse(raw, at + n * _RAIL.size) for n in range(count))
    if len({rail.number for rail in rails}) != count:
        raise FabricError(f"malformed verbs {what}", status=Status.BAD_REQUEST)
    return rails


@dataclass(frozen=True, slots=True)
class OfferParams:
    """The daemon's queue pairs, in INIT, waiting for a peer."""

    private: bool
    lifetime_ms: int
    ticket: bytes = field(repr=False)
    rails: tuple[Rail, ...]

    def encode(self) -> bytes:
        flags = _PRIVATE if self.private else 0
        head = _OFFER.pack(_VERSION, flags, len(self.rails), 0, self.lifetime_ms, self.ticket)
        return head + b"".join(rail.encode() for rail in self.rails)

    @classmethod
    def parse(cls, raw: bytes) -> OfferParams:
        """Raises: FabricError (BAD_REQUEST)."""
        try:
            version, flags, count, zero, lifetime_ms, ticket = _OFFER.unpack_from(raw)
        except struct.error:
            version, flags, count, zero, lifetime_ms, ticket = 0, 0, 0, 0, 0, b""
        sane = 0 < lifetime_ms <= limits.VERBS_OFFER_LIFETIME_MS_MAX
        if version != _VERSION or flags > _PRIVATE or zero or not sane:
            raise FabricError("malformed verbs offer", status=Status.BAD_REQUEST)
        rails = _parse_rails(raw, _OFFER.size, count, "offer")
        if [rail.number for rail in rails] != list(range(count)):
            raise FabricError("malformed verbs offer", status=Status.BAD_REQUEST)
        return cls(bool(flags & _PRIVATE), lifetime_ms, ticket, rails)


@dataclass(frozen=True, slots=True)
class ReplyParams:
    """The host's queue pairs, ready; `Rail.number` says which offered rail each belongs to."""

    ticket: bytes = field(repr=False)
    rails: tuple[Rail, ...]

    def encode(self) -> bytes:
        head = _REPLY.pack(_VERSION, len(self.rails), self.ticket)
        return head + b"".join(rail.encode() for rail in self.rails)

    @classmethod
    def parse(cls, raw: bytes) -> ReplyParams:
        """Raises: FabricError (BAD_REQUEST)."""
        try:
            version, count, ticket = _REPLY.unpack_from(raw)
        except struct.error:
            version, count, ticket = 0, 0, b""
        if version != _VERSION:
            raise FabricError("malformed verbs reply", status=Status.BAD_REQUEST)
        return cls(ticket, _parse_rails(raw, _REPLY.size, count, "reply"))


class Kind(enum.IntEnum):
    """Messages between the endpoints of a session."""

    WELCOME = 1  # daemon, first: the session stands
    EXPOSED = 2  # this memory of mine may be read
    REVOKE = 3  # no longer: finish what you have on the wire and say so
    REVOKED = 4  # I have no read of it under way and begin none
    TAKEN = 5  # only the count of messages taken
    GOODBYE = 6  # the sender closes


@dataclass(frozen=True, slots=True)
class Message:
    """One message. `taken` counts the peer's messages (TAKEN not among them), modulo 2**32."""

    kind: Kind
    rkeys: tuple[int, ...] = ()  # of the region on each rail; the first one names it
    address: int = 0
    length_bytes: int = 0

    def encode(self, taken: int) -> bytes:
        rkeys = (*self.rkeys, 0, 0, 0, 0)[: limits.VERBS_RAILS_MAX]
        return _MESSAGE.pack(
            self.kind, len(self.rkeys), 0, taken & 0xFFFF_FFFF, self.address, self.length_bytes,
            *rkeys, bytes(24),
        )  # fmt: skip

    @classmethod
    def parse(cls, raw: bytes | memoryview, rails: int) -> tuple[Message, int]:
        """A message of a session over `rails` rails, and its `taken`. Raises: ProtocolError."""
        try:
            number, count, zero, taken, address, length, *rkeys, rest = _MESSAGE.unpack(raw)
            kind = Kind(number)
        except (struct.error, ValueError):
            raise ProtocolError("malformed verbs message") from None
        expected = {Kind.EXPOSED: rails, Kind.REVOKE: 1, Kind.REVOKED: 1}.get(kind, 0)
        region_ok = kind is Kind.EXPOSED or (address == 0 and length == 0)
        if kind is Kind.EXPOSED:
            region_ok = length > 0 and address + length <= 2**64
        if count != expected or zero or any(rest) or any(rkeys[count:]) or not region_ok:
            raise ProtocolError(f"malformed verbs message {kind.name}")
        return cls(kind, tuple(rkeys[:count]), address, length), taken
