"""The seam between the gRPC surface and the shard: what the shard must answer, in plain records.

Invariant: nothing here or behind it knows grpc or protobuf; nothing in front of it touches the
index, keys or memory. Sizes are bytes, times nanoseconds, counts since this start of the daemon.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from entresol_daemon.events.log import EventLog
from entresol_daemon.events.types import Event
from entresol_proto.ids import (
    HostSealedNamespace,
    NamespaceDescriptor,
    NamespaceId,
    TenantName,
)

SEGMENTS_PER_PAGE_MAX = 1_024


class ShardState(enum.IntEnum):
    """Numbers of `entresol.v1.State`."""

    STARTING = 1
    SERVING = 2
    LOCKED = 3
    DRAINING = 4


@dataclass(frozen=True, slots=True)
class ShardDescription:
    """What anyone who may talk to the shard may know."""

    version: str
    shard: str
    control_address: str  # host:port
    data_addresses: tuple[str, ...]  # host:port of the tcp fabric
    fabrics: tuple[str, ...]  # FabricKind labels
    limits: dict[str, int]
    state: ShardState


@dataclass(frozen=True, slots=True)
class ShardStat:
    """The operator's overview."""

    state: ShardState
    uptime_ns: int = 0
    sessions: int = 0
    leases: int = 0
    blocks: int = 0
    dram_capacity_bytes: int = 0
    dram_used_bytes: int = 0
    flash_capacity_bytes: int = 0
    flash_live_bytes: int = 0
    flash_written_bytes: int = 0
    blocks_served: int = 0
    blocks_missed: int = 0
    blocks_stored: int = 0
    blocks_corrupt: int = 0
    plain_bytes: int = 0
    stored_bytes: int = 0
    reasons_not_ready: tuple[str, ...] = ()
    flash_direct: bool = False
    scrub_state: str = "off"  # off, resting, running
    scrub_share: float = 0.0
    scrub_cycles: int = 0
    scrub_cycle_ns: int = 0
    scrubbed_bytes: int = 0
    scrub_found: int = 0


@dataclass(frozen=True, slots=True)
class TenantQuota:
    """What one tenant may use. 0 is "no number of its own"; weight 0 reads as 1."""

    flash_bytes: int = 0
    dram_bytes: int = 0
    get_bytes: int = 0
    index_blocks: int = 0
    sessions: int = 0
    leases: int = 0
    weight: int = 0
    put_bytes: int = 0
    watchers: int = 0


@dataclass(frozen=True, slots=True)
class KeyVersionRecord:
    """One version of a tenant's data key."""

    version: int
    fingerprint: str
    created_unix_s: int
    blocks: int  # stored now
    sealed_blocks: int  # ever; rounded up after a restart


@dataclass(frozen=True, slots=True)
class TenantRecord:
    """One tenant as the operator sees it."""

    name: TenantName
    quota: TenantQuota = field(default_factory=TenantQuota)
    dek_version: int = 0
    blocks: int = 0
    flash_bytes: int = 0
    dram_bytes: int = 0
    sessions: int = 0
    leases: int = 0
    get_bytes: int = 0
    put_bytes: int = 0
    watchers: int = 0
    key_versions: tuple[KeyVersionRecord, ...] = ()
    blocks_not_counted: int = 0
    blocks_host_sealed: int = 0


@dataclass(frozen=True, slots=True)
class NamespaceRecord:
    """One namespace as its tenant sees it. The descriptor is the tenant's data: never log it."""

    namespace_id: NamespaceId
    descriptor: NamespaceDescriptor | HostSealedNamespace = field(repr=False)
    blocks: int = 0
    codec: str = ""  # chosen last for a session; empty: nothing stored of late
    codec_why: str = ""
    plain_bytes: int = 0  # of blocks stored since the start
    sealed_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EraseReceipt:
    """Evidence that a tenant's keys were destroyed, by whom and when."""

    tenant: TenantName
    erased_unix_ns: int
    dek_versions_destroyed: tuple[int, ...]
    blocks_dropped: int
    leases_revoked: int
    sessions_closed: int
    shard: str
    incarnation: int
    signed_receipt: bytes = b""  # of the keyring: `keys.receipts.canonical`

    def digest(self) -> bytes:
        """SHA-256 over a length-framed encoding of all fields but the signed receipt, in order.

        Text: u32 length, UTF-8. Numbers: u64. List: u32 count, u64 each. All little-endian, after
        the label "entresol/erase/v1". Proves that two copies of a receipt agree, not who wrote it.
        """
        parts = [b"entresol/erase/v1"]
        for text in (self.tenant, self.shard):
            raw = text.encode()
            parts.append(struct.pack("<I", len(raw)) + raw)
        versions = self.dek_versions_destroyed
        parts.append(struct.pack(f"<I{len(versions)}Q", len(versions), *versions))
        counts = (self.blocks_dropped, self.leases_revoked, self.sessions_closed)
        parts.append(struct.pack("<5Q", self.erased_unix_ns, *counts, self.incarnation))
        return hashlib.sha256(b"".join(parts)).digest()


@dataclass(frozen=True, slots=True)
class DrainResult:
    """How far draining came before its deadline."""

    complete: bool
    sessions_left: int = 0
    leases_left: int = 0


@dataclass(frozen=True, slots=True)
class SegmentRecord:
    """One flash segment."""

    segment: int
    state: str  # free, open, sealed, condemned
    tenant: str = ""
    records: int = 0
    live_records: int = 0
    size_bytes: int = 0
    used_bytes: int = 0
    live_bytes: int = 0
    sequence: int = 0


class ShardBackend(Protocol):
    """What a shard offers to its gRPC surface.

    Called on the shard's event loop. Every method may raise EntresolError, whose status and hint
    reach the caller; anything else is logged and answered as an internal error. Names are already
    checked (`ids.check_tenant_name`); an unknown one is the shard's to refuse (BAD_REQUEST).
    """

    @property
    def event_log(self) -> EventLog: ...

    def admit(self, tenant: TenantName) -> None:
        """Return if an authenticated tenant may use this shard.

        Raises: EntresolError FORBIDDEN when it is not known here, ERASED when it was erased.
        """
        ...

    def reasons_not_ready(self) -> Sequence[str]:
        """Why the shard should get no traffic; empty when it is ready."""
        ...

    async def event_turn(self, tenant: TenantName, events: int) -> None:
        """Wait until it is the tenant's turn to have so many events written to a consumer."""
        ...

    def snapshot(self, tenant: TenantName) -> AsyncIterator[Event | None]:
        """What the tenant has stored; see `events.stream.SnapshotProvider` for the contract."""
        ...

    async def namespaces(self, tenant: TenantName) -> Sequence[NamespaceRecord]:
        """A tenant's namespaces; those whose record does not open are left out."""
        ...

    async def describe(self) -> ShardDescription: ...
    async def stat(self) -> ShardStat: ...
    async def tenant_list(self) -> Sequence[TenantRecord]: ...

    async def tenant_add(self, name: TenantName, quota: TenantQuota) -> TenantRecord:
        """Raises: EntresolError BAD_REQUEST when it exists, QUOTA when the table is full."""
        ...

    async def tenant_set_quota(
        self, name: TenantName, quota: TenantQuota, fields: Collection[str] = ()
    ) -> TenantRecord:
        """Change these fields of its quota as it is in that moment; without any, all of it."""
        ...

    async def tenant_rotate(self, name: TenantName, *, force: bool) -> TenantRecord:
        """Start a new DEK version; `force` destroys the older ones and drops what they sealed."""
        ...

    async def unlock(self, kek_file: str) -> str:
        """Give a locked shard its KEK, of that file or the configured one; returns its id."""
        ...

    async def change_kek(self, kek_file: str) -> tuple[str, str]:
        """Wrap every key under the KEK in that file; returns the ids of the old and the new."""
        ...

    async def tenant_erase(self, name: TenantName) -> EraseReceipt:
        """Destroy the tenant's keys everywhere; returns only when that is durable."""
        ...

    async def drain(self, deadline_ns: int) -> DrainResult:
        """Refuse new work and finish what runs. `deadline_ns` is a duration, 0 for the default."""
        ...

    async def scrub(self) -> bool:
        """Begin to verify everything on flash; True when that was under way already."""
        ...

    async def segments(self, first_segment: int, count_max: int) -> Sequence[SegmentRecord]:
        """Segments numbered `first_segment` and up, ascending, at most `count_max`."""
        ...
