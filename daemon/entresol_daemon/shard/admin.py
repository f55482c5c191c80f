"""What the shard answers to its operator and to gRPC: describe, stat, tenants, drain, snapshot.

Invariant: erasing a tenant returns only when its keys are destroyed in every copy, its sessions are
ended, its blocks left the index, and the event is published.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace

from entresol_daemon.control.admin import (
    DrainResult,
    EraseReceipt,
    KeyVersionRecord,
    NamespaceRecord,
    SegmentRecord,
    ShardDescription,
    ShardStat,
    ShardState,
    TenantQuota,
    TenantRecord,
)
from entresol_daemon.core.accounts import Account
from entresol_daemon.events import types as events
from entresol_daemon.events.log import EventLog
from entresol_daemon.events.types import Event
from entresol_daemon.flash.model import SegmentState
from entresol_daemon.keys.receipts import Receipt, canonical
from entresol_daemon.metric_codecs import name_of
from entresol_daemon.shard import quotas
from entresol_daemon.shard.keycare import wipe_from_memory
from entresol_daemon.shard.listing import Listing
from entresol_daemon.shard.shard import Shard
from entresol_daemon.shard.turns import (
    EVENT_COST,
    NAMESPACE_COST,
    REQUEST_COST,
    Stretches,
)
from entresol_proto import __version__, limits
from entresol_proto.ids import TenantName
from entresol_proto.seal.wiping import wipe
from entresol_proto.status import EntresolError, Status

DRAIN_NS_DEFAULT = 30_000_000_000
LOCKED = (
    "locked: no key-encryption key; put the file of [keys] kek_file in place, `entresol unlock`"
)
TENANTS_IN_STEP = 16  # of a list, before others have their turns

log = logging.getLogger("entresol.admin")


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the daemon listens, for `describe`."""

    control: str
    data: tuple[str, ...]


class ShardAdmin:
    """`control.admin.ShardBackend` over a shard."""

    def __init__(
        self,
        shard: Shard,
        addresses: Addresses,
        *,
        end_sessions: Callable[[TenantName], Awaitable[int]],
        begin_drain: Callable[[], None],
        unlock: Callable[[str], Awaitable[str]],
        change_kek: Callable[[str], Awaitable[tuple[str, str]]],
        flash_direct: bool = False,
        unusable: Callable[[], str] = str,  # nothing
    ) -> None:
        """`end_sessions` closes a tenant's connections and waits; `begin_drain` tells hosts;
        `unlock` and `change_kek` read KEK files, see `ShardBackend`; `flash_direct` tells whether
        the device bypasses the page cache; `unusable` says why hosts cannot connect, or nothing."""
        self._shard = shard
        self._addresses = addresses
        self._end_sessions = end_sessions
        self._begin_drain = begin_drain
        self._unlock = unlock
        self._change_kek = change_kek
        self._flash_direct = flash_direct
        self._unusable = unusable
        self._started_ns = shard.parts.now_ns()

    @property
    def event_log(self) -> EventLog:
        return self._shard.parts.events

    def state(self) -> ShardState:
        """What the shard is doing."""
        if self._shard.draining:
            return ShardState.DRAINING
        return ShardState.LOCKED if self._shard.parts.keyring.locked else ShardState.SERVING

    def reasons_not_ready(self) -> list[str]:
        """Why the shard should get no traffic; empty when it is ready."""
        reasons = []
        if self._shard.draining:
            reasons.append("draining")
        if self._shard.parts.keyring.locked:
            reasons.append(LOCKED)
        if self._shard.parts.engine.failed:
            reasons.append("flash failed: puts are refused")
        if unusable := self._unusable():
            reasons.append(unusable)
        return reasons

    def admit(self, tenant: TenantName) -> None:
        """Raises: KeyringError (FORBIDDEN, ERASED) for a tenant that is not ours."""
        parts = self._shard.parts
        if parts.keyring.info(tenant) is not None:
            return
        if parts.config.tenants.auto_add and not parts.keyring.was_erased(tenant):
            return  # its first session will add it; until then it has nothing to see
        parts.keyring.get(tenant)

    async def event_turn(self, tenant: TenantName, events: int) -> None:
        parts = self._shard.parts
        account = parts.accounts.by_name.get(tenant)
        if account is not None:
            await parts.turns.loop.take(account, REQUEST_COST + events * EVENT_COST)

    async def describe(self) -> ShardDescription:
        config = self._shard.parts.config
        return ShardDescription(
            version=__version__,
            shard=config.shard.name,
            control_address=self._addresses.control,
            data_addresses=self._addresses.data,
            fabrics=tuple(kind.label for kind in self._shard.fabrics),
            limits={
                "block_bytes_max": config.limits.block_bytes_max,
                "blocks_per_fetch_max": limits.BLOCKS_PER_FETCH_MAX,
                "keys_per_frame_max": limits.KEYS_PER_FRAME_MAX,
                "lease_ns": config.limits.lease_ns,
                "requests_in_flight_max": limits.REQUESTS_IN_FLIGHT_MAX,
            },
            state=self.state(),
        )

    async def stat(self) -> ShardStat:
        return self.look()

    def look(self) -> ShardStat:
        """The operator's overview, now."""
        parts = self._shard.parts
        engine, totals = parts.engine, parts.meters.totals
        pool, scrubber = parts.residency.pool, self._shard.scrubber
        return ShardStat(
            state=self.state(),
            uptime_ns=parts.now_ns() - self._started_ns,
            sessions=len(self._shard.sessions),
            leases=self._shard.leases_held(),
            blocks=len(engine.index),
            dram_capacity_bytes=pool.budget_bytes,
            dram_used_bytes=pool.allocated_bytes,
            flash_capacity_bytes=engine.capacity_bytes,
            flash_live_bytes=sum(a.flash_bytes for a in parts.accounts.by_name.values()),
            flash_written_bytes=engine.stats.written_bytes,
            blocks_served=totals.blocks_served,
            blocks_missed=totals.blocks_missed,
            blocks_stored=totals.blocks_stored,
            blocks_corrupt=totals.blocks_corrupt,
            plain_bytes=totals.plain_bytes,
            stored_bytes=totals.stored_bytes,
            reasons_not_ready=tuple(self.reasons_not_ready()),
            flash_direct=self._flash_direct,
            scrub_state=scrubber.state,
            scrub_share=scrubber.share(),
            scrub_cycles=scrubber.progress.cycles,
            scrub_cycle_ns=scrubber.progress.last_cycle_ns,
            scrubbed_bytes=scrubber.scrubbed_bytes,
            scrub_found=scrubber.found,
        )

    async def scrub(self) -> bool:
        """Raises: EntresolError when the scrubber is off."""
        return self._shard.scrubber.begin_now()

    async def tenant_list(self) -> Sequence[TenantRecord]:
        found = []
        for info in self._shard.parts.keyring.tenants():
            with contextlib.suppress(EntresolError):  # erased meanwhile
                found.append(self._record(info.name))
            if len(found) % TENANTS_IN_STEP == 0:
                await asyncio.sleep(0)
        return found

    async def tenant_add(self, name: TenantName, quota: TenantQuota) -> TenantRecord:
        parts = self._shard.parts

        def add() -> None:
            now_unix_s, kept = parts.unix_ns() // 10**9, quotas.to_keyring(quota)
            parts.keyring.add_tenant(name, kept, now_unix_s=now_unix_s, after_erase=True)

        async with self._shard.tenancy.changing(name):
            await parts.keys.run(add)
            return self._record(name)

    async def tenant_set_quota(
        self, name: TenantName, quota: TenantQuota, fields: Collection[str] = ()
    ) -> TenantRecord:
        parts = self._shard.parts
        async with self._shard.tenancy.changing(name):
            info = parts.keyring.info(name)
            if fields and info is not None:
                named = {field: getattr(quota, field) for field in fields}
                quota = replace(quotas.from_keyring(info.quota), **named)
            await parts.keys.run(parts.keyring.set_quota, name, quotas.to_keyring(quota))
            account = self._adopt(name)
        await self._shard.removal.shrink_to_quota(account)
        return self._record(name)

    async def tenant_rotate(self, name: TenantName, *, force: bool = False) -> TenantRecord:
        await self._shard.keycare.rotate(name, force=force)
        return self._record(name)

    async def tenant_erase(self, name: TenantName) -> EraseReceipt:
        async with self._shard.tenancy.erasing(name):
            return await self._erase(name)

    async def _erase(self, name: TenantName) -> EraseReceipt:
        parts = self._shard.parts
        now_ns = parts.unix_ns()

        def erase() -> Receipt:
            return parts.keyring.erase(name, now_unix_s=now_ns // 10**9)

        receipt = await parts.keys.run(erase)
        if receipt["time_unix_s"] != now_ns // 10**9:  # of an erasure that was asked for before
            now_ns = receipt["time_unix_s"] * 10**9
        account = parts.accounts.by_name.get(name)
        leases = 0 if account is None else account.leases
        secrets = [
            space.secret
            for session in self._shard.sessions.values() if session.account.name == name
            for space in session.namespaces.values()
        ]  # fmt: skip
        sessions = await self._end_sessions(name)
        dropped = 0
        try:
            if account is not None:
                # By what lies in its segments: a namespace may have been opened until a moment ago.
                dropped = await self._shard.removal.drop_stream(account)
                await self._shard.removal.barrier(account)
                parts.valued.forget(account.stream)
                parts.admission.forget(account.stream)
                parts.accounts.remove(name)
                parts.residency.pool.release_owner(account.stream)
                parts.room.notify()  # others may have what was kept for it
        finally:  # also where flash takes no removals: its keys are gone from the disk for good
            for secret in secrets:
                wipe(secret)
            await wipe_from_memory(parts, name, None if account is None else account.stream)
            parts.events.publish(events.Kind.TENANT_ERASED, name, time_unix_ns=now_ns)
        parts.metrics.forget_tenant(name)
        parts.meters.ratios.forget(name)
        parts.codecs.forget(name)
        return EraseReceipt(
            tenant=name,
            erased_unix_ns=now_ns,
            dek_versions_destroyed=tuple(row["version"] for row in receipt["erased"]),
            blocks_dropped=dropped,
            leases_revoked=leases,
            sessions_closed=sessions,
            shard=parts.config.shard.name,
            incarnation=self._shard.incarnation,
            signed_receipt=canonical(receipt),
        )

    async def unlock(self, kek_file: str) -> str:
        return await self._unlock(kek_file)

    async def change_kek(self, kek_file: str) -> tuple[str, str]:
        return await self._change_kek(kek_file)

    async def drain(self, deadline_ns: int) -> DrainResult:
        self._begin_drain()
        now = self._shard.parts.now_ns()
        complete = await self._shard.drain(now + (deadline_ns or DRAIN_NS_DEFAULT))
        return DrainResult(complete, len(self._shard.sessions), self._shard.leases_held())

    async def segments(self, first_segment: int, count_max: int) -> Sequence[SegmentRecord]:
        parts = self._shard.parts
        rows: list[SegmentRecord] = []
        end = min(first_segment + count_max, parts.engine.segment_count)
        for number in range(first_segment, end):
            info = parts.engine.segment_info(number)
            account = parts.accounts.by_stream.get(info.stream)
            state = "free" if info.state is SegmentState.FREEING else info.state.value
            rows.append(
                SegmentRecord(
                    segment=info.segment,
                    state=state,
                    tenant=account.name if account is not None else "",
                    records=info.blocks,
                    live_records=info.live_blocks,
                    size_bytes=parts.engine.segment_bytes,
                    used_bytes=info.used_bytes,
                    live_bytes=info.live_bytes,
                    sequence=info.sequence,
                )
            )
        return rows

    async def namespaces(self, tenant: TenantName) -> Sequence[NamespaceRecord]:
        """A tenant's namespaces, in turns of its own. Raises: KeyringError while locked."""
        parts = self._shard.parts
        account = parts.accounts.by_name.get(tenant)
        if account is None or parts.keyring.info(tenant) is None:
            return []
        stretches = Stretches(parts.turns.loop, account)
        chosen = parts.codecs.latest(tenant)
        sealed: dict[str, tuple[int, int]] = {}
        for row in parts.meters.ratios.rows(tenant):
            plain, stored = sealed.get(row.namespace, (0, 0))
            sealed[row.namespace] = (plain + row.plain_bytes, stored + row.stored_bytes)
        await stretches.spend(len(chosen) + len(sealed))
        found = []
        for each in parts.keyring.namespaces_of(tenant):
            descriptor = parts.keyring.descriptor_of(each)
            if descriptor is not None:
                plain, stored = sealed.get(each.hex(), (0, 0))
                choice = chosen.get(each)
                found.append(
                    NamespaceRecord(
                        each, descriptor, parts.engine.index.count_of(each),
                        codec="" if choice is None else name_of(choice.codec_id),
                        codec_why="" if choice is None else choice.why,
                        plain_bytes=plain, sealed_bytes=stored,
                    )
                )  # fmt: skip
            await stretches.spend(NAMESPACE_COST)
        return found

    def snapshot(self, tenant: TenantName) -> AsyncIterator[Event | None]:
        """Every stored block of a tenant as a STORED event; see `Listing`."""
        return Listing(self._shard.parts, tenant).events()

    def _adopt(self, name: TenantName) -> Account:
        info = self._shard.parts.keyring.info(name)
        assert info is not None, name
        return self._shard.tenancy.adopt(info)

    def _record(self, name: TenantName) -> TenantRecord:
        parts = self._shard.parts
        info = parts.keyring.info(name)
        if info is None:
            raise EntresolError(f"there is no tenant {name!r}", status=Status.BAD_REQUEST)
        account = parts.accounts.by_name.get(name)
        if account is None or account.stream != info.stream:
            account = self._shard.tenancy.adopt(info)
        uses, not_counted, host_sealed = self._shard.keycare.uses(info)
        return TenantRecord(
            name=name,
            quota=quotas.from_keyring(info.quota),
            dek_version=info.active_version,
            blocks=account.flash_blocks,
            flash_bytes=account.flash_bytes,
            dram_bytes=parts.residency.pool.owned_bytes(account.stream),
            sessions=account.sessions,
            leases=account.leases,
            get_bytes=account.get_bytes,
            put_bytes=account.put_bytes,
            watchers=parts.events.subscriptions_of(name),
            key_versions=tuple(
                KeyVersionRecord(
                    use.version, use.fingerprint, use.created_unix_s, use.blocks, use.sealed_blocks
                )
                for use in uses
            ),
            blocks_not_counted=not_counted,
            blocks_host_sealed=host_sealed,
        )
