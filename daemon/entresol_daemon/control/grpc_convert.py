"""Between protobuf messages and the plain records of the daemon; no logic beyond renaming.

Invariant: enum numbers are equal on both sides (a test compares them), so they convert by value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

from entresol_daemon.control.admin import (
    EraseReceipt,
    NamespaceRecord,
    SegmentRecord,
    ShardDescription,
    ShardStat,
    TenantQuota,
    TenantRecord,
)
from entresol_daemon.events.types import (
    Event,
    Gap,
    GapReason,
    Kind,
    Medium,
    Position,
    Reason,
)
from entresol_proto.ids import HostSealedNamespace, TenantName, pack_token_ids
from entresol_proto.status import EntresolError, Status
from entresol_proto.v1 import entresol_pb2 as pb

REPLY_BYTES_MAX = 1024 * 1024  # of events in one reply, unless one event alone is larger


def event_message(event: Event) -> pb.Event:
    """One event for the wire."""
    return pb.Event(
        seq=event.seq,
        time_unix_ns=event.time_unix_ns,
        tenant=event.tenant,
        kind=cast("pb.Kind", event.kind.value),
        namespace_id=event.namespace_id,
        wire_keys=event.wire_keys,
        engine_keys=event.engine_keys,
        parent=event.parent,
        position=event.position,
        block_tokens=event.block_tokens,
        token_ids=event.token_ids,
        medium=cast("pb.Medium", event.medium.value),
        reason=cast("pb.Reason", event.reason.value),
        size_bytes=event.size_bytes,
        until_unix_ns=event.until_unix_ns,
    )


def event_record(message: pb.Event) -> Event:
    """One event from the wire. Raises: ValueError for a kind, medium or reason not known here."""
    return Event(
        seq=message.seq,
        time_unix_ns=message.time_unix_ns,
        tenant=TenantName(message.tenant),
        kind=Kind(message.kind),
        namespace_id=message.namespace_id,
        wire_keys=tuple(message.wire_keys),
        engine_keys=tuple(message.engine_keys),
        parent=message.parent,
        position=message.position,
        block_tokens=message.block_tokens,
        token_ids_u32le=pack_token_ids(tuple(message.token_ids)),
        medium=Medium(message.medium),
        reason=Reason(message.reason),
        size_bytes=message.size_bytes,
        until_unix_ns=message.until_unix_ns,
    )


def event_groups(events: Iterable[Event]) -> Iterator[list[pb.Event]]:
    """Events as messages, in groups that fit one reply each."""
    group: list[pb.Event] = []
    size_bytes = 0
    for event in events:
        if group and size_bytes + event.cost_bytes > REPLY_BYTES_MAX:
            yield group
            group, size_bytes = [], 0
        group.append(event_message(event))
        size_bytes += event.cost_bytes
    if group:
        yield group


def gap_message(gap: Gap) -> pb.Gap:
    """One gap for the wire."""
    return pb.Gap(
        tenant=gap.tenant,
        reason=cast("pb.GapReason", gap.reason.value),
        asked_seq=gap.asked_seq,
        first_seq=gap.first_seq,
        last_seq=gap.last_seq,
    )


def gap_record(message: pb.Gap) -> Gap:
    """One gap from the wire. Raises: ValueError for a reason not known here."""
    return Gap(
        TenantName(message.tenant),
        GapReason(message.reason),
        message.asked_seq,
        message.first_seq,
        message.last_seq,
    )


def position_message(position: Position) -> pb.Position:
    """A position for the wire."""
    return pb.Position(incarnation=position.incarnation, seq=position.seq)


def namespace_message(found: NamespaceRecord) -> pb.NamespaceInfo:
    """A namespace for the wire, without its salt."""
    given = found.descriptor
    message = pb.NamespaceInfo(
        namespace_id=found.namespace_id,
        blocks=found.blocks,
        block_tokens=given.block_tokens,
        codec=found.codec,
        codec_why=found.codec_why,
        plain_bytes=found.plain_bytes,
        sealed_bytes=found.sealed_bytes,
    )
    if isinstance(given, HostSealedNamespace):
        message.host_sealed = True
        return message
    known = pb.NamespaceInfo(
        model=given.model,
        model_revision=given.model_revision,
        lora=given.lora or "",
        salted=given.cache_salt is not None,
        dtype=given.dtype,
        layers=given.layers,
        kv_heads=given.kv_heads,
        head_dim=given.head_dim,
        kv_order=given.kv_order,
        page_layout=given.page_layout,
        tp_rank=given.tp_rank,
        tp_world=given.tp_world,
        pp_rank=given.pp_rank,
        pp_world=given.pp_world,
    )
    message.MergeFrom(known)
    return message


def description_message(found: ShardDescription, incarnation: int, tenant: str) -> pb.DescribeReply:
    """A description for the wire; limits sorted by name."""
    return pb.DescribeReply(
        version=found.version,
        shard=found.shard,
        incarnation=incarnation,
        control_address=found.control_address,
        data_addresses=found.data_addresses,
        fabrics=found.fabrics,
        limits=[pb.Limit(name=name, value=value) for name, value in sorted(found.limits.items())],
        state=cast("pb.State", found.state.value),
        tenant=tenant,
    )


def stat_message(stat: ShardStat) -> pb.StatReply:
    """The operator's overview for the wire."""
    return pb.StatReply(
        state=cast("pb.State", stat.state.value),
        uptime_ns=stat.uptime_ns,
        sessions=stat.sessions,
        leases=stat.leases,
        blocks=stat.blocks,
        dram_capacity_bytes=stat.dram_capacity_bytes,
        dram_used_bytes=stat.dram_used_bytes,
        flash_capacity_bytes=stat.flash_capacity_bytes,
        flash_live_bytes=stat.flash_live_bytes,
        flash_written_bytes=stat.flash_written_bytes,
        blocks_served=stat.blocks_served,
        blocks_missed=stat.blocks_missed,
        blocks_stored=stat.blocks_stored,
        blocks_corrupt=stat.blocks_corrupt,
        plain_bytes=stat.plain_bytes,
        stored_bytes=stat.stored_bytes,
        reasons_not_ready=stat.reasons_not_ready,
        flash_direct=stat.flash_direct,
        scrub_state=stat.scrub_state,
        scrub_share=stat.scrub_share,
        scrub_cycles=stat.scrub_cycles,
        scrub_cycle_ns=stat.scrub_cycle_ns,
        scrubbed_bytes=stat.scrubbed_bytes,
        scrub_found=stat.scrub_found,
    )


def quota_message(quota: TenantQuota) -> pb.Quota:
    """A quota for the wire."""
    return pb.Quota(**{name: getattr(quota, name) for name in quota.__slots__})


def quota_record(message: pb.Quota) -> TenantQuota:
    """A quota from the wire."""
    return TenantQuota(**{name: getattr(message, name) for name in TenantQuota.__slots__})


def quota_fields(named: Iterable[str]) -> frozenset[str]:
    """Names of fields of a quota. Raises: EntresolError (BAD_REQUEST) for any other."""
    found = frozenset(named)
    if unknown := found.difference(TenantQuota.__slots__):
        raise EntresolError(
            f"a quota has no field {min(unknown)!r}",
            hint="an older daemon? it knows fewer",
            status=Status.BAD_REQUEST,
        )
    return found


def tenant_message(tenant: TenantRecord) -> pb.TenantInfo:
    """A tenant for the wire."""
    return pb.TenantInfo(
        name=tenant.name,
        quota=quota_message(tenant.quota),
        dek_version=tenant.dek_version,
        blocks=tenant.blocks,
        flash_bytes=tenant.flash_bytes,
        dram_bytes=tenant.dram_bytes,
        sessions=tenant.sessions,
        leases=tenant.leases,
        get_bytes=tenant.get_bytes,
        put_bytes=tenant.put_bytes,
        watchers=tenant.watchers,
        key_versions=[
            pb.KeyVersion(
                version=row.version,
                fingerprint=row.fingerprint,
                created_unix_s=row.created_unix_s,
                blocks=row.blocks,
                sealed_blocks=row.sealed_blocks,
            )
            for row in tenant.key_versions
        ],
        blocks_not_counted=tenant.blocks_not_counted,
        blocks_host_sealed=tenant.blocks_host_sealed,
    )


def receipt_message(receipt: EraseReceipt) -> pb.EraseReceipt:
    """An erase receipt for the wire, with its digest."""
    return pb.EraseReceipt(
        tenant=receipt.tenant,
        erased_unix_ns=receipt.erased_unix_ns,
        dek_versions_destroyed=receipt.dek_versions_destroyed,
        blocks_dropped=receipt.blocks_dropped,
        leases_revoked=receipt.leases_revoked,
        sessions_closed=receipt.sessions_closed,
        shard=receipt.shard,
        incarnation=receipt.incarnation,
        digest=receipt.digest(),
        signed_receipt=receipt.signed_receipt,
    )


def segment_message(segment: SegmentRecord) -> pb.SegmentInfo:
    """A segment for the wire."""
    return pb.SegmentInfo(
        segment=segment.segment,
        state=segment.state,
        tenant=segment.tenant,
        records=segment.records,
        live_records=segment.live_records,
        size_bytes=segment.size_bytes,
        used_bytes=segment.used_bytes,
        live_bytes=segment.live_bytes,
        sequence=segment.sequence,
    )
