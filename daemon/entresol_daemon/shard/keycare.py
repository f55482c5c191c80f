"""The life of tenants' data keys while blocks come and go: rotation, its limits, old versions' end.

A version begins when somebody asks, when the one before has sealed as much as it may, or when it is
old. Blocks are never sealed anew: an old version's go by eviction, and with the last of them the
version is destroyed. Forced, old versions go at once, and their blocks with them.

Invariants: a version is destroyed by itself only when no stored block, no put and no unread record
can need it; no block enters the index under a version that is gone.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections import Counter
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from entresol_daemon.core.accounts import Account
from entresol_daemon.core.census import HOST_SEALED, NOT_COUNTED, code_of
from entresol_daemon.flash.model import RemoveReason
from entresol_daemon.flash.segment import RECORD_HEADER_BYTES
from entresol_daemon.keys.keyring import DEK_VERSIONS_PER_TENANT_MAX, TenantInfo
from entresol_daemon.shard.parts import Parts
from entresol_daemon.shard.removal import Removal
from entresol_daemon.shard.sessions import Session
from entresol_daemon.shard.tenancy import Tenancy
from entresol_daemon.shard.turns import DROP_COST, NAMESPACE_COST, REMOVAL_COST, Stretches
from entresol_proto.ids import HostSealedNamespace, TenantName
from entresol_proto.seal.block import SealedHeader
from entresol_proto.status import EntresolError, SealError

LOOK_NS = 1_000_000_000  # between two looks at what is due
RETRY_NS = 60_000_000_000  # after one that failed, or found blocks that cannot be read
SWEEP_WAIT_NS = 60_000_000_000  # freed memory is swept so long after a version's end at the latest
CENSUS_BATCH_BLOCKS = 64  # heads read at once to see their version
SEGMENTS_IN_STEP = 4_096  # asked whose they are before others have their turns
CENSUS_PAUSE_S = 0.05  # between batches: at most about 1,300 small reads a second
_SECOND_NS = 1_000_000_000
_NEVER_NS = 2**63

log = logging.getLogger("entresol.keys")


@dataclass(frozen=True, slots=True)
class VersionUse:
    """One version of a tenant's data key and what is under it."""

    version: int
    fingerprint: str
    created_unix_s: int
    blocks: int  # stored now
    sealed_blocks: int  # ever


async def wipe_from_memory(parts: Parts, name: TenantName, stream: bytes | None) -> None:
    """The destroyed keys of a tenant leave memory: where they were held, and in what was freed.

    No session may hold them any more. `stream` is the tenant's; None: it never had a block in
    memory. Lets others run in between.
    """
    await _wipe_destroyed(parts, name, stream)
    await _sweep(parts)


async def _wipe_destroyed(parts: Parts, name: TenantName, stream: bytes | None) -> None:
    """Where they are held, and the keys of blocks, which were derived from them: those under other
    versions are derived again when they are asked for."""
    parts.keyring.wipe_destroyed(name)
    if stream is not None:
        for _ in parts.residency.forget_keys(stream):
            await asyncio.sleep(0)


def _stream_of(parts: Parts, name: TenantName) -> bytes | None:
    account = parts.accounts.by_name.get(name)
    return None if account is None else account.stream


async def _sweep(parts: Parts) -> None:
    # What only its own cycles keep is freed now, and swept with the rest: all of it, because what
    # is in use meanwhile (the very call that erases) would else not be looked at for hours.
    gc.collect()
    for _ in parts.sweep():
        await asyncio.sleep(0)


class KeyCare:
    """Of all tenants of a shard."""

    def __init__(
        self, parts: Parts, removal: Removal, tenancy: Tenancy, sessions: Mapping[int, Session]
    ) -> None:
        self._parts = parts
        self._removal = removal
        self._tenancy = tenancy
        self._sessions = sessions
        self._putting: Counter[tuple[bytes, int]] = Counter()  # (stream, version): reservations
        self._tasks: set[asyncio.Task[None]] = set()
        self._busy: set[TenantName] = set()  # a change of their keys is under way
        self._not_before_ns: dict[TenantName, int] = {}
        # Of namespaces that a rotation is emptying: what it leaves, see `core.census`.
        self._spared: dict[bytes, frozenset[int]] = {}
        self._next_look_ns = 0
        # Of many tenants that are due at once (made by one script, say) one has its turn.
        self._line = asyncio.Lock()
        self._counting = False  # a tenant's unread records
        # What their versions sealed is written down then at the earliest; being written: never.
        self._note_after_ns: dict[TenantName, int] = {}
        self._ended_ns = 0  # when a version ended of which freed memory may still hold copies
        self.rotations: Counter[str] = Counter()  # by cause
        self.versions_ended = 0

    # -- what puts say

    def reserved(self, session: Session, version: int) -> None:
        """A block key of this version was made."""
        self._putting[session.account.stream, version] += 1
        name = session.account.name
        if not self._parts.keyring.note_sealed(name, version):
            return
        if self._parts.now_ns() >= self._note_after_ns.get(name, 0):
            self._note_after_ns[name] = _NEVER_NS
            self._begin(self._guard(name, self._keep_usage(name)))

    def put_ended(self, session: Session, version: int) -> None:
        """Its reservation ended, one way or another."""
        place = (session.account.stream, version)
        self._putting[place] -= 1
        if not self._putting[place]:
            del self._putting[place]

    # -- what the operator asks

    async def rotate(self, name: TenantName, *, force: bool = False) -> int:
        """Begin a new version; `force` ends the older ones and drops what they sealed.

        Returns the number of blocks dropped, once that would survive a crash. Raises: KeyringError.
        """
        async with self._tenancy.changing(name):
            return await self._rotate(name, force=force, cause="asked")

    async def _rotate(self, name: TenantName, *, force: bool, cause: str) -> int:
        parts = self._parts

        def rotate() -> None:
            now_s = parts.unix_ns() // _SECOND_NS
            parts.keyring.rotate(name, now_unix_s=now_s, force=force)

        try:
            await parts.keys.run(rotate)
        finally:  # nor when this is cancelled may a session go on under a key that is destroyed
            self._renew_sessions(name)
        self.rotations["forced" if force else cause] += 1
        if not force:
            return 0
        try:
            dropped = await self._drop_unreadable(name)
            await self._removal.barrier(parts.accounts.by_name[name])
        finally:  # also where flash takes no removals
            await wipe_from_memory(parts, name, _stream_of(parts, name))
        log.warning("event=key_rotation_forced tenant=%s blocks=%d", name, dropped)
        return dropped

    def uses(self, info: TenantInfo) -> tuple[list[VersionUse], int, int]:
        """(versions, blocks not counted yet, host-sealed blocks) of a tenant."""
        census, stream = self._parts.census, info.stream
        rows = [
            VersionUse(
                version,
                fingerprint,
                info.created[version],
                census.blocks(stream, code_of(version)),
                self._parts.keyring.sealed_blocks(info.name, version),
            )
            for version, fingerprint in sorted(info.fingerprints.items())
        ]
        return rows, self._not_counted(stream), census.blocks(stream, HOST_SEALED)

    def old_blocks(self, info: TenantInfo) -> int:
        """Blocks under other versions than the active one, as far as counted."""
        census = self._parts.census
        others = (code_of(info.active_version), HOST_SEALED, NOT_COUNTED)
        return census.total(info.stream) - sum(census.blocks(info.stream, c) for c in others)

    def not_counted(self, info: TenantInfo) -> int:
        """Blocks found at start whose version nobody has looked at yet."""
        return self._not_counted(info.stream)

    # -- what is due by itself

    def tick(self, now_ns: int) -> None:
        """Begin what is due; called often, looks once a second."""
        if now_ns < self._next_look_ns or self._parts.keyring.locked:
            return
        self._next_look_ns = now_ns + LOOK_NS
        for table in (self._not_before_ns, self._note_after_ns):
            for erased in table.keys() - self._parts.accounts.by_name.keys():
                del table[erased]
        uncounted: list[Account] = []
        for account in self._parts.accounts.by_name.values():
            if account.name in self._busy or now_ns < self._not_before_ns.get(account.name, 0):
                continue
            info = self._parts.keyring.info(account.name)
            if info is None:
                continue
            cause = self._due(info)
            if cause:
                self._start(info.name, self._rotate_by_itself(info.name))
            elif info.active_version > 1 and self._not_counted(info.stream):
                uncounted.append(account)
            elif self._unused(info):
                self._start(info.name, self._end_unused(info.name))
        if uncounted and not self._counting:
            self._counting = True  # first who was not looked at, or longest ago
            account = min(uncounted, key=lambda each: self._not_before_ns.get(each.name, 0))
            self._start(account.name, self._count(account))
        if self._ended_ns and (not self._line.locked() or now_ns - self._ended_ns > SWEEP_WAIT_NS):
            self._ended_ns = 0
            self._begin(self._sweep())

    async def close(self) -> None:
        """Give up what is under way."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _due(self, info: TenantInfo) -> str:
        """Why the tenant's key should be rotated now; empty when it should not."""
        limits = self._parts.config.keys
        version = info.active_version
        if self._parts.keyring.sealed_blocks(info.name, version) >= limits.rotate_blocks:
            return "limit"
        age_ns = self._parts.unix_ns() - info.created[version] * _SECOND_NS
        return "age" if limits.rotate_age_ns and age_ns >= limits.rotate_age_ns else ""

    def _unused(self, info: TenantInfo) -> list[int]:
        """Older versions that nothing needs any more."""
        if len(info.fingerprints) < 2 or self._not_counted(info.stream):
            return []
        if self._parts.engine.hides_blocks:
            return []  # another start may find blocks that this one could not read
        census, stream = self._parts.census, info.stream
        return [
            version
            for version in info.fingerprints
            if version != info.active_version
            and not census.blocks(stream, code_of(version))
            and not self._putting[stream, version]
        ]

    def _not_counted(self, stream: bytes) -> int:
        return self._parts.census.blocks(stream, NOT_COUNTED)

    async def _rotate_by_itself(self, name: TenantName) -> None:
        async with self._line, self._tenancy.changing(name):
            info = self._parts.keyring.info(name)
            cause = self._due(info) if info is not None else ""
            if info is None or not cause:
                return  # rotated, or erased, by somebody else meanwhile
            if len(info.fingerprints) >= DEK_VERSIONS_PER_TENANT_MAX:
                # The oldest has had its time: so many rotations of it ago.
                await self._end_versions(name, [min(info.fingerprints)])
                await self._drop_unreadable(name)
            await self._rotate(name, force=False, cause=cause)
        log.info("event=key_rotated_by_itself tenant=%s cause=%s", name, cause)

    async def _end_unused(self, name: TenantName) -> None:
        """Before they are ended, those that still reserve under an older version are told, and it
        is looked at once more."""
        async with self._line, self._tenancy.changing(name):
            info = self._renew_sessions(name)
            if info is not None:
                await self._end_versions(name, self._unused(info))

    async def _end_versions(self, name: TenantName, versions: list[int]) -> None:
        if not versions:
            return
        for version in versions:
            await self._parts.keys.run(self._parts.keyring.retire, name, version)
            self.versions_ended += 1
        self._renew_sessions(name)
        await _wipe_destroyed(self._parts, name, _stream_of(self._parts, name))
        self._ended_ns = self._ended_ns or self._parts.now_ns()  # one sweep for all of a while

    async def _sweep(self) -> None:
        try:
            await _sweep(self._parts)
        except Exception:
            log.exception("event=sweep_failed")

    async def _keep_usage(self, name: TenantName) -> None:
        after_ns = _NEVER_NS
        try:
            await self._parts.keys.run(self._parts.keyring.keep_usage, name)
            after_ns = 0
        finally:  # a full disk is not asked again by every put
            self._note_after_ns[name] = min(after_ns, self._parts.now_ns() + RETRY_NS)

    async def _count(self, account: Account) -> None:
        """Look at the blocks whose version is not known; drop those whose version is gone.
        Where some cannot be looked at, it is others' turn first."""
        try:
            await self._count_all(account)
        finally:
            self._counting = False
        if self._not_counted(account.stream):
            self._not_before_ns[account.name] = self._parts.now_ns() + RETRY_NS

    async def _count_all(self, account: Account) -> None:
        engine, census = self._parts.engine, self._parts.census
        for number in range(engine.segment_count):
            if not number % SEGMENTS_IN_STEP:
                await asyncio.sleep(0)
            if engine.stream_of(number) != account.stream:
                continue
            slots = engine.segment_slots(number)
            unknown = slots[census.codes(slots) == NOT_COUNTED].tolist()
            for at in range(0, len(unknown), CENSUS_BATCH_BLOCKS):
                await self._look_at(account, unknown[at : at + CENSUS_BATCH_BLOCKS])
                await asyncio.sleep(CENSUS_PAUSE_S)

    async def _look_at(self, account: Account, slots: list[int]) -> None:
        parts = self._parts
        mine = [slot for slot in slots if parts.census.code(slot) == NOT_COUNTED]
        heads = await parts.engine.read_heads(mine)
        info = parts.keyring.info(account.name)
        if info is None or info.stream != account.stream:
            return  # erased meanwhile
        for slot, head in zip(mine, heads, strict=True):
            if parts.census.code(slot) != NOT_COUNTED:
                continue  # read and counted by now, or another block, perhaps of the same name
            try:
                header = SealedHeader.parse(memoryview(head)[RECORD_HEADER_BYTES:])
            except SealError:
                continue  # unreadable: the next read of it, or the scrubber, drops it
            if header.host_sealed:
                census_code = HOST_SEALED
            elif header.dek_version in info.fingerprints:
                census_code = code_of(header.dek_version)
            else:
                parts.engine.remove(slot, RemoveReason.UNREADABLE)
                continue
            parts.census.note(slot, account.stream, census_code)

    async def _drop_unreadable(self, name: TenantName) -> int:
        """Forget every block of a tenant whose key version is gone, others' turns between.

        Those found at start and not looked at yet are older than the only version, if there is but
        one and they are known to be sealed here; otherwise their turn comes when they are counted.
        """
        parts = self._parts
        info = parts.keyring.info(name)
        if info is None:
            return 0
        kept = [HOST_SEALED, *map(code_of, info.fingerprints)]
        if len(info.fingerprints) > 1:
            kept.append(NOT_COUNTED)
        stretches = self._removal.stretches_of(parts.accounts.by_name[name])
        doomed: list[bytes] = []
        dropped = 0
        try:
            for namespace_id in self._removal.namespaces_of(info.stream):
                described = parts.keyring.descriptor_of(namespace_id)
                await self._removal.rest(stretches, NAMESPACE_COST)
                if isinstance(described, HostSealedNamespace):
                    continue
                spared = kept if described is not None else [*kept, NOT_COUNTED]
                self._spared[namespace_id] = frozenset(spared)
                doomed.append(namespace_id)
            for namespace_id in doomed:
                dropped += await self._drop_doomed(namespace_id, stretches)
        finally:
            for namespace_id in doomed:
                del self._spared[namespace_id]
        return dropped

    async def _drop_doomed(self, namespace_id: bytes, stretches: Stretches) -> int:
        engine, census = self._parts.engine, self._parts.census
        spared = list(self._spared[namespace_id])
        dropped = 0
        while True:  # again: an eviction has moved some meanwhile
            slots = engine.index.slots_of(namespace_id)
            doomed = slots[~np.isin(census.codes(slots), spared)]
            if not len(doomed):
                return dropped
            if len(doomed) == len(slots):
                for removed in engine.drop_namespace(namespace_id, RemoveReason.UNREADABLE):
                    dropped += len(removed)
                    await self._removal.rest(stretches, len(removed) * DROP_COST)
                continue
            for slot in doomed.tolist():
                # Others have had their turns: it may hold another block by now.
                if engine.index.is_live(slot) and engine.index.namespace_of(slot) == namespace_id:
                    dropped += self.drop_if_doomed(namespace_id, slot)
                    await self._removal.rest(stretches, REMOVAL_COST)

    def drop_if_doomed(self, namespace_id: bytes, slot: int) -> bool:
        """True if a forced rotation has destroyed the key of the block in this slot: whoever meets
        it before its turn to be dropped has come drops it."""
        spared = self._spared.get(namespace_id)
        if spared is None or self._parts.census.code(slot) in spared:
            return False
        if self._parts.engine.index.is_live(slot):  # not of two that met it at once the second
            self._parts.engine.remove(slot, RemoveReason.UNREADABLE)
        return True

    def _renew_sessions(self, name: TenantName) -> TenantInfo | None:
        """Sessions use the keys as they are now, which are returned. The tenant may have been
        erased meanwhile."""
        keyring = self._parts.keyring
        if keyring.locked or keyring.info(name) is None:
            return None
        tenant = keyring.get(name)
        for session in self._sessions.values():
            if session.account.name == name:
                session.tenant = tenant
        return tenant.info

    def _start(self, name: TenantName, work: Coroutine[Any, Any, None]) -> None:
        if name in self._busy:
            work.close()
            return
        self._busy.add(name)
        self._begin(self._change(name, work))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _change(self, name: TenantName, work: Coroutine[Any, Any, None]) -> None:
        try:
            await self._guard(name, work)
        finally:
            self._busy.discard(name)

    async def _guard(self, name: TenantName, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except EntresolError as error:
            self._not_before_ns[name] = self._parts.now_ns() + RETRY_NS
            log.error("event=key_care_failed tenant=%s reason=%s", name, error)
        except Exception:
            self._not_before_ns[name] = self._parts.now_ns() + RETRY_NS
            log.exception("event=key_care_failed tenant=%s", name)
