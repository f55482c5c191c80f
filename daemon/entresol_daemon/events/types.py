"""The vocabulary of events: kinds, reasons, media, and one frozen record per event.

Invariant: the numbers are those of proto/entresol_proto/v1/entresol.proto and never change meaning.
Events are idempotent statements about where a block is, so a snapshot followed by a replay of
events that it already contains gives the same result (daemon/EVENTS.md).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from entresol_proto import limits
from entresol_proto.ids import TenantName, unpack_token_ids


class Kind(enum.IntEnum):
    """What happened. `label` is the text form; `meaning` is the line of EVENTS.md."""

    STORED = 1
    REMOVED = 2
    STAGED = 3
    DEMOTED = 4
    EXPIRED = 5
    CORRUPT = 6
    PINNED = 7
    TENANT_ERASED = 8
    CLEARED = 9

    @property
    def label(self) -> str:
        """Lower-case text for metrics, logs and JSON."""
        return self.name.lower()

    @property
    def meaning(self) -> str:
        """What a consumer should conclude."""
        return _KIND_MEANINGS[self]

    @property
    def ends_blocks(self) -> bool:
        """True when the named keys are gone afterwards (REMOVED, EXPIRED, CORRUPT)."""
        return self in (Kind.REMOVED, Kind.EXPIRED, Kind.CORRUPT)


class Reason(enum.IntEnum):
    """Why a block went, or where corruption was found."""

    NONE = 0
    EVICTED = 1
    FORGOTTEN = 2
    CORRUPT = 3
    ERASED = 4
    QUOTA = 5
    LOST = 6
    SUPERSEDED = 7
    HEADER = 8
    FLASH = 9
    HOST_REPORT = 10

    @property
    def label(self) -> str:
        """Lower-case text for metrics, logs and JSON."""
        return self.name.lower()

    @property
    def meaning(self) -> str:
        """What the reason says."""
        return _REASON_MEANINGS[self]


class Medium(enum.IntEnum):
    """Where a block is."""

    NONE = 0
    MEMORY = 1
    FLASH = 2
    REMOTE = 3

    @property
    def label(self) -> str:
        """Lower-case text for metrics, logs and JSON."""
        return self.name.lower()


class GapReason(enum.IntEnum):
    """Why a consumer must take a snapshot before it may go on."""

    INCARNATION = 1
    TRIMMED = 2
    AHEAD = 3
    SLOW = 4

    @property
    def label(self) -> str:
        """Lower-case text for metrics, logs and JSON."""
        return self.name.lower()

    @property
    def meaning(self) -> str:
        """What happened to the consumer's position."""
        return _GAP_MEANINGS[self]


_KIND_MEANINGS = {
    Kind.STORED: "The keys can be read here; a copy is at `medium`. Carries chain and tokens.",
    Kind.REMOVED: "The keys are gone from every medium, for `reason`.",
    Kind.STAGED: "A copy is now also in memory.",
    Kind.DEMOTED: "The only copy is now at `medium`.",
    Kind.EXPIRED: "The keys are gone: their retention ended.",
    Kind.CORRUPT: "The keys are gone: verification failed at the place `reason` names.",
    Kind.PINNED: "The keys are kept until `until_unix_ns` (0: no longer pinned).",
    Kind.TENANT_ERASED: "The tenant's keys were destroyed: nothing of it can be read any more.",
    Kind.CLEARED: "Every block of the namespace is gone (no namespace: of the tenant).",
}
_REASON_MEANINGS = {
    Reason.NONE: "No reason applies.",
    Reason.EVICTED: "Room was needed.",
    Reason.FORGOTTEN: "The tenant asked for it.",
    Reason.CORRUPT: "Another event said that it failed verification.",
    Reason.ERASED: "The tenant was erased.",
    Reason.QUOTA: "The tenant was over its quota.",
    Reason.LOST: "Its segment failed, or was condemned after a failed flush.",
    Reason.SUPERSEDED: "Another write of the same key took its place.",
    Reason.HEADER: "Corrupt: the record or block header did not verify.",
    Reason.FLASH: "Corrupt: the bytes read from flash did not verify.",
    Reason.HOST_REPORT: "Corrupt: it does not open, as a host reported or the daemon saw.",
}
_GAP_MEANINGS = {
    GapReason.INCARNATION: "The position belongs to another start of the daemon.",
    GapReason.TRIMMED: "The position is older than the oldest event still held.",
    GapReason.AHEAD: "The position was not given out yet: it is not one of ours.",
    GapReason.SLOW: "The consumer fell so far behind that events it had not read were dropped.",
}

_EVENT_OVERHEAD_BYTES = 320  # the record, its integers and its place in the ring, measured roughly
_KEY_OVERHEAD_BYTES = 41  # a bytes object without its content, and its place in a tuple
_WIRE_KEY_COST_BYTES = _KEY_OVERHEAD_BYTES + limits.WIRE_KEY_BYTES


# Not frozen, because one is made per block: a frozen one takes several times as long.
@dataclass(slots=True)
class Event:
    """One entry of one tenant's log. All bytes are owned by the event (immutable).

    `wire_keys` and `engine_keys` are parallel; `engine_keys` is empty where they are not known.
    `parent` is the engine key of the block before the first, empty at the head of a chain.
    `token_ids_u32le` holds the token ids of all keys in order, 4 bytes little-endian each (packed,
    because a ring holds tens of thousands of events). An empty `namespace_id` means all of them.
    """

    seq: int  # from 1 per (incarnation, tenant); 0 in a snapshot
    time_unix_ns: int
    tenant: TenantName
    kind: Kind
    namespace_id: bytes = b""
    wire_keys: tuple[bytes, ...] = ()
    engine_keys: tuple[bytes, ...] = ()
    parent: bytes = b""
    position: int = 0
    block_tokens: int = 0
    token_ids_u32le: bytes = b""
    medium: Medium = Medium.NONE
    reason: Reason = Reason.NONE
    size_bytes: int = 0
    until_unix_ns: int = 0

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids as integers (unpacked on every call)."""
        return unpack_token_ids(self.token_ids_u32le)

    @property
    def cost_bytes(self) -> int:
        """What holding this event costs in memory, approximately."""
        wire, engine = self.wire_keys, self.engine_keys
        return (
            _EVENT_OVERHEAD_BYTES
            + len(wire) * _WIRE_KEY_COST_BYTES
            + len(engine) * _KEY_OVERHEAD_BYTES
            + sum(map(len, engine))
            + len(self.token_ids_u32le)
        )


@dataclass(frozen=True, slots=True)
class Position:
    """A place in one tenant's log: `seq` is the last event already known (0: none)."""

    incarnation: int
    seq: int


@dataclass(frozen=True, slots=True)
class Gap:
    """The end of a subscription: events between are not to be had; take a snapshot."""

    tenant: TenantName
    reason: GapReason
    asked_seq: int  # the last event the consumer knew
    first_seq: int  # oldest event held, 0 when none
    last_seq: int  # newest event given out, 0 when none
